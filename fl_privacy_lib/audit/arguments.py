"""Arguments behind the statements: who takes part, what is seen, and what no accountant can claim.

How often the holders of an example take part, and what an adversary learns who sees it. And why
some published steps do not give what they are used for: a *lower* bound on ε comes from one pair of
neighbouring data sets whose outputs are known exactly, and no accountant can go below it; each such
function says which pair it is.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import binom, hypergeom

from fl_privacy_lib._checks import in_range, positive, refuse, whole_number
from fl_privacy_lib.accounting.events import Floats, check_delta
from fl_privacy_lib.accounting.gdp import gdp_delta, gdp_epsilon
from fl_privacy_lib.sampling import Plan

UNITS = 50  # of μ² in one participation, at most


def participations(plan: Plan, holders: int = 1, costs: Sequence[int] = ()) -> Floats:
    """Return the probabilities of 0, 1, 2, … participations of an example's holders.

    Parameters
    ----------
    plan : Plan
        Rounds are independent of each other.
    holders : int
        Clients that hold the example, 1 to K. Each participation of each holder counts.
    costs : whole numbers, [holders]
        How much a participation of each holder counts; (): 1.

    Returns
    -------
    array, [Σ costs · T + 1]
        Sums to 1. Clients ``poisson``: binomial. ``fixed``: in each round hypergeometric.
        ``one_pass``: in each epoch.

    Raises
    ------
    InputError
        If there are more holders than clients.

    Examples
    --------
    >>> two = Plan(4, 2, 1, 1, 1, local_lr=0.1)
    >>> participations(two, holders=2).round(3)
    array([0.167, 0.667, 0.167])
    """
    whole_number(1, holders=holders)
    refuse({f"holders = {holders} is more than the plan's {plan.clients} clients: lower it.":
            holders > plan.clients})  # fmt: skip
    costs = costs or (1,) * int(holders)
    whole = plan.client_sampling != "one_pass"
    most, alike = sum(costs) * plan.rounds, max(costs) == 1
    free = whole and (plan.client_sampling == "poisson" or holders == 1)
    if free and alike:
        return binom.pmf(np.arange(most + 1), most, plan.client_rate)
    # rounds whose clients are all different
    together = 1 if whole else plan.clients // plan.participants
    spent = np.eye(holders + 1) if alike else _spent(costs)

    def drawn(rounds: int) -> Floats:
        law = (binom(holders, plan.client_rate * rounds) if free
               else hypergeom(plan.clients, holders, rounds * plan.participants))  # fmt: skip
        return law.pmf(np.arange(holders + 1)) @ spent

    left, rest = divmod(plan.rounds, together)
    total = np.convolve(np.polynomial.polynomial.polypow(drawn(together), left), drawn(rest))
    return np.pad(total, (0, most + 1))[: most + 1]


def _spent(costs: Sequence[int]) -> Floats:
    """Return what h of the holders cost, all sets of h alike: its law for each h, a row each."""
    laws = np.pad(np.ones((1, 1)), ((0, len(costs)), (0, sum(costs))))
    for i, cost in enumerate(costs, 1):
        among = np.arange(len(costs) + 1)[:, None] / i  # holder i among h of the first i
        laws = (1 - among) * laws + among * np.roll(laws, (1, cost), (0, 1))
    return laws


def weighted_participations(
    plan: Plan, holders: int, shifts: Sequence[float], costs: Sequence[int] = ()
) -> tuple[Floats, float]:
    """Return the probabilities of 0, 1, 2, … units of μ² that an example's holders spend.

    Parameters
    ----------
    holders, costs : as in `participations`
    shifts : [T], μ of one participation in each round

    Returns
    -------
    probabilities : as `mixture_epsilon` takes them
    mu : float
        √unit. A participation's μ² is rounded up to whole units, so ε is bounded from above; the
        dearest one has `UNITS` of them.

    Notes
    -----
    Rounds are independent of each other, which those of clients ``one_pass`` are not.
    """
    squares = np.square(np.asarray(shifts, dtype=np.float64))
    unit = float(squares.max()) / UNITS
    once = participations(replace(plan, rounds=1), holders, costs)  # of one round
    total = np.ones(1)
    for cost in np.ceil(squares / unit * (1 - 1e-12)).astype(int):
        total = np.trim_zeros(np.convolve(total, np.kron(once, np.eye(1, cost)[0])), "b")
    return total, math.sqrt(unit)


def mixture_epsilon(probabilities: Floats, mu: float, delta: float) -> float:
    """Return the exact ε where N participations are seen, each a Gaussian shifted by μ.

    Parameters
    ----------
    probabilities : array
        Of N = 0, 1, 2, …; whatever the data are. Sums to 1.
    mu : float
        √uses / z of one participation, > 0.
    delta : float
        In (0, 1).

    Notes
    -----
    N is part of what the adversary sees and does not depend on the data, so δ(ε) is the mean of the
    Gaussian δ(ε) with parameter μ√N. Leaving something out of the view only lowers δ(ε): the value
    bounds ε for every adversary who sees less.

    Examples
    --------
    >>> always_ten = np.eye(11)[10]
    >>> round(mixture_epsilon(always_ten, 1 / 6, 1e-5), 2)
    2.11
    """
    positive(mu=mu)
    check_delta(delta=delta)
    counts = 1 + np.flatnonzero(probabilities[1:])
    if not counts.size:
        return 0.0
    return gdp_epsilon(mu * np.sqrt(counts), delta, probabilities[counts])


def visible_participation(
    epsilon: float, rate: float, noise_multiplier: float
) -> tuple[float, float]:
    """Return δ(ε) of one round where participation is hidden, and where it is visible.

    Parameters
    ----------
    epsilon : float
        ≥ 0.
    rate : float
        K_t/K in (0, 1].
    noise_multiplier : float
        z of one use of the example, if its client takes part.

    Returns
    -------
    hidden, visible : float
        Hidden: the subsampled Gaussian, exact if the client's other gradients are zero. Visible: if
        they are large, "the client is absent" can be told from the rest, and what is left is q
        times the Gaussian's δ at the *same* ε. Sampling of clients therefore does not amplify an
        example's ε in general.

    Examples
    --------
    >>> hidden, visible = visible_participation(0.5, 0.1, 1.0)
    >>> f"{hidden:.4f} {visible:.4f}"
    '0.0020 0.0238'
    """
    in_range(1e-12, 1, rate=rate)
    positive(noise_multiplier=noise_multiplier)
    mu = 1 / noise_multiplier
    inner = math.log1p(math.expm1(epsilon) / rate)
    return rate * float(gdp_delta(inner, mu)), rate * float(gdp_delta(epsilon, mu))


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
    refuse({f"ratio = {ratio} must be above 1: it is the larger noise level over the smaller.":
            not ratio > 1})  # fmt: skip
    positive(ratio=ratio, dimension=dimension)
    check_delta(delta=delta)
    log_overlap = dimension / 2 * math.log(2 * ratio / (1 + ratio**2))
    gap = math.log1p(-delta) - log_overlap  # ln((1 - δ)/BC)
    return max(0.0, gap + math.log1p(-math.exp(-gap))) if gap > 0 else 0.0
