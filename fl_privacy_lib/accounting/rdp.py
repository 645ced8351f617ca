"""Rényi divergences of the subsampled Gaussian, and the moments accountant that adds them up.

Integer orders come from a binomial sum over all (q, z) at once, which is fast enough for a schedule
of 10,000 noise levels and keeps its digits where q is tiny. Fractional orders, sampling without
replacement and the improved conversion come from dp_accounting.
"""

from functools import lru_cache
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import rdp as peer
from scipy.special import gammaln

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.events import (
    MOST_PAIRS,
    Event,
    Floats,
    Ledger,
    Spending,
    check_delta,
)

Conversion = Literal["classic", "improved"]
Orders = tuple[float, ...]

# The order set of all three papers' code (early TensorFlow Privacy).
PAPER_ORDERS: Orders = (
    *(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5),
    *map(float, range(5, 64)),
    *(128.0, 256.0, 512.0),
)
# The default of dp_accounting 0.4.3.
TODAY_ORDERS: Orders = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    *(128.0, 256.0, 512.0, 1024.0),
)

_CHUNK = 512  # pairs at once: a [512, 1023] table of terms stays in the cache


def integer_rdp(rates: Floats, noise: Floats, orders: Orders) -> Floats:
    """Return the Rényi divergences of Poisson-subsampled Gaussians at integer orders.

    Parameters
    ----------
    rates, noise : array, [pairs]
        q in (0, 1] and z > 0.
    orders : tuple of float
        Integers from 2.

    Returns
    -------
    array, [pairs, orders]
        RDP of one step under ``add_remove``.

    Raises
    ------
    InputError
        If an order is below 2 or not whole.

    Notes
    -----
    Mironov, Talwar and Zhang (2019), section 3.3: with A = E[(1 - q + q·ratio)^α], RDP = ln A / (α
    - 1) and A - 1 = Σ_{k≥2} C(α,k) q^k (1-q)^{α-k} (e^{k(k-1)/(2z²)} - 1).

    Examples
    --------
    >>> print(f"{integer_rdp(np.array([0.01]), np.array([6.0]), (2.0,))[0, 0]:.6e}")
    2.816714e-06
    """
    if any(order < 2 or order != int(order) for order in orders):
        raise InputError(f"orders = {orders} must be whole numbers from 2 for the binomial sum.")
    rates, noise = np.asarray(rates, dtype=np.float64), np.asarray(noise, dtype=np.float64)
    result = np.empty((rates.size, len(orders)))  # [pairs, orders]
    for start in range(0, rates.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        result[rows] = _binomial_sums(rates[rows, None], noise[rows, None], orders)
    unsampled = rates == 1  # the closed form of the plain Gaussian; the sum would meet 0 · log 0
    result[unsampled] = 0.5 * np.array(orders) / np.square(noise[unsampled, None])
    return result


def _binomial_sums(rates: Floats, noise: Floats, orders: Orders) -> Floats:
    k = np.arange(2.0, max(orders) + 1)  # [k]
    with np.errstate(divide="ignore", invalid="ignore"):  # q = 1, which the caller overwrites
        log_other = np.log1p(-rates)  # [pairs, 1]
        gap = k * (k - 1) / (2 * np.square(noise))  # [pairs, k]
        # The summand without A's 1 is what remains of the sum: no digits are lost to a 1 that is
        # taken away.
        terms = gap + np.log(-np.expm1(-gap)) + k * (np.log(rates) - log_other)  # [pairs, k]
        columns = []
        for order in orders:
            used = k[: int(order) - 1]
            choose = gammaln(order + 1) - gammaln(used + 1) - gammaln(order - used + 1)
            summand = terms[:, : used.size] + choose
            top = summand.max(axis=1, keepdims=True)
            log_sum = (
                top[:, 0] + np.log(np.exp(summand - top).sum(axis=1)) + order * log_other[:, 0]
            )
            columns.append(np.logaddexp(0, log_sum) / (order - 1))
    return np.stack(columns, axis=1)


@lru_cache(maxsize=4096)
def _peer_rdp(rate: float, noise: float, orders: Orders, replaced: bool) -> Floats:
    gaussian = dp_accounting.GaussianDpEvent(noise)
    event: dp_accounting.DpEvent = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if replaced:  # the peer uses the two sizes only through their quotient
        event = dp_accounting.SampledWithoutReplacementDpEvent(1.0, rate, gaussian)
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    return peer.RdpAccountant(orders, relation).compose(event).rdp


def step_rdp(events: Event | Ledger, orders: Orders = TODAY_ORDERS) -> Floats:
    """Return the Rényi divergences of one use of each event, [events, orders].

    Parameters
    ----------
    events : Event, Ledger
        Under ``replace_one`` a sampled event gets the bound for sampling without replacement (Wang,
        Balle and Kasiviswanathan, 2019, theorem 27). It covers Poisson sampling too, whose three
        cases (without the unit, with it, with its replacement) are no further apart.
    orders : tuple of float
        Above 1. With more than 64 different (q, z), fractional orders are left out (their value is
        infinite): leaving an order out can only raise ε.

    Raises
    ------
    InputError
        If an order is not above 1, or more than 64 different (q, z) are sampled under
        ``replace_one``.
    """
    if not orders or min(orders) <= 1:
        raise InputError(f"orders = {orders} must be at least one number, all greater than 1.")
    ledger = Ledger.of(events)
    pairs, where = np.unique(
        np.stack([ledger.rates, ledger.noise], axis=1), axis=0, return_inverse=True
    )
    sampled = pairs[:, 0] < 1
    replaced = ledger.relation == "replace_one" and sampled.any()
    table = _replaced(pairs, orders) if replaced else _poisson(pairs, orders)
    return table[np.ravel(where)]


def _poisson(pairs: Floats, orders: Orders) -> Floats:
    whole = {float(bound) for order in orders for bound in (np.floor(order), np.ceil(order))}
    exact_orders = tuple(sorted(order for order in whole if order >= 2))
    exact = integer_rdp(pairs[:, 0], pairs[:, 1], exact_orders).T
    columns = dict(zip(exact_orders, exact, strict=True))
    fractional = tuple(order for order in orders if order != int(order))
    left_out = np.full(len(pairs), np.inf)
    if fractional and len(pairs) <= MOST_PAIRS:
        table = np.array([_peer_rdp(rate, noise, fractional, False) for rate, noise in pairs])
        for order, column in zip(fractional, table.T, strict=True):
            # RDP rises with the order: the whole neighbours hold the series where it runs out of
            # digits (tiny q).
            below, above = columns.get(np.floor(order), 0.0), columns[np.ceil(order)]
            columns[order] = np.clip(column, below, above)
    return np.stack([columns.get(order, left_out) for order in orders], axis=1)


def _replaced(pairs: Floats, orders: Orders) -> Floats:
    if len(pairs) > MOST_PAIRS:
        raise InputError(
            f"The plan has {len(pairs)} different (q, z) under relation = 'replace_one', where "
            f"each takes a while: use at most {MOST_PAIRS}, for example by rounding the noise down "
            "to a few levels."
        )
    plain = 0.5 * np.array(orders) / np.square(pairs[:, 1:])  # [pairs, orders]
    bound = plain.copy()
    for row, (rate, noise) in enumerate(pairs):
        if rate < 1:
            bound[row] = _peer_rdp(rate, noise, orders, True)
    # joint quasi-convexity: sampling never makes a release reveal more
    return np.minimum(bound, plain)


def order_epsilons(
    rdp: Floats, order: Floats | float, delta: float, conversion: Conversion
) -> Floats:
    """Return what each divergence says of ε by its order; 0 or less: ε = 0 holds.

    Parameters
    ----------
    rdp, order : arrays that broadcast, orders above 1
    delta : in (0, 1)
    conversion : {"classic", "improved"}
        ``classic``: RDP + ln(1/δ)/(α - 1), Mironov (2017), used by all three papers. ``improved``:
        RDP + ln(1 - 1/α) - ln(δα)/(α - 1), Canonne, Kamath and Steinke (2020), as in dp_accounting.

    Examples
    --------
    >>> for name in ("classic", "improved"):
    ...     print(order_epsilons(np.array([0.1, 0.2]), np.array([8.0, 16.0]), 1e-5, name).round(4))
    [1.7447 0.9675]
    [1.3141 0.7182]
    """
    if conversion == "classic":
        return rdp - np.log(delta) / (order - 1)
    improved = rdp + (np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    # δ² ≥ 1 - e^{-RDP} bounds the total variation by δ: ε = 0 already holds
    return np.where(delta**2 + np.expm1(-rdp) > 0, 0.0, improved)


def rdp_curve(
    ledger: Ledger,
    delta: float,
    orders: Orders = TODAY_ORDERS,
    conversion: Conversion = "improved",
) -> Floats:
    """Return ε after each release, [steps].

    The orders are gone through one by one, so that memory grows with the steps and not with their
    product.
    """
    table = step_rdp(ledger, orders)  # [events, orders]
    best = np.full(ledger.steps, np.inf)
    for column, order in zip(table.T, orders, strict=True):
        spent = np.cumsum(np.repeat(column, ledger.uses))  # [steps]
        best = np.minimum(best, order_epsilons(spent, order, delta, conversion))
    return np.maximum(best, 0.0)


def rdp_spending(
    events: Event | Ledger,
    delta: float,
    orders: Orders = TODAY_ORDERS,
    conversion: Conversion = "improved",
    name: str = "rdp",
) -> Spending:
    """Return what a ledger costs by Rényi accounting.

    Examples
    --------
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> print(f"{rdp_spending(run, 1e-5).epsilon:.3f}")
    0.659
    >>> print(f"{rdp_spending(run, 1e-5, PAPER_ORDERS, 'classic').epsilon:.3f}")
    0.823
    """
    check_delta(delta=delta)
    ledger = Ledger.of(events)
    rdp = ledger.uses @ step_rdp(ledger, orders)  # of all releases, [orders]
    each = order_epsilons(rdp, np.array(orders), delta, conversion)
    return Spending(ledger, name, float(np.maximum(0.0, each.min())), delta, delta)
