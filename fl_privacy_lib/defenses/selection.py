"""Private selection of one coordinate per client: FedSel's three, and two that are not private.

Every distribution here depends only on a dimension's *rank* among the scores, equal scores being
ranked at random. So a draw has two steps: first how important the dimension is, then which one it
is. The distributions are those of real numbers: a draw of 53 bits cannot show probabilities below
2⁻⁵³.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import brentq
from scipy.special import expit, log_expit
from scipy.stats import binom

from fl_privacy_lib._checks import in_range, one_of, positive, refuse, whole_number
from fl_privacy_lib.accounting.events import Floats

LARGEST_EPSILON = 500.0  # beyond it e^-ε vanishes, and a distribution would seem to hide nothing
READINGS = ("e_eps", "e_half_eps", "calibrated")


class Selection(ABC):
    """What all selections share: ``select(scores, generator)`` and its distribution."""

    epsilon: float

    @abstractmethod
    def rank_probabilities(self, d: int) -> Floats:
        """Return P(rank 1 is chosen), …, P(rank d, the largest), P(none): float64 [d + 1]."""

    def probabilities_given(self, scores: npt.ArrayLike) -> Floats:
        """Return P(dimension 1 is chosen), …, P(dimension d), P(none) for scores [d]: [d + 1].

        Equal scores share the probabilities of their ranks.
        """
        values = np.asarray(scores, dtype=float)
        by_rank = self.rank_probabilities(len(values))
        _, level, size = np.unique(values, return_inverse=True, return_counts=True)
        shared = np.bincount(np.sort(level), weights=by_rank[:-1]) / size
        return np.append(shared[level], by_rank[-1])

    def __call__(self, scores: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the chosen dimension of every client, int64 [n], -1 where nothing is sent.

        Parameters
        ----------
        scores : [n, d], finite
            The larger, the more important (FedSel: |residual + gradient|).
        generator : on the scores' device

        Raises
        ------
        InputError
            If the scores have another shape or hold a number that cannot be ranked.
        """
        refuse(
            {
                f"scores have shape {list(scores.shape)}: give one row per client, [n, d].": (
                    scores.dim() != 2
                ),
                "the scores hold NaN or infinity, which cannot be ranked: the training has "
                "diverged or the data hold such a value; lower the learning rate or mend the "
                "data.": not scores.isfinite().all(),
            }
        )
        n, d = scores.shape
        # "none" first, so that rounding at the end of the sum never gives it
        below = np.cumsum(np.roll(self.rank_probabilities(d), 1))[:-1]  # [d]
        first, second = torch.rand(
            2, n, generator=generator, device=scores.device, dtype=torch.float64
        )
        place = torch.searchsorted(torch.as_tensor(below, device=scores.device), first, right=True)
        # 0: none, else the rank
        # NumPy sorts ten times as fast as torch on a CPU
        rising = torch.from_numpy(np.sort(scores.numpy(force=True), axis=1)).to(scores.device)
        value = rising.gather(1, (place[:, None] - 1).clamp_min(0))  # [n, 1]
        return torch.where(place == 0, -1, _one_of(scores == value, second))


@dataclass(frozen=True)
class Exponential(Selection):
    """EXP: the dimension of rank z with probability proportional to e^{εz/(d-1)}.

    Parameters
    ----------
    epsilon : float, in (0, 500]

    Notes
    -----
    Exactly ε-LDP: the normaliser is the same for every input, and ranks differ by at most d - 1.
    Source: FedSel, Section 4.1, Lemma 1.

    Examples
    --------
    >>> Exponential(1.0).probabilities_given([1, 3, 2]).round(3)
    array([0.186, 0.506, 0.307, 0.   ])
    """

    epsilon: float

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)

    def rank_probabilities(self, d: int) -> Floats:
        """Return the distribution by rank; see `Selection.rank_probabilities`."""
        _check_dimensions(d)
        weights = np.exp(self.epsilon * (np.arange(1, d + 1) - d) / (d - 1))
        return np.append(weights / weights.sum(), 0.0)


@dataclass(frozen=True)
class PerturbedEncoding(Selection):
    """PE: keep every bit of the top-k status with probability p, then choose one of the ones.

    Parameters
    ----------
    epsilon : float, in (0, 500]
    k : int, ≥ 1
        The same for all clients, as P(none) shows the number of ones.
    reading : {'calibrated', 'e_eps', 'e_half_eps'}
        'calibrated': the p with which the mechanism is exactly ε-LDP for the given d and k. The
        paper's p is lost; the other two read it as e^ε/(1 + e^ε), or e^{ε/2}/(1 + e^{ε/2}).

    Notes
    -----
    Read 'e_eps', it is *not* ε-LDP, against Lemma 2: that a bit is one removes a likely competitor
    in the draw among the ones. Read 'e_half_eps', it is, with ε to spare. See
    `audit.selection_epsilon`. The paper flips d bits a client; here one draw from the
    distribution by rank, which those flips give, stands for them. Source: FedSel, Section 4.1,
    Lemma 2.

    Examples
    --------
    >>> PerturbedEncoding(1.0, k=1, reading="e_eps").probabilities_given([1, 0]).round(4)
    array([0.6328, 0.1706, 0.1966])
    >>> round(PerturbedEncoding(1.0, k=12).keep_probability(123), 4)
    0.7287
    """

    epsilon: float
    k: int
    reading: str = "calibrated"

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)
        whole_number(1, k=self.k)
        one_of(READINGS, reading=self.reading)

    def log_odds(self, d: int) -> float:
        """Return ln(p/(1 - p)) of a bit's being kept, in nats: d matters only if calibrated."""
        if self.reading == "calibrated":
            return _calibrated(self.epsilon, self.k, d)
        return self.epsilon if self.reading == "e_eps" else self.epsilon / 2

    def keep_probability(self, d: int) -> float:
        """Return p, in (1/2, 1)."""
        return float(expit(self.log_odds(d)))

    def rank_probabilities(self, d: int) -> Floats:
        """Return the distribution by rank; see `Selection.rank_probabilities`."""
        _check_dimensions(d, self.k)
        return _by_group(d, self.k, *_encoding_probabilities(self.log_odds(d), self.k, d))


