"""What must hold for every accountant and every plan, tried on random ones."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fl_privacy_lib.accounting.accountants import (
    ACCOUNTANTS,
    first_step_beyond,
    noise_for,
    spend,
    spending_curve,
)
from fl_privacy_lib.accounting.composition import composed, step_sums
from fl_privacy_lib.accounting.events import Event, Ledger
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, rdp_spending
from fl_privacy_lib.accounting.schedules import (
    cosine,
    exponential,
    linear,
    noise_of_epsilon,
    staircase,
    triangular,
)

RATES = st.floats(1e-4, 1.0)
NOISE = st.floats(0.4, 50.0)
STEPS = st.integers(1, 3_000)
DELTAS = st.sampled_from([1e-8, 1e-5, 1e-3])
SAMPLED = [name for name in ACCOUNTANTS if name not in ("pld", "gdp")]
SLACK = 1 + 1e-9  # round-off of sums whose exact values are equal or ordered


def step(rate, noise, uses=1):
    return Event(rate, noise, "example", "add_remove", uses=uses)


@pytest.mark.parametrize("accountant", SAMPLED)
@settings(max_examples=12, deadline=None)
@given(rate=RATES, noise=NOISE, uses=STEPS, more=STEPS, delta=DELTAS)
def test_more_steps_never_cost_less(accountant, rate, noise, uses, more, delta):
    few = spend(step(rate, noise, uses), accountant, delta).epsilon
    many = spend(step(rate, noise, uses + more), accountant, delta).epsilon
    assert 0 <= few <= many * SLACK


@pytest.mark.parametrize("accountant", SAMPLED)
@settings(max_examples=12, deadline=None)
@given(rates=st.tuples(RATES, RATES), noise=NOISE, uses=STEPS, delta=DELTAS)
def test_a_larger_rate_never_costs_less(accountant, rates, noise, uses, delta):
    low, high = sorted(rates)
    # dp_accounting's series at fractional orders is good to about 1e-8.
    assert spend(step(low, noise, uses), accountant, delta).epsilon <= (
        spend(step(high, noise, uses), accountant, delta).epsilon * (1 + 1e-7)
    )


@pytest.mark.parametrize("accountant", SAMPLED)
@settings(max_examples=12, deadline=None)
@given(rate=RATES, noise=st.tuples(NOISE, NOISE), uses=STEPS, delta=DELTAS)
def test_more_noise_never_costs_more(accountant, rate, noise, uses, delta):
    low, high = sorted(noise)
    assert spend(step(rate, high, uses), accountant, delta).epsilon <= (
        spend(step(rate, low, uses), accountant, delta).epsilon * (1 + 1e-7)
    )


@pytest.mark.parametrize("accountant", SAMPLED)
@settings(max_examples=12, deadline=None)
@given(
    pairs=st.lists(st.tuples(RATES, NOISE), min_size=1, max_size=4),
    extra=st.tuples(RATES, NOISE),
    delta=DELTAS,
)
def test_adding_a_step_never_lowers_epsilon(accountant, pairs, extra, delta):
    events = [step(rate, noise) for rate, noise in pairs]
    before = spend(events, accountant, delta).epsilon
    assert before <= spend([*events, step(*extra)], accountant, delta).epsilon * SLACK
    assert before <= spend([step(*extra), *events], accountant, delta).epsilon * SLACK


@pytest.mark.parametrize("accountant", SAMPLED)
@settings(max_examples=12, deadline=None)
@given(
    events=st.lists(st.tuples(RATES, NOISE, st.integers(1, 5)), min_size=1, max_size=5),
    delta=DELTAS,
)
def test_the_curve_rises_to_the_spending(accountant, events, delta):
    ledger = Ledger(tuple(step(*event) for event in events))
    curve = spending_curve(ledger, accountant, delta)
    assert (np.diff(curve) >= -1e-12 * curve[1:]).all()
    assert curve[-1] == pytest.approx(spend(ledger, accountant, delta).epsilon, rel=1e-9, abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(st.tuples(RATES, NOISE, STEPS), min_size=1, max_size=4), slack=DELTAS)
def test_a_minimum_is_at_most_each_of_its_terms(events, slack):
    sums = step_sums(Ledger(tuple(step(*event) for event in events)))
    least = composed(sums, "optimal", slack)
    for theorem in ("base", "advanced_tanh", "optimal_third_term"):
        assert least <= composed(sums, theorem, slack)
    assert composed(sums, "advanced_tanh", slack) <= composed(sums, "advanced", slack)


@settings(max_examples=30, deadline=None)
@given(rate=RATES, noise=NOISE, uses=STEPS, delta=DELTAS)
def test_todays_conversion_never_costs_more(rate, noise, uses, delta):
    improved, classic = (
        rdp_spending(step(rate, noise, uses), delta, PAPER_ORDERS, conversion).epsilon
        for conversion in ("improved", "classic")
    )
    assert improved <= classic


@settings(max_examples=30, deadline=None)
@given(noise=st.tuples(NOISE, NOISE), uses=st.integers(1, 500), delta=DELTAS)
def test_unsampled_releases_are_exact_and_monotone(noise, uses, delta):
    low, high = sorted(noise)

    def exact(z, k):
        return spend(
            Event(1.0, z, "client", "replace_one", uses=k, sampling="none"), "gdp", delta
        ).epsilon

    assert exact(high, uses) <= exact(low, uses) * SLACK
    assert exact(low, uses) <= exact(low, uses + 1) * SLACK
    run = Event(1.0, low, "client", "replace_one", uses=uses, sampling="none")
    assert exact(low, uses) <= spend(run, "rdp", delta).epsilon * SLACK


@pytest.mark.long
@pytest.mark.parametrize(
    "accountant", ["base", "advanced", "optimal", "zcdp", "moments_accountant", "rdp"]
)
@settings(max_examples=5, deadline=None)
@given(rate=st.floats(1e-3, 0.5), noise=st.floats(0.7, 20.0), uses=st.integers(1, 2_000))
def test_noise_for_epsilon_inverts_epsilon_for_noise(accountant, rate, noise, uses):
    target = spend(step(rate, noise, uses), accountant, 1e-5).epsilon
    # Where ε is flat (at the largest order) many noise levels share it, and the smallest is found
    # instead.
    assume(spend(step(rate, noise / 1.01, uses), accountant, 1e-5).epsilon > target * (1 + 1e-6))
    found = noise_for(
        target * (1 + 1e-9), lambda z: step(rate, z, uses), accountant, 1e-5, tolerance=1e-4
    )
    assert found == pytest.approx(noise, rel=1e-2)
    assert spend(step(rate, found, uses), accountant, 1e-5).epsilon <= target * (1 + 1e-8)


@pytest.mark.parametrize("accountant", ["base", "zcdp", "moments_accountant", "rdp"])
@settings(max_examples=10, deadline=None)
@given(rate=st.floats(1e-3, 0.5), noise=st.floats(0.7, 20.0), budget=st.floats(0.05, 20.0))
def test_the_first_step_beyond_a_budget_is_the_first_that_does_not_fit(
    accountant, rate, noise, budget
):
    first = first_step_beyond(step(rate, noise, 2_000), budget, accountant, 1e-5) or 2_001
    if first > 1:
        assert spend(step(rate, noise, first - 1), accountant, 1e-5).epsilon <= budget
    if first <= 2_000:
        assert spend(step(rate, noise, first), accountant, 1e-5).epsilon > budget


VALUES = st.floats(0.1, 100.0)


@settings(max_examples=50, deadline=None)
@given(a=VALUES, b=VALUES, steps=st.integers(1, 200), parts=st.integers(1, 12))
def test_schedules_start_where_they_say_and_stay_between_their_ends(a, b, steps, parts):
    low, high = sorted((a, b))
    for values in (
        linear(a, b, steps),
        staircase(a, b, steps),
        exponential(a, b, steps),
        cosine(a, b, steps, cycles=parts),
    ):
        assert values.shape == (steps,)
        assert (values >= low * (1 - 1e-12)).all() and (values <= high * (1 + 1e-12)).all()
    for falling in (linear(high, low, steps), exponential(high, low, steps)):
        assert falling[0] == pytest.approx(high)
        assert (np.diff(falling) <= 1e-9).all()
    wave = triangular(low, high, steps, cycles=parts)
    assert wave[0] == pytest.approx(low)
    assert (wave >= low * (1 - 1e-12)).all() and (wave <= high * (1 + 1e-12)).all()


def test_schedules_at_chosen_steps():
    assert exponential(8.0, 2.0, 2).tolist() == pytest.approx([8.0, 4.0])
    assert linear(10.0, 0.5, 4)[2] == pytest.approx(10 - 9.5 / 2)
    stairs = staircase(10.0, 5.0, 1000)
    assert stairs[[99, 100, 299, 300]].tolist() == pytest.approx([10, 9.5, 9, 8.5])
    assert cosine(9.0, 1.0, 8, cycles=2)[[0, 2, 4, 6]].tolist() == pytest.approx([9, 5, 9, 5])
    assert triangular(1.0, 3.0, 8, cycles=2)[[2, 5, 6]].tolist() == pytest.approx([3, 2, 3])
    noise = noise_of_epsilon(np.array([0.80747]))
    assert noise[0] == pytest.approx(6.0, rel=1e-5)
