"""Gaussian releases without sampling: their exact ε.

An adversary who sees who sent what gets no help from sampling. What remains is a composition of
Gaussian releases, which is one Gaussian release with a larger μ.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from fl_privacy_lib._checks import InputError, positive
from fl_privacy_lib.accounting.events import Floats, Ledger, Spending, check_delta


def gdp_delta(epsilon: Floats | float, mu: Floats | float) -> Floats:
    """Return δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), exact for a μ-Gaussian release.

    Balle and Wang (2018), theorem 8; Dong, Roth and Su (2022), corollary 1.
    """
    positive(mu=float(np.min(mu)))
    epsilon = np.asarray(epsilon, dtype=np.float64)
    first = log_ndtr(mu / 2 - epsilon / mu)
    # logarithms: e^ε alone overflows from ε = 710
    second = epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return np.exp(first) * -np.expm1(np.minimum(second - first, 0.0))


def gdp_epsilon(mu: Floats | float, delta: float, weights: Floats | float = 1.0) -> float:
    """Return the exact ε ≥ 0 of a μ-Gaussian release at δ.

    Parameters
    ----------
    mu : float or array
        μ > 0: sensitivity over standard deviation; sqrt(Σ 1/z²) for several releases.
    delta : float
        In (0, 1).
    weights : array
        Of several μ, with what probability each is the release's; none of it is hidden.

    Examples
    --------
    >>> [round(gdp_epsilon(uses**0.5 / 6, 1e-5), 2) for uses in (1, 10, 100)]
    [0.59, 2.11, 8.0]
    """
    check_delta(delta=delta)

    def excess(epsilon: float) -> float:
        return float(np.sum(weights * gdp_delta(epsilon, mu))) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = float(np.max(mu))
    # The Gaussian tail bound: at this ε, Φ(μ/2 - ε/μ) alone is below δ.
    high = most * (most / 2 + math.sqrt(2 * math.log(1 / delta)) + 1)
    return float(brentq(excess, 0.0, high, xtol=1e-12))


def gdp_spending(ledger: Ledger, delta: float) -> Spending:
    """Return the exact cost of releases without sampling: one of μ = sqrt(Σ uses/z²).

    Raises
    ------
    InputError
        If an event is sampled with q < 1.
    """
    if (ledger.rates < 1).any():
        raise InputError(
            f"The plan samples at q = {ledger.rates.min():g}, and a sampled Gaussian is not a "
            "Gaussian: use 'pld' or 'rdp', or sampling = 'none' for an adversary who sees who "
            "takes part."
        )
    mu = math.sqrt(float(np.sum(ledger.uses / np.square(ledger.noise))))
    return Spending(ledger, "gdp", gdp_epsilon(mu, delta), delta, delta)
