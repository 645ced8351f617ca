"""Perturbing one number in [-1, 1]: four unbiased mechanisms, with distributions in closed form.

Draws are made in float64 and returned in the values' own type; the distributions are those of real
numbers.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, log_expit

from fl_privacy_lib._checks import positive, refuse
from fl_privacy_lib.accounting.events import Floats

_ROOTS = sum(2 * (6353 + sign * 405 * math.sqrt(241)) ** (1 / 3) for sign in (-1, 1))
# ≈ 0.61; below it Duchi's largest variance is the smaller one
HYBRID_FROM = math.log((_ROOTS - 5) / 27)


def inside(values: torch.Tensor) -> torch.Tensor:
    """Return the values in float64; refuse them unless all lie in [-1, 1]."""
    exact = values.to(torch.float64)
    largest = float(exact.abs().max()) if exact.numel() else 0.0  # NaN if one of them is
    refuse(
        {
            # what is returned has the values' type, and would be rounded
            f"the values are {values.dtype}, whole numbers: give them as floating-point "
            "numbers.": not values.is_floating_point(),
            "the values hold NaN or infinity: the training has diverged; lower the learning "
            "rate.": not math.isfinite(largest),
            f"the largest |value| is {largest:.6g}, above 1: scale or clip the values.": (
                largest > 1
            ),
        }
    )
    return exact


@dataclass(frozen=True)
class Perturbation(ABC):
    """What the one-dimensional mechanisms share: ``perturb(values, generator)``.

    Parameters
    ----------
    epsilon : float, > 0; all four are exactly ε-LDP
    """

    epsilon: float

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return perturbed values, of the shape and type of ``values``, each drawn by itself.

        Raises
        ------
        InputError
            If a value is not finite, or lies outside [-1, 1].
        """
        return self._draw(inside(values), generator).to(values.dtype)

    @abstractmethod
    def variance(self, values: npt.ArrayLike) -> Floats:
        """Return the variance of the output at each value in [-1, 1], same shape."""

    @abstractmethod
    def output_bound(self) -> float:
        """Return the largest |output|, ``inf`` if there is none."""

    @abstractmethod
    def log_prob(self, outputs: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
        """Return ln of the density of outputs at values; at an atom, ln of its probability."""

    @abstractmethod
    def _draw(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the outputs, float64, of values in float64."""


def uniform(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return float64 draws from [0, 1), of the shape of ``like``."""
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float64)


@dataclass(frozen=True)
class Duchi(Perturbation):
    """One of two values, ±coth(ε/2). Source: Duchi, Jordan and Wainwright (2018), in one dimension.

    Examples
    --------
    >>> Duchi(1.0).variance([0.0, 1.0]).round(3)
    array([4.683, 3.683])
    """

    def _draw(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        up = (1 + values * math.tanh(self.epsilon / 2)) / 2
        return (2 * (uniform(values, generator) < up).to(torch.float64) - 1) * self.output_bound()

    def variance(self, values: npt.ArrayLike) -> Floats:
        """Return coth²(ε/2) - t²."""
        return self.output_bound() ** 2 - np.square(np.asarray(values, dtype=float))

    def output_bound(self) -> float:
        """Return coth(ε/2) = (e^ε + 1)/(e^ε - 1)."""
        return 1 / math.tanh(self.epsilon / 2)

    def log_prob(self, outputs: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
        """Return ln P(output | value); see `Perturbation.log_prob`."""
        y, t = np.asarray(outputs, dtype=float), np.asarray(values, dtype=float)
        likely, unlikely = expit(self.epsilon), expit(-self.epsilon)
        chance = ((1 + np.sign(y) * t) * likely + (1 - np.sign(y) * t) * unlikely) / 2
        return np.where(np.abs(y) == self.output_bound(), np.log(chance), -np.inf)


@dataclass(frozen=True)
class Piecewise(Perturbation):
    """PM: uniform near the value with probability e^{ε/2}/(e^{ε/2} + 1), else elsewhere.

    Notes
    -----
    Outputs lie in [-A, A], A = coth(ε/4). Source: Wang et al. (ICDE 2019), Algorithm 2.

    Examples
    --------
    >>> [round(float(Piecewise(e).variance(0.0)), 3) for e in (0.5, 1.0, 2.0, 4.0)]
    [17.702, 3.682, 0.646, 0.085]
    """

    @property
    def _widths(self) -> tuple[float, float]:
        """Return A - 1, the length of the short interval, and A + 1, that of its outside."""
        down = math.exp(-self.epsilon / 2)
        gap = -math.expm1(-self.epsilon / 2)
        return 2 * down / gap, 2 / gap

    def _draw(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        narrow, wide = self._widths
        left = (wide * values - narrow) / 2
        near = uniform(values, generator) < float(expit(self.epsilon / 2))
        place = uniform(values, generator)
        far = place * wide - self.output_bound()
        far = torch.where(far < left, far, far + narrow)  # the interval is stepped over
        return torch.where(near, left + place * narrow, far)

    def variance(self, values: npt.ArrayLike) -> Floats:
        """Return t²/(e^{ε/2} - 1) + (e^{ε/2} + 3)/(3(e^{ε/2} - 1)²)."""
        narrow, wide = self._widths
        return (
            np.square(np.asarray(values, dtype=float)) * narrow / 2
            + narrow * (wide + 3 * narrow) / 12
        )

    def output_bound(self) -> float:
        """Return A = coth(ε/4)."""
        return 1 / math.tanh(self.epsilon / 4)

    def log_prob(self, outputs: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
        """Return ln of the density; see `Perturbation.log_prob`."""
        y, t = np.asarray(outputs, dtype=float), np.asarray(values, dtype=float)
        narrow, wide = self._widths
        # an end of the range belongs to it, whatever its last digit
        rounding = 4e-16 * self.output_bound()
        near = np.abs(y - wide * t / 2) <= narrow / 2 + rounding
        level = np.where(near, log_expit(self.epsilon / 2) - math.log(narrow),
                         log_expit(-self.epsilon / 2) - math.log(wide))  # fmt: skip
        return np.where(np.abs(y) <= self.output_bound() + rounding, level, -np.inf)


@dataclass(frozen=True)
class Hybrid(Perturbation):
    """HM: Piecewise with probability 1 - e^{-ε/2}, else Duchi; for ε ≤ 0.61 Duchi alone.

    Notes
    -----
    Source: Wang et al. (ICDE 2019), Section III-C. Above 0.61 the variance is the same for all
    values.
    """

    @property
    def _share(self) -> float:
        return -math.expm1(-self.epsilon / 2) if self.epsilon > HYBRID_FROM else 0.0

    @property
    def _parts(self) -> tuple[Piecewise, Duchi]:
        return Piecewise(self.epsilon), Duchi(self.epsilon)

    def _draw(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        piecewise, duchi = (part._draw(values, generator) for part in self._parts)
        return torch.where(uniform(values, generator) < self._share, piecewise, duchi)

    def variance(self, values: npt.ArrayLike) -> Floats:
        """Return the mixture's variance: both parts have the same mean."""
        piecewise, duchi = (part.variance(values) for part in self._parts)
        return self._share * piecewise + (1 - self._share) * duchi

    def output_bound(self) -> float:
        """Return the bound of the part that reaches further, Piecewise where it is used."""
        piecewise, duchi = self._parts
        return piecewise.output_bound() if self._share else duchi.output_bound()

    def log_prob(self, outputs: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
        """Return ln of Duchi's probabilities at its two atoms, of Piecewise's density elsewhere."""
        piecewise, duchi = (part.log_prob(outputs, values) for part in self._parts)
        shares = np.array([self._share, 1 - self._share])
        with np.errstate(divide="ignore"):
            density, mass = np.log(shares)
        return np.where(np.isneginf(duchi), piecewise + density, duchi + mass)


@dataclass(frozen=True)
class Laplace(Perturbation):
    """Laplace noise of scale 2/ε: the range [-1, 1] is 2 wide. Variance 8/ε²."""

    def _draw(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        first, second = (
            torch.empty_like(values).exponential_(generator=generator) for _ in range(2)
        )
        return values + 2 / self.epsilon * (first - second)

    def variance(self, values: npt.ArrayLike) -> Floats:
        """Return 8/ε², at every value."""
        return np.full(np.shape(values), 8 / self.epsilon**2)

    def output_bound(self) -> float:
        """Return infinity."""
        return math.inf

    def log_prob(self, outputs: npt.ArrayLike, values: npt.ArrayLike) -> Floats:
        """Return ln of the density; see `Perturbation.log_prob`."""
        distance = np.abs(np.asarray(outputs, dtype=float) - np.asarray(values, dtype=float))
        return math.log(self.epsilon / 4) - self.epsilon / 2 * distance
