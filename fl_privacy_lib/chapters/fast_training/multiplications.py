"""Multiplications that one example's gradient takes, in a library and in the compiled kernel.

The kernel saves where the answer is the same: Winograd's products in the forward pass of the second
convolution, no work on positions that no window reads, and none on what ReLU and the maximum have
set to zero.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

WINOGRAD = 16 / 36
"""Products of F(2×2, 3×3) over those of four positions by nine taps (Lavin and Gray, 2016)."""


@dataclass(frozen=True)
class Work:
    """One pass through one layer: multiplications of an example in a library and in the kernel."""

    name: str
    library: float
    kernel: float


def multiplications(model: nn.Module, x: torch.Tensor) -> list[Work]:
    """Return the passes of an example's gradient through the papers' CNN or MLP, in their order.

    Parameters
    ----------
    model : one of those two networks
    x : examples [n, …], over which the share of what is not zero is averaged

    Notes
    -----
    Transforms, norms and the weighted sums of gradients are not counted; they hold no product that
    could be saved.
    """
    layers = nn.Sequential(*model.children())
    counts = [weight.numel() for weight in model.parameters()]
    if any(isinstance(layer, nn.Conv2d) for layer in layers):
        return _cnn(layers, x)
    forward, back = float(sum(counts)), float(sum(counts[1:]))
    passes = (
        ("dense, forward", forward),
        ("dense, weight gradient", forward),
        ("dense, input gradient", back),
    )
    return [Work(name, count, count) for name, count in passes]


def _cnn(model: nn.Sequential, x: torch.Tensor) -> list[Work]:
    first, second, dense = (p.shape for p in model.parameters())
    with torch.no_grad():
        features = model[:6](x)  # [n, 64, T, T]
    active = float((features > 0).flatten(1).sum(1).double().mean())
    tiles, side = features[0, 0].numel(), x.shape[-1] - 2
    # of the first pool's windows, only those that the second convolution reads
    inner, windows = side // 2 - 2, (2 * math.isqrt(tiles) + 2) ** 2
    w1, w2, w3 = (float(shape.numel()) for shape in (first, second, dense))
    reads = active * w2 / second[0]  # each feature that is not zero meets nine taps of 32 channels
    return [
        Work("first convolution, forward", side**2 * w1, 4 * windows * w1),
        Work("second convolution, forward", inner**2 * w2, WINOGRAD * 4 * tiles * w2),
        Work("dense, forward", w3, w3),
        Work("dense, weight gradient", w3, w3),
        Work("dense, input gradient", w3, w3),
        Work("second convolution, weight gradient", inner**2 * w2, reads),
        Work("second convolution, input gradient", inner**2 * w2, reads),
        Work("first convolution, weight gradient", side**2 * w1, windows * w1),
    ]
