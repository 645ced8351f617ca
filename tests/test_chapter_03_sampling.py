"""Chapter 03: drawing clients, then examples; the bound against simulations and all draws."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.chapters.counting_privacy.local_sampling import (
    class_gap,
    local_sampling_epsilon,
)
from fl_privacy_lib.sampling import Plan


def drawn(clients, participants, rounds, iterations, batch):
    return Plan(
        clients, participants, rounds, iterations, batch, "fixed", "with_replacement", local_lr=0.1
    )


def simulated(plan, size, noise, trials, uses_it, draw):
    """Run the sampling step by step; return marked rounds and the sum of first numbers, [trials].

    The client under test is client 0 and x its example 0. All batch sums are divided by C.
    """
    marked, total = np.zeros(trials, int), np.zeros(trials)
    mark = plan.batch_size * math.sqrt(plan.local_iterations) / noise
    rate = plan.participants / plan.clients
    middle = mark / 2 + math.log((1 - rate) / rate) / mark
    for _ in range(plan.rounds):
        order = draw.random((trials, plan.clients)).argsort(1)
        present = (order[:, : plan.participants] == 0).any(1)
        first, second = np.zeros(trials), np.zeros(trials)
        for _ in range(plan.local_iterations):
            batch = draw.integers(0, size, (trials, plan.batch_size))
            uses = (batch == 0).sum(1) if uses_it else 0
            first += present * uses + noise * draw.standard_normal(trials)
            second += present * plan.batch_size + noise * draw.standard_normal(trials)
        scale = noise * math.sqrt(plan.local_iterations)
        seen = second / scale > middle
        marked += seen
        total += seen * first / scale
    return marked, total


def test_the_lower_bound_against_a_simulation_of_the_whole_sampling():
    """δ at the returned ε, for the best threshold at each number of marked rounds."""
    plan, size, noise, trials = drawn(3, 1, 4, 3, 2), 4, 1.2, 400_000
    draw = np.random.default_rng(5)
    delta = 0.05
    epsilon = local_sampling_epsilon(plan, size, noise, delta)
    assert epsilon > 0.2
    with_it = simulated(plan, size, noise, trials, True, draw)
    without = simulated(plan, size, noise, trials, False, draw)
    for n in range(plan.rounds + 1):  # the marks alone tell nothing
        assert np.mean(with_it[0] == n) == pytest.approx(np.mean(without[0] == n), abs=5e-3)
    thresholds, found = np.linspace(-3, 12, 301), 0.0
    for n in range(1, plan.rounds + 1):
        one, other = (np.sort(total[marked == n]) for marked, total in (with_it, without))
        above = [
            (values.size - np.searchsorted(values, thresholds)) / trials for values in (one, other)
        ]
        found += max(0.0, (above[0] - math.exp(epsilon) * above[1]).max())
    assert found == pytest.approx(delta, abs=3e-3)


@pytest.mark.parametrize(("noise", "most"), [(0.2, 0.0101), (0.3, 0.0105), (1.0, 0.03)])
def test_the_lower_bound_is_below_the_exact_delta_of_one_step(noise, most):
    """One round of one step: both numbers are seen as they are, and δ is a double integral. The
    clearer the mark, the less is thrown away.
    """
    plan, size, rate = drawn(4, 1, 1, 1, 1), 2, 0.25
    epsilon = local_sampling_epsilon(plan, size, noise, 0.01)
    x, y = np.meshgrid(np.linspace(-9, 1 / noise + 9, 1501), np.linspace(-9, 1 / noise + 9, 1501))
    absent = (1 - rate) * norm.pdf(y) * norm.pdf(x)
    unused = rate * norm.pdf(y - 1 / noise) * norm.pdf(x)
    used = rate * norm.pdf(y - 1 / noise) * norm.pdf(x - 1 / noise)
    gap = absent + (unused + used) / 2 - math.exp(epsilon) * (absent + unused)
    exact = np.maximum(gap, 0).sum() * (x[0, 1] - x[0, 0]) * (y[1, 0] - y[0, 0])
    assert 0.01 - 1e-5 <= exact <= most


@pytest.mark.parametrize("noise", [1.0, 2.0, 6.0])
def test_a_client_that_always_takes_part_with_its_one_example_is_one_gaussian(noise):
    plan = drawn(1, 1, 1, 1, 1)
    assert local_sampling_epsilon(plan, 1, noise, 1e-5) == pytest.approx(
        gdp_epsilon(1 / noise, 1e-5), abs=1e-8
    )


def test_hiding_participation_would_give_less_than_the_formula():
    """Without the mark the same sampling is near the formula's own exact count, 0.049: what refutes
    the sentence is the mark, not the two stages of the draw.
    """
    run = Event(0.001, 6.0, "example", "add_remove", uses=10_000)
    formula = spend(run, "moments_accountant", 1e-5).epsilon
    assert spend(run, "pld", 1e-5).epsilon < 0.05 < formula
    assert local_sampling_epsilon(drawn(100, 10, 100, 100, 5), 500, 6.0, 1e-5) > 2 * formula


def test_the_lower_bound_falls_with_noise_and_delta_and_refuses_nonsense():
    plan = drawn(10, 1, 5, 4, 2)
    values = [local_sampling_epsilon(plan, 8, noise, 1e-3) for noise in (0.5, 1.0, 2.0)]
    assert values == sorted(values, reverse=True) and values[-1] > 0
    assert local_sampling_epsilon(plan, 8, 1.0, 0.5) == 0
    for bad in ({"client_size": 1}, {"noise_multiplier": 0.0}, {"delta": 1.0}):
        given = {"client_size": 8, "noise_multiplier": 1.0, "delta": 1e-3} | bad
        with pytest.raises(InputError):
            local_sampling_epsilon(plan, **given)


def test_the_chance_of_a_class_against_all_draws():
    counts = np.array([[2, 1], [0, 3], [4, 2]], float)
    chance = np.zeros(2)
    for row in counts:
        for label, many in enumerate(row):
            chance[label] += many * (1 / 3) * (1 / row.sum())
    assert class_gap(counts) == pytest.approx(np.abs(chance - counts.sum(0) / 12).max())
    equal = np.array([[2, 1], [0, 3], [3, 0]], float)
    assert class_gap(equal) == pytest.approx(0, abs=1e-15)
    assert class_gap(np.array([[1, 0], [0, 9]], float)) == pytest.approx(0.4)
