"""The local iterations of several clients at once: the same stages as client by client."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.route import BatchNoise, Defense, PerExample
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.federated.stacked import Factors, Stack, stack
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan


def stacked_form(model: nn.Module, train: Examples, defense: Defense) -> Stack | str:
    """Return the model in the engine's form, or what the engine does not know.

    Draws that a participation shares, and a user's rules for each example, see whole gradients: a
    defence that has them takes the generic path.
    """
    rule = defense.per_example or PerExample()
    if defense.begin_client or type(rule) is not PerExample or not rule.is_fixed:
        return f"the defence {defense.name!r} has a local rule"
    return stack(model, tuple(train[0].shape[1:])) or "the model has a layer"


def local_noise(defense: Defense, batch_size: int, round: int) -> float:
    """Return the standard deviation per coordinate of a batch mean's noise, from data stages.

    Independent Gaussian draws add up to one Gaussian draw of the summed variance: exactly, not in
    the limit. B draws at the examples of standard deviation s become one of s/√B on their mean.
    """
    rule, late = defense.per_example or PerExample(), defense.per_batch
    variance = rule.example_std(batch_size, round) ** 2 / batch_size
    if type(late) is BatchNoise and isinstance(late.clip, Clip):
        std = mean_std(late.noise_scale, late.clip.bound(round), batch_size, late.divide_by)
        variance += std**2
    return variance**0.5


@dataclass(frozen=True)
class StackedEngine:
    """The local iterations of several clients together; batches of different sizes are padded.

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
        stack, plan, round = self.stack, self.plan, contexts[0].round
        start = stack.pack(self.weights, len(contexts))
        # accumulated apart from the weights: subtracting these at the end would lose low-order bits
        flat, update, step = start.clone(), torch.zeros_like(start), torch.empty_like(start)
        views = stack.views(flat)
        late = self.defense.per_batch
        late_rule = late is not None and not (type(late) is BatchNoise and late.is_fixed)
        factors = self._factors(round, late_rule)
        std = local_noise(self.defense, plan.batch_size, round) * plan.batch_size
        for iteration, positions in enumerate(zip(*batches, strict=True)):
            index, mask = _pad(positions, self.examples[0].device)
            x, y = self.examples[0][index], self.examples[1][index]
            _fill(step, contexts, std)
            norms = stack.add_gradients(views, x, y, factors, step, mask) if x.shape[1] else {}
            if late_rule or iteration == plan.local_iterations - 1:  # else no stage reads these
                for i, (ctx, batch) in enumerate(zip(contexts, positions, strict=True)):
                    rows = (slice(i, i + 1), slice(len(batch)))
                    ctx.iteration, ctx.examples = iteration, (x[rows], y[rows])
                    ctx.norms = {name: n[rows] for name, n in norms.items()} or None
            if late_rule:
                self._step_by_rule(update, step, contexts)
            else:
                update.add_(step, alpha=-plan.local_lr / plan.batch_size)
            torch.add(start, update, out=flat)
        rows_by_name = (stack.unpack(update[i : i + 1]) for i in range(len(contexts)))
        return [{name: u.contiguous() for name, u in row.items()} for row in rows_by_name]

    def _factors(self, round: int, late_rule: bool) -> Factors | None:
        """Return the clipping rule, None where norms are of no use."""
        clip = self.defense.per_example.clip if self.defense.per_example else None
        if clip:
            return lambda norms: clip.factors(norms, round)
        if late_rule:  # it may read the norms
            return lambda norms: {name: torch.ones_like(n) for name, n in norms.items()}
        return None

    def _step_by_rule(
        self, update: torch.Tensor, step: torch.Tensor, contexts: Sequence[ClientContext]
    ) -> None:
        """Pass every client's batch mean through a user's per_batch rule, and take the step."""
        means = step / self.plan.batch_size
        for i, ctx in enumerate(contexts):
            mean = {n: g.contiguous() for n, g in self.stack.unpack(means[i : i + 1]).items()}
            changed = self.defense.apply("per_batch", mean, ctx)
            for name, u in self.stack.unpack(update[i : i + 1]).items():
                u.sub_(self.plan.local_lr * changed[name])


def _pad(
    batches: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the positions of all clients' batches, [k, B], and where they are no padding, [k, B].

    The latter is None where all batches have the same size.
    """
    sizes = np.array([len(batch) for batch in batches])
    mask = np.arange(sizes.max()) < sizes[:, None]
    padded = np.zeros(mask.shape, dtype=np.int64)
    padded[mask] = np.concatenate(batches)
    index = torch.from_numpy(padded).to(device)
    return index, None if mask.all() else torch.from_numpy(mask).to(device)


def _fill(step: torch.Tensor, contexts: Sequence[ClientContext], std: float) -> None:
    """Write every client's noise, from its generator, where its gradients will be added."""
    if std == 0:
        step.zero_()
        return
    for row, ctx in zip(step, contexts, strict=True):
        row.normal_(0, std, generator=ctx.generators[0])
