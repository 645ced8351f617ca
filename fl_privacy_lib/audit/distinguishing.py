"""What a noise level tells: two releases, told apart by how far they scatter (chapter 06)."""

import math

from scipy import stats


def level_advantage(ratio: float, dimension: int) -> float:
    """Return the best advantage of who sees noise of one of two levels, and nothing else.

    Parameters
    ----------
    ratio : r ≥ 1, the larger standard deviation over the smaller
    dimension : d, coordinates of the noise

    Notes
    -----
    The noise's squared length over σ² is χ²_d or r² χ²_d. The two densities are equal where that is
    d ln(r²) / (1 − 1/r²), so the advantage is the difference of the distributions there.

    Examples
    --------
    >>> [round(level_advantage(r, 34_720), 3) for r in (1.0, 1.005, 1.02)]
    [0.0, 0.489, 0.991]
    """
    edge = dimension * math.log(ratio**2) / (1 - ratio**-2) if ratio > 1 else dimension
    return float(stats.chi2.cdf(edge, dimension) - stats.chi2.cdf(edge / ratio**2, dimension))


def allowed_advantage(epsilon: float, delta: float) -> float:
    """Return the most that an (ε, δ) guarantee leaves to who has to tell two neighbours apart.

    Examples
    --------
    >>> [round(allowed_advantage(e, 1e-5), 2) for e in (0.0, 0.8, 8.0)]
    [0.0, 0.38, 1.0]
    """
    return (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)
