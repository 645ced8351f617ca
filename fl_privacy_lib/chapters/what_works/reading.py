"""What is read off the records: accuracy beside the ε that is proved (chapter 10)."""

import functools
import math
from dataclasses import replace
from typing import Any

from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.audit import statement
from fl_privacy_lib.chapters.what_works.shares import noise_left, noise_share
from fl_privacy_lib.chapters.what_works.training import SummedTraining
from fl_privacy_lib.defenses import Defense, Holding, adaclip, fed_cdp, quantile_clipped
from fl_privacy_lib.reproduction.comparison import cells, measured
from fl_privacy_lib.reproduction.experiments.spending import TENSORS, holding
from fl_privacy_lib.reproduction.experiments.training import Training, point_of
from fl_privacy_lib.sampling import Plan


@functools.cache
def _proved(defense: Defense, plan: Plan, holding: Holding) -> float:
    return statement(defense, plan, holding, delta=DELTA).proved.epsilon


def _of_clients(cell: dict[str, Any]) -> float:
    """Return the ε of one example in a federated training of chapter 05."""
    point = point_of(cell, Training)
    return _proved(point.defense, point.plan(0), holding(point.dataset, point.clients))


def _central(cell: dict[str, Any]) -> float:
    """Return the ε of one example in a central training of chapter 06."""
    clip, scale, size = (float(cell[n]) for n in ("clip_norm", "noise_scale", "batch_size"))
    both: dict[str, Any] = {"clip_norm": clip, "noise_scale": scale}
    plain: dict[str, Any] = {  # a bound that falls takes its noise along, at an equal multiplier
        **dict.fromkeys(
            ("dp_baseline", "dp_dyns_cdecay", "dp_rate_decay", "dp_short_steps"),
            fed_cdp("batch", **both),
        ),
        "dp_flat": fed_cdp("batch", scope="all", **both), "adaclip": adaclip(scope="layer", **both),
        "quantile_clip": quantile_clipped(scope="layer", count_scale=size / 20, **both),
    }  # fmt: skip
    if cell["method"] not in plain:
        return math.inf  # noise that follows the largest norm, or none
    plan = Plan(1, 1, int(cell["rounds"]), 1, int(size), batch_sampling="poisson", local_lr=1.0)
    return _proved(plain[cell["method"]], plan, Holding(60_000, 60_000, TENSORS))


SOURCES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "fed_cdp/table_2": (
        "05",
        {"dataset": "mnist", "clients": "1000", "participants": "100", "local_iterations": "100"},
        _of_clients,
    ),
    "dynamic_parameters/table_4": (
        "06", {"dataset": "mnist", "setting": "batch", "clip_norm": "4", "rounds": "10000"},
        _central,
    ),
    "dynamic_parameters/repairs": ("06", {"dataset": "mnist"}, _central),
}  # fmt: skip
"""Record → its chapter, the rows that are shown, and what is proved of them."""


def recorded() -> list[dict[str, Any]]:
    """Return the private trainings on MNIST that chapters 05 and 06 have recorded.

    Beside a cell's columns stands its `chapter` and, as `epsilon`, what is proved for one example
    against anyone who reads every client's update, or of one client that holds all; ∞ where nothing
    is.
    """
    return [
        c | {"chapter": chapter, "epsilon": proved(c)}
        for table, (chapter, rows, proved) in SOURCES.items()
        for c in cells(measured(table), rows)
        if c["method"] != "non_private"
    ]


def epsilon_left(
    point: SummedTraining, examples: int, margin: int, gone: int, accountant: Any = "pld"
) -> float:
    """Return a training's proved ε where so many clients drop out or collude in every round.

    Parameters
    ----------
    point : calibrated, so that K - margin shares carry its noise
    examples : N of the training data
    margin, gone : clients that were planned for, and that are missing
    accountant : one of `accounting.accountants`

    Returns
    -------
    ε for one example, added or removed, at δ = 1e-5
    """
    share = noise_share(point.noise_scale, point.summed, margin)
    (event,) = point.events(examples)
    fewer = noise_left(share, point.summed, gone) / point.noise_scale
    weaker = replace(event, noise_multiplier=event.noise_multiplier * fewer)
    return spend(weaker, accountant, DELTA).epsilon
