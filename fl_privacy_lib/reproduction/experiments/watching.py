"""What is watched while a training runs: whether it breaks, and the norms of its gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.defenses import Gradient, Transformation

LOST, EXPLODED, ROUNDS_LOST = 0.05, 10.0, 10


class NotFinite(Exception):
    """The weights of a training are no longer numbers."""


def read_checkpoint(checkpoint: Path) -> tuple[Gradient, dict[int, float | None]]:
    """Return the weights after the last round, and round → accuracy, None where not measured."""
    record = torch.load(checkpoint, weights_only=True)
    return record["weights"], {round: score for round, _, score in record["history"]}


def end_if_not_finite(checkpoint: Path) -> None:
    """Raise `NotFinite` where the last finished round was looked at and its weights are not finite.

    Nothing else ends a training: one that is at chance under much noise may still learn, late.
    """
    weights, looks = read_checkpoint(checkpoint)
    if looks[max(looks)] is not None and not math.isfinite(norm_of(weights)):
        raise NotFinite


def has_diverged(curve: Mapping[int, float], constant: float, growth: float) -> bool:
    """Return whether the weights are not finite, or long while the training ended at chance.

    Parameters
    ----------
    curve : round → accuracy; at chance is one that was within `LOST` of `constant`, or below, at
        every look over `ROUNDS_LOST` rounds and more until the end
    constant : the accuracy of the best constant guess
    growth : the weights' norm over their first one; long is `EXPLODED` and more
    """
    since = max((t for t in curve if t <= max(curve) - ROUNDS_LOST), default=None)
    at_chance = since is not None and all(
        value <= constant + LOST for t, value in curve.items() if t >= since
    )
    return not math.isfinite(growth) or (at_chance and growth >= EXPLODED)


def norm_of(tensors: Gradient) -> float:
    """Return the ℓ2 norm of all tensors together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


@dataclass(frozen=True, eq=False)
class NormWatch(Transformation):
    """A stage that changes nothing and keeps the mean norm of the raw gradients of each tensor."""

    norms: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict, repr=False)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the values as they are."""
        means = torch.stack([n.mean() for n in ctx.norms.values()])  # [M]
        self.norms.setdefault((ctx.round, ctx.iteration), []).append(means.cpu())
        return values

    def table(self, rounds: int, local_iterations: int) -> np.ndarray:
        """Return the means over clients, [T, L, M]."""
        return np.array([
            [torch.stack(self.norms[t, i]).mean(0).numpy() for i in range(local_iterations)]
            for t in range(rounds)
        ])  # fmt: skip
