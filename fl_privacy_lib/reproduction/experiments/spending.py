"""What a recorded training spends: its ε as the paper counts it and as it can be proved."""

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np

from fl_privacy_lib.audit import Statements, statement
from fl_privacy_lib.data import load
from fl_privacy_lib.defenses import Holding
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.training import CODE_RATE, SDP, Training
from fl_privacy_lib.reproduction.paths import data_root, decoded_cache

DELTA, TENSORS = 1e-5, 3  # of both networks
HELD = {
    ("mnist", 100): Holding(50_000, 500, TENSORS, 1, 1, 500),
    ("mnist", 1000): Holding(50_000, 500, TENSORS, 10, 3, 500, (
        (3,) + 7 * (1,), (2, 2) + 6 * (1,), (2,) + 8 * (1,), 10 * (1,))),
    ("mnist", 10_000): Holding(50_000, 500, TENSORS, 100, 3, 500, tuple(
        many + (100 - sum(many)) * (1,)
        for many in ((3, 2), (3,), 5 * (2,), 4 * (2,), 3 * (2,), (2, 2), (2,), ()))),
    ("cifar10", 100): Holding(40_000, 400, TENSORS, 1, 1, 400),
    ("cifar10", 1000): Holding(40_000, 400, TENSORS, 10, 2, 400, (
        (2, 2) + 6 * (1,), (2,) + 8 * (1,), 10 * (1,))),
    ("lfw", 100): Holding(2_267, 300, TENSORS, 27, 1, 300),
    ("lfw", 1000): Holding(2_267, 300, TENSORS, 175, 1, 300),
    ("adult", 1000): Holding(36_631, 300, TENSORS, 9, 1, 300),
    ("cancer", 1000): Holding(426, 426, TENSORS, 1000, 1, 426),
}  # fmt: skip
"""Data set and K of the records → how the examples lie among the clients of the first seed.

It is all that ε needs of the data, so that a record shows its ε without their files.
"""


@functools.cache
def holding(dataset: str, clients: int) -> Holding:
    """Return how a data set's training examples lie among so many clients."""
    if known := HELD.get((dataset.removesuffix("_z"), clients)):
        return known
    data = load(dataset, data_root(), decoded_cache())  # not kept: what is counted is
    split = setup_of(dataset).split(data, clients, np.random.default_rng([0, 1]))
    return Holding.of(split, TENSORS)


@functools.cache
def spent(point: Training, tap: str = "update") -> Statements:
    """Return a training's ε as the paper counts it and as it can be proved.

    The unit is a client under Fed-SDP, else an example, which is added or removed; δ = 1e-5. See
    `audit.statement`.
    """
    unit: Any = "client" if point.method in SDP else "example"
    data = holding(point.dataset, point.clients)
    return statement(point.defense, point.plan(0), data, delta=DELTA, unit=unit, tap=tap)


def epsilons(point: Training) -> str:
    """Return both ε of a private training as 'counted / proved', a dash for one without noise."""
    if not point.multiplier:
        return "—"
    # noise is in units of C: one computation serves every fixed C, and all that costs no ε
    bound = point.clip_norm if point.clip_end else 4.0
    both = spent(replace(
        point, local_lr=CODE_RATE, clip_norm=bound, seed=0, seeds=1, pruned=0.0, held_out=False,
        watched=False,
    ))  # fmt: skip
    return " / ".join(
        "∞" if math.isinf(s.epsilon) else f"{float(f'{s.epsilon:.3g}'):,g}"
        for s in (both.paper, both.proved)
    )
