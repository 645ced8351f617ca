"""The layers that the fast engine knows, each with its own forward and backward pass over stacked clients.

Everything has two leading axes, [clients k, batch B]; images lie as [k, B, height, width,
channels], so that a patch is a few long runs of memory. A backward pass leaves the tensors'
gradients as contractions, see `contractions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib.federated.contractions import Contractions, Formed, Outer, Summed

Weights = dict[
    str, torch.Tensor
]  # a layer's own tensors by their short names, [k, *parameter shape]
Shape = tuple[int, ...]  # of one example


class Layer(Protocol):
    """What the engine asks of a layer."""

    def shape(self, shape: Shape) -> Shape | None:
        """Return the output's shape for one example's shape, or None if this layer cannot take it."""

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the output and what the backward pass needs."""

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return the gradient of the input (None where the layer is the first) and of each tensor.

        `apart` says whether somebody will ask for the examples' gradients one by one.
        """


@dataclass(frozen=True)
class Dense:
    """y = x Wᵀ + b."""

    features: int
    outputs: int

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
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g W and the outer products g ⊗ x."""
        sums: Contractions = {"weight": Outer(g, saved)}
        if "bias" in weights:
            sums["bias"] = Formed(g)
        return None if first else torch.bmm(g, weights["weight"]), sums


