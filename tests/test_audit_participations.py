"""How often an example, or a client, is used in a training: against all draws and orders."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fl_privacy_lib import audit
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.defenses import (
    Holding,
    fed_cdp,
)
from fl_privacy_lib.sampling import ClientSampling, Plan

DELTA = 1e-5


@pytest.mark.parametrize(
    ("clients", "taking", "rounds", "holders"),
    [(4, 2, 3, 2), (5, 1, 2, 3), (3, 3, 2, 2), (4, 3, 2, 4)],
)
def test_participations_against_all_draws(clients, taking, rounds, holders):
    draws = list(itertools.combinations(range(clients), taking))
    count = np.zeros(holders * rounds + 1)
    for picked in itertools.product(draws, repeat=rounds):
        count[sum(len(set(one) & set(range(holders))) for one in picked)] += 1
    plan = Plan(clients, taking, rounds, 1, 1, local_lr=0.1)
    assert audit.participations(plan, holders) == pytest.approx(count / count.sum(), abs=1e-12)


@pytest.mark.parametrize(
    ("clients", "taking", "rounds", "holders"), [(4, 2, 3, 2), (5, 2, 4, 3), (3, 1, 2, 1)]
)
def test_participations_of_whole_epochs_against_all_orders(clients, taking, rounds, holders):
    epoch, orders = clients // taking, list(itertools.permutations(range(clients)))
    count = np.zeros(holders * rounds + 1)
    for picked in itertools.product(orders, repeat=-(-rounds // epoch)):
        flat = [c for order in picked for c in order[: epoch * taking]][: rounds * taking]
        count[sum(c < holders for c in flat)] += 1
    plan = Plan(clients, taking, rounds, 1, 1, "one_pass", local_lr=0.1)
    assert audit.participations(plan, holders) == pytest.approx(count / count.sum(), abs=1e-12)


@pytest.mark.parametrize("costs", [(9, 1, 1), (4, 4, 1), (2, 1)])
def test_what_holders_spend_against_all_draws(costs):
    clients, taking, rounds = 4, 2, 2
    draws = [sum(costs[c] for c in one if c < len(costs))
             for one in itertools.combinations(range(clients), taking)]  # fmt: skip
    count = np.zeros(sum(costs) * rounds + 1)
    for spent in itertools.product(draws, repeat=rounds):
        count[sum(spent)] += 1
    plan = Plan(clients, taking, rounds, 1, 1, local_lr=0.1)
    found = audit.participations(plan, len(costs), costs)
    assert found == pytest.approx(count / count.sum(), abs=1e-12)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_what_holders_spend_under_poisson_against_all_sets(costs, rounds, taking):
    plan, rate = Plan(10, taking, rounds, 1, 1, "poisson", local_lr=0.1), taking / 10
    count = np.zeros(sum(costs) * rounds + 1)
    for takes in itertools.product((0, 1), repeat=len(costs) * rounds):
        chance = math.prod(rate if t else 1 - rate for t in takes)
        count[sum(t * c for t, c in zip(takes, costs * rounds, strict=True))] += chance
    exact = audit.participations(plan, len(costs), costs)
    assert exact.sum() == pytest.approx(1)
    assert exact @ np.arange(exact.size) == pytest.approx(rounds * rate * sum(costs))
    assert exact == pytest.approx(count, abs=1e-12)


def test_an_example_that_lies_unevenly_is_proved_by_its_own_copies():
    """Removing (3, 1, 1) moves what three holders send; three threefold ones would send more."""
    plan = Plan(20, 4, 10, 2, 5, local_lr=0.1)
    even = Holding(100, 10, 1, 3, 3, 10)
    uneven = replace(even, kinds=((3, 1, 1), (2, 2, 1)))

    def proved(holding):
        return audit.statement(fed_cdp("batch", noise_scale=2.0), plan, holding, delta=1e-5).proved

    mu = 1 / 2.0  # C over the noise on the sum of a batch
    costs = {(3, 1, 1): (9, 1, 1), (2, 2, 1): (4, 4, 1)}
    expected = max(
        audit.mixture_epsilon(audit.participations(plan, 3, cost), mu, 1e-5)
        for cost in costs.values()
    )
    assert proved(uneven).epsilon == pytest.approx(expected, rel=1e-9)
    assert proved(uneven).epsilon < proved(even).epsilon / 1.5
    assert proved(replace(even, kinds=((3, 3, 3),))) == proved(even)
    counted = audit.mixture_epsilon(audit.participations(plan, 3), 3 * mu, 1e-5)
    assert proved(even).epsilon == pytest.approx(counted, rel=1e-9)


@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 8),
    st.sampled_from(get_args(ClientSampling)),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_participations_are_a_law_with_the_right_mean(clients, holders, rounds, sampling, data):
    holders = min(holders, clients)
    taking = data.draw(st.integers(1, clients))
    distribution = audit.participations(
        Plan(clients, taking, rounds, 1, 1, sampling, local_lr=0.1), holders
    )
    assert distribution.sum() == pytest.approx(1)
    assert distribution @ np.arange(distribution.size) == pytest.approx(
        rounds * holders * taking / clients
    )


def test_mixture_against_integration():
    """The view (N, x): N of known distribution, x normal with a shift of √N μ or none."""
    distribution, mu = np.array([0.2, 0.5, 0.3]), 0.7
    epsilon = audit.mixture_epsilon(distribution, mu, 1e-3)
    x = np.linspace(-15, 15, 200_001)
    gap = [
        p * np.maximum(norm.pdf(x - mu * math.sqrt(n)) - math.exp(epsilon) * norm.pdf(x), 0)
        for n, p in enumerate(distribution)
    ]
    assert sum(np.trapz(part, x) for part in gap) == pytest.approx(1e-3, rel=1e-6)


@given(st.integers(1, 40), st.floats(0.05, 2.0))
@settings(max_examples=40, deadline=None)
def test_a_certain_number_of_participations_is_one_gaussian(count, mu):
    distribution = np.eye(count + 1)[count]
    assert audit.mixture_epsilon(distribution, mu, DELTA) == pytest.approx(
        gdp_epsilon(mu * math.sqrt(count), DELTA), abs=1e-7
    )


def test_nobody_taking_part_costs_nothing():
    assert audit.mixture_epsilon(np.array([1.0]), 1.0, DELTA) == 0
    assert audit.mixture_epsilon(np.array([1 - 1e-7, 1e-7]), 1.0, DELTA) == 0
