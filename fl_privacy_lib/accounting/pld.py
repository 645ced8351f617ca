"""Privacy loss distributions: the composition itself, on a grid that errs on the safe side."""

import math

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant, pld_pmf, privacy_loss_distribution

from fl_privacy_lib._checks import InputError, positive
from fl_privacy_lib.accounting.events import Event, Floats, Ledger, check_delta
from fl_privacy_lib.accounting.gdp import gdp_delta
from fl_privacy_lib.accounting.spending import Spending

GRID = 1e-4  # width of the grid of privacy losses; a coarser one costs accuracy, never truth

_BINS = 100_000  # little noise makes large losses: the grid is then coarser, or one run would take minutes
_PAIRS = 64  # each different (q, z) is a distribution and a convolution of its own
_TAIL = 9.0  # standard deviations: what lies beyond has a mass of 1e-19 and counts as an infinite loss


def pld_spending(events: Event | Ledger, delta: float, grid: float | None = None) -> Spending:
    """Return what a ledger costs by composing privacy loss distributions.

    Parameters
    ----------
    events : Event, Ledger
        At most 64 different (q, z, sampling).
    delta : float
        In (0, 1).
    grid : float, optional
        Width of the grid of losses; 1e-4, or the largest loss of a step over 100,000, if that is more.

    Returns
    -------
    Spending
        An upper bound on ε. Under ``replace_one`` a sampled step is bounded by the symmetric curve of
        `replaced_delta`.

    Raises
    ------
    InputError
        If a value is out of range or there are too many different events.

    Examples
    --------
    >>> print(f"{pld_spending(Event(0.01, 6.0, 'example', 'add_remove', uses=10_000), 1e-5).epsilon:.3f}")
    0.601
    """
    check_delta(delta=delta)
    ledger = Ledger.of(events)
    if grid is None:
        grid = max(GRID, _largest_gaussian_loss(float(ledger.noise.min())) / _BINS)
    positive(grid=grid)
    totals: dict[tuple[float, float], int] = {}
    for event in ledger.events:
        pair = (event.sampling_rate, event.noise_multiplier)
        totals[pair] = totals.get(pair, 0) + int(event.uses)
    if len(totals) > _PAIRS:
        raise InputError(
            f"The plan has {len(totals)} different (q, z), and each needs a privacy loss distribution of its "
            f"own: use 'rdp', or at most {_PAIRS}, for example by rounding the noise down to a few levels."
        )
    if ledger.relation == "replace_one":
        epsilon = _replaced(totals, delta, grid)
    else:
        accountant = PLDAccountant(value_discretization_interval=grid)
        for (rate, noise), uses in totals.items():
            accountant.compose(_peer_event(rate, noise), uses)
        epsilon = accountant.get_epsilon(delta)
    return Spending.on(ledger, "pld", epsilon, delta)


def _largest_gaussian_loss(noise: float) -> float:
    mu = 1 / noise
    return mu * (mu / 2 + _TAIL)


def _peer_event(rate: float, noise: float) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(noise)
    return gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)


def replaced_delta(epsilon: Floats, rate: float, noise: float) -> Floats:
    """Return a bound on δ(ε) of one sampled Gaussian step under ``replace_one``, for ε of either sign.

    Parameters
    ----------
    epsilon : array
        Any shape and sign.
    rate, noise : float
        q in (0, 1], and z relative to the sensitivity under replacement.

    Notes
    -----
    For ε ≥ 0, advanced joint convexity (Balle, Barthe and Gaboardi, 2018) gives
    q δ_Gauss(ln(1 + (e^ε - 1)/q)) for fixed-size and for Poisson sampling alike: the three cases of a step
    (without the unit, with it, with its replacement) are pairwise within the sensitivity. The bound holds in
    both directions, so the curve is continued to ε < 0 by δ(ε) = 1 - e^ε + e^ε δ(-ε), the form that
    composition needs (Zhu, Dong and Wang, 2022).
    """
    size = np.abs(np.asarray(epsilon, dtype=np.float64))
    inner = size + np.log(np.exp(-size) - np.expm1(-size) / rate)  # ln(1 + (e^ε - 1)/q) without e^ε
    before = rate * gdp_delta(inner, 1 / noise)
    return np.where(np.asarray(epsilon) >= 0, before, -np.expm1(-size) + np.exp(-size) * before)


def _replaced(totals: dict[tuple[float, float], int], delta: float, grid: float) -> float:
    composed = privacy_loss_distribution.identity(value_discretization_interval=grid)
    for (rate, noise), uses in totals.items():
        if rate == 1:
            plain = privacy_loss_distribution.from_gaussian_mechanism(
                noise / math.sqrt(uses), value_discretization_interval=grid
            )
            composed = composed.compose(plain)
            continue
        loss = _largest_gaussian_loss(noise)
        largest = loss + math.log(math.exp(-loss) - rate * math.expm1(-loss))  # ln(1 + q (e^loss - 1))
        bins = math.ceil(largest / grid)
        curve = replaced_delta(np.arange(-bins, bins + 1) * grid, rate, noise)  # [2 bins + 1]
        curve = np.minimum.accumulate(np.clip(curve, 0.0, 1.0))  # rounding may lift a flat stretch by 1e-16
        step = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, -bins, bins, curve)
        repeated = privacy_loss_distribution.PrivacyLossDistribution(step).self_compose(uses)
        composed = composed.compose(repeated)
    return float(composed.get_epsilon_for_delta(delta))