@dataclass(frozen=True)
class Convolution:
    """A convolution without groups, over images [k, B, height, width, channels].

    The library's convolution is used wherever it is fast. The first layer of a network is not such
    a place: it has few channels and its input needs no gradient, so one matrix of patches serves
    its forward and its backward pass.
    """

    channels: int
    outputs: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    first: bool

    def _size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (height, width) of the output."""
        height, width = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(
                size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )
        return height, width

    def shape(self, shape: Shape) -> Shape | None:
        """Return (height, width, outputs) for (height, width, channels)."""
        if len(shape) != 3 or shape[2] != self.channels:
            return None
        size = self._size((shape[0], shape[1]))
        return (*size, self.outputs) if min(size) > 0 else None

    def _patches(self, x: torch.Tensor) -> torch.Tensor:
        """Return the patches of x, [k·B, channels·kh·kw, T]: position last, where a row of pixels stays one run."""
        images = F.pad(
            _channels_second(x.flatten(0, 1)), (self.padding[1],) * 2 + (self.padding[0],) * 2
        )
        image, channel, row, column = images.stride()
        (sy, sx), (dy, dx) = self.stride, self.dilation
        size = self._size((x.shape[2], x.shape[3]))
        view = images.as_strided(
            (len(images), self.channels, *self.kernel, *size),
            (image, channel, dy * row, dx * column, sy * row, sx * column),
            images.storage_offset(),
        )
        return view.reshape(len(images), -1, size[0] * size[1])

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, height', width', outputs] of x [k, B, height, width, channels]."""
        if self.first:
            patches = self._patches(x)
            matrix = weights["weight"].flatten(2).transpose(1, 2)  # [k, P, outputs]
            out = torch.bmm(
                patches.transpose(1, 2),
                matrix[:, None].expand(-1, x.shape[1], -1, -1).flatten(0, 1),
            )
            out = out.view(*x.shape[:2], *self._size((x.shape[2], x.shape[3])), self.outputs)
            return (
                out + weights["bias"][:, None, None, None] if "bias" in weights else out
            ), patches

        def one(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
            images, offset = _channels_second(x), bias[0] if bias else None
            out = F.conv2d(images, weight, offset, self.stride, self.padding, self.dilation)
            return out.permute(0, 2, 3, 1).contiguous()

        return _each(
            one, x, weights["weight"], *([weights["bias"]] if "bias" in weights else [])
        ), x

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return the transposed convolution of g and, for the tensor, what x and g correlate to."""
        sums: Contractions = {"weight": self._correlation(weights["weight"], g, saved, apart)}
        if "bias" in weights:
            sums["bias"] = Formed(g.sum((2, 3)))
        if first:
            return None, sums

        def one(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            back = self._library(_channels_second(g), _channels_second(x), weight, 1, 0)
            return back.permute(0, 2, 3, 1).contiguous()

        return _each(one, g, saved, weights["weight"]), sums

    def _correlation(
        self, weight: torch.Tensor, g: torch.Tensor, saved: Any, apart: bool
    ) -> Formed | Summed:
        """Return the gradients of the tensor, [k, B, size], or their sums, [k, size]."""
        clients, batch = g.shape[:2]
        if self.first:
            formed = torch.bmm(saved, g.flatten(2, 3).flatten(0, 1))  # [k·B, P, outputs]
            return Formed(formed.transpose(1, 2).reshape(clients, batch, -1))
        if not apart:

            def one(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return self._library(
                    _channels_second(g), _channels_second(x), weight, 1, 1
                ).flatten()

            return Summed(_each(one, g, saved, weight))
        # every example is a group of its own: one call of the library, in the layout where it is
        # fast
        x, g = (v.permute(0, 1, 4, 2, 3).reshape(1, -1, *v.shape[2:4]) for v in (saved, g))
        shape_only = weight.new_empty(clients * batch * self.outputs, *weight.shape[2:])
        return Formed(
            self._library(g, x, shape_only, clients * batch, 1).reshape(clients, batch, -1)
        )

    def _library(
        self, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int, what: int
    ) -> torch.Tensor:
        """Return the gradient of the input (what = 0) or of the weight (1) from torch's own backward pass."""
        return torch.ops.aten.convolution_backward(
            g, x, weight, None, self.stride, self.padding, self.dilation, False, (0, 0), groups,
            (what == 0, what == 1, False),
        )[what]  # fmt: skip


def _channels_second(x: torch.Tensor) -> torch.Tensor:
    """Return [B, H, W, C] seen as [B, C, H, W]."""
    return x.permute(0, 3, 1, 2)


def _each(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Return f of every client's tensors, stacked: a library's convolution has one weight for all its images."""
    if len(tensors[0]) == 1:
        return f(*(t[0] for t in tensors))[None]
    return torch.stack([f(*parts) for parts in zip(*tensors, strict=True)])


FUNCTIONS = {"relu": torch.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}


@dataclass(frozen=True)
class Pointwise:
    """An activation whose derivative is a function of its own output."""

    name: str  # of one of FUNCTIONS

    def shape(self, shape: Shape) -> Shape | None:
        """Return the shape as it is."""
        return shape

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the activation, which is also all that is kept.

        One client at a time: a vector unit rounds an exponential differently in the last,
        incomplete vector, and a client's numbers may not depend on who is stacked beside it.
        """
        out = torch.relu(x) if self.name == "relu" else _each(FUNCTIONS[self.name], x)
        return out, out

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g times the derivative."""
        if self.name == "relu":
            return torch.ops.aten.threshold_backward(g, saved, 0), {}
        slope = saved * (1 - saved) if self.name == "sigmoid" else 1 - saved * saved
        return g * slope, {}


ACTIVATIONS = {
    nn.ReLU: Pointwise("relu"),
    nn.Sigmoid: Pointwise("sigmoid"),
    nn.Tanh: Pointwise("tanh"),
}


@dataclass(frozen=True)
class Pool:
    """Maximum or average over windows of images [k, B, height, width, channels]."""

    kind: str  # 'max' or 'average'
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def shape(self, shape: Shape) -> Shape | None:
        """Return (height', width', channels)."""
        if len(shape) != 3:
            return None
        size = [
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(shape[:2], self.padding, self.kernel, self.stride, strict=True)
        ]
        return (*size, shape[2]) if min(size) > 0 else None

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, height', width', channels]."""
        images = _channels_second(x.flatten(0, 1))
        where = None
        if self.kind == "max":
            out, where = torch.ops.aten.max_pool2d_with_indices(
                images, self.kernel, self.stride, self.padding
            )
        else:
            out = F.avg_pool2d(images, self.kernel, self.stride, self.padding)
        return out.permute(0, 2, 3, 1).unflatten(0, x.shape[:2]).contiguous(), (
            x.shape,
            images,
            where,
        )

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g at the maxima, or spread evenly."""
        shape, images, where = saved
        g = _channels_second(g.flatten(0, 1))
        if self.kind == "max":
            back = torch.ops.aten.max_pool2d_with_indices_backward(
                g, images, self.kernel, self.stride, self.padding, (1, 1), False, where
            )
        else:
            back = torch.ops.aten.avg_pool2d_backward(
                g, images, self.kernel, self.stride, self.padding, False, True, None
            )
        return back.permute(0, 2, 3, 1).contiguous().view(shape), {}


@dataclass(frozen=True)
class Flat:
    """Images to vectors, in the order (channels, height, width) that a dense layer's weights expect."""

    def shape(self, shape: Shape) -> Shape | None:
        """Return (features,)."""
        return (int(torch.tensor(shape).prod()),)

    def forward(self, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return [k, B, features]."""
        return (x.permute(0, 1, 4, 2, 3) if x.dim() == 5 else x).flatten(2), x.shape

    def backward(
        self, weights: Weights, g: torch.Tensor, saved: Any, first: bool, apart: bool
    ) -> tuple[torch.Tensor | None, Contractions]:
        """Return g in the images' layout."""
        if len(saved) != 5:
            return g.view(saved), {}
        k, batch, height, width, channels = saved
        return g.view(k, batch, channels, height, width).permute(0, 1, 3, 4, 2).contiguous(), {}


def cross_entropy_gradient(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the gradient of every example's cross-entropy by its logits.

    Parameters
    ----------
    logits : [k, B, classes]
    target : class indices [k, B] or soft labels [k, B, classes]
    """
    probabilities = torch.softmax(logits, -1)
    if target.dim() == 3:
        return probabilities * target.sum(-1, keepdim=True) - target
    return probabilities.scatter_add_(
        2, target[..., None], probabilities.new_tensor(-1.0).expand(*target.shape, 1)
    )


def layer_of(module: nn.Module, first: bool) -> Layer | None:
    """Return the engine's form of a module, or None if the engine does not know it.

    Only the very types are known, not what inherits from them: a subclass may compute something
    else.
    """
    if type(module) in ACTIVATIONS:
        return ACTIVATIONS[type(module)]
    if type(module) is nn.Linear:
        return Dense(module.in_features, module.out_features)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flat()
    if type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros":
        if isinstance(module.padding, str):
            return None
        window = (module.kernel_size, module.stride, module.padding, module.dilation)
        kernel, stride, padding, dilation = map(_pair, window)
        return Convolution(
            module.in_channels, module.out_channels, kernel, stride, padding, dilation, first
        )
    if type(module) is nn.MaxPool2d and not (
        module.ceil_mode or module.return_indices or module.dilation != 1
    ):
        return Pool("max", _pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
    plain = type(module) is nn.AvgPool2d and not module.ceil_mode and module.count_include_pad
    if plain and module.divisor_override is None:
        return Pool(
            "average", _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        )
    return None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
