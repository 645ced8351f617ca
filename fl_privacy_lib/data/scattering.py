"""The scattering transform: features of an image that nothing was learned for."""

from functools import cache
from math import pi

import numpy as np
import torch
from torch.nn import functional

SCALES, ANGLES = 2, 8
GROUPS = 27
"""Of the features of a colour image that are normalised together; Tramèr and Boneh's choice."""
Filters = tuple[torch.Tensor, list[torch.Tensor]]


def morlet(side: int, width: float, angle: float, slant: float, frequency: float) -> np.ndarray:
    """Return a Morlet wavelet, or a Gaussian, on a torus.

    Parameters
    ----------
    side : pixels of the torus in either direction
    width : standard deviation of the envelope along the wave, in pixels
    angle : of the wave, in radians from the rows' axis
    slant : width of the envelope along the wave, over that across
    frequency : of the wave, in radians a pixel; 0: the envelope alone, with sum 1

    Returns
    -------
    complex array [side, side], a wavelet's sum is 0; its centre is at [0, 0]
    """
    place = np.arange(-side, side)  # beyond that the envelope is zero to seven digits
    along = np.cos(angle) * place[:, None] + np.sin(angle) * place
    across = slant * (np.cos(angle) * place - np.sin(angle) * place[:, None])
    envelope = np.exp(-(along**2 + across**2) / (2 * width**2)) * slant / (2 * pi * width**2)
    wave = envelope * np.exp(1j * frequency * along)
    if frequency:
        wave -= envelope * wave.sum() / envelope.sum()
    return wave.reshape(2, side, 2, side).sum((0, 2))


@cache
def _filters(side: int) -> Filters:
    """Return the spectra of the low pass [side, side] and, for each scale, of all angles."""

    def spectrum(*shape: float) -> torch.Tensor:
        return torch.from_numpy(np.fft.fft2(morlet(side, *shape)).real.astype(np.float32))

    angles = [pi * (ANGLES // 2 - 1 - k) / ANGLES for k in range(ANGLES)]
    wavelets = [
        torch.stack([spectrum(0.8 * 2**j, angle, 4 / ANGLES, 0.75 * pi / 2**j) for angle in angles])
        for j in range(SCALES)
    ]
    return spectrum(0.8 * 2 ** (SCALES - 1), 0, 1, 0), wavelets


def _every(spectrum: torch.Tensor, step: int) -> torch.Tensor:
    """Return the spectrum of a signal of which each step-th row and column is kept."""
    side = spectrum.shape[-1] // step
    return spectrum.unflatten(-1, (step, side)).unflatten(-3, (step, side)).mean((-4, -2))


def scattering(images: torch.Tensor) -> torch.Tensor:
    """Return the scattering transform of images.

    A first order is the local mean of |x ★ ψ| for wavelets ψ of two scales and eight angles; a
    second one that of ||x ★ ψ| ★ ψ'| for all ψ' of a larger scale than ψ; the order 0 is that of x.

    Parameters
    ----------
    images : float [N, C, H, H], H a multiple of 4

    Returns
    -------
    float [N, C, 81, H/4, H/4]: orders 0 (1), 1 (16) and 2 (64), each by scales, then angles

    Notes
    -----
    Source: Bruna and Mallat (2013), section 2; filters and padding as in Kymatio (Andreux et al.
    2020), for J = 2 and L = 8.
    """
    low, wavelets = _filters(images.shape[-1] + 2 ** (SCALES + 1))
    orders: tuple[list[torch.Tensor], ...] = ([], [], [])

    def follow(signal: torch.Tensor, scale: int, order: int) -> None:
        """Add a signal's local mean, and go on to its wavelets; 2^scale pixels are one of its."""
        spectrum = torch.fft.fft2(signal)

        def through(passed: torch.Tensor, to: int) -> torch.Tensor:
            """Return the signal through a filter, at a coarser scale."""
            product = spectrum * _every(passed, 2**scale) * 4**scale
            return torch.fft.ifft2(_every(product, 2 ** (to - scale)))

        orders[order].append(through(low, SCALES).real[..., 1:-1, 1:-1])
        for larger in range(scale + (order > 0), SCALES) if order < 2 else ():
            for wavelet in wavelets[larger]:
                follow(through(wavelet, larger).abs(), larger, order + 1)

    follow(functional.pad(images, (2**SCALES,) * 4, mode="reflect"), 0, 0)
    return torch.stack([*orders[0], *orders[1], *orders[2]], dim=2)


def features(images: np.ndarray) -> np.ndarray:
    """Return what a linear model is trained on: uint8 [N, H, H, 3] → float32 [N, 243·(H/8)²].

    The means of 2×2 places of the transform, which a laptop's memory holds; each group of nine
    channels is then shifted and scaled to mean 0 and variance 1 *within the example*, so that no
    example's features depend on another's.
    """
    rows = []
    for chunk in np.array_split(images, -(-len(images) // 100)):
        x = torch.from_numpy(chunk.transpose(0, 3, 1, 2) / np.float32(255))
        pooled = functional.avg_pool2d(scattering(x).flatten(1, 2), 2)
        rows.append(functional.group_norm(pooled, GROUPS).flatten(1))
    return torch.cat(rows).numpy()
