"""Auditing ε in one run: a lower bound from how many canaries an adversary guesses right.

Each of m canaries is put in or left out by a fair coin of its own. Who is shown what the run
releases guesses some of the coins. No (ε, δ) mechanism lets too many guesses be right.
"""

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom

from fl_privacy_lib._checks import in_range


def p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return the most likely that so many right guesses can be, if the run is (ε, δ) private.

    Parameters
    ----------
    right, guesses, canaries : 0 ≤ v ≤ r ≤ m; a canary that is not guessed counts for neither
    epsilon : ε ≥ 0, for one canary put in or left out
    delta : δ in [0, 1)

    Raises
    ------
    InputError
        If there are more right guesses than guesses, or more of these than canaries; if δ is none.

    Notes
    -----
    β + 2mδα, with β = P[W ≥ v] and α = max_i P[v > W ≥ v - i]/i, where W is binomial, r draws of
    probability e^ε/(1 + e^ε). Which coins are guessed may depend on the release. Source: Steinke,
    Nasr and Jagielski (2023), Theorem 5.2 and appendix D.

    Examples
    --------
    >>> round(p_value(70, 100, 100, 0.5, 0.0), 4), round(p_value(70, 100, 100, 1.0, 0.0), 4)
    (0.0656, 0.7936)
    """
    in_range(0, canaries, guesses=guesses)
    in_range(0, guesses, right=right)
    in_range(0, 1, delta=delta)
    chance = float(expit(epsilon))
    # P[v > W ≥ v - i] over i, [v]; no right guess proves nothing
    below = binom.pmf(np.arange(right)[::-1], guesses, chance).cumsum() / np.arange(1, right + 1)
    slack = 2 * canaries * delta * below.max(initial=0.0)
    return min(1.0, float(binom.sf(right - 1, guesses, chance) + slack))


def audited_epsilon(
    right: int, guesses: int, canaries: int, delta: float, level: float = 0.05
) -> float:
    """Return the largest ε that so many right guesses rule out, 0 if none: a lower bound.

    Parameters
    ----------
    right, guesses, canaries, delta : as in `p_value`
    level : the probability with which the bound may be wrong, in (0, 1)

    Examples
    --------
    >>> [round(audited_epsilon(v, 1000, 1000, 0.0), 3) for v in (500, 750, 1000)]
    [0.0, 0.977, 5.809]
    """
    in_range(1e-9, 1 - 1e-9, level=level)

    def left(epsilon: float) -> float:
        return p_value(right, guesses, canaries, epsilon, delta) - level

    # at ε = 40 every guess is right, to the last digit of a float
    return 0.0 if left(0.0) > 0 else max(0.0, float(brentq(left, 0.0, 40.0, xtol=1e-6)) - 1e-6)


def right_guesses(scores: np.ndarray, present: np.ndarray, guesses: int) -> int:
    """Return how many guesses are right: half go to the highest scores, half to the lowest.

    Parameters
    ----------
    scores : [m], the higher, the more likely a canary was put in
    present : bool [m], the coins
    guesses : r, even, fixed before the scores are seen
    """
    in_range(0, len(scores), guesses=guesses)
    order, half = np.argsort(scores, kind="stable"), guesses // 2
    return int((~present[order[:half]]).sum() + present[order[len(order) - half :]].sum())


def epsilon_of_advantage(advantage: float, delta: float) -> float:
    """Return the least ε with which who tells two neighbours apart can have an advantage.

    Parameters
    ----------
    advantage : true positive minus false positive rate, in [0, 1]

    Notes
    -----
    Both error rates of an (ε, δ) mechanism have 1 - δ - fn ≤ e^ε fp, and the other way round. They
    add up to 1 - advantage. Source: Kairouz, Oh and Viswanath (2015), Theorem 2.1.

    Examples
    --------
    >>> round(epsilon_of_advantage(0.383145, 1e-5), 3)
    0.807
    """
    return (
        max(0.0, float(np.log((1 + advantage - 2 * delta) / (1 - advantage))))
        if advantage < 1
        else float("inf")  # no ε allows who is never wrong
    )
