"""Gaussian noise: where it enters is a stage's business, what divides it is decided here."""

import hashlib
import math
from collections.abc import Sequence

import torch

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.defenses.clipping import Gradient

DIVISORS = ("sqrt_batch", "batch", "none")


def mean_std(noise_scale: float, bound: float, batch_size: int, divide_by: str) -> float:
    """Return the standard deviation of the noise per coordinate of the batch mean.

    The papers and their code disagree on this number by a factor of B.

    Parameters
    ----------
    noise_scale : float, ≥ 0, the σ that the papers account with
    bound : float, > 0, the clipping bound C
    batch_size : int, ≥ 1, B
    divide_by : {'sqrt_batch', 'batch', 'none'}
        'sqrt_batch': σC/√B, each example noised and the results averaged (Fed-CDP, Algorithm 2).
        'batch': σC/B, the batch sum noised and divided (the released code; DP-SGD).
        'none': σC, the mean noised as if it were one example (Fed-alphaCDP, Algorithm 1).

    Examples
    --------
    >>> [round(mean_std(6, 4, 5, how), 2) for how in DIVISORS]
    [10.73, 4.8, 24.0]
    """
    one_of(DIVISORS, divide_by=divide_by)
    return noise_scale * bound / {"sqrt_batch": math.sqrt(batch_size), "batch": batch_size, "none": 1}[divide_by]


def keyed_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator that depends on the key alone: never on the order in which clients are simulated.

    Parameters
    ----------
    device : where the noise is drawn; CPU and CUDA give different, equally distributed numbers
    key : e.g. seed, round, client
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def add_gaussian(values: Gradient, std: float, generators: Sequence[torch.Generator]) -> Gradient:
    """Return values plus independent N(0, std²) in every coordinate.

    Parameters
    ----------
    values : tensors [clients, …]
    std : float, ≥ 0; at 0 the values are returned as they are
    generators : one for each client, in the order of the leading axis
    """
    if std == 0:
        return values
    noisy = {}
    for name, tensor in values.items():
        draws = [
            torch.randn(row.shape, generator=g, device=row.device, dtype=row.dtype)
            for row, g in zip(tensor, generators, strict=True)
        ]
        noisy[name] = tensor + std * torch.stack(draws)
    return noisy
