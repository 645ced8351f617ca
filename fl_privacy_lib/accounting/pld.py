"""Privacy loss distributions: the composition itself, on a grid that errs on the safe side."""

import math
from collections import Counter
from collections.abc import Mapping

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant, pld_pmf, privacy_loss_distribution

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.events import MOST_PAIRS, Floats, Ledger, Relation, Spending
from fl_privacy_lib.accounting.gdp import gdp_delta
from fl_privacy_lib.accounting.rdp import rdp_spending

Uses = Mapping[tuple[float, float], int]  # (q, z) → number of releases

GRID = 1e-4  # width of the grid of privacy losses; a coarser one costs accuracy, never truth

# little noise makes large losses: the grid is then coarser, or one run would take minutes
_BINS = 100_000
# widths of the grid in ε, below which the grid's error, paid at every step, would show
_FINE = 1000
_FINER = 8.0  # how much finer the grid becomes at a time
_MOST_BINS = 1_000_000  # of a grid that was made finer: a second or two a distribution
_SETTLED = 1e-3  # relative error of ε that ends the refinement
# standard deviations: what lies beyond has a mass of 1e-19 and counts as an infinite loss
_TAIL = 9.0


def pld_spending(ledger: Ledger, delta: float) -> Spending:
    """Return what a ledger costs by composing privacy loss distributions.

    Parameters
    ----------
    ledger : Ledger
        At most 64 different (q, z, sampling).
    delta : float
        In (0, 1).

    Returns
    -------
    Spending
        The least of two upper bounds on ε: that of the composed distributions, and that of Rényi
        accounting, which a grid's error can exceed. Under ``replace_one`` a sampled step is bounded
        by the symmetric curve of `replaced_delta`.

    Raises
    ------
    InputError
        If a value is out of range or there are too many different events.

    Notes
    -----
    The grid of losses is 1e-4 wide, or the largest loss of a step over 100,000, if that is more. It
    is made finer for a small ε, until its error is about 0.1 %.

    Examples
    --------
    >>> from fl_privacy_lib.accounting.events import Event
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> print(f"{pld_spending(Ledger.of(run), 1e-5).epsilon:.3f}")
    0.601
    """
    totals = Counter[tuple[float, float]]()
    for event in ledger.events:
        totals[event.sampling_rate, event.noise_multiplier] += int(event.uses)
    if len(totals) > MOST_PAIRS:
        raise InputError(
            f"The plan has {len(totals)} different (q, z), and each needs a privacy loss "
            f"distribution of its own: use 'rdp', or at most {MOST_PAIRS}, for example by rounding "
            "the noise down to a few levels."
        )
    epsilon = min(_refined(ledger.relation, totals, delta), rdp_spending(ledger, delta).epsilon)
    return Spending(ledger, "pld", epsilon, delta, delta)


def _refined(relation: Relation, totals: Uses, delta: float) -> float:
    """Return ε on a grid that is fine enough for it, if a step's losses fit on such a grid."""
    grid = max(GRID, _largest_loss(1.0, min(noise for _, noise in totals)) / _BINS)
    largest = max(_largest_loss(*pair) for pair in totals)
    epsilon = grid_epsilon(relation, totals, delta, grid)
    while 0 < epsilon < _FINE * grid and largest * _FINER / grid < _MOST_BINS:
        grid /= _FINER
        before, epsilon = epsilon, min(epsilon, grid_epsilon(relation, totals, delta, grid))
        error = (before - epsilon) / (_FINER**2 - 1)  # it falls with the square of the width
        if error <= _SETTLED * epsilon:
            break
    return epsilon


def grid_epsilon(relation: Relation, totals: Uses, delta: float, grid: float) -> float:
    """Return an upper bound on ε from loss distributions on a grid of the given width."""
    if relation == "replace_one":
        return _replaced(totals, delta, grid)
    accountant = PLDAccountant(value_discretization_interval=grid)
    for (rate, noise), uses in totals.items():
        gaussian = dp_accounting.GaussianDpEvent(noise)
        sampled = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        accountant.compose(gaussian if rate == 1 else sampled, uses)
    return float(accountant.get_epsilon(delta))


def _largest_loss(rate: float, noise: float) -> float:
    """Return the largest loss of a sampled step: ln(1 + q (e^loss - 1)) of the Gaussian's."""
    loss = (0.5 / noise + _TAIL) / noise
    return loss + math.log(math.exp(-loss) - rate * math.expm1(-loss))


def replaced_delta(epsilon: Floats, rate: float, noise: float) -> Floats:
    """Return a bound on δ(ε) of one sampled Gaussian step under ``replace_one``.

    Parameters
    ----------
    epsilon : array
        Any shape and sign.
    rate, noise : float
        q in (0, 1], and z relative to the sensitivity under replacement.

    Notes
    -----
    For ε ≥ 0, advanced joint convexity (Balle, Barthe and Gaboardi, 2018) gives q δ_Gauss(ln(1 +
    (e^ε - 1)/q)) for fixed-size and for Poisson sampling alike: the three cases of a step (without
    the unit, with it, with its replacement) are pairwise within the sensitivity. The bound holds in
    both directions, so the curve is continued to ε < 0 by δ(ε) = 1 - e^ε + e^ε δ(-ε), the form that
    composition needs (Zhu, Dong and Wang, 2022).
    """
    size = np.abs(np.asarray(epsilon, dtype=np.float64))
    inner = size + np.log(np.exp(-size) - np.expm1(-size) / rate)  # ln(1 + (e^ε - 1)/q) without e^ε
    before = rate * gdp_delta(inner, 1 / noise)
    return np.where(np.asarray(epsilon) >= 0, before, -np.expm1(-size) + np.exp(-size) * before)


def _replaced(totals: Uses, delta: float, grid: float) -> float:
    composed = privacy_loss_distribution.identity(value_discretization_interval=grid)
    for (rate, noise), uses in totals.items():
        if rate == 1:
            plain = privacy_loss_distribution.from_gaussian_mechanism(
                noise / math.sqrt(uses), value_discretization_interval=grid
            )
            composed = composed.compose(plain)
            continue
        bins = math.ceil(_largest_loss(rate, noise) / grid)
        curve = replaced_delta(np.arange(-bins, bins + 1) * grid, rate, noise)  # [2 bins + 1]
        # rounding may lift a flat stretch by 1e-16
        curve = np.minimum.accumulate(np.clip(curve, 0.0, 1.0))
        step = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -bins, bins, curve)
        repeated = privacy_loss_distribution.PrivacyLossDistribution(step).self_compose(uses)
        composed = composed.compose(repeated)
    return float(composed.get_epsilon_for_delta(delta))
