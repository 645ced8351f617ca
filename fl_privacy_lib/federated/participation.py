"""Taps, and the engine that runs the local iterations of any model: the oracle of the faster ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses.clipping import Gradient, layer_norms
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import TAPS, ClientContext
from fl_privacy_lib.federated.gradients import Loss, example_gradients
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
    values : what stands there; example: [batch, …], else […]; an update is (weights after − weights
        before)
    weights : the model's parameters before the step that made the values (for an update: before the
        round)
    local_lr, local_iterations, batch_size : the public plan
    defense : ``Defense.public()``
    """

    tap: Tap
    values: Gradient
    weights: Parameters
    local_lr: float
    local_iterations: int
    batch_size: int
    defense: dict[str, object]


@dataclass
class Taps:
    """Collects what was asked for, and the examples behind it, which only the scoring may look at."""

    wanted: frozenset[Tap] = frozenset()
    observations: dict[Tap, Observation] = field(default_factory=dict)
    truth: dict[Tap, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def at(cls, taps: Iterable[Tap]) -> "Taps":
        """Return an empty collection for these taps."""
        return cls(frozenset(taps))

    def keep(
        self,
        tap: Tap,
        values: Gradient,
        weights: Parameters,
        plan: Plan,
        defense: Defense,
        truth: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Keep copies of values and weights if this tap was asked for."""
        if tap not in self.wanted:
            return
        copied = {name: v.detach().clone() for name, v in values.items()}
        before = {name: w.detach().clone() for name, w in weights.items()}
        self.observations[tap] = Observation(
            tap,
            copied,
            before,
            plan.local_lr,
            plan.local_iterations,
            plan.batch_size,
            defense.public(),
        )
        if truth is not None:
            self.truth[tap] = truth


class Engine(Protocol):
    """What computes the local iterations of some clients; the walk around them stands in `rounds`."""

    def train(
        self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]
    ) -> list[Gradient]:
        """Return each client's weights after its last iteration minus those before its first.

        Parameters
        ----------
        batches : for each client, L arrays of positions in the training examples
        contexts : one for each client, alone: what a stage sees does not depend on who is computed
            beside it

        Returns
        -------
        one update a client, tensors [1, …], before the stage per_client
        """


@dataclass(frozen=True)
class GenericEngine:
    """Every example's gradient by automatic differentiation, one client at a time: any model, any rule, every tap.

    Parameters
    ----------
    weights : the global model, without a client axis
    train : all examples [N, …] and labels [N]
    """

    model: nn.Module
    weights: Parameters
    examples: Examples
    plan: Plan
    defense: Defense
    loss: Loss
    taps: Taps

    def train(
        self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]
    ) -> list[Gradient]:
        """Return each client's update; see `Engine`."""
        return [
            self._client(client_batches, ctx)
            for client_batches, ctx in zip(batches, contexts, strict=True)
        ]

    def _client(self, batches: Sequence[np.ndarray], ctx: ClientContext) -> Gradient:
        # accumulated apart from the weights: subtracting these at the end would lose low-order bits
        update = {name: torch.zeros_like(w)[None] for name, w in self.weights.items()}  # [1, …]
        for iteration, positions in enumerate(batches):
            ctx.iteration = iteration
            index = torch.as_tensor(positions, device=self.examples[0].device)
            x, y = self.examples[0][index], self.examples[1][index]
            local = {name: w + update[name] for name, w in self.weights.items()}  # [1, …]
            gradients = example_gradients(self.model, local, x[None], y[None], self.loss)
            ctx.examples, ctx.norms = (x[None], y[None]), layer_norms(gradients, leading=2)
            example, batch = self.defense.local_step(gradients, ctx)
            before = {name: w[0] for name, w in local.items()}
            for stage, values in (("example", example), ("batch", batch)):
                tap = Tap(stage, ctx.clients[0], ctx.round, iteration)
                rows = {name: v[0] for name, v in values.items()}
                self.taps.keep(tap, rows, before, self.plan, self.defense, (x, y))
            update = {name: u - self.plan.local_lr * batch[name] for name, u in update.items()}
        return update
