"""The stacked engine: local iterations of several clients by explicit passes, without autograd.

The weights of the stacked clients lie in one flat memory [k, P]. An iteration fills a second one
with the noise, adds the clipped gradients to it, and takes the step: three passes over P numbers
besides the network itself. The stages are the same as client by client.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.defenses import (
    BatchNoise,
    ClientContext,
    Clip,
    Defense,
    Gradient,
    PerExample,
    mean_std,
)
from fl_privacy_lib.federated.contractions import Contraction, Contractions
from fl_privacy_lib.federated.layers import (
    Convolution,
    Layer,
    Pool,
    Shape,
    cross_entropy_gradient,
    layer_of,
)
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan

# examples of one client at a time: what lies in a core's cache; large batches go slice by slice
BATCH_SLICE = 32

Views = list[dict[str, torch.Tensor]]  # by layer, then by the short name of its tensor
Factors = Callable[[Gradient], Gradient]  # norms [k, B] by parameter name → clipping factors [k, B]


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat memory."""

    name: str
    layer: int
    short: str
    start: int
    shape: tuple[int, ...]

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part [k, size] of the flat memory [k, P]."""
        return flat[:, self.start : self.start + prod(self.shape)]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter [k, *shape] as a view of the flat memory [k, P]."""
        return self.part(flat).view(-1, *self.shape)


@dataclass(frozen=True)
class Stack:
    """A network in the engine's form.

    Attributes
    ----------
    layers : in the order in which they run
    slots : one for each parameter, in the model's order
    first : index of the first layer with parameters; nothing before it needs a gradient
    crop : (height, width) or None
        The part of an image that any output depends on, None for flat examples. Pooling drops a
        last odd row; what only that row would have read is not computed at all.
    """

    layers: tuple[Layer, ...]
    slots: tuple[Slot, ...]
    first: int
    crop: Shape | None

    def pack(self, weights: Parameters, clients: int) -> torch.Tensor:
        """Return the global weights in flat memory, once for each client: [k, P]."""
        return torch.cat([weights[s.name].flatten() for s in self.slots]).repeat(clients, 1)

    def unpack(self, flat: torch.Tensor) -> Gradient:
        """Return views [k, *parameter shape] of the flat memory, by name."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def views(self, flat: torch.Tensor) -> Views:
        """Return each layer's tensors as views of the flat memory: they follow its changes."""
        return [
            {slot.short: slot.view(flat) for slot in self.slots if slot.layer == layer}
            for layer in range(len(self.layers))
        ]

    def add_gradients(
        self,
        weights: Views,
        x: torch.Tensor,
        y: torch.Tensor,
        factors: Factors | None,
        out: torch.Tensor,
    ) -> Gradient:
        """Add the sum of the examples' gradients, each clipped, to the memory `out` [k, P].

        Parameters
        ----------
        weights : from `views`
        x, y : examples [k, B, …] and labels
        factors : from norms to what each example is multiplied with; None: no norms are taken

        Returns
        -------
        norms [k, B] by parameter name, before clipping; empty without `factors`
        """
        slices: list[Gradient] = []
        for part in zip(x.split(BATCH_SLICE, 1), y.split(BATCH_SLICE, 1), strict=True):
            contractions = self._contractions(weights, factors is not None, *part)
            norms = {name: c.norms() for name, c in contractions.items()} if factors else {}
            scale = factors(norms) if factors else {}
            for slot in self.slots:
                contractions[slot.name].add_to(slot.part(out), scale.get(slot.name))
            slices.append(norms)
        return {name: torch.cat([norms[name] for norms in slices], 1) for name in slices[0]}

    def _contractions(
        self, weights: Views, apart: bool, x: torch.Tensor, y: torch.Tensor
    ) -> Contractions:
        """Run the network forwards and backwards; return the gradients by parameter name."""
        if self.crop:
            x = x[..., : self.crop[0], : self.crop[1]].permute(0, 1, 3, 4, 2)
        saved = []
        for layer, tensors in zip(self.layers, weights, strict=True):
            x, needed = layer.forward(tensors, x)
            saved.append(needed)
        g: Any = cross_entropy_gradient(x, y)
        sums: dict[tuple[int, str], Contraction] = {}
        for i in reversed(range(self.first, len(self.layers))):
            g, gradients = self.layers[i].backward(weights[i], g, saved.pop(), apart)
            sums |= {(i, short): contraction for short, contraction in gradients.items()}
        return {slot.name: sums[slot.layer, slot.short] for slot in self.slots}


