"""Accounting of schedules: every round counts with its own noise, and what is proved of them."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.schedules import ledger_of, rounded_down
from fl_privacy_lib.audit import statement
from fl_privacy_lib.defenses import Clip, Defense, Holding, PerExample, Schedule
from fl_privacy_lib.defenses.route import BatchNoise
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.sampling import Plan

ROUNDS, LOT, EXAMPLES, TENSORS = 40, 60, 600, 3
CENTRAL = Plan(1, 1, ROUNDS, 1, LOT, batch_sampling="poisson", local_lr=0.05)
HELD = Holding(EXAMPLES, EXAMPLES, TENSORS)
DELTA = 1e-5
DECAYS = {
    "linear": Schedule(6.0, 2.0, ROUNDS),
    "exponential": Schedule(15.0, 1.5, ROUNDS, "exponential"),
    "cyclic": Schedule(6.0, 2.0, ROUNDS, "cyclic", cycles=3),
    "triangular": Schedule(6.0, 2.0, ROUNDS, "triangular", cycles=2),
    "ended": Schedule(6.0, 2.0, ROUNDS // 2),
    "epsilon": Schedule(0.3, 1.3, ROUNDS, of_epsilon=True),
}


def central(sigma, bound=4.0, level=None):
    return Defense("x", PerExample(Clip(bound)), BatchNoise(level or Clip(bound), sigma))


def listed(events):
    """Return the multipliers of events, one for each use, in order."""
    return sorted(z for e in events for z in [e.noise_multiplier] * e.uses)


def covers(events, exact):
    """Return whether each release is counted with its noise or up to 3 % less, and none twice."""
    counted, exact = np.array(listed(events)), np.sort(exact)
    return len(counted) == len(exact) and bool(
        (counted <= exact * (1 + 1e-9)).all() and (counted >= exact / 1.03 * (1 - 1e-9)).all()
    )


@pytest.mark.parametrize("name", DECAYS)
@pytest.mark.parametrize(("relation", "twice"), [("add_remove", 1), ("replace_one", 2)])
@pytest.mark.parametrize(("scope", "root"), [("all", 1.0), ("layer", 3**0.5)])
def test_a_noise_schedule_counts_every_round_with_its_own_noise(name, relation, twice, scope, root):
    bound, sigma = Clip(4.0, scope), DECAYS[name]
    defense = Defense("x", PerExample(bound), BatchNoise(bound, sigma))
    events = defense.events(CENTRAL, HELD, relation=relation)
    assert sum(e.uses for e in events) == ROUNDS
    assert covers(events, [sigma.at(t) / root / twice for t in range(ROUNDS)])
    assert not covers(events, [sigma.at(t + 6) / root / twice for t in range(ROUNDS)])
    assert {(e.sampling_rate, e.sampling, e.unit, e.relation) for e in events} == {
        (0.1, "poisson", "example", relation)
    }


@pytest.mark.parametrize("divide_by", ["batch", "sqrt_batch", "none"])
def test_what_divides_the_noise_multiplies_every_rounds_multiplier(divide_by):
    sigma, factor = DECAYS["linear"], {"batch": 1, "sqrt_batch": LOT**0.5, "none": LOT}[divide_by]
    defense = Defense("x", PerExample(Clip(4.0)), BatchNoise(Clip(4.0), sigma, divide_by))
    exact = [sigma.at(t) * factor / TENSORS**0.5 for t in range(ROUNDS)]
    assert covers(defense.events(CENTRAL, HELD), exact)


@pytest.mark.parametrize("name", DECAYS)
def test_a_schedule_of_the_bound_alone_counts_like_a_fixed_bound(name):
    (fixed,) = central(6.0).events(CENTRAL, HELD)
    assert central(6.0, DECAYS[name]).events(CENTRAL, HELD) == (fixed,)
    assert fixed.noise_multiplier == pytest.approx(6 / 3**0.5) and fixed.uses == ROUNDS


@pytest.mark.parametrize("name", ["linear", "exponential", "ended"])
def test_noise_that_keeps_its_size_while_the_bound_falls_counts_for_more(name):
    fall = DECAYS[name]
    gain = [fall.start / fall.at(t) for t in range(ROUNDS)]
    events = central(2.0, fall, Clip(fall.start)).events(CENTRAL, HELD)
    assert covers(events, [2 * g / TENSORS**0.5 for g in gain])
    # the other way round the noise vanishes beside the bound
    events = central(2.0, fall.start, Clip(fall)).events(CENTRAL, HELD)
    assert covers(events, [2 / g / TENSORS**0.5 for g in gain])


@pytest.mark.parametrize("participations", [1, 5, 20])
def test_of_some_participations_those_with_the_least_noise_count(participations):
    plan = Plan(10, 2, 20, 3, 6, batch_sampling="poisson", local_lr=0.05)
    sigma = Schedule(6.0, 2.0, 20, "cyclic", cycles=2)  # the least noise is not all at the end
    events = central(sigma).events(plan, Holding(600, 60, 1), participations=participations)
    least = sorted(sigma.at(t) for t in range(20))[:participations]
    assert covers(events, np.repeat(least, 3))
    assert {e.sampling_rate for e in events} == {0.1}


FEW = 8  # a privacy loss distribution for each round is slow
SHORT = replace(CENTRAL, rounds=FEW)
SHORTER = {
    "linear": Schedule(6.0, 2.0, FEW),
    "exponential": Schedule(6.0, 2.0, FEW, "exponential"),
    "epsilon": Schedule(0.8, 2.4, FEW, of_epsilon=True),
}


@pytest.mark.parametrize("name", SHORTER)
@pytest.mark.parametrize("level", ["bound", "largest"])
def test_the_papers_statement_is_the_moments_accountants_of_every_steps_scale(name, level):
    sigma, q = SHORTER[name], LOT / EXAMPLES
    steps = np.array([sigma.at(t) for t in range(FEW)])
    expected, worst = (
        spend(ledger_of(z, q, "example", "add_remove"), "moments_accountant", DELTA).epsilon
        for z in (steps, np.full(FEW, steps.min()))
    )
    rule = LargestNorm(Clip(4.0)) if level == "largest" else None
    paper = statement(central(sigma, 4.0, rule), SHORT, HELD, delta=DELTA).paper
    assert paper.epsilon == pytest.approx(expected, rel=1e-9)
    assert (paper.accountant, paper.unit) == ("moments_accountant", "example")
    assert paper.epsilon < 0.95 * worst  # the least noise for all rounds is another number


def tight_epsilon(multipliers, rate):
    """Return ε from Google's privacy loss distributions, one for each step."""
    steps = [
        privacy_loss_distribution.from_gaussian_mechanism(
            z, sampling_prob=rate, value_discretization_interval=1e-3
        )
        for z in multipliers
    ]
    return functools.reduce(lambda one, other: one.compose(other), steps).get_epsilon_for_delta(
        DELTA
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["linear", "exponential", "bound falls"])
def test_the_proved_epsilon_lies_between_that_of_the_noise_and_of_a_little_less(kind):
    if kind == "bound falls":
        fall = Schedule(4.0, 1.0, FEW)
        defense = central(2.0, fall, Clip(4.0))
        exact = [2.0 * 4.0 / fall.at(t) / TENSORS**0.5 for t in range(FEW)]
    else:
        sigma = SHORTER[kind]
        defense, exact = central(sigma), [sigma.at(t) / TENSORS**0.5 for t in range(FEW)]
    proved = statement(defense, SHORT, HELD, delta=DELTA).proved.epsilon
    least, less = tight_epsilon(exact, 0.1), tight_epsilon([z / 1.03 for z in exact], 0.1)
    assert least * 0.99 <= proved <= less * 1.01 < math.inf
    # what counts the least noise for all rounds, or the mean noise, is told apart
    assert tight_epsilon([min(exact)] * FEW, 0.1) > 1.05 * less
    assert tight_epsilon([np.mean(exact)] * FEW, 0.1) < 0.95 * least


