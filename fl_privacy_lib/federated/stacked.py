"""The fast engine: one local iteration of several clients by explicit passes, without autograd.

The weights of the stacked clients lie in one flat memory [k, P]. An iteration fills a second one
with the noise, adds the clipped gradients to it, and takes the step: three passes over P numbers
besides the network itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.contractions import Contraction, Contractions
from fl_privacy_lib.federated.layers import (
    Convolution,
    Layer,
    Pool,
    Shape,
    cross_entropy_gradient,
    layer_of,
)
from fl_privacy_lib.models import Parameters

BATCH_SLICE = 32  # examples of one client at a time: what lies in a core's cache; large batches go slice by slice

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

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter [k, *shape] as a view of the flat memory [k, P]."""
        return flat[:, self.start : self.start + self.size].view(-1, *self.shape)


@dataclass(frozen=True)
class Stack:
    """A network in the engine's form.

    Attributes
    ----------
    layers : in the order in which they run
    slots : one for each parameter, in the model's order
    first : index of the first layer with parameters; nothing before it needs a gradient
    crop : (height, width) of the part of an image that any output depends on, or None for flat
        examples Pooling drops a last odd row; what only that row would have read is not computed at
        all.
    """

    layers: tuple[Layer, ...]
    slots: tuple[Slot, ...]
    first: int
    crop: tuple[int, int] | None

    @property
    def size(self) -> int:
        """P, the number of parameters."""
        return sum(slot.size for slot in self.slots)

    def pack(self, weights: Parameters, clients: int) -> torch.Tensor:
        """Return the global weights in flat memory, once for each client: [k, P]."""
        anyone = next(iter(weights.values()))
        flat = torch.empty(clients, self.size, dtype=anyone.dtype, device=anyone.device)
        for slot in self.slots:
            slot.view(flat).copy_(weights[slot.name])
        return flat

    def unpack(self, flat: torch.Tensor) -> Gradient:
        """Return views [k, *parameter shape] of the flat memory, by name."""
        return {slot.name: slot.view(flat) for slot in self.slots}

    def views(self, flat: torch.Tensor) -> Views:
        """Return each layer's tensors as views of the flat memory; they stay valid while it is changed in place."""
        weights: Views = [{} for _ in self.layers]
        for slot in self.slots:
            weights[slot.layer][slot.short] = slot.view(flat)
        return weights

    def sums(self, out: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part [k, size] of the memory [k, P] where gradients are added."""
        return [out[:, slot.start : slot.start + slot.size] for slot in self.slots]

    def add_gradients(
        self,
        weights: Views,
        x: torch.Tensor,
        y: torch.Tensor,
        factors: Factors | None,
        sums: list[torch.Tensor],
    ) -> Gradient:
        """Add the sum of the examples' gradients, each clipped, to sums.

        Parameters
        ----------
        weights : from `views`
        x, y : examples [k, B, …] and labels
        factors : from norms to what each example is multiplied with; None: no norms are taken
        sums : from `sums`

        Returns
        -------
        norms [k, B] by parameter name, before clipping; empty without `factors`
        """
        norms: Gradient = {}
        for part in _slices(x.shape[1]):
            found = self._contractions(weights, x[:, part], y[:, part], apart=factors is not None)
            own = {slot.name: found[slot.name].norms() for slot in self.slots} if factors else {}
            scale = factors(own) if factors else {}
            for slot, part_of_out in zip(self.slots, sums, strict=True):
                found[slot.name].add_to(part_of_out, scale.get(slot.name))
            norms = (
                {name: torch.cat([norms[name], n], 1) for name, n in own.items()} if norms else own
            )
        return norms

    def _contractions(
        self, weights: Views, x: torch.Tensor, y: torch.Tensor, apart: bool
    ) -> Contractions:
        """Run the network forwards and backwards, and return each parameter's gradients as contractions."""
        if self.crop:
            x = x[..., : self.crop[0], : self.crop[1]].permute(0, 1, 3, 4, 2)
        kept = []
        for layer, own in zip(self.layers, weights, strict=True):
            x, saved = layer.forward(own, x)
            kept.append(saved)
        g: torch.Tensor | None = cross_entropy_gradient(x, y)
        found: dict[tuple[int, str], Contraction] = {}
        for i in range(len(self.layers) - 1, self.first - 1, -1):
            assert (
                g is not None
            )  # only the first layer with parameters returns None, and there the loop ends
            g, sums = self.layers[i].backward(weights[i], g, kept.pop(), i == self.first, apart)
            found.update({(i, short): contraction for short, contraction in sums.items()})
        return {slot.name: found[slot.layer, slot.short] for slot in self.slots}


def _slices(batch: int) -> Iterable[slice]:
    bounds = [*range(0, batch, BATCH_SLICE), batch]
    return [slice(a, b) for a, b in pairwise(bounds)]


def stack(model: nn.Module, shape: Shape) -> Stack | None:
    """Return the model in the engine's form, or None where the engine does not know a layer or what is frozen.

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
    if (
        type(model) is not nn.Sequential
        or _hooked(model)
        or any(not p.requires_grad for p in model.parameters())
    ):
        return None
    # not named_children(), which leaves out a module that stands in the model twice
    modules = _rectify_late(list(model._modules.items()))
    own = [i for i, (_, module) in enumerate(modules) if list(module.parameters())]
    if not own or len({p.dtype for p in model.parameters()}) > 1:
        return None
    layers = [layer_of(module, i <= own[0]) for i, (_, module) in enumerate(modules)]
    if any(layer is None for layer in layers):
        return None
    found: list[Layer] = [layer for layer in layers if layer is not None]
    sizes = _sizes(found, (shape[1], shape[2], shape[0]) if len(shape) == 3 else shape)
    if sizes is None or len(sizes[-1]) != 1:
        return None
    slots = _slots(model, modules, found)
    if slots is None:
        return None
    return Stack(tuple(found), slots, own[0], _needed(found, sizes) if len(shape) == 3 else None)


def _hooked(model: nn.Module) -> bool:
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules()
    )


def _rectify_late(modules: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the modules with every ReLU before a maximum moved behind it, where it has a quarter of the work.

    ReLU is monotone, so it commutes with a maximum; where several pixels tie at zero, the gradient
    is zero.
    """
    out = list(modules)
    for i in range(len(out) - 1):
        if type(out[i][1]) is nn.ReLU and type(out[i + 1][1]) is nn.MaxPool2d:
            out[i], out[i + 1] = out[i + 1], out[i]
    return out


def _sizes(layers: list[Layer], shape: Shape) -> list[Shape] | None:
    """Return the shape of one example before each layer and after the last, or None if they do not fit."""
    sizes = [shape]
    for layer in layers:
        after = layer.shape(sizes[-1])
        if after is None:
            return None
        sizes.append(after)
    return sizes


def _needed(layers: list[Layer], sizes: list[Shape]) -> tuple[int, int]:
    """Return how many rows and columns of an image the network reads: asked from the end to the beginning."""
    images = [i for i, size in enumerate(sizes) if len(size) == 3]
    height, width = sizes[images[-1]][:2]
    for i in reversed(images[:-1]):
        layer = layers[i]
        if isinstance(layer, Convolution | Pool):
            spread = layer.dilation if isinstance(layer, Convolution) else (1, 1)
            if any(layer.padding):
                height, width = sizes[i][
                    :2
                ]  # padding counts from the true edge: keep it where it is
                continue
            height, width = (
                (n - 1) * s + d * (k - 1) + 1
                for n, s, d, k in zip(
                    (height, width), layer.stride, spread, layer.kernel, strict=True
                )
            )
    return height, width


def _slots(
    model: nn.Module, modules: list[tuple[str, nn.Module]], layers: list[Layer]
) -> tuple[Slot, ...] | None:
    """Return where each parameter lies, in the model's order, or None if two layers share one."""
    places = {
        f"{name}.{short}": (i, short)
        for i, (name, m) in enumerate(modules)
        for short, _ in m.named_parameters()
    }
    slots, start = [], 0
    for name, parameter in model.named_parameters():
        index, short = places.pop(name)
        slots.append(Slot(name, index, short, start, tuple(parameter.shape)))
        start += parameter.numel()
    return None if places else tuple(slots)
