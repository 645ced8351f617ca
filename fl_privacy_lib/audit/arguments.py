"""Why some published steps do not give what they are used for: each with numbers that show it.

A *lower* bound on ε comes from one pair of neighbouring data sets whose outputs are known exactly:
no accountant can go below it. Each function says which pair it is.
"""

import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import hypergeom, norm

from fl_privacy_lib._checks import InputError, in_range, positive
from fl_privacy_lib.accounting.events import check_delta


def sampled_gaussian_lower_bound(
    rate: float, noise_multiplier: float, steps: int, delta: float
) -> float:
    """Return an ε that a sampled Gaussian training cannot go below (adding or removing).

    The pair: one example with the largest gradient, all other gradients zero. Rounding of the
    losses is optimistic.

    Examples
    --------
    >>> print(f"{sampled_gaussian_lower_bound(0.01, 6 / 3**0.5, 10_000, 1e-5):.2f}")
    1.07
    """
    positive(noise_multiplier=noise_multiplier, rate=rate)
    in_range(0, 1, rate=rate)
    check_delta(delta=delta)
    step = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        pessimistic_estimate=False,
        value_discretization_interval=1e-5,  # an optimistic grid errs by its width at every step
        sampling_prob=rate,
        use_connect_dots=False,
    )
    return float(step.self_compose(steps).get_epsilon_for_delta(delta))


def global_rate(batch_size: int, participants: int, examples: int) -> float:
    """Return B·K_t/N, the rate in the sentence after Fed-CDP's Proposition 1.

    Notes
    -----
    The proposition says that each class is drawn as often as it occurs. That holds where all
    clients hold as many examples, and says nothing on *which examples are drawn together*: the
    examples of a client are there in a round all at once or not at all. Where its other gradients
    betray that it takes part, drawing clients amplifies nothing. Chapter 03 has a lower bound on ε
    for batches drawn with replacement, as the text says; the released code makes one pass.

    Examples
    --------
    >>> [round(global_rate(*row), 4) for row in ((5, 100, 50_000), (3, 100, 2267), (4, 100, 426))]
    [0.01, 0.1323, 0.939]
    """
    return batch_size * participants / examples


def l2_max_epsilon(ratio: float, dimension: int, delta: float) -> float:
    """Return an ε that noise scaled with the batch's own largest norm cannot go below, at δ.

    Parameters
    ----------
    ratio : float
        r > 1: one example changes the largest norm, and with it the noise's standard deviation, by
        this factor.
    dimension : int
        d, coordinates that carry the noise.
    delta : float
        In (0, 1).

    Notes
    -----
    The Bhattacharyya coefficient of two normal distributions in d coordinates with standard
    deviations s and rs is at most BC = (2r/(1 + r²))^{d/2}, whatever their means. It bounds both
    errors of the better-likelihood test, so δ(ε) ≥ 1 - (1 + e^ε) BC, and ε ≥ ln((1 - δ)/BC - 1).
    Without a floor under the noise the largest norm may be 0 on one side, and no ε holds at all.

    Examples
    --------
    >>> [round(l2_max_epsilon(r, 34_720, 0.5)) for r in (1.05, 1.1)]
    [20, 78]
    """
    if not ratio > 1:
        raise InputError(
            f"ratio = {ratio} must be above 1: it is the larger noise level over the smaller."
        )
    positive(ratio=ratio, dimension=dimension)
    check_delta(delta=delta)
    log_overlap = dimension / 2 * math.log(2 * ratio / (1 + ratio**2))
    gap = math.log1p(-delta) - log_overlap  # ln((1 - δ)/BC)
    return max(0.0, gap + math.log1p(-math.exp(-gap))) if gap > 0 else 0.0


def gaussian_loss_exceeds(epsilon: float, noise_multiplier: float) -> float:
    """Return the probability that one Gaussian release's privacy loss exceeds ε; never 0.

    Notes
    -----
    Fed-alphaCDP's Theorem 5 claims pure ε for Gaussian noise: δ = 0. Its density e^{-β‖μ‖} is not
    the Gaussian one (that would be e^{-‖μ‖²/2s²}) but the ℓ2-Laplace distribution of Chaudhuri,
    Monteleoni and Sarwate (2011), which does give pure ε. Besides: it needs a strongly convex loss,
    which no network has; its S is a maximum over the private batch, so β itself depends on the
    data; e^{-β(‖μ1‖-‖μ2‖)} is bounded from *below* by e^{-β‖μ1-μ2‖}, not from above; and its last
    line bounds the ratio by ε where the definition has e^ε: for ε < 1 a ratio and its inverse, with
    the two batches exchanged, would both be below 1.

    Examples
    --------
    >>> f"{gaussian_loss_exceeds(0.5, 6.0):.4f}"
    '0.0018'
    """
    positive(noise_multiplier=noise_multiplier)
    mu = 1 / noise_multiplier
    return float(norm.sf(epsilon / mu - mu / 2))


def shared_in_a_round(clients: int, participants: int, holders: int) -> float:
    """Return the probability that at least two holders of one example take part in the same round.

    Notes
    -----
    Parallel composition, max over the clients of a round, needs disjoint data. With 10 holders of
    each example (1,000 clients that share 50,000 examples) two of five rounds with one holder have
    a second: the example's cost adds up within the round.

    Examples
    --------
    >>> round(shared_in_a_round(1000, 100, 10), 2), shared_in_a_round(100, 10, 1)
    (0.26, 0.0)
    """
    distribution = hypergeom(clients, holders, participants)
    return float(max(0.0, 1 - np.sum(distribution.pmf([0, 1]))))
