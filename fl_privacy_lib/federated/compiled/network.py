"""The models that have a kernel: how one is recognised, and where its weights lie in the kernel's memory."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from types import ModuleType

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.models import Parameters

IMAGE_LAYERS = (nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Conv2d, nn.ReLU, nn.MaxPool2d, nn.Flatten, nn.Linear)


@dataclass(frozen=True)
class Network:
    """A model in a kernel's form.

    Attributes
    ----------
    names : of the parameters, in the model's order
    shapes : theirs
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.shapes[-1][0]

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where each tensor begins in a memory of P floats, and P; each is padded to a multiple of 32."""
        return (0, *accumulate(-(-size // 32) * 32 for size in self.room()))

    def room(self) -> list[int]:
        """Return how many floats each tensor takes."""
        raise NotImplementedError

    def views(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return each parameter's part of the memory as a view of a shape that `Tensor.view` gives the parameter."""
        raise NotImplementedError

    def _views(self, flat: np.ndarray) -> list[torch.Tensor]:
        memory = torch.from_numpy(flat)
        return self.views([memory[a : a + n] for a, n in zip(self.begins, self.room(), strict=False)])

    def pack(self, weights: Parameters, flat: np.ndarray) -> None:
        """Write weights into a memory [P] of zeros."""
        for name, view in zip(self.names, self._views(flat), strict=True):
            view.copy_(weights[name].reshape(view.shape))

    def unpack(self, flat: np.ndarray) -> Gradient:
        """Return copies of what lies in a memory [P], tensors [1, *parameter shape]."""
        update = {name: torch.empty(1, *shape) for name, shape in zip(self.names, self.shapes, strict=True)}
        for u, view in zip(update.values(), self._views(flat), strict=True):
            u.view(view.shape).copy_(view)
        return update


@dataclass(frozen=True)
class Cnn(Network):
    """The papers' CNN; the layouts are explained in `convolutions` and `cnn`."""

    side: int = 0

    @property
    def windows(self) -> int:
        """T², the number of windows that are pooled last."""
        return (((self.side - 2) // 2 - 2) // 2) ** 2

    def room(self) -> list[int]:
        """Return how many floats each tensor takes."""
        return [9 * 32 * self.shapes[0][1], 9 * 32 * 64, self.classes * self.windows * 64]

    def views(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters' views, [32, C, 3, 3], [64, 2, 16, 3, 3] and [classes, 64, T²]."""
        first, second, dense = memory
        return [
            first.view(-1, 3, 3, 32).permute(3, 0, 1, 2),
            second.view(2, 64, 3, 3, 16).permute(1, 0, 4, 2, 3),
            dense.view(self.classes, self.windows, 64).permute(0, 2, 1),
        ]


@dataclass(frozen=True)
class Mlp(Network):
    """The papers' multilayer perceptron, with any number of layers of any width."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Features, the hidden layers, classes."""
        return (self.shapes[0][1], *(out for out, _ in self.shapes))

    def room(self) -> list[int]:
        """Return how many floats each tensor takes, its rows padded to a multiple of 16."""
        return [before * (-(-out // 16) * 16) for before, out in pairwise(self.widths)]

    def views(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters' views, [outputs, inputs]."""
        return [part.view(before, -1)[:, :out].T for part, (out, before) in zip(memory, self.shapes, strict=True)]


def kernel_of(network: Network) -> ModuleType:
    """Return the module with a network's kernel; the first call in a process imports numba."""
    from fl_privacy_lib.federated.compiled import cnn, mlp

    return cnn if isinstance(network, Cnn) else mlp


def network_of(model: nn.Module, train: tuple[torch.Tensor, torch.Tensor]) -> Network | None:
    """Return the model in a kernel's form, or None where it, or the examples, have another one.

    Examples
    --------
    >>> from fl_privacy_lib.models import mlp, training_cnn
    >>> network_of(training_cnn((1, 28, 28), 10), (torch.zeros(1, 1, 28, 28), torch.tensor([9]))).windows
    25
    >>> network_of(mlp(30, 2), (torch.zeros(1, 30), torch.tensor([1]))).widths
    (30, 600, 100, 2)
    >>> network_of(mlp(30, 2), (torch.zeros(1, 30), torch.tensor([2]))) is None  # no such class
    True
    """
    x, y = train
    layers = list(model.children())
    if type(model) is not nn.Sequential or not all(map(_plain, [model, *layers])) or len(set(layers)) < len(layers):
        return None
    parameters = dict(model.named_parameters())
    usual = all(p.dtype == torch.float32 and p.requires_grad and not p._backward_hooks for p in parameters.values())
    form = tuple(parameters), tuple(tuple(p.shape) for p in parameters.values())
    if not usual or len(parameters) != len([m for m in layers if list(m.parameters())]) or not _readable(x, y):
        return None
    network = _cnn(layers, x, form) or _mlp(layers, x, form)
    return network if network and (len(y) == 0 or int(y.max()) < network.classes) else None


def _plain(module: nn.Module) -> bool:
    """Return whether a module does what its class says: no hooks, no forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in vars(module)


def _readable(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether a kernel may read the examples where they lie."""
    placed = x.dtype == torch.float32 and y.dtype == torch.int64 and x.device.type == y.device.type == "cpu"
    whole = x.is_contiguous() and y.is_contiguous() and y.shape == x.shape[:1]
    return placed and whole and (len(y) == 0 or int(y.min()) >= 0)


def _cnn(layers: list[nn.Module], x: torch.Tensor, form: tuple) -> Cnn | None:
    """Return the CNN that the layers are, if they are one."""
    if tuple(map(type, layers)) != IMAGE_LAYERS or x.dim() != 4 or x.shape[2] != x.shape[3] or x.shape[3] < 10:
        return None
    network = Cnn(form[0], form[1], x.shape[3])
    channels = x.shape[1]
    expected = ((32, channels, 3, 3), (64, 32, 3, 3), (form[1][-1][0], 64 * network.windows))
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    pools = [layer for layer in layers if isinstance(layer, nn.MaxPool2d)]
    same = all((c.stride, c.padding, c.dilation, c.groups) == ((1, 1), (0, 0), (1, 1), 1) for c in convolutions)
    halved = all(_pair(p.kernel_size) == _pair(p.stride) == (2, 2) and _default(p) for p in pools)
    return network if form[1] == expected and same and halved and _flattens(layers[6]) else None


def _mlp(layers: list[nn.Module], x: torch.Tensor, form: tuple) -> Mlp | None:
    """Return the multilayer perceptron that the layers are, if they are one."""
    alternating = [nn.Flatten, *[nn.Linear, nn.ReLU] * len(form[1])][:-1]
    if list(map(type, layers)) != alternating or not form[1] or not _flattens(layers[0]):
        return None
    network = Mlp(form[0], form[1])
    chained = all(len(shape) == 2 and shape[1] == w for shape, w in zip(form[1], network.widths, strict=False))
    return network if chained and x.dim() > 1 and x[:1].numel() == len(x[:1]) * network.widths[0] else None


def _pair(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value, value)


def _default(pool: nn.MaxPool2d) -> bool:
    rest = _pair(pool.padding), _pair(pool.dilation), pool.ceil_mode, pool.return_indices
    return rest == ((0, 0), (1, 1), False, False)


def _flattens(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
