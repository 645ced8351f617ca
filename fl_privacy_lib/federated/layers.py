"""The layers that the stacked engine knows: forward and backward passes over stacked clients.

Everything has two leading axes, [clients k, batch B]; images lie as [k, B, height, width,
channels], so that a patch is a few long runs of memory. A backward pass leaves the tensors'
gradients as contractions, see `contractions`.

A layer has ``shape(shape)``, the output's shape for one example's, or None if it cannot be taken;
``forward(weights, x)``, the output and what the backward pass needs; and ``backward(weights, g,
saved, apart)``, the gradients of the input (None from a network's first layer with weights) and, by
short name, of the layer's tensors. There g is the gradient of the output, and apart says whether
somebody will ask for the examples' gradients one by one.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib.federated.contractions import Contractions, Formed, Outer

Weights = dict[str, torch.Tensor]  # of a layer, by their short names, [k, *parameter shape]
Shape = tuple[int, ...]  # of one example
Pair = tuple[int, int]  # (vertical, horizontal)


@dataclass(frozen=True)
class Dense:
    """y = x Wᵀ + b."""

    features: int
    outputs: int
    first: bool  # of the network's layers with weights: its input needs no gradient

    def shape(self, shape: Shape) -> Shape | None:
        """Return (outputs,) for flat examples."""
        return (self.outputs,) if shape == (self.features,) else None

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, outputs] of x [k, B, features]."""
        transposed = weights["weight"].transpose(1, 2)
        if "bias" in weights:
            return torch.baddbmm(weights["bias"][:, None], x, transposed), x
        return torch.bmm(x, transposed), x

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g W and the outer products g ⊗ x."""
        sums: Contractions = {"weight": Outer(g, saved)}
        if "bias" in weights:
            sums["bias"] = Formed(g)
        return None if self.first else torch.bmm(g, weights["weight"]), sums


@dataclass(frozen=True)
class Window:
    """A window that slides over an image, as torch's layers describe it."""

    kernel: Pair
    stride: Pair
    padding: Pair

    @classmethod
    def of(cls, module: Any) -> "Window":
        """Return the window of a convolution or a pool."""
        settings = (module.kernel_size, module.stride, module.padding)
        return cls(*((v, v) if isinstance(v, int) else tuple(v) for v in settings))

    def places(self, size: Shape) -> Shape:
        """Return how many places it has along an image's height and width."""
        return tuple(
            (n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, *astuple(self), strict=True)
        )

    def pixels(self, places: Shape) -> Shape:
        """Return how many pixels these places cover along height and width, without padding."""
        axes = zip(places, self.kernel, self.stride, strict=True)
        return tuple((n - 1) * s + k for n, k, s in axes)


@dataclass(frozen=True)
class Convolution:
    """A convolution without groups and dilation, over images [k, B, height, width, channels].

    The library's convolution is used wherever it is fast. The first layer of a network is not such
    a place: it has few channels and its input needs no gradient, so one matrix of patches serves
    its forward and its backward pass.
    """

    channels: int
    outputs: int
    window: Window
    first: bool

    def shape(self, shape: Shape) -> Shape | None:
        """Return (height, width, outputs) for (height, width, channels)."""
        fits = len(shape) == 3 and shape[2] == self.channels
        size = self.window.places(shape[:2]) if fits else (0,)
        return (*size, self.outputs) if min(size) > 0 else None

    def _patches(self, x: torch.Tensor) -> torch.Tensor:
        """Return the patches of x, [k·B, channels·kh·kw, T].

        The position comes last, where a row of pixels stays one run. `F.unfold` is 7 times slower.
        """
        vertical, horizontal = self.window.padding
        images = F.pad(x.flatten(0, 1).movedim(-1, -3), (horizontal,) * 2 + (vertical,) * 2)
        for axis in (0, 1):
            images = images.unfold(2 + axis, self.window.kernel[axis], self.window.stride[axis])
        return images.permute(0, 1, 4, 5, 2, 3).flatten(1, 3).flatten(2)

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, height', width', outputs] of x [k, B, height, width, channels]."""
        weight, bias = weights["weight"], weights.get("bias")
        if self.first:
            patches = self._patches(x)
            matrix = weight.flatten(2).transpose(1, 2)  # [k, P, outputs]
            matrices = matrix[:, None].expand(-1, x.shape[1], -1, -1).flatten(0, 1)
            out = torch.bmm(patches.transpose(1, 2), matrices)
            out = out.view(*x.shape[:2], *self.window.places(x.shape[2:4]), self.outputs)
            return out if bias is None else out + bias[:, None, None, None], patches
        # client by client: the library's convolution has one weight for all its images
        images, offsets = x.movedim(-1, -3), [None] * len(x) if bias is None else bias
        outs = [
            F.conv2d(*parts, self.window.stride, self.window.padding).movedim(-3, -1)
            for parts in zip(images, weight, offsets, strict=True)
        ]
        return torch.stack(outs), x

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return the transposed convolution of g and, for the tensor, what x and g correlate to."""
        weight, g_images = weights["weight"], g.movedim(-1, -3)
        sums: Contractions = {"weight": self._correlate(weight, g, saved, apart)}
        if "bias" in weights:
            sums["bias"] = Formed(g.sum((2, 3)))
        if self.first:
            return None, sums
        clients = zip(g_images, saved.movedim(-1, -3), weight, strict=True)
        return torch.stack([self._library(*c, 1, 0).movedim(-3, -1) for c in clients]), sums

    def _correlate(self, weight: torch.Tensor, g: torch.Tensor, saved: Any, apart: bool) -> Formed:
        """Return the gradients of the weight, [k, B, size], or their sum, [k, 1, size]."""
        clients, batch = g.shape[:2]
        if self.first:
            formed = torch.bmm(saved, g.flatten(2, 3).flatten(0, 1))  # [k·B, P, outputs]
            return Formed(formed.transpose(1, 2).reshape(clients, batch, -1))
        x, g = saved.movedim(-1, -3), g.movedim(-1, -3)
        if not apart:
            parts = zip(g, x, weight, strict=True)
            sums = [self._library(*part, 1, 1).flatten() for part in parts]
            return Formed(torch.stack(sums)[:, None])
        # every example as a group: one call of the library, in the layout where it is fast
        x, g = (images.reshape(1, -1, *images.shape[3:]) for images in (x, g))
        shape_only = weight.new_empty(clients * batch * self.outputs, *weight.shape[2:])
        formed = self._library(g, x, shape_only, clients * batch, 1)
        return Formed(formed.reshape(clients, batch, -1))

    def _library(
        self, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int, what: int
    ) -> torch.Tensor:
        """Return torch's own gradient of the input (what = 0) or of the weight (1)."""
        window = self.window
        return torch.ops.aten.convolution_backward(
            g, x, weight, None, window.stride, window.padding, (1, 1), False, (0, 0),
            groups, (what == 0, what == 1, False),
        )[what]  # fmt: skip