@pytest.mark.parametrize("sigma", [6.0, SHORTER["linear"]], ids=["fixed", "falling"])
@pytest.mark.parametrize("bound", [4.0, Schedule(4.0, 1.0, FEW)], ids=["fixed", "falling"])
@pytest.mark.parametrize("statistic", ["max", "mean"])
def test_noise_of_the_largest_norm_has_no_proved_epsilon(sigma, bound, statistic):
    defense = central(sigma, bound, LargestNorm(Clip(bound), statistic))
    both = statement(defense, SHORT, HELD, delta=DELTA)
    assert both.proved.epsilon == math.inf and math.isfinite(both.paper.epsilon)
    with pytest.raises(InputError, match=r"has no events .* largest gradient norm"):
        defense.events(SHORT, HELD)
    assert central(sigma, bound).events(SHORT, HELD)


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=60),
    st.sampled_from([1.001, 1.03, 1.5, 4.0]),
)
@settings(max_examples=300, deadline=None)
def test_rounding_down_never_adds_noise_nor_takes_more_than_a_step(values, step):
    levels = rounded_down(values, step)
    assert sum(levels.values()) == len(values) and min(levels.values()) >= 1
    keys = np.repeat(list(levels), list(levels.values()))
    keys, exact = np.sort(keys), np.sort(values)
    assert (keys <= exact * (1 + 1e-9)).all() and (exact < keys * step * (1 + 1e-9)).all()
    assert keys[0] == exact[0]
    # so many steps fit between the least and the most
    assert len(levels) <= math.log(exact[-1] / exact[0]) / math.log(step) + 1 + 1e-6


def test_rounding_down_of_a_geometric_row_keeps_it_and_of_nothing_is_nothing():
    row = [2 * 1.03**i for i in range(50)]
    assert sorted(rounded_down(row)) == pytest.approx(row)
    assert rounded_down(iter([])) == {}
    assert rounded_down(iter([3.0, 3.0 * 1.029])) == {3.0: 2}
