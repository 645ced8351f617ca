"""What is audited: sound trainings, and methods whose claim fails (chapter 10)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.audit import local, one_run
from fl_privacy_lib.chapters.what_works.training import SummedTraining
from fl_privacy_lib.defenses.selection import PerturbedEncoding
from fl_privacy_lib.reproduction.comparison import cells, measured
from fl_privacy_lib.reproduction.experiment import Row
from fl_privacy_lib.reproduction.experiments.auditing import Audit, audit_row
from fl_privacy_lib.reproduction.experiments.spending import DELTA, spent
from fl_privacy_lib.reproduction.experiments.training import Training

RUNS, FEWER, CLAIMED, ROUNDS, TURN = 20, 5, 0.82, 100, 29
NOISE = {CLAIMED: 1.831, 3.0: 0.909, 8.0: 0.616}
"""ε → σ of a hundred rounds of B = 2,048 of 60,000 examples; a test holds them to it."""
FED_CDP = Training("mnist", "fed_cdp", "code", 100, 10, local_iterations=20, local_lr=0.001)
"""As coded, with a fifth of the printed local iterations: a canary is used in one of them."""


def runs(training: Training, count: int, every: int = 1) -> list[Audit]:
    """Return so many runs of a training's audit; seed 0 has shown that the code runs."""
    return [Audit(training, every, seed=seed) for seed in range(1, count + 1)]


def audits(settings: Any, dataset: str) -> Iterator[Row]:
    """Yield the recorded audits."""
    sums, steps, inf = "sees_sums", "sees_steps", float("inf")
    for claimed, scale in NOISE.items():
        training = SummedTraining(dataset, rounds=ROUNDS, noise_scale=scale, local_lr=1.0)
        (event,) = training.events(60_000)
        fixed = replace(event, sampling_rate=1.0, sampling="none", uses=-(-ROUNDS // TURN))
        proved, certain = (spend(e, "pld", DELTA).epsilon for e in (event, fixed))
        yield audit_row("distributed_noise", sums, claimed, proved, *runs(training, RUNS))
        if claimed == CLAIMED:
            yield audit_row("fixed_order", sums, claimed, certain, *runs(training, FEWER, TURN))
    proved = spent(FED_CDP, "batch").proved.epsilon
    yield audit_row("fed_cdp", steps, CLAIMED, proved, *runs(FED_CDP, FEWER))
    exact = local.selection_epsilon(PerturbedEncoding(1.0, k=1, reading="e_eps"), 2)
    yield audit_row("pe", "sees_reports", 1.0, exact, exact=exact, unit="local_report")
    for cell in cells(
        measured("dynamic_parameters/distinguishing"), {"at_round": 0, "clip_norm": 4}
    ):
        exact = one_run.epsilon_of_advantage(cell["sure_advantage"], DELTA)
        yield audit_row("dp_dyns_l2max", steps, CLAIMED, inf, exact=exact, **cell["key"])
