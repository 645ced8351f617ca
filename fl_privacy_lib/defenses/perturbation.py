"""Perturbed vectors: all coordinates under one ε, or those of a random projection.

The mechanisms for one number, which both are built from, stand in `values` and are offered here as
well.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from fl_privacy_lib._checks import InputError, in_range, one_of, positive, whole_number
from fl_privacy_lib.defenses.values import (
    Duchi,
    Hybrid,
    Laplace,
    Perturbation,
    Piecewise,
    inside,
    uniform,
)

__all__ = [
    "Compressed",
    "Duchi",
    "Flat",
    "Hybrid",
    "Laplace",
    "Perturbation",
    "Piecewise",
    "random_projection",
]


@dataclass(frozen=True)
class Flat:
    """All d coordinates under one ε, as the solutions without selection do.

    Parameters
    ----------
    mechanism : type
        Duchi: its own mechanism for vectors, every output ±B. Laplace: ε/d a coordinate. Piecewise,
        Hybrid, or another: `sampled` coordinates are drawn, perturbed with ε/sampled each, and
        multiplied by d/sampled.
    epsilon : float, > 0
    d : int, ≥ 1
    scaled : bool
        False leaves out d/sampled: a control arm, whose mean is sampled/d times the value.
    reading : {'calibrated', 'published'}
        Concerns Duchi with an even d alone: the published form is not ε-LDP then, see Notes.

    Notes
    -----
    Duchi's vectors: round t to v ∈ {-1, 1}^d without bias, then draw s ∈ {-1, 1}^d, uniform among
    s·v ≥ 0 with probability e^ε/(e^ε + 1), else among s·v ≤ 0. With an even d, s·v = 0 is in both
    halves and is e^ε + 1 times as likely as a vector of the losing half: exactly ln(1 + e^ε)-LDP.
    Calibrated, such an s is as likely as one of the losing half, which is the repair of Nguyên et
    al. (2016) but for the name of the half. Source: Wang et al. (ICDE 2019), Algorithms 3 and 4;
    Duchi, Jordan and Wainwright (2018).

    Examples
    --------
    >>> [Flat(Piecewise, epsilon, d=100).sampled for epsilon in (1, 4, 10)]
    [1, 1, 4]
    >>> round(Flat(Duchi, 1.0, d=100, reading="published").duchi_bound(), 2)
    29.35
    """

    mechanism: type[Perturbation]
    epsilon: float
    d: int
    scaled: bool = True
    reading: str = "calibrated"

    _TOGETHER: ClassVar[tuple[type[Perturbation], ...]] = (Duchi, Laplace)

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        one_of(["calibrated", "published"], reading=self.reading)
        whole_number(1, d=self.d)
        if not self.scaled and self.mechanism in self._TOGETHER:
            raise InputError(
                f"scaled = False: {self.mechanism.__name__} sends all coordinates and has no "
                "factor d."
            )

    @property
    def sampled(self) -> int:
        """Return how many coordinates a client sends: max(1, min(d, ⌊ε/2.5⌋)), or all d."""
        return (
            self.d
            if self.mechanism in self._TOGETHER
            else max(1, min(self.d, math.floor(self.epsilon / 2.5)))
        )

    @property
    def inner(self) -> Perturbation:
        """Return the mechanism of one sent coordinate (for Duchi's vectors there is none such)."""
        return self.mechanism(self.epsilon / self.sampled)

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return perturbed vectors [n, d] for values [n, d], in their type."""
        if values.dim() != 2 or values.shape[1] != self.d:
            raise InputError(
                f"values have shape {list(values.shape)}: give one row per client, [n, {self.d}]."
            )
        if self.mechanism is Duchi:
            return self._signs(inside(values), generator).to(values.dtype) * self.duchi_bound()
        if self.sampled == self.d:
            return self.inner(values, generator)
        # [n, sampled], a uniform subset
        columns = uniform(values, generator).topk(self.sampled, dim=1).indices
        factor = self.d / self.sampled if self.scaled else 1.0
        sent = self.inner(inside(values).gather(1, columns), generator) * factor
        return torch.zeros_like(values).scatter(1, columns, sent.to(values.dtype))

    def duchi_bound(self) -> float:
        """Return B: Duchi's vectors are ±B in every coordinate."""
        won, drawn, lost = self.weights()
        tie = 0.0 if self.d % 2 else math.comb(self.d, self.d // 2) / 2**self.d  # P(s·v = 0)
        # Σ s_j v_j over the winning half, over 2^d
        agreeing = math.comb(self.d - 1, self.d // 2) / 2**self.d
        return ((won + lost) * (1 - tie) / 2 + drawn * tie) / ((won - lost) * agreeing)

    def weights(self) -> tuple[float, float, float]:
        """Return how likely one s is, relatively, for s·v > 0, = 0 and < 0 (Duchi's vectors)."""
        down = math.exp(-self.epsilon)
        return 1.0, down if self.reading == "calibrated" else 1 + down, down

    def _signs(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return Duchi's s [n, d] for values [n, d], by rejection from fair coins."""
        won, drawn, lost = self.weights()
        rounded = torch.where(uniform(values, generator) < (1 + values) / 2, 1, -1)  # v
        mean = (won + lost) / 2  # of an s and its opposite
        keep_tie = min(1.0, drawn / mean)
        keep_other = 1.0 if self.d % 2 else min(1.0, mean / drawn)
        agree = torch.empty_like(rounded)
        pending = torch.arange(len(values), device=values.device)
        while len(pending):
            shape = (len(pending), self.d)
            coins = 2 * torch.randint(0, 2, shape, generator=generator, device=values.device) - 1
            balance = coins.sum(1)
            keep, turn = torch.rand(
                2, len(pending), generator=generator, device=values.device, dtype=torch.float64
            )
            wins = torch.where(turn < won / (won + lost), 1, -1)
            agree[pending] = coins * torch.where(balance == 0, 1, balance.sign() * wins)[:, None]
            pending = pending[keep >= torch.where(balance == 0, keep_tie, keep_other)]
        return rounded * agree


def random_projection(d: int, q: int, generator: torch.Generator) -> torch.Tensor:
    """Return a public matrix [q, d] of independent N(0, 1/q).

    This variance keeps a vector's expected squared length; the paper's is lost.

    Parameters
    ----------
    d, q : int, 1 ≤ q ≤ d
    """
    in_range(1, d, q=q)
    matrix = torch.randn(q, d, generator=generator, device=generator.device, dtype=torch.float64)
    return matrix * math.sqrt(1 / q)


@dataclass(frozen=True, eq=False)
class Compressed:
    """Project d coordinates to q, perturb those, and map back with the pseudo-inverse.

    Parameters
    ----------
    inner : Flat
        With d = q. Projected values can leave [-1, 1] although no value did; they are clipped.
    projection : tensor [q, d], see `random_projection`

    Notes
    -----
    Where nothing is clipped the mean is the value's projection onto the matrix's q rows, not the
    value: that is the recovery error. The matrix is public, so ε is the inner one's. Source:
    FedSel, Section 3.1, after Shin et al. (2018).
    """

    inner: Flat
    projection: torch.Tensor

    @cached_property
    def inverse(self) -> torch.Tensor:
        """Return the pseudo-inverse [d, q]."""
        return torch.linalg.pinv(self.projection)

    def recover(self, reports: torch.Tensor) -> torch.Tensor:
        """Return the server's estimate [..., d] from reports or their mean, [..., q]."""
        return reports @ self.inverse.to(reports).T

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return recovered vectors [n, d]; their mean is recovered from the mean report."""
        projected = (values @ self.projection.to(values).T).clamp(-1, 1)  # [n, q]
        return self.recover(self.inner(projected, generator))
