"""What the tests of local privacy share: seeded draws, laws by enumeration, a test of fit."""

import itertools
import math

import numpy as np
import torch
from scipy import stats

from fl_privacy_lib.defenses.perturbation import Duchi, Hybrid, Laplace, Piecewise

ONE_DIMENSIONAL = (Duchi, Piecewise, Hybrid, Laplace)
WRONG_ALARM = 1e-6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def fits(observed, distribution):
    """Whether counts look drawn from a distribution: a chi-squared test over the outputs that
    are possible.
    """
    assert observed[distribution == 0].sum() == 0
    possible = distribution > 0
    if possible.sum() == 1:
        return True
    return (
        stats.chisquare(observed[possible], distribution[possible] * observed.sum()).pvalue
        > WRONG_ALARM
    )


def by_flipping(status, keep):
    """PE as it is described: flip every bit, take one of the ones; over all 2^d outcomes."""
    d = len(status)
    distribution = np.zeros(d + 1)
    for bits in itertools.product((0, 1), repeat=d):
        chance = math.prod(
            keep if bit == true else 1 - keep for bit, true in zip(bits, status, strict=True)
        )
        ones = np.flatnonzero(bits)
        if len(ones):
            distribution[ones] += chance / len(ones)
        else:
            distribution[d] += chance
    return distribution


def signs_distribution(t, epsilon, calibrated):
    """Duchi's vectors as described: over all roundings v, s uniform in one half space or the
    other.
    """
    d, p = len(t), math.exp(epsilon) / (1 + math.exp(epsilon))
    cube = np.array(list(itertools.product((-1, 1), repeat=d)))
    distribution = np.zeros(len(cube))
    for v in cube:
        chance = math.prod((1 + a * b) / 2 for a, b in zip(v, t, strict=True))
        dot = cube @ v
        if (
            calibrated
        ):  # Nguyên et al.: the tied vectors count with the losing half, and its weight is adapted
            weights = np.where(dot > 0, math.exp(epsilon), 1.0)
            distribution += chance * weights / weights.sum()
        else:
            distribution += chance * (
                p * (dot >= 0) / (dot >= 0).sum() + (1 - p) * (dot <= 0) / (dot <= 0).sum()
            )
    return cube, distribution
