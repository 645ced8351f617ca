"""One participation: L local iterations at a client, from the global model to the client's update."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses.clipping import Gradient, layer_norms
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import TAPS, ClientContext
from fl_privacy_lib.federated.gradients import Loss, cross_entropy, example_gradients
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan


@dataclass(frozen=True)
class Tap:
    """A place and a time on the route: the only thing of a run that is kept for an adversary.

    Parameters
    ----------
    stage : {'example', 'batch', 'update', 'received', 'aggregate'}
    client : int; ignored for 'aggregate', which belongs to none
    round : int
    iteration : int, local iteration; ignored for all but 'example' and 'batch', which alone have one
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
        object.__setattr__(self, "iteration", self.iteration if self.stage in ("example", "batch") else 0)


@dataclass(frozen=True)
class Observation:
    """What an adversary at a tap gets, and no more.

    Attributes
    ----------
    tap : Tap
    values : what stands there; example: [batch, …], else […]; an update is (weights after − weights before)
    weights : the model's parameters before the step that made the values (for an update: before the round)
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
            tap, copied, before, plan.local_lr, plan.local_iterations, plan.batch_size, defense.public()
        )
        if truth is not None:
            self.truth[tap] = truth


def participate(
    model: nn.Module,
    weights: Parameters,
    data: tuple[torch.Tensor, torch.Tensor],
    batches: list[np.ndarray],
    plan: Plan,
    defense: Defense,
    ctx: ClientContext,
    taps: Taps,
    loss: Loss = cross_entropy,
) -> Gradient:
    """Run one client's local iterations and return its update, as it leaves the client.

    Parameters
    ----------
    weights : the global model, without a client axis
    data : this client's examples [n, …] and labels [n]
    batches : L arrays of positions in the client's data

    Returns
    -------
    tensors [1, …]: weights after the last iteration minus weights before the first, after per_client
    """
    client = ctx.clients[0]
    # accumulated apart from the weights: subtracting these at the end would lose low-order bits
    update = {name: torch.zeros_like(w)[None] for name, w in weights.items()}  # [1, …]
    if defense.begin_client:
        defense.begin_client(ctx)
    seen = []
    for iteration, positions in enumerate(batches):
        ctx.iteration = iteration
        index = torch.as_tensor(positions, device=data[0].device)
        x, y = data[0][index], data[1][index]
        seen.append(index)
        local = {name: w + update[name] for name, w in weights.items()}  # [1, …]
        gradients = example_gradients(model, local, x[None], y[None], loss)
        ctx.examples, ctx.norms = (x[None], y[None]), layer_norms(gradients, leading=2)
        example, batch = defense.local_step(gradients, ctx)
        before = {name: w[0] for name, w in local.items()}
        for stage, values in (("example", example), ("batch", batch)):
            tap = Tap(stage, client, ctx.round, iteration)
            taps.keep(tap, {name: v[0] for name, v in values.items()}, before, plan, defense, (x, y))
        update = {name: u - plan.local_lr * batch[name] for name, u in update.items()}
    update = defense.apply("per_client", update, ctx)
    used = torch.unique(torch.cat(seen)) if seen else torch.zeros(0, dtype=torch.long)
    for stage in ("update", "received"):  # the server replaces the second by what its own stage makes of it
        tap = Tap(stage, client, ctx.round)
        truth = (data[0][used], data[1][used])
        taps.keep(tap, {name: u[0] for name, u in update.items()}, weights, plan, defense, truth)
    return update
