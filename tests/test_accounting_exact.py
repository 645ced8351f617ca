"""Composition theorems, zCDP, Gaussian releases and privacy loss distributions, each found a
second way.
"""

import math

import mpmath
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fl_privacy_lib.accounting.accountants import (
    ACCOUNTANTS,
    first_step_beyond,
    noise_for,
    spend,
    spending_curve,
)
from fl_privacy_lib.accounting.composition import (
    amplified,
    composed,
    composition_spending,
    step_epsilon,
    step_sums,
)
from fl_privacy_lib.accounting.events import Event, Ledger
from fl_privacy_lib.accounting.gdp import gdp_delta, gdp_epsilon
from fl_privacy_lib.accounting.pld import grid_epsilon, replaced_delta
from fl_privacy_lib.accounting.rdp import rdp_spending
from fl_privacy_lib.accounting.zcdp import step_rho

MIXED = Ledger(
    (
        Event(0.01, 6.0, "example", "add_remove", uses=30),
        Event(0.1, 4.0, "example", "add_remove", uses=2),
        Event(1.0, 50.0, "example", "add_remove", uses=5, sampling="none"),
    )
)


def naive_composition(ledger: Ledger, theorem: str, delta: float) -> float:
    """One step after the other, with Python's own numbers."""
    steps = []
    for event in ledger.events:
        plain = math.sqrt(2 * math.log(1.25 / delta)) / event.noise_multiplier
        steps += [math.log(1 + event.sampling_rate * (math.exp(plain) - 1))] * event.uses
    total, squares = sum(steps), sum(e * e for e in steps)
    drift = sum(e * (math.exp(e) - 1) for e in steps)
    halved = sum(e * (math.exp(e) - 1) / (math.exp(e) + 1) for e in steps)
    root = math.sqrt(2 * math.log(1 / delta) * squares)
    third = halved + math.sqrt(2 * squares * math.log(math.e + math.sqrt(squares) / delta))
    return {
        "base": total,
        "advanced": root + drift,
        "advanced_tanh": root + halved,
        "optimal_third_term": third,
        "optimal": min(total, root + halved, third),
    }[theorem]


@pytest.mark.parametrize(
    "theorem", ["base", "advanced", "advanced_tanh", "optimal", "optimal_third_term"]
)
def test_compositions_agree_with_a_loop_over_the_steps(theorem):
    expected = naive_composition(MIXED, theorem, 1e-5)
    assert spend(MIXED, theorem, 1e-5).epsilon == pytest.approx(expected, rel=1e-12)
    curve = spending_curve(MIXED, theorem, 1e-5)
    for steps in (1, 30, 31, 33, 37):
        expected = naive_composition(MIXED.first(steps), theorem, 1e-5)
        assert curve[steps - 1] == pytest.approx(expected, rel=1e-12)


def test_each_of_the_three_bounds_is_the_smallest_somewhere():
    """Otherwise the minimum would be an ornament."""
    winners = set()
    for uses, rate in ((1, 0.5), (10_000, 0.01), (50, 0.01)):
        sums = step_sums(Ledger.of(Event(rate, 6.0, "example", "add_remove", uses=uses)))
        terms = {
            name: float(composed(sums, name))
            for name in ("base", "advanced_tanh", "optimal_third_term")
        }
        assert float(composed(sums, "optimal")) == min(terms.values())
        winners.add(min(terms, key=terms.get))
    assert winners == {"base", "advanced_tanh", "optimal_third_term"}


def test_advanced_composition_with_tanh_is_below_dwork_rothblum_vadhan():
    run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    values = {name: spend(run, name, 1e-5).epsilon for name in ACCOUNTANTS if name != "gdp"}
    assert values["advanced_tanh"] < values["optimal_third_term"] < values["advanced"]
    assert (
        values["optimal"] == values["advanced_tanh"]
    )  # so the papers' "optimal" is not the optimum


def test_rounding_of_the_step():
    assert float(amplified(step_epsilon(6.0, decimals=3), 0.01)) == pytest.approx(
        0.0123353, abs=5e-8
    )
    run = Ledger.of(Event(0.01, 6.0, "example", "add_remove", uses=10_000))
    rounded = composition_spending(run, "base", decimals=3)
    assert rounded.epsilon == pytest.approx(123.3535, abs=5e-4)


def test_the_textbook_bound_covers_steps_below_one_only():
    """Where ε_0 < 1 the exact δ is below δ_0; for small σ it is not, which is what the caveat
    counts.
    """
    for noise in (4.9, 6.0, 20.0):
        assert gdp_delta(float(step_epsilon(noise)), 1 / noise) < 1e-5
    assert gdp_delta(float(step_epsilon(0.2)), 1 / 0.2) > 1e-5
    ledger = Ledger(
        tuple(
            Event(0.01, z, "example", "add_remove", uses=n)
            for z, n in ((6.0, 5), (4.0, 2), (1.0, 1))
        )
    )
    assert "fails at 3 of 8 steps" in spend(ledger, "base", 1e-5).caveats[0]


