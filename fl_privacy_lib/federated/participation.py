"""What is kept for an adversary: taps, and what is observed there."""

from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses import TAPS, Defense, Gradient
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan

Examples = tuple[torch.Tensor, torch.Tensor]  # [N, …] and labels [N]


@dataclass(frozen=True)
class Tap:
    """A place and a time on the route: the only thing of a run that is kept for an adversary.

    Parameters
    ----------
    stage : {'example', 'batch', 'update', 'received', 'aggregate'}
    client : int; ignored for 'aggregate', which belongs to none
    round : int
    iteration : int, local iteration; ignored for all but 'example' and 'batch', which alone have
        one
    """

    stage: str
    client: int = 0
    round: int = 0
    iteration: int = 0

    def __post_init__(self) -> None:
        one_of(TAPS, stage=self.stage)
        in_range(0, float("inf"), client=self.client, round=self.round, iteration=self.iteration)
        # what is ignored must not tell two taps apart
        object.__setattr__(self, "client", 0 if self.stage == "aggregate" else self.client)
        object.__setattr__(
            self, "iteration", self.iteration if self.stage in ("example", "batch") else 0
        )


@dataclass(frozen=True)
class Observation:
    """What an adversary at a tap gets, and no more.

    Attributes
    ----------
    tap : Tap
    values : what stands there; example: [batch, …], else […]; an update is the weights after the
        participation minus those before it
    weights : the model's parameters before the step that gave the values (for an update: before
        the round)
    local_lr, local_iterations, batch_size : the public plan
    defense : ``Defense.public()``
    """

    tap: Tap
    values: Gradient
    weights: Parameters
    local_lr: float
    local_iterations: int
    batch_size: int
    defense: dict[str, Any]


@dataclass
class Taps:
    """Collects what was asked for, and the examples behind it, which only the scoring may look at.

    Parameters
    ----------
    wanted : what was asked for
    plan, defense : of the run; their public part goes into every observation
    """

    wanted: frozenset[Tap]
    plan: Plan
    defense: Defense
    observations: dict[Tap, Observation] = field(default_factory=dict)
    truth: dict[Tap, Examples] = field(default_factory=dict)

    def keep(
        self, tap: Tap, values: Gradient, weights: Parameters, truth: Examples | None = None
    ) -> None:
        """Keep copies of values and weights if this tap was asked for."""
        if tap not in self.wanted:
            return
        self.observations[tap] = Observation(
            tap,
            {name: v.detach().clone() for name, v in values.items()},
            {name: w.detach().clone() for name, w in weights.items()},
            self.plan.local_lr,
            self.plan.local_iterations,
            self.plan.batch_size,
            self.defense.public(),
        )
        if truth is not None:
            self.truth[tap] = truth

    def records(self, but: Collection[Tap] = ()) -> list[tuple]:
        """Return the arguments of `keep` for all that is there, with taps as plain values."""
        return [
            (astuple(tap), seen.values, seen.weights, self.truth.get(tap))
            for tap, seen in self.observations.items()
            if tap not in but
        ]

    def restore(self, records: Iterable[tuple]) -> None:
        """Keep what another collection's `records` hold."""
        for place, values, weights, truth in records:
            self.keep(Tap(*place), values, weights, truth)
