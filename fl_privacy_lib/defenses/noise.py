"""Noise: where it enters is a stage's business, what divides it is decided here."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.defenses.clipping import Gradient, scaled

DIVISORS = ("sqrt_batch", "batch", "none")

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]  # one client's row → noise like it


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
    if noise_scale == 0:
        return 0.0  # also for a batch that has no size
    divisors = {"sqrt_batch": math.sqrt(batch_size), "batch": batch_size, "none": 1}
    return noise_scale * bound / divisors[divide_by]


def keyed_generator(device: torch.device, *key: int | str) -> torch.Generator:
    """Return a generator that depends on the key alone: not on the order of the simulation.

    Parameters
    ----------
    device : where the noise is drawn; CPU and CUDA give different, equally distributed numbers
    key : e.g. seed, round, client
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def draws(like: Gradient, generators: Sequence[torch.Generator], draw: Draw) -> Gradient:
    """Return random tensors like `like` [clients, …], each row from its client's generator.

    Raises
    ------
    InputError
        Unless there is one generator for each client; an attacker's replay has none.
    """
    clients = len(next(iter(like.values()))) if like else 0
    if len(generators) != clients:
        raise InputError(
            f"noise for {clients} client(s) is asked of {len(generators)} generator(s): a stage's "
            "noiseless() form must draw nothing, and where many clients share one generator a "
            "stage must draw for all of them at once."
        )
    return {
        name: torch.stack([draw(row, g) for row, g in zip(tensor, generators, strict=True)])
        for name, tensor in like.items()
    }


def normal(row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return N(0, 1) in the shape of a row."""
    return torch.randn(row.shape, generator=generator, device=row.device, dtype=row.dtype)


def laplace(row: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return Laplace draws of mean 0 and variance 1 (scale 1/√2), in the shape of a row."""
    # a difference of two exponential draws: no uniform draw of 0 whose logarithm is infinite
    one, other = (
        torch.empty_like(row, memory_format=torch.contiguous_format).exponential_(
            generator=generator
        )
        for _ in range(2)
    )
    return (one - other) / math.sqrt(2)


def add_noise(
    values: Gradient,
    std: float | Mapping[str, float | torch.Tensor],
    generators: Sequence[torch.Generator],
    draw: Draw = normal,
) -> Gradient:
    """Return values plus independent noise in every coordinate, by default Gaussian.

    Parameters
    ----------
    values : tensors [clients, …]
    std : standard deviation, ≥ 0
        A number for all; at 0 the values are returned as they are. Or by the values' names numbers,
        or tensors [clients] or of the values' own shape.
    generators : one for each client, in the order of the leading axis
    draw : the distribution, scaled to variance 1
    """
    if not isinstance(std, Mapping):
        if std == 0:
            return values
        std = dict.fromkeys(values, std)
    noise = scaled(draws(values, generators, draw), std)
    return {name: value + noise[name] for name, value in values.items()}
