"""A recorded training, audited in one run by who reads the release of every step (chapter 10)."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fl_privacy_lib.audit import canaries, one_run
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments import spending, training
from fl_privacy_lib.reproduction.records import Values, numbers

SETTINGS = ("unit", "dataset", "canaries", "guesses", "rounds", "local_iterations", "batch_size",
            "clip_norm", "noise_scale", "local_lr")  # fmt: skip


@dataclass(frozen=True)
class Audit:
    """One run of a training with canaries.

    Parameters
    ----------
    training : with noise on the batch, of one client that draws, or of clients in a fixed order
    every : where examples are drawn, canaries have their turn once in so many rounds instead; 1:
        they are drawn, too
    canaries, guesses : m and r, both chosen before the first run
    """

    training: training.Training
    every: int = 1
    canaries: int = 5000
    guesses: int = 250
    seed: int = 0


def measure(point: Audit, device: Any) -> Result:
    """Return the audited ε of a run."""
    start = training.scene(point.training, point.seed, device)
    plan, defense = point.training.plan(point.seed), point.training.defense
    each, drawn = np.arange(point.canaries), plan.batch_sampling == "poisson" and point.every == 1
    stage = canaries.Canaries(
        defense.per_example.clip, defense.per_batch,  # type: ignore[union-attr, arg-type]
        np.random.default_rng([point.seed, 2]).random(point.canaries) < 0.5,
        np.stack([each % plan.clients, each // plan.clients % plan.local_iterations], 1),
        np.zeros(point.canaries), plan.batch_size / len(start.train[1]) if drawn else 1.0,
        point.every, point.seed,
    )  # fmt: skip
    watched = replace(defense, per_batch=stage)
    simulate(start.model, start.train, start.partition, plan, watched, engine="auto")
    right = one_run.right_guesses(stage.scores, stage.present, point.guesses)
    sure = one_run.audited_epsilon(right, point.guesses, point.canaries, spending.DELTA)
    return {"audited": np.array(sure)}


def audit_row(
    route: str, adversary: str, claimed: float, proved: float, *points: Audit, **ran: Any
) -> Row:
    """Return an audit's row, of runs that differ in their seed; an ε of ∞ has no metric.

    Parameters
    ----------
    ran : without points, the key columns of what ran and the bound that is known of it, `exact`
    """
    exact = np.array(ran.pop("exact", 0.0))
    ran = {"unit": "example"} | ran
    ran |= vars(points[0]) | vars(points[0].training) if points else {}
    key = {"route": route, "adversary": adversary, "epsilon": claimed, "delta": spending.DELTA}
    key |= {name: ran.get(name, "not_applicable") for name in SETTINGS}

    def values(results: list[Result]) -> Values:
        found = np.array([result["audited"] for result in results] or [exact])
        named = {"claimed": claimed, "proved": proved, "audited": found,
                 "most_audited": found.max(), "least_audited": found.min()}  # fmt: skip
        return {n: numbers(np.atleast_1d(v)) for n, v in named.items() if np.isfinite(v).all()}

    return Row(key, points, values, max(1, len(points)))