def test_zcdp_by_hand():
    rho = 30 * 0.01**2 / 36 + 2 * 0.1**2 / 16 + 5 / (2 * 50**2)
    expected = rho + 2 * math.sqrt(rho * math.log(1e5))
    assert spend(MIXED, "zcdp", 1e-5).epsilon == pytest.approx(expected, rel=1e-12)
    assert step_rho(MIXED).shape == (3,)


@pytest.mark.parametrize("accountant", [name for name in ACCOUNTANTS if name not in ("pld", "gdp")])
def test_a_curve_ends_in_the_spending(accountant):
    curve = spending_curve(MIXED, accountant, 1e-5)
    assert curve.shape == (MIXED.steps,)
    assert curve[-1] == pytest.approx(spend(MIXED, accountant, 1e-5).epsilon, rel=1e-12)
    assert (np.diff(curve) > 0).all()


@pytest.mark.parametrize("accountant", ["base", "zcdp", "moments_accountant", "rdp"])
def test_the_first_step_beyond_a_budget(accountant):
    run = Event(0.05, 4.0, "example", "add_remove", uses=400)
    budget = 0.7 * spend(run, accountant, 1e-5).epsilon
    step = first_step_beyond(run, budget, accountant, 1e-5)
    ledger = Ledger.of(run)
    assert spend(ledger.first(step), accountant, 1e-5).epsilon > budget
    assert spend(ledger.first(step - 1), accountant, 1e-5).epsilon <= budget
    assert first_step_beyond(run, 1e6, accountant, 1e-5) is None


def test_a_budget_below_the_first_step_allows_none():
    run = Event(0.5, 1.0, "example", "add_remove")
    assert first_step_beyond(run, 0.1, "rdp", 1e-5) == 1


# ---- Gaussian releases ---------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.05, 1 / 6, 1.0, 8.3, 50.0])
def test_gaussian_delta_agrees_with_fifty_digits(mu):
    with mpmath.workdps(50):
        for epsilon in (0.0, 0.5 * mu, mu * (mu / 2 + 3)):
            e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
            exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
            assert float(gdp_delta(epsilon, mu)) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("mu", [1e-6, 0.01, 1 / 6, 1.0, 8.3, 50.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_epsilon_inverts_delta(mu, delta):
    epsilon = gdp_epsilon(mu, delta)
    if epsilon == 0:
        assert gdp_delta(0.0, mu) <= delta
    else:
        assert float(gdp_delta(epsilon, mu)) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(
    ("uses", "noise", "expected"),
    [
        (1, 6.0, 0.594),
        (10, 6.0, 2.11),
        (100, 6.0, 8.00),
        (1, 6 / 3**0.5, 1.085),
        (10, 6 / 3**0.5, 3.94),
    ],
)
def test_an_adversary_who_sees_who_sent_what(uses, noise, expected):
    run = Event(1.0, noise, "example", "add_remove", uses=uses, sampling="none")
    assert spend(run, "gdp", 1e-5).epsilon == pytest.approx(expected, rel=3e-3)


def test_gaussian_releases_add_up_like_vectors():
    parts = [Event(1.0, z, "client", "replace_one", sampling="none") for z in (3.0, 4.0)]
    together = gdp_epsilon(math.hypot(1 / 3, 1 / 4), 1e-5)
    assert spend(parts, "gdp", 1e-5).epsilon == pytest.approx(together)


# ---- privacy loss distributions ------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("noise", "uses"), [(6.0, 1), (6.0, 100), (2.0, 7), (0.5, 1)])
def test_pld_of_unsampled_releases_is_the_exact_gaussian(relation, noise, uses):
    run = Event(1.0, noise, "example", relation, uses=uses, sampling="none")
    exact = spend(run, "gdp", 1e-5).epsilon
    found = spend(run, "pld", 1e-5).epsilon
    assert exact <= found + 1e-9 and found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 0.5), (0.1, 1.0), (0.5, 2.0)])
def test_pld_of_one_sampled_step_is_the_amplified_gaussian(relation, rate, noise):
    """For one step both relations have δ(ε) = q δ_Gauss(ln(1 + (e^ε - 1)/q)), solved in
    closed form.
    """
    exact = math.log1p(rate * math.expm1(gdp_epsilon(1 / noise, 1e-5 / rate)))
    found = spend(Event(rate, noise, "example", relation), "pld", 1e-5).epsilon
    assert found == pytest.approx(exact, rel=2e-3)
    assert found >= exact * (1 - 1e-9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "noise", "uses"),
    [
        (0.01, 6.0, 10_000),
        (0.1, 6.0, 100),
        (0.01, 6 / 3**0.5, 10_000),
        (0.01, 0.5, 1_000),
        (0.5, 2.0, 20),
        (0.001, 1.0, 300),
        (0.9, 10.0, 50),
    ],
)
def test_pld_is_never_above_rdp(rate, noise, uses):
    for relation in ("add_remove", "replace_one"):
        run = Event(rate, noise, "example", relation, uses=uses)
        tight = spend(run, "pld", 1e-5).epsilon
        assert tight <= spend(run, "rdp", 1e-5).epsilon
        assert spend(run, "rdp", 1e-5).epsilon <= spend(run, "moments_accountant", 1e-5).epsilon


