"""The search for a learning rate: what it asks for, what it chooses, and what never is chosen."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fl_privacy_lib.reproduction.experiments.searching import (
    EXTENSIONS,
    STEPS,
    Try,
    rate_at,
    search,
    stages_of,
    step_near,
)
from fl_privacy_lib.reproduction.experiments.training import Training, best_rate


def run(accuracy, rounds=100, learns=lambda step, rounds: True, steps=STEPS, error=0.001):
    """Run a search to its end; `accuracy` and `learns` are functions of a step and its rounds."""
    stages = stages_of(rounds) if steps is STEPS else ((rounds, 1),)
    tries = {}
    for _ in range(100):
        found = search(tries, stages, steps)
        missing = [point for point in found.asked if point not in tries]
        if not missing:
            return found
        assert found.rate is None
        for length, rate in missing:
            step = step_near(rate)
            tries[length, rate] = Try(accuracy(step, length), error, learns(step, length))
    raise AssertionError("the search does not end")


def test_halving_tries_seven_then_three_then_two():
    found = run(lambda step, rounds: 0.5 - 0.01 * abs(step + 1))
    assert found.rate == rate_at(-1) and found.learns
    count = {length: sum(r == length for r, _ in found.asked) for length in (10, 34, 100)}
    # with the step below the smallest that goes on, and one beyond the edge where the best lies
    assert count == {10: 7, 34: 4, 100: 4}


def test_short_trainings_are_all_run_in_full():
    found = run(lambda step, rounds: 0.5 - 0.01 * abs(step), rounds=10)
    assert found.asked == tuple((10, rate_at(step)) for step in STEPS) and found.rate == rate_at(0)


@pytest.mark.parametrize(("slope", "edge"), [(1, STEPS[-1] + 2), (-1, STEPS[0] - 2)])
def test_a_best_at_the_edge_extends_it_twice_at_most(slope, edge):
    found = run(lambda step, rounds: 0.5 + 0.01 * slope * step, rounds=10)
    assert found.rate == rate_at(edge) and len(found.asked) == len(STEPS) + EXTENSIONS


def test_an_edge_that_gains_less_than_its_error_is_not_extended():
    found = run(lambda step, rounds: 0.5 - 0.01 * step, rounds=10, error=0.02)
    assert len(found.asked) == len(STEPS) and found.rate == rate_at(STEPS[0])


def test_a_later_stage_brings_back_what_a_shorter_one_dropped():
    """Short runs favour large steps, whole ones small steps: the best of either lies far apart."""
    found = run(lambda step, rounds: 0.5 - 0.01 * abs(step - {10: 1, 34: -1, 100: -3}[rounds]))
    assert found.rate == rate_at(-3)
    full = [step_near(rate) for length, rate in found.asked if length == 100]
    assert set(full) >= {-4, -3, -2}


def test_what_does_not_learn_is_never_the_best():
    found = run(lambda step, rounds: 0.5 + 0.1 * step, 10, lambda step, rounds: step <= -3)
    assert found.rate == rate_at(-3) and found.learns


def test_where_nothing_learns_every_rate_is_run_in_full_and_the_guess_is_the_result():
    found = run(lambda step, rounds: 0.1, learns=lambda step, rounds: False)
    assert not found.learns and found.rate is not None
    full = sorted(step_near(rate) for length, rate in found.asked if length == 100)
    assert full == [STEPS[0] - 1, *STEPS, STEPS[-1] + 1]


def test_a_stage_without_evidence_drops_no_rate():
    """Only the smallest rate learns, and only in the end."""
    found = run(lambda step, rounds: 0.1, learns=lambda step, rounds: rounds == 100 and step == -4)
    assert found.learns and found.rate == rate_at(-4)


def test_three_rates_around_another_cells_are_run_in_full():
    found = run(lambda step, rounds: 0.5 - 0.01 * abs(step), steps=(-1, 0, 1))
    assert found.asked == tuple((100, rate_at(step)) for step in (-1, 0, 1))


@given(
    st.lists(st.floats(0, 1), min_size=26, max_size=26),
    st.lists(st.booleans(), min_size=26, max_size=26),
    st.sampled_from([3, 10, 60, 100]),
)
def test_a_search_ends_and_chooses_the_best_that_ran_in_full(scores, learn, rounds):
    score, ok = (lambda s, _: scores[s + 13]), (lambda s, _: learn[s + 13])
    found = run(score, rounds, ok)
    full = [step_near(rate) for length, rate in found.asked if length == rounds]
    best = max(full, key=lambda s: (ok(s, 0), score(s, 0)))
    assert score(step_near(found.rate), 0) == score(best, 0) and found.learns == ok(best, 0)
    assert len(set(found.asked)) == len(found.asked)
    for length in {length for length, _ in found.asked}:
        count = sum(length == other for other, _ in found.asked)
        assert count <= len(STEPS) + (EXTENSIONS + 1) * len(stages_of(rounds))
    assert search({}, stages_of(rounds)).rate is None


QUARTERS = st.lists(st.integers(0, 4), min_size=2, max_size=2)  # two seeds; many rates tie


@given(st.dictionaries(st.sampled_from([0.4, 0.002, 0.01, 0.05]), QUARTERS, min_size=1))
def test_the_best_rate_is_the_most_accurate_and_the_smaller_of_equals(quarters):
    point = Training("mnist", "fed_cdp", "code")
    results = {
        replace(point, local_lr=rate): {"accuracy": np.array(seeds) / 4}
        for rate, seeds in quarters.items()
    }
    best, most = None, -1
    for rate in sorted(quarters):
        if sum(quarters[rate]) > most:
            best, most = rate, sum(quarters[rate])
    assert best_rate(results) == best
