"""Where an attack starts: the first dummy image."""

import math

import torch

from fl_privacy_lib._checks import one_of

STARTS = ("patterned", "uniform", "normal")


def start(
    kind: str, count: int, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return dummy images to begin a reconstruction with.

    Parameters
    ----------
    kind : one of STARTS
        'patterned': one random quarter, U(0, 1), tiled 2×2 (CPL); 'uniform': U(0, 1); 'normal':
        N(0, 1) (DLG).
    count : int, number of images
    shape : (channels, height, width)

    Returns
    -------
    tensor [count, *shape], on the generator's device

    Notes
    -----
    Source: CPL (Wei et al. 2020) and its released code; DLG (Zhu et al. 2019) for 'normal'.
    """
    one_of(STARTS, start=kind)
    device = generator.device
    if kind == "normal":
        return torch.randn((count, *shape), generator=generator, device=device)
    if kind == "uniform":
        return torch.rand((count, *shape), generator=generator, device=device)
    channels, height, width = shape
    size = (count, channels, math.ceil(height / 2), math.ceil(width / 2))
    tile = torch.rand(size, generator=generator, device=device)
    return tile.repeat(1, 1, 2, 2)[..., :height, :width]