def test_pld_of_a_mixed_ledger_is_below_rdp_and_above_each_part():
    whole = spend(MIXED, "pld", 1e-5).epsilon
    assert whole <= spend(MIXED, "rdp", 1e-5).epsilon
    assert all(whole >= spend(part, "pld", 1e-5).epsilon for part in MIXED.events)


def test_replacing_costs_more_than_adding():
    """At the same clipping and noise, z halves under replacement; 'fixed' and Poisson share
    the bound.
    """
    added = Event(0.01, 6.0, "example", "add_remove", uses=1_000)
    for sampling in ("poisson", "fixed"):
        replaced = Event(0.01, 3.0, "example", "replace_one", uses=1_000, sampling=sampling)
        assert spend(replaced, "pld", 1e-5).epsilon > 1.5 * spend(added, "pld", 1e-5).epsilon


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.2, 0.5), (0.7, 2.0)])
def test_replacement_curve_covers_a_pair_that_replaces(rate, noise):
    """Hockey-stick divergence of two opposite examples, by integration, for ε of either sign."""
    z = 2 * noise  # the examples are 2 apart

    for epsilon in (-1.5, -0.3, -0.01, 0.0, 0.01, 0.3, 1.5):

        def excess(x, epsilon=epsilon):
            none = (1 - rate) * norm.pdf(x, 0, z)
            up, down = none + rate * norm.pdf(x, 1, z), none + rate * norm.pdf(x, -1, z)
            return max(0.0, up - math.exp(epsilon) * down)

        true = quad(excess, -15 * z, 15 * z, limit=400)[0]
        assert true <= float(replaced_delta(np.array(epsilon), rate, noise)) + 1e-9


def test_replacement_curve_is_a_possible_one():
    """δ falls from 1 to 0, is convex in e^ε, and is never below 1 - e^ε: what composition
    asks of a curve.
    """
    epsilon = np.linspace(-6, 6, 4001)
    for rate, noise in ((0.01, 1.0), (0.3, 0.4), (1.0, 2.0)):
        delta = replaced_delta(epsilon, rate, noise)
        slopes = np.diff(delta) / np.diff(np.exp(epsilon))
        assert (np.diff(slopes) >= -1e-9).all()
        assert (delta >= -np.expm1(epsilon) - 1e-12).all()
        assert delta[0] > 0.99
        assert 0 <= delta[-1] < 1e-2


# ---- the other direction -------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("accountant", [name for name in ACCOUNTANTS if name != "gdp"])
def test_noise_for_an_epsilon_inverts_the_accountant(accountant):
    def plan(noise):
        return Event(0.02, noise, "example", "add_remove", uses=50)

    tolerance = 1e-2 if accountant == "pld" else 1e-4  # a PLD takes a while
    noise = noise_for(0.6, plan, accountant, 1e-5, tolerance)
    assert spend(plan(noise), accountant, 1e-5).epsilon <= 0.6
    assert spend(plan(noise / (1 + 2 * tolerance)), accountant, 1e-5).epsilon > 0.6


def test_noise_for_a_whole_schedule():
    shape = np.linspace(1.5, 0.5, 20)

    def plan(factor):
        return [Event(0.1, float(factor * s), "client", "add_remove") for s in shape]

    factor = noise_for(1.0, plan, "moments_accountant", 1e-6, tolerance=1e-4)
    assert spend(plan(factor), "moments_accountant", 1e-6).epsilon == pytest.approx(1.0, rel=1e-3)


def test_noise_may_be_far_below_one():
    def plan(noise):
        return Event(1.0, noise, "example", "add_remove", sampling="none")

    noise = noise_for(1000.0, plan, "gdp", 1e-5)
    assert noise < 0.05
    assert spend(plan(noise), "gdp", 1e-5).epsilon == pytest.approx(1000.0, rel=1e-4)


@pytest.mark.parametrize(
    ("rate", "noise", "uses", "relation"),
    [
        (0.00069, 6.77, 8374, "replace_one"),  # 7 % too high on a grid of 1e-4
        (0.00044, 10.74, 1660, "add_remove"),  # above Rényi accounting on that grid
        (0.00012, 15.12, 142, "replace_one"),  # five times too high
        (0.1, 5.0, 1, "add_remove"),
    ],
)
def test_the_grid_follows_a_small_epsilon_and_the_least_bound_counts(rate, noise, uses, relation):
    event = Event(rate, noise, "example", relation, uses=uses)
    epsilon = spend(event, "pld", 1e-5).epsilon
    assert epsilon <= rdp_spending(event, 1e-5).epsilon
    fine = grid_epsilon(relation, {(rate, noise): uses}, 1e-5, epsilon / 20_000)
    assert fine * (1 - 1e-9) <= epsilon <= fine * 1.003