@dataclass(frozen=True)
class PerturbedSampling(Selection):
    """PS: uniform in the top k with probability e^ε k/(d - k + e^ε k), else uniform in the others.

    Parameters
    ----------
    epsilon : float, in (0, 500], or ∞: uniform in the top k, not private
    k : int, ≥ 1

    Notes
    -----
    Exactly ε-LDP. Source: FedSel, Section 4.1, Lemma 3; Section 5.2, NP-K, for ε = ∞.

    Examples
    --------
    >>> PerturbedSampling(1.0, k=1).probabilities_given([1, 0, 0]).round(3)
    array([0.576, 0.212, 0.212, 0.   ])
    """

    epsilon: float
    k: int

    def __post_init__(self) -> None:
        if self.epsilon != math.inf:
            _check_epsilon(self.epsilon)
        whole_number(1, k=self.k)

    def rank_probabilities(self, d: int) -> Floats:
        """Return the distribution by rank; see `Selection.rank_probabilities`."""
        _check_dimensions(d, self.k)
        down = math.exp(-self.epsilon)
        top = 1 / (self.k + (d - self.k) * down)
        return _by_group(d, self.k, top, top * down, 0.0)


@dataclass(frozen=True)
class RandomChoice(Selection):
    """Uniform in all dimensions: it reveals nothing.

    Source: FedSel, Section 5.2, NP-RS, without its factor d.
    """

    epsilon: ClassVar[float] = 0.0  # type: ignore[misc]

    def rank_probabilities(self, d: int) -> Floats:
        """Return the distribution by rank; see `Selection.rank_probabilities`."""
        _check_dimensions(d)
        return np.append(np.full(d, 1 / d), 0.0)


def _by_group(d: int, k: int, top: float, other: float, none: float) -> Floats:
    """Return a distribution by rank that tells only the k largest scores from the others."""
    return np.concatenate([np.full(d - k, other), np.full(k, top), [none]])


def _one_of(mask: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return one of the true columns [n] of mask [n, d], later ones at larger draws."""
    count = mask.cumsum(1, dtype=torch.int32)
    # rounding may not step past the last
    place = torch.minimum((draws * count[:, -1]).int() + 1, count[:, -1])
    return torch.searchsorted(count, place[:, None])[:, 0]


def _mean_inverse(ones: int, zeros: int, flip: float) -> float:
    """Return E[1/(1 + W)] for W ones after flipping each bit with probability flip."""
    still_one = binom.pmf(np.arange(ones + 1), ones, flip)[::-1]
    now_one = binom.pmf(np.arange(zeros + 1), zeros, flip)
    return float(np.convolve(still_one, now_one) @ (1 / np.arange(1, ones + zeros + 2)))


@lru_cache(maxsize=1024)
def _encoding_probabilities(log_odds: float, k: int, d: int) -> tuple[float, float, float]:
    """Return PE's P(j) for a j in the top k, for another j, and P(none)."""
    # j is chosen if its bit is one after the flips, and then against the W others that are one
    keep, flip = float(expit(log_odds)), float(expit(-log_odds))
    top = keep * _mean_inverse(k - 1, d - k, flip)
    other = flip * _mean_inverse(k, d - k - 1, flip) if k < d else 0.0
    return top, other, float(np.exp(k * log_expit(-log_odds) + (d - k) * log_expit(log_odds)))


@lru_cache(maxsize=1024)
def _calibrated(epsilon: float, k: int, d: int) -> float:
    """Return the log-odds with which PE's exact ε is ``epsilon``."""
    _check_dimensions(d, k)
    refuse({f"k = d = {d} puts every dimension into the top k, which tells nothing: choose a "
            "smaller k.":
            k == d})  # fmt: skip

    def excess(log_odds: float) -> float:
        top, other, _ = _encoding_probabilities(log_odds, k, d)
        return math.log(top) - math.log(other) - epsilon

    return float(brentq(excess, 0.0, epsilon + min(epsilon, 1.0), xtol=1e-15))


def _check_epsilon(epsilon: float) -> None:
    positive(epsilon=epsilon)
    in_range(0, LARGEST_EPSILON, epsilon=epsilon)


def _check_dimensions(d: int, k: int = 1) -> None:
    refuse(
        {
            f"d = {d} leaves nothing to select from: perturb the value alone.": d < 2,
            f"k = {k} is more than the d = {d} dimensions there are: choose k between 1 and {d}.": k
            > d,
        }
    )
