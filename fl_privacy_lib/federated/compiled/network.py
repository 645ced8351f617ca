"""The models that have a kernel: how one is recognised, and what the kernel reads and writes."""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Examples
from fl_privacy_lib.models import Parameters, mlp, training_cnn

# channels of the convolutions; the second's weights lie in halves of 16 inputs
FIRST, SECOND, HALF = 32, 64, 16
# examples that go together: their gradients of the second weights fill half of a 1 MiB L2 cache
SLICE = 6
ROWS = 6  # tiles that go through the second convolution together
# attributes of a module that say nothing of how it computes; the hooks themselves are compared,
# that there once was one changes nothing
CONTENTS = {"_parameters", "_modules", "training", "_is_full_backward_hook"}


@dataclass(frozen=True)
class Network:
    """A model in the kernel's form: dense layers, after two convolutions where `side` is not 0.

    Attributes
    ----------
    names : of the parameters, in the model's order
    shapes : theirs
    side : of the images, in pixels
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    side: int = 0

    @property
    def windows(self) -> int:
        """T², the number of windows that are pooled last."""
        return (((self.side - 2) // 2 - 2) // 2) ** 2 if self.side else 0

    @property
    def size(self) -> int:
        """S, the windows that the first convolution pools, a side."""
        return 2 * int(self.windows**0.5) + 2 if self.side else 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Features, the hidden layers, classes."""
        dense = self.shapes[2:] if self.side else self.shapes
        return (dense[0][1], *(shape[0] for shape in dense))

    @property
    def form(self) -> tuple[int, int, int, int]:
        """Channels, side, S and the number of dense layers, as the kernel takes them."""
        return (self.shapes[0][1] if self.side else 0, self.side, self.size, len(self.widths) - 1)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where each tensor, padded to a multiple of 32, begins in a memory of P floats; and P."""
        return (0, *accumulate(-(-prod(self._layout(s)) // 32) * 32 for s in self.shapes))

    def _layout(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in memory of a parameter: the two convolutions' or a dense layer's."""
        if len(shape) == 2:
            return (shape[0], -(-shape[1] // 16) * 16)
        return (shape[1], 3, 3, FIRST) if shape[0] == FIRST else (2, SECOND, 3, 3, HALF)

    def _views(self, flat: np.ndarray) -> list[torch.Tensor]:
        """Return each parameter's part of a memory, as a view that its reshaped tensor fits."""
        views = []
        for begin, shape in zip(self.begins, self.shapes, strict=False):
            layout = self._layout(shape)
            part = torch.from_numpy(flat[begin : begin + prod(layout)]).view(layout)
            if len(shape) == 4:
                part = (
                    part.permute(3, 0, 1, 2) if shape[0] == FIRST else part.permute(1, 0, 4, 2, 3)
                )
            elif self.side:
                part = part.view(-1, self.windows, SECOND).transpose(1, 2)
            else:
                part = part[:, : shape[1]]
            views.append(part)
        return views

    def pack(self, weights: Parameters, flat: np.ndarray) -> None:
        """Write weights into a memory [P] of zeros."""
        for name, part in zip(self.names, self._views(flat), strict=True):
            part.copy_(weights[name].reshape(part.shape))

    def unpack(self, flat: np.ndarray) -> Gradient:
        """Return copies of what lies in a memory [P], tensors [1, *parameter shape]."""
        parts = zip(self.names, self.shapes, self._views(flat), strict=True)
        return {
            name: part.clone(memory_format=torch.contiguous_format).view(1, *shape)
            for name, shape, part in parts
        }


def network_of(model: nn.Module, train: Examples) -> Network | None:
    """Return the model in the kernel's form, or None where it, or the examples, have another one.

    Examples
    --------
    >>> from fl_privacy_lib.models import mlp, training_cnn
    >>> images, rows, label = torch.zeros(1, 1, 28, 28), torch.zeros(1, 30), torch.tensor([1])
    >>> network_of(training_cnn((1, 28, 28), 10), (images, label)).windows
    25
    >>> network_of(mlp(30, 2), (rows, label)).widths
    (30, 600, 100, 2)
    >>> network_of(mlp(30, 2), (rows, label + 1)) is None  # no such class
    True
    """
    x, y = train
    parameters = dict(model.named_parameters())
    if not parameters or not _readable(x, y):
        return None
    shapes = tuple(tuple(p.shape) for p in parameters.values())
    image = len(shapes[0]) == 4 and x.dim() == 4 and x.shape[2] == x.shape[3] >= 10
    if not image and not all(len(shape) == 2 for shape in shapes):
        return None
    classes, hidden = shapes[-1][0], tuple(shape[0] for shape in shapes[:-1])
    with torch.device("meta"):  # no memory, and no draw from torch's generator
        twin = (
            training_cnn((x.shape[1], *x.shape[2:]), classes)
            if image
            else mlp(prod(x.shape[1:]), classes, hidden)
        )
    if not _same(model, twin) or (len(y) and int(y.max()) >= classes):
        return None
    return Network(tuple(parameters), shapes, x.shape[3] if image else 0)


def _readable(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether the kernel may read the examples where they lie."""
    placed = (
        x.dtype == torch.float32
        and y.dtype == torch.int64
        and x.device.type == y.device.type == "cpu"
    )
    whole = x.is_contiguous() and y.is_contiguous() and y.shape == x.shape[:1] and x.dim() > 1
    return placed and whole and (len(y) == 0 or int(y.min()) >= 0)


def _same(model: nn.Module, twin: nn.Module) -> bool:
    """Return whether a model's modules are its twin's: classes, options, hooks, parameters.

    What somebody else has noted on a module beside these (Opacus does) changes nothing, but for
    another ``forward``.
    """
    mine, others = list(model.modules()), list(twin.modules())
    return len(mine) == len(others) and all(map(_alike, mine, others))


def _alike(module: nn.Module, other: nn.Module) -> bool:
    options = {name: value for name, value in vars(other).items() if name not in CONTENTS}
    kinds, others = (
        [
            (p.shape, p.dtype, p.requires_grad, bool(p._backward_hooks))
            for p in m.parameters(recurse=False)
        ]
        for m in (module, other)
    )
    same = type(module) is type(other) and options.items() <= vars(module).items()
    return same and "forward" not in vars(module) and kinds == others


Memory = namedtuple(
    "Memory",
    "x y positions ends begins widths rows places state bounds stds norms factors hits "
    "weights start update sums inputs gradients middle marks feature_marks middle_gradient "
    "convolutions transformed tiles outputs tile_values tile_channels tile_counts channel_values "
    "channel_patches channel_counts",
)
"""The arrays of a participation, for M tensors in P floats; rows are padded to a multiple of 16.

x, y : all examples, float32 [N, pixels or features], and labels, int64 [N]
positions, ends : every batch's positions in x, one after another, and where each batch begins and
    ends [L + 1]
begins : where each tensor begins, and P, int64 [M + 1]
widths, rows, places : of each dense layer's input, and of the logits: its width, padded width and
    place in a row of `inputs`
state : the noise's, uint32 [4, 16]
bounds, stds : of each tensor, float32 [M]: what it is clipped to, and its noise on the batch's mean
norms, factors : of each example of a batch and each tensor, float32 [B, M]
hits : the number of right answers, int64 [1]
weights, start, update, sums : float32 [P]: the weights, the global ones, the update since (apart:
    as a difference it would be lost in the weights' rounding), the sum of a batch's clipped
    gradients
inputs, gradients : every dense layer's input and the logits, side by side, float32 [SLICE, …], and
    their gradients
convolutions : gradients of an example's first two tensors, float32 [SLICE, …]
middle … channel_counts : what lies between the convolutions' steps, see `convolutions`
"""


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Return zeros that begin at a multiple of 64 bytes, as a cache line does: torch's all do."""
    return torch.zeros(shape, dtype=dtype).numpy()


def memory_of(network: Network, weights: Parameters, examples: Examples) -> Memory:
    """Return a kernel's memory, with the global weights in it and room for no batch."""
    count, begins = len(network.names), np.array(network.begins)
    size, tiles = network.size, network.windows
    rows = [-(-width // 16) * 16 for width in network.widths]
    middle, none = size * size * FIRST, np.zeros(0, np.int64)
    memory = Memory(
        x=examples[0].detach().numpy().reshape(len(examples[1]), -1),
        y=examples[1].numpy(),
        positions=none,
        ends=none,
        norms=none,
        factors=none,
        hits=np.zeros(1, np.int64),
        state=none,
        begins=begins,
        widths=np.array(network.widths),
        rows=np.array(rows),
        places=np.cumsum([0, *rows]),
        bounds=aligned(count),
        stds=aligned(count),
        weights=aligned(begins[-1]),
        start=aligned(begins[-1]),
        update=aligned(begins[-1]),
        sums=aligned(begins[-1]),
        inputs=aligned(SLICE, sum(rows)),
        gradients=aligned(SLICE, sum(rows)),
        middle=aligned(SLICE, middle),
        marks=aligned(SLICE, middle, dtype=torch.uint8),
        feature_marks=aligned(SLICE, tiles * SECOND, dtype=torch.uint8),
        middle_gradient=aligned(middle),
        convolutions=aligned(SLICE, begins[2 if tiles else 0]),
        transformed=aligned(16, FIRST, SECOND),
        tiles=aligned(16, ROWS, FIRST),
        outputs=aligned(16, ROWS, SECOND),
        tile_values=aligned(tiles, 5, SECOND),
        tile_channels=aligned(tiles, 5, SECOND, dtype=torch.int32),
        tile_counts=aligned(tiles, dtype=torch.int64),
        channel_values=aligned(SECOND, tiles),
        channel_patches=aligned(SECOND, tiles, dtype=torch.int32),
        channel_counts=aligned(SECOND, dtype=torch.int32),
    )
    network.pack(weights, memory.start)
    return memory