@dataclass(frozen=True)
class Pointwise:
    """An activation whose derivative is a function of its own output."""

    function: Callable[[torch.Tensor], torch.Tensor]  # torch.relu, torch.sigmoid or torch.tanh

    def shape(self, shape: Shape) -> Shape | None:
        """Return the shape as it is."""
        return shape

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the activation, which is also all that is kept.

        One client at a time: a vector unit rounds an exponential differently in the last,
        incomplete vector, and a client's numbers may not depend on who is stacked beside it.
        """
        together = self.function is torch.relu
        out = self.function(x) if together else torch.stack([self.function(part) for part in x])
        return out, out

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g times the derivative."""
        if self.function is torch.relu:
            return torch.ops.aten.threshold_backward(g, saved, 0), {}
        tanh = self.function is torch.tanh
        return g * (1 - saved.square() if tanh else saved * (1 - saved)), {}


ACTIVATIONS = {
    nn.ReLU: Pointwise(torch.relu), nn.Sigmoid: Pointwise(torch.sigmoid),
    nn.Tanh: Pointwise(torch.tanh),
}  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """Maximum over windows of images [k, B, height, width, channels]."""

    window: Window

    def shape(self, shape: Shape) -> Shape | None:
        """Return (height', width', channels)."""
        size = self.window.places(shape[:2]) if len(shape) == 3 else (0,)
        return (*size, shape[2]) if min(size) > 0 else None

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, height', width', channels]."""
        images = x.flatten(0, 1).movedim(-1, -3)
        out, where = torch.ops.aten.max_pool2d_with_indices(images, *astuple(self.window))
        return out.movedim(-3, -1).unflatten(0, x.shape[:2]).contiguous(), (images, where)

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g at the maxima."""
        images, where = saved
        back = torch.ops.aten.max_pool2d_with_indices_backward(
            g.flatten(0, 1).movedim(-1, -3), images, *astuple(self.window), (1, 1), False, where
        )
        return back.movedim(-3, -1).contiguous().unflatten(0, g.shape[:2]), {}


@dataclass(frozen=True)
class Flat:
    """Images to vectors, in the order (channels, height, width) of a dense layer's weights."""

    def shape(self, shape: Shape) -> Shape | None:
        """Return (features,)."""
        return (prod(shape),)

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, features]."""
        x = x.movedim(-1, -3) if x.dim() == 5 else x
        return x.flatten(2), x.shape[2:]

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g in the images' layout."""
        x = g.unflatten(2, saved)
        return x.movedim(-3, -1).contiguous() if len(saved) == 3 else x, {}


Layer = Dense | Convolution | Pointwise | Pool | Flat


def cross_entropy_gradient(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the gradient of every example's cross-entropy by its logits.

    Parameters
    ----------
    logits : [k, B, classes]
    target : class indices [k, B]
    """
    return torch.softmax(logits, -1) - F.one_hot(target, logits.shape[-1])


def layer_of(module: nn.Module, first: bool) -> Layer | None:
    """Return the engine's form of a module, or None if the engine does not know it.

    Only the very types are known, not what inherits from them: a subclass may compute something
    else.

    Parameters
    ----------
    first : whether it is the network's first layer with weights
    """
    if type(module) in ACTIVATIONS:
        return ACTIVATIONS[type(module)]
    if type(module) is nn.Linear:
        return Dense(module.in_features, module.out_features, first)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flat()
    if type(module) is nn.Conv2d and not (
        module.groups != 1
        or module.dilation != (1, 1)
        or module.padding_mode != "zeros"
        or isinstance(module.padding, str)
    ):
        return Convolution(module.in_channels, module.out_channels, Window.of(module), first)
    if type(module) is nn.MaxPool2d and not (
        module.ceil_mode or module.return_indices or module.dilation != 1
    ):
        return Pool(Window.of(module))
    return None