def stack(model: nn.Module, shape: Shape) -> Stack | None:
    """Return the model in the engine's form, or None where a layer or a frozen tensor has none.

    Parameters
    ----------
    model : a plain `nn.Sequential`
    shape : of one example, e.g. (channels, height, width)

    Examples
    --------
    >>> from fl_privacy_lib.models import training_cnn
    >>> stack(training_cnn((1, 28, 28), 10), (1, 28, 28)).crop
    (26, 26)
    >>> stack(nn.Sequential(nn.Linear(3, 2), nn.Dropout()), (3,)) is None
    True
    """
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )
    if type(model) is not nn.Sequential or hooked:
        return None
    parameters = dict(model.named_parameters())
    # not named_children(), which leaves out a module that stands in the model twice
    modules = _rectify_late(list(model._modules.items()))
    places = {
        f"{name}.{short}": (i, short)
        for i, (name, module) in enumerate(modules)
        for short, _ in module.named_parameters()
    }
    dtypes = {p.dtype for p in parameters.values()}
    frozen = any(not p.requires_grad for p in parameters.values())
    shared = len(places) > len(parameters)
    if len(dtypes) != 1 or frozen or shared:
        return None
    first = min(i for i, _ in places.values())
    layers: list[Layer] = []
    sizes = [(*shape[1:], shape[0]) if len(shape) == 3 else shape]
    for i, (_, module) in enumerate(modules):
        layer = layer_of(module, i == first)
        size = layer.shape(sizes[-1]) if layer else None
        if layer is None or size is None:
            return None
        layers.append(layer)
        sizes.append(size)
    if len(sizes[-1]) != 1:
        return None
    starts = accumulate((p.numel() for p in parameters.values()), initial=0)
    slots = tuple(
        Slot(name, *places[name], start, tuple(parameter.shape))
        for (name, parameter), start in zip(parameters.items(), starts, strict=False)
    )
    return Stack(tuple(layers), slots, first, _crop(layers, sizes) if len(shape) == 3 else None)


def _rectify_late(modules: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the modules with every ReLU before a maximum moved behind it: a quarter of the work.

    ReLU is monotone, so it commutes with a maximum; where several pixels tie at zero, the gradient
    is zero.
    """
    out = list(modules)
    for i in range(len(out) - 1):
        if type(out[i][1]) is nn.ReLU and type(out[i + 1][1]) is nn.MaxPool2d:
            out[i], out[i + 1] = out[i + 1], out[i]
    return out


def _crop(layers: list[Layer], sizes: list[Shape]) -> Shape:
    """Return how many rows and columns of an image the network reads.

    It is asked from the end to the beginning: what a layer reads is what its output needs.
    """
    last = max(i for i, size in enumerate(sizes) if len(size) == 3)
    needed = sizes[last][:2]
    for layer, size in zip(reversed(layers[:last]), reversed(sizes[:last]), strict=True):
        if isinstance(layer, Convolution | Pool):
            # padding counts from the true edge: keep it where it is
            needed = size[:2] if any(layer.window.padding) else layer.window.pixels(needed)
    return needed


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
    variance = 0.0
    for stage in filter(None, (defense.per_example, defense.per_batch)):
        if type(stage) in (PerExample, BatchNoise) and isinstance(stage.clip, Clip):
            bound = stage.clip.bound(round)
            variance += mean_std(stage.sigma(round), bound, batch_size, stage.divide_by) ** 2
    return variance**0.5


@dataclass(frozen=True)
class StackedEngine:
    """The local iterations of several clients together, whose batches have the same size.

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
        """Return each client's update; see `rounds.GenericEngine`."""
        stack, plan, round = self.stack, self.plan, contexts[0].round
        start = stack.pack(self.weights, len(contexts))
        # accumulated apart from the weights: subtracting these at the end would lose low-order bits
        flat, update, step = start.clone(), torch.zeros_like(start), torch.empty_like(start)
        views = stack.views(flat)
        late = self.defense.per_batch
        late_rule = late is not None and not (type(late) is BatchNoise and late.is_fixed)
        rule = (self.defense.per_example or PerExample()).rule
        # None: nobody reads norms
        factors = partial(rule.factors, ctx=contexts[0]) if rule.clip or late_rule else None
        std = local_noise(self.defense, plan.batch_size, round) * plan.batch_size
        for iteration, positions in enumerate(zip(*batches, strict=True)):
            index = torch.from_numpy(np.stack(positions)).to(self.examples[0].device)
            x, y = self.examples[0][index], self.examples[1][index]
            _fill(step, contexts, std)
            norms = stack.add_gradients(views, x, y, factors, step) if x.shape[1] else {}
            if late_rule or iteration == plan.local_iterations - 1:  # else no stage reads these
                for i, ctx in enumerate(contexts):
                    ctx.iteration, ctx.examples = iteration, (x[i : i + 1], y[i : i + 1])
                    ctx.norms = {name: n[i : i + 1] for name, n in norms.items()} or None
            if late_rule:
                self._step_by_rule(update, step, contexts)
            else:
                update.add_(step, alpha=-plan.local_lr / plan.batch_size)
            torch.add(start, update, out=flat)
        rows_by_name = (stack.unpack(update[i : i + 1]) for i in range(len(contexts)))
        return [{name: u.contiguous() for name, u in row.items()} for row in rows_by_name]

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


def _fill(step: torch.Tensor, contexts: Sequence[ClientContext], std: float) -> None:
    """Write every client's noise, from its generator, where its gradients will be added."""
    if std == 0:
        step.zero_()
        return
    for row, ctx in zip(step, contexts, strict=True):
        row.normal_(0, std, generator=ctx.generators[0])
