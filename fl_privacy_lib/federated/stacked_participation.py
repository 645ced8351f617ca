"""The local iterations of several clients at once through explicit passes: the same stages as one at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.route import BatchNoise, Defense, PerExample
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.federated.stacked import Stack, Views, stack
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan


def stacked_form(model: nn.Module, train: Examples, defense: Defense) -> Stack | str:
    """Return the model in the engine's form, or what the engine does not know.

    Draws that a participation shares, and a user's rules for each example, see whole gradients: a
    defence that has them takes the generic path.
    """
    if defense.begin_client or type(defense.per_example) not in (PerExample, NoneType):
        return f"the defence {defense.name!r} has a local rule"
    return stack(model, tuple(train[0].shape[1:])) or "the model has a layer"


def local_noise(defense: Defense, batch_size: int, round: int) -> float:
    """Return the standard deviation per coordinate of a batch mean's noise from the stages that are data.

    Independent Gaussian draws add up to one Gaussian draw of the summed variance: exactly, not in
    the limit. B draws at the examples of standard deviation s become one of s/√B on their mean.
    """
    rule = defense.per_example or PerExample()
    variance = rule.example_std(batch_size, round) ** 2 / batch_size
    late = defense.per_batch
    if isinstance(late, BatchNoise) and type(late) is BatchNoise:
        variance += (
            mean_std(late.noise_scale, late.clip.bound(round), batch_size, late.divide_by) ** 2
        )
    return variance**0.5


@dataclass(frozen=True)
class StackedEngine:
    """The local iterations of several clients together, by explicit passes; batches of different sizes are padded.

    Parameters
    ----------
    stack : the model in the engine's form
    weights : the global model, without a client axis
    examples : all examples [N, …] and labels [N]
    """

    stack: Stack
    weights: Parameters
    examples: Examples
    plan: Plan
    defense: Defense

    def train(
        self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]
    ) -> list[Gradient]:
        """Return each client's update; see `participation.Engine`."""
        stack, plan, defense, round = self.stack, self.plan, self.defense, contexts[0].round
        start = stack.pack(self.weights, len(contexts))
        # accumulated apart from the weights: subtracting these at the end would lose low-order bits
        flat, way, step = start.clone(), torch.zeros_like(start), torch.empty_like(start)
        views, sums = stack.views(flat), stack.sums(step)
        fused = defense.per_batch is None or type(defense.per_batch) is BatchNoise
        for iteration in range(plan.local_iterations):
            index, mask = _together(
                [client_batches[iteration] for client_batches in batches], self.examples[0].device
            )
            x, y = self.examples[0][index], self.examples[1][index]
            _fill(step, contexts, local_noise(defense, plan.batch_size, round) * plan.batch_size)
            norms = _add(stack, views, x, y, mask, defense, round, sums)
            if not fused or iteration == plan.local_iterations - 1:
                _tell(
                    contexts,
                    iteration,
                    x,
                    y,
                    norms,
                    [len(client_batches[iteration]) for client_batches in batches],
                )
            if fused:
                way.add_(step, alpha=-plan.local_lr / plan.batch_size)
            else:
                _step_by_stage(stack, way, step, plan, defense, contexts)
            torch.add(start, way, out=flat)
        return [
            {name: u.contiguous() for name, u in stack.unpack(way[i : i + 1]).items()}
            for i in range(len(contexts))
        ]


def _together(
    batches: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the positions of all clients' batches, [k, B], and a mask [k, B] where some had to be padded."""
    sizes = np.array([len(batch) for batch in batches])
    longest = sizes.max()
    if (sizes == longest).all():
        return torch.from_numpy(np.stack(batches)).to(device), None
    padded = np.zeros((len(batches), longest), dtype=np.int64)
    for row, batch in zip(padded, batches, strict=True):
        row[: len(batch)] = batch
    index = torch.from_numpy(padded).to(device)
    return index, torch.from_numpy(np.arange(longest) < sizes[:, None]).to(device, torch.float32)


def _fill(step: torch.Tensor, contexts: Sequence[ClientContext], std: float) -> None:
    """Write every client's noise, from its own generator, where its gradients will be added."""
    if std == 0:
        step.zero_()
        return
    for row, ctx in zip(step, contexts, strict=True):
        row.normal_(0, std, generator=ctx.generators[0])


def _tell(
    contexts: Sequence[ClientContext],
    iteration: int,
    x: torch.Tensor,
    y: torch.Tensor,
    norms: Gradient,
    counts: Sequence[int],
) -> None:
    """Tell every client's context the iteration, its examples and their norms: what its own stages may read."""
    for i, (ctx, count) in enumerate(zip(contexts, counts, strict=True)):
        ctx.iteration = iteration
        ctx.examples = (x[i : i + 1, :count], y[i : i + 1, :count])
        ctx.norms = {name: n[i : i + 1, :count] for name, n in norms.items()} or None


def _add(
    stack: Stack,
    views: Views,
    x: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor | None,
    defense: Defense,
    round: int,
    sums: list[torch.Tensor],
) -> Gradient:
    """Add the clipped gradients of every client's batch to sums and return their norms."""
    if x.shape[1] == 0:
        return {}
    clip = defense.per_example.clip if defense.per_example else None
    own_stage = defense.per_batch is not None and type(defense.per_batch) is not BatchNoise
    if clip is None and mask is None and not own_stage:
        return stack.add_gradients(views, x, y, None, sums)
    done = 0

    def factors(norms: Gradient) -> Gradient:
        nonlocal done
        scale = (
            clip.factors(norms, round)
            if clip
            else {name: torch.ones_like(n) for name, n in norms.items()}
        )
        if mask is not None:
            width = next(iter(norms.values())).shape[1]
            scale = {name: f * mask[:, done : done + width] for name, f in scale.items()}
            done += width
        return scale

    return stack.add_gradients(views, x, y, factors, sums)


def _step_by_stage(
    stack: Stack,
    way: torch.Tensor,
    step: torch.Tensor,
    plan: Plan,
    defense: Defense,
    contexts: Sequence[ClientContext],
) -> None:
    """Pass every client's batch mean through a per_batch stage of one's own, and take the step."""
    for i, ctx in enumerate(contexts):
        mean = {
            name: g.contiguous()
            for name, g in stack.unpack(step[i : i + 1] / plan.batch_size).items()
        }
        changed = defense.apply("per_batch", mean, ctx)
        for name, w in stack.unpack(way[i : i + 1]).items():
            w.sub_(plan.local_lr * changed[name])
