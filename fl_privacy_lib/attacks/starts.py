"""Where an attack starts: the first dummy image."""

import math

import torch

from fl_privacy_lib._checks import one_of

TILES = {"patterned": 2, "patterned_4x4": 4, "patterned_8x8": 8}  # tiles along each side
STARTS = (*TILES, "uniform", "normal", "single_colour", "zeros", "ones")


def start(
    kind: str, count: int, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return dummy images to begin a reconstruction with.

    Parameters
    ----------
    kind : one of STARTS
        'patterned': one random quarter, U(0, 1), tiled 2×2 (CPL); 'patterned_4x4' and
        'patterned_8x8': a smaller tile, so often along each side; 'uniform': U(0, 1); 'normal':
        N(0, 1) (DLG); 'single_colour': one channel, drawn by chance, is 1 and the others 0, which
        for grey images is 'ones'.
    count : int, number of images
    shape : (channels, height, width)

    Returns
    -------
    tensor [count, *shape], on the generator's device

    Notes
    -----
    'zeros' and 'ones' have no chance in them: a fresh start, or another try, begins at the same
    point. Source: CPL (Wei et al. 2020) and its released code; DLG (Zhu et al. 2019) for 'normal'.
    """
    one_of(STARTS, start=kind)
    device = generator.device
    if kind == "normal":
        return torch.randn((count, *shape), generator=generator, device=device)
    if kind == "uniform":
        return torch.rand((count, *shape), generator=generator, device=device)
    if kind in ("zeros", "ones"):
        return torch.full((count, *shape), float(kind == "ones"), device=device)
    channels, height, width = shape
    if kind == "single_colour":
        drawn = torch.randint(channels, (count,), generator=generator, device=device)
        lit = torch.nn.functional.one_hot(drawn, channels).float()  # [count, channels]
        return lit[:, :, None, None].expand(count, *shape).clone()
    times = TILES[kind]
    size = (count, channels, math.ceil(height / times), math.ceil(width / times))
    tile = torch.rand(size, generator=generator, device=device)
    return tile.repeat(1, 1, times, times)[..., :height, :width]
