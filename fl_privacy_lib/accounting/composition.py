"""Composition of (ε, δ) steps: base, advanced and optimal.

Each step is first turned into an (ε_t, δ_0) statement by the textbook Gaussian bound and then
amplified by sampling. The theorems differ only in how they add the steps up, and all of them need
no more than four sums.
"""

import math
from typing import Literal

import numpy as np

from fl_privacy_lib.accounting.events import Floats, Ledger, Spending, check_delta

Theorem = Literal["base", "advanced", "advanced_tanh", "optimal", "optimal_third_term"]

# δ_0 of one step in all three papers, and the slack of their composition theorems
STEP_DELTA = 1e-5


def step_epsilon(
    noise_multiplier: Floats | float, step_delta: float = STEP_DELTA, decimals: int | None = None
) -> Floats:
    """Return ε_0 = sqrt(2 ln(1.25/δ_0)) / z of one Gaussian release, before sampling.

    Parameters
    ----------
    noise_multiplier : array or float
        z > 0, any shape.
    step_delta : float
        δ_0 in (0, 1).
    decimals : int, optional
        Round ε_0 to so many decimals. The base and advanced columns of the published tables come
        from a rounded 0.807.

    Returns
    -------
    array
        ε_0, the shape of z. The theorem covers 0 < ε_0 < 1 only.

    Notes
    -----
    Theorem 1 of the Fed-CDP and dynamic-parameters papers.

    Examples
    --------
    >>> print(f"{float(step_epsilon(6.0)):.5f} {float(step_epsilon(6.0, decimals=3)):.5f}")
    0.80747 0.80700
    """
    check_delta(step_delta=step_delta)
    epsilon = np.sqrt(2 * np.log(1.25 / step_delta)) / np.asarray(
        noise_multiplier, dtype=np.float64
    )
    return epsilon if decimals is None else np.round(epsilon, decimals)


def amplified(epsilon: Floats | float, sampling_rate: Floats | float) -> Floats:
    """Return ln(1 + q (e^ε - 1)), the ε of a step that holds a unit with probability q.

    Examples
    --------
    >>> print(f"{float(amplified(step_epsilon(6.0), 0.01)):.7f}")
    0.0123457
    """
    # e^ε of a nearly noiseless step is infinite, and so is the answer
    with np.errstate(over="ignore"):
        return np.log1p(np.asarray(sampling_rate) * np.expm1(epsilon))


def step_sums(
    ledger: Ledger,
    step_delta: float = STEP_DELTA,
    decimals: int | None = None,
    prefixes: bool = False,
) -> dict[str, Floats]:
    """Return the sums that the composition theorems use, over all steps or over each prefix.

    Parameters
    ----------
    ledger : Ledger
        The releases.
    step_delta, decimals
        See `step_epsilon`.
    prefixes : bool
        Whether each prefix of the steps has a sum of its own.

    Returns
    -------
    dict of str to array, scalars or [steps]
        ``linear``, ``squared``: Σ ε and Σ ε². ``drift``, ``drift_tanh``: Σ ε (e^ε - 1) and
        Σ ε (e^ε - 1) / (e^ε + 1), bounds on the expected privacy loss. ``delta``: Σ q δ_0.
    """
    epsilon = amplified(step_epsilon(ledger.noise, step_delta, decimals), ledger.rates)  # [events]
    with np.errstate(over="ignore"):
        terms = {
            "linear": epsilon,
            "squared": epsilon**2,
            "drift": epsilon * np.expm1(epsilon),
            "drift_tanh": epsilon * np.tanh(epsilon / 2),
            "delta": ledger.rates * step_delta,
        }
    if prefixes:
        return {name: np.cumsum(np.repeat(term, ledger.uses)) for name, term in terms.items()}
    return {name: np.asarray(np.sum(term * ledger.uses)) for name, term in terms.items()}


def composed(sums: dict[str, Floats], theorem: Theorem, slack: float = STEP_DELTA) -> Floats:
    """Return ε of all steps together under one theorem.

    Parameters
    ----------
    sums : dict of str to array
        Of `step_sums`, of any shape.
    theorem : str
        ``base``: Σ ε. ``advanced``: sqrt(2 ln(1/δ~) Σε²) + Σ ε(e^ε - 1), Dwork, Rothblum and
        Vadhan. ``advanced_tanh``: the same with Σ ε(e^ε - 1)/(e^ε + 1), second term of Kairouz, Oh
        and Viswanath. ``optimal_third_term``: Σ ε(e^ε - 1)/(e^ε + 1) + sqrt(2 Σε² ln(e +
        sqrt(Σε²)/δ~)), all that the papers use of that theorem. ``optimal``: the theorem itself,
        the smallest of the three.
    slack : float
        δ~ in (0, 1), paid once on top of the steps' own δ.

    Returns
    -------
    array
        ε, the shape of the sums.
    """
    root = np.sqrt(2 * math.log(1 / slack) * sums["squared"])
    spread = 2 * sums["squared"] * np.log(math.e + np.sqrt(sums["squared"]) / slack)
    bounds = {
        "base": sums["linear"],
        "advanced": root + sums["drift"],
        "advanced_tanh": root + sums["drift_tanh"],
        "optimal_third_term": sums["drift_tanh"] + np.sqrt(spread),
    }
    bounds["optimal"] = np.minimum.reduce(
        [bounds[term] for term in ("base", "advanced_tanh", "optimal_third_term")]
    )
    return bounds[theorem]


def composition_spending(
    ledger: Ledger, theorem: Theorem, delta: float = STEP_DELTA, decimals: int | None = None
) -> Spending:
    """Return what a ledger costs under a composition theorem.

    Parameters
    ----------
    ledger : Ledger
        The releases; any q_t and z_t.
    theorem : str
        See `composed`.
    delta : float
        δ_0 of one step, and δ~ of the theorem. ε holds for δ = Σ q_t δ_0, plus δ~ unless the
        theorem is ``base``: the result's ``composition_delta``.
    decimals : int, optional
        Round the step's ε_0; see `step_epsilon`.

    Examples
    --------
    >>> from fl_privacy_lib.accounting.events import Event
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> spent = composition_spending(Ledger.of(run), "optimal")
    >>> print(f"{spent.epsilon:.3f} {spent.delta:g} {spent.composition_delta:g}")
    6.686 1e-05 0.00101
    """
    sums = step_sums(ledger, delta, decimals)
    total = float(sums["delta"]) + (0.0 if theorem == "base" else delta)
    # where ε_0 ≥ 1, the textbook Gaussian bound proves nothing
    failures = int(ledger.uses[step_epsilon(ledger.noise, delta) >= 1].sum())
    fails = {
        f"The textbook Gaussian bound needs ε_0 < 1, which fails at {failures} of {ledger.steps} "
        "steps.": failures > 0,
        f"The steps' δ add up to {total:.3g}, at least 1, so ε promises nothing.": total >= 1,
    }
    caveats = tuple(sentence for sentence, applies in fails.items() if applies)
    epsilon = float(composed(sums, theorem, delta))
    return Spending(ledger, theorem, epsilon, delta, min(total, 1.0), caveats)
