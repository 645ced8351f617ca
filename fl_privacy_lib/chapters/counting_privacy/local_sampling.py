"""Drawing clients, then examples: what Fed-CDP's Proposition 1 says, and what it is used for.

The proposition is about the chance of a class. The sentence after it takes the two draws for one
draw from all data at rate B·K_t/N, and `local_sampling_epsilon` is a lower bound on the ε of the
two draws: no statement below it is true.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, norm

from fl_privacy_lib._checks import positive, whole_number
from fl_privacy_lib.accounting.events import Floats, check_delta
from fl_privacy_lib.sampling import Plan


def class_gap(counts: Floats) -> float:
    """Return how far a class's chance of being drawn is from its share of the data, at most.

    Parameters
    ----------
    counts : array, [clients, classes]
        Examples of each class at each client. A client is drawn uniformly, then one of its
        examples uniformly: Fed-CDP's Proposition 1, in [0, 1].

    Examples
    --------
    >>> class_gap(np.array([[2, 0], [0, 2]])), class_gap(np.array([[1, 0], [0, 9]]))
    (0.0, 0.4)
    """
    drawn = (counts / counts.sum(1, keepdims=True)).mean(0)
    return float(np.abs(drawn - counts.sum(0) / counts.sum()).max())


def local_sampling_epsilon(
    plan: Plan, client_size: int, noise_multiplier: float, delta: float
) -> float:
    """Return an ε that a training with clients and then examples drawn cannot go below, at δ.

    Parameters
    ----------
    plan : Plan
        K, K_t, T, L and B. In each round a client takes part with probability K_t/K, anew; in each
        local iteration it draws B examples with replacement, as section V of Fed-CDP has it.
    client_size : int
        n, examples of the client, at least B.
    noise_multiplier : float
        z > 0: the noise on a step's sum of gradients, in units of C.
    delta : float
        In (0, 1).

    Notes
    -----
    The pair of data sets. One client holds x and n - 1 others; every gradient of another client is
    zero. The gradient of x has norm C in one layer, along a direction that no other gradient has.
    In a second layer all n gradients of the client are equal, of norm C. The neighbour lacks x, or
    has in its place an example that is zero in the first layer: both give the same law.

    The adversary reads two numbers of the client's update, or of a sum with as much noise on every
    step, after each round: the change along the two directions, over z C √L. The second is normal
    around s = B √L / z where the client took part, around 0 elsewhere, with and without x; a round
    where it is beyond a threshold is *marked*. The first is normal around k / (z √L), with k the
    uses of x, binomial of L B draws at 1/n; without x it is around 0. The first numbers of the N
    marked rounds, added and divided by √N, are normal around J / (z √(L N)), J uses in all. Given N
    both laws are known in closed form, and so is δ(ε) for the best threshold on that one number; a
    threshold that is not the best would only lower it. All that the adversary throws away makes the
    bound smaller, never wrong; what remains is rounding, below 1e-9.

    Examples
    --------
    >>> plan = Plan(100, 10, 100, 100, 5, "fixed", "with_replacement", local_lr=0.05)
    >>> print(f"{local_sampling_epsilon(plan, 500, 6.0, 1e-5):.4f}")
    0.1869
    """
    whole_number(plan.batch_size, client_size=client_size)
    positive(noise_multiplier=noise_multiplier)
    check_delta(delta=delta)
    views = _views(plan, client_size, noise_multiplier)

    def excess(epsilon: float) -> float:
        return sum(chance * _delta(epsilon, *view) for chance, *view in views) - delta

    return float(brentq(excess, 0.0, 500.0, xtol=1e-10)) if excess(0.0) > 0 else 0.0


def _views(plan: Plan, client_size: int, noise: float) -> list[tuple[float, Floats, Floats]]:
    """Return, of N = 1, 2, … marked rounds, the chance, the law of J and the shift for each J."""
    rate, draws = plan.client_rate, plan.local_iterations * plan.batch_size
    mark = plan.batch_size * math.sqrt(plan.local_iterations) / noise
    with np.errstate(divide="ignore"):
        threshold = mark / 2 + np.log((1 - rate) / rate) / mark  # where both are equally likely
    false, true = (1 - rate) * norm.sf(threshold), rate * norm.sf(threshold - mark)
    uses = true * binom.pmf(np.arange(draws + 1), draws, 1 / client_size)
    uses[0] += false
    views, law = [], np.ones(1)
    for marked in range(1, plan.rounds + 1):
        law = np.convolve(law, uses / (false + true))
        law = law[: np.flatnonzero(law > 1e-18)[-1] + 1]
        shifts = np.arange(law.size) / (noise * math.sqrt(plan.local_iterations * marked))
        views.append((float(binom.pmf(marked, plan.rounds, false + true)), law, shifts))
    return [view for view in views if view[0] > 1e-15]


def _delta(epsilon: float, law: Floats, shifts: Floats) -> float:
    """Return δ(ε) of a mixture of shifted normals against one that is not shifted, exactly."""

    def loss(x: float) -> float:  # rises with x
        return float(np.logaddexp.reduce(np.log(law) + shifts * (x - shifts / 2))) - epsilon

    if loss(40.0) <= 0:
        return 0.0
    x = brentq(loss, -40.0, 40.0)
    return float(law @ norm.sf(x - shifts) - math.exp(epsilon) * norm.sf(x))
