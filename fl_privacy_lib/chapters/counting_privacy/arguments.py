"""Numbers behind the arguments of chapter 03: a lower bound, and two probabilities."""

from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import hypergeom, norm

from fl_privacy_lib._checks import in_range, positive
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
    return float(hypergeom.sf(1, clients, holders, participants))
