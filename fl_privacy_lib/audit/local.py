"""The exact ε of the local mechanisms, from the distributions of their outputs.

It is the largest log-ratio of an output's probability over all pairs of inputs: any two inputs of a
client are neighbours here, and δ = 0. Taught in notebook 08.
"""

import math

import numpy as np

from fl_privacy_lib.accounting.events import Floats
from fl_privacy_lib.defenses.perturbation import Compressed, Duchi, Flat, Perturbation
from fl_privacy_lib.defenses.selection import Selection

AnyPerturbation = Perturbation | Flat | Compressed


def selection_epsilon(mechanism: Selection, d: int) -> float:
    """Return the exact ε of a selection among d dimensions.

    A dimension can have any rank, so ε is the spread of the distribution by rank.

    Parameters
    ----------
    mechanism : one of `fl_privacy_lib.defenses.selection`
    d : int, ≥ 2

    Returns
    -------
    float, ≥ 0; ``inf`` if some output is possible from one input and impossible from another

    Notes
    -----
    FedSel's Lemma 2 claims ε₁ for PE. Read with p = e^ε₁/(1 + e^ε₁), the exact value is ε₁ +
    ln(E[1/(1 + W₁)] / E[1/(1 + W₀)]), where W counts the *other* ones after flipping, given that
    the own bit was 1 or 0. The proof takes the two means for one and the same number.

    Examples
    --------
    >>> from fl_privacy_lib.defenses.selection import Exponential, PerturbedEncoding
    >>> round(selection_epsilon(PerturbedEncoding(1.0, k=1, reading="e_eps"), d=2), 4)
    1.3106
    >>> round(selection_epsilon(Exponential(1.0), d=123), 3)
    1.0
    """
    with np.errstate(divide="ignore"):  # an impossible output has -inf
        return _spread(np.log(mechanism.rank_probabilities(d)[:-1, None]))


def value_epsilon(mechanism: AnyPerturbation) -> float:
    """Return the exact ε of a perturbation of values in [-1, 1].

    For the four mechanisms of one number, the largest ratio is found at the ends of the outputs
    (or, beyond ±1, of Laplace) and of the values, which are among the points compared; for another
    mechanism it is a lower bound. A vector's ε is the sum over the coordinates sent; Duchi's
    vectors have a distribution of their own.

    Examples
    --------
    >>> from fl_privacy_lib.defenses.perturbation import Piecewise
    >>> round(value_epsilon(Piecewise(1.0)), 6)
    1.0
    >>> [round(value_epsilon(Flat(Duchi, 1.0, d, reading="published")), 4) for d in (123, 100)]
    [1.0, 1.3133]
    """
    if isinstance(mechanism, Compressed):
        return value_epsilon(mechanism.inner)
    if isinstance(mechanism, Flat) and mechanism.mechanism is Duchi:
        won, drawn, lost = mechanism.weights()
        return _spread(np.log([[won], [lost]] if mechanism.d % 2 else [[won], [drawn], [lost]]))
    if isinstance(mechanism, Flat):
        return mechanism.sampled * value_epsilon(mechanism.inner)
    bound, atom = mechanism.output_bound(), Duchi(mechanism.epsilon).output_bound()
    end = bound if math.isfinite(bound) else 2.0
    outputs = np.concatenate([np.linspace(-end, end, 401), [-atom, atom]])
    return _spread(mechanism.log_prob(outputs, np.linspace(-1, 1, 41)[:, None]))


def claimed_epsilons(
    selection: Selection | None, value: AnyPerturbation | None
) -> tuple[float, float]:
    """Return the ε that a report's stages claim: 0 if nothing is selected, ``inf`` in clear."""
    inner = value.inner if isinstance(value, Compressed) else value
    return (
        0.0 if selection is None else selection.epsilon,
        math.inf if inner is None else inner.epsilon,
    )


def exact_epsilons(
    selection: Selection | None, value: AnyPerturbation | None, d: int
) -> tuple[float, float]:
    """Return the exact ε of a report's stages among d coordinates; ``inf`` for a value in clear.

    Notes
    -----
    Their sum is the ε of the report, and no less: let one vector have its largest coordinate at +1
    and another its smallest at -1 (before clipping nothing bounds the others), and both stages are
    at their worst on this pair. FedSel's Theorem 3.1 holds as far as both stages keep their own ε.
    Residual and momentum change nothing: they are functions of the client's own data and of what it
    has already sent.
    """
    return (
        0.0 if selection is None else selection_epsilon(selection, d),
        math.inf if value is None else value_epsilon(value),
    )


def _spread(logs: Floats) -> float:
    """Return the largest difference of two rows of log-probabilities [inputs, outputs]."""
    possible = logs[:, np.isfinite(logs).any(0)]
    return float(np.max(possible.max(0) - possible.min(0)))
