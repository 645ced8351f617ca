"""Rényi divergences against numerical integration and dp_accounting."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp as peer
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from scipy.integrate import quad
from scipy.stats import norm

from fl_privacy_lib.accounting.accountants import spend, spending_curve
from fl_privacy_lib.accounting.events import Event, Ledger
from fl_privacy_lib.accounting.rdp import (
    PAPER_ORDERS,
    TODAY_ORDERS,
    integer_rdp,
    order_epsilons,
    rdp_curve,
    rdp_spending,
    step_rdp,
)
from fl_privacy_lib.accounting.schedules import ledger_of


def total(events, orders=TODAY_ORDERS):
    """Return the divergences of all releases together, [orders], summed one release at a time."""
    ledger = Ledger.of(events)
    each = step_rdp(ledger, orders)
    return sum(each[i] for i, uses in enumerate(ledger.uses) for _ in range(uses))


def integrated_rdp(rate: float, noise: float, order: float) -> float:
    """ln E_{x ~ N(0, z²)}[(1 - q + q e^{(2x - 1)/(2z²)})^α] / (α - 1), by quadrature in 30
    digits.
    """
    with mpmath.workdps(30):
        q, z, alpha = mpmath.mpf(rate), mpmath.mpf(noise), mpmath.mpf(order)

        def integrand(x):
            ratio = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * z * z))
            return ratio**alpha * mpmath.npdf(x, 0, z)

        # The mass lies within a few z of 0 and of α, where the ratio's power moves it.
        pieces = mpmath.linspace(-14 * z, alpha + 14 * z, int(30 + 1.5 * order / noise))
        return float(mpmath.log(mpmath.quad(integrand, pieces)) / (alpha - 1))


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.1, 0.7])
@pytest.mark.parametrize(("noise", "order"), [(6.0, 2), (6.0, 22), (1.0, 3), (0.5, 8), (15.0, 64)])
def test_integer_orders_agree_with_integration(rate, noise, order):
    ours = integer_rdp(np.array([rate]), np.array([noise]), (float(order),))[0, 0]
    assert ours == pytest.approx(integrated_rdp(rate, noise, order), rel=1e-10)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.7])
@pytest.mark.parametrize(
    ("noise", "order"), [(6.0, 1.25), (6.0, 3.5), (2.0, 1.5), (1.0, 1.1), (0.7, 4.5)]
)
def test_fractional_orders_agree_with_integration(rate, noise, order):
    ours = step_rdp(Event(rate, noise, "example", "add_remove"), (order,))[0, 0]
    assert ours == pytest.approx(integrated_rdp(rate, noise, order), rel=1e-7)


def test_no_digits_are_lost_at_tiny_rates():
    """The leading term q²(e^{1/z²} - 1) at α = 2 is exact: the binomial sum ends there."""
    for rate in (1e-6, 1e-9, 1e-12):
        ours = integer_rdp(np.array([rate]), np.array([6.0]), (2.0,))[0, 0]
        assert ours == pytest.approx(rate**2 * np.expm1(1 / 36), rel=1e-12)
        # dp_accounting's series turns negative here; between two whole orders nothing can go wrong.
        between = step_rdp(Event(rate, 6.0, "example", "add_remove"), (2.0, 2.5, 3.0))[0]
        assert between[0] <= between[1] <= between[2]


@pytest.mark.parametrize("orders", [PAPER_ORDERS, TODAY_ORDERS])
def test_both_order_sets_agree_with_the_peer(orders):
    events = tuple(
        Event(rate, noise, "example", "add_remove", uses=uses)
        for rate, noise, uses in (
            (0.01, 6.0, 10_000),
            (0.1, 2.0, 100),
            (1.0, 30.0, 5),
            (0.3, 0.8, 7),
        )
    )
    accountant = peer.RdpAccountant(orders)
    for event in events:
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(
                event.sampling_rate, dp_accounting.GaussianDpEvent(event.noise_multiplier)
            ),
            event.uses,
        )
    np.testing.assert_allclose(total(Ledger(events), orders), accountant.rdp, rtol=1e-9)
    assert rdp_spending(Ledger(events), 1e-6, orders).epsilon == pytest.approx(
        accountant.get_epsilon(1e-6), rel=1e-9
    )


def test_the_order_sets_are_those_of_their_sources():
    assert TODAY_ORDERS == pytest.approx(tuple(DEFAULT_RDP_ORDERS))
    assert len(PAPER_ORDERS) == 10 + 59 + 3
    assert PAPER_ORDERS[:4] == (1.25, 1.5, 1.75, 2.0)


def test_many_noise_levels_agree_with_one_at_a_time():
    noise = np.linspace(3, 15, 700)  # more than one chunk, more than the fractional limit
    ledger = ledger_of(noise, 0.02, "example", "add_remove")
    table = step_rdp(ledger, (2.5, 3.0, 40.0))
    assert np.isinf(table[:, 0]).all()  # left out, and never taken for a small value
    for row in (0, 399, 511, 512, 699):
        one = step_rdp(ledger.events[row], (3.0, 40.0))[0]
        np.testing.assert_allclose(table[row, 1:], one, rtol=1e-13)
    with_fractions = Ledger(ledger.events[:64])
    assert np.isfinite(step_rdp(with_fractions, (2.5,))).all()


def test_order_of_events_and_repeats_do_not_matter():
    noise = np.array([6.0, 3.0, 6.0, 9.0, 3.0])
    scattered = ledger_of(noise, 0.05, "example", "add_remove")
    together = Ledger(
        tuple(
            Event(0.05, z, "example", "add_remove", uses=n)
            for z, n in ((3.0, 2), (6.0, 2), (9.0, 1))
        )
    )
    np.testing.assert_allclose(total(scattered), total(together), rtol=1e-13)
    one, other = (rdp_spending(ledger, 1e-5).epsilon for ledger in (scattered, together))
    assert one == pytest.approx(other, rel=1e-13)


def test_without_sampling_the_divergence_is_that_of_two_gaussians():
    for relation in ("add_remove", "replace_one"):
        for sampling in ("none", "poisson"):
            event = Event(1.0, 3.0, "example", relation, sampling=sampling)
            np.testing.assert_allclose(
                step_rdp(event, (1.5, 8.0))[0], [1.5 / 18, 8 / 18], rtol=1e-14
            )


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 3.0), (0.2, 1.0), (0.6, 2.0)])
def test_replacement_bound_covers_a_pair_that_replaces(rate, noise, sampling):
    """Two opposite examples are a pair that replaces one: distance 1 from no example, 2 from
    each other.
    """
    z = 2 * noise  # standard deviation, as the sensitivity under replacement is 2

    for order in (2.0, 5.0):

        def integrand(x, order=order):
            mass = norm.pdf(x, 0, z)
            up, down = (np.exp((2 * side * x - 1) / (2 * z * z)) for side in (1, -1))
            return mass * (1 - rate + rate * up) ** order * (1 - rate + rate * down) ** (1 - order)

        true = np.log(quad(integrand, -12 * z, order + 12 * z, epsabs=0, epsrel=1e-12)[0]) / (
            order - 1
        )
        bound = step_rdp(Event(rate, noise, "example", "replace_one", sampling=sampling), (order,))[
            0, 0
        ]
        unsampled = order / (2 * noise**2)
        assert true <= bound <= unsampled * (1 + 1e-12)


def test_replacement_bound_is_the_peers():
    orders = (2.0, 7.5, 32.0)
    accountant = peer.RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(3.0)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(50_000, 500, gaussian))
    event = Event(0.01, 3.0, "example", "replace_one", sampling="fixed")
    np.testing.assert_allclose(step_rdp(event, orders)[0], accountant.rdp, rtol=1e-12)


def test_conversions():
    rdp = total(Event(0.01, 6.0, "example", "add_remove", uses=10_000), PAPER_ORDERS)
    orders = np.array(PAPER_ORDERS)
    classic = order_epsilons(rdp, orders, 1e-5, "classic")
    by_hand = [r + math.log(1e5) / (a - 1) for a, r in zip(PAPER_ORDERS, rdp, strict=True)]
    assert classic == pytest.approx(by_hand, rel=1e-14)
    improved = order_epsilons(rdp, orders, 1e-5, "improved")
    theirs, best = peer.compute_epsilon(PAPER_ORDERS, rdp, 1e-5)
    assert improved.min() == pytest.approx(theirs, rel=1e-14) and orders[improved.argmin()] == best
    assert improved.min() < classic.min()


@pytest.mark.parametrize("conversion", ["classic", "improved"])
@pytest.mark.parametrize("delta", [1e-5, 0.05])
def test_a_curve_is_the_spending_of_every_prefix(conversion, delta):
    ledger = Ledger(
        (
            Event(0.01, 6.0, "example", "add_remove", uses=40),
            Event(1e-4, 20.0, "example", "add_remove", uses=3),
            Event(0.2, 1.5, "example", "add_remove", uses=7),
        )
    )
    curve = rdp_curve(ledger, delta, PAPER_ORDERS, conversion)
    assert curve.shape == (50,)
    for steps in (1, 2, 40, 41, 43, 44, 50):
        prefix = rdp_spending(ledger.first(steps), delta, PAPER_ORDERS, conversion)
        assert curve[steps - 1] == pytest.approx(prefix.epsilon, rel=1e-12, abs=1e-15)


def test_the_improved_curve_knows_that_a_tiny_divergence_is_free():
    """At δ = 0.05 the first steps already hold with ε = 0, in the curve as in dp_accounting."""
    run = Event(0.001, 20.0, "example", "add_remove", uses=10)
    assert spend(run, "rdp", 0.05).epsilon == 0.0
    assert (spending_curve(run, "rdp", 0.05) == 0.0).all()
