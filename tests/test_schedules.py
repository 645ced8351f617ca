"""Schedules: their values by formula, and noise and bounds that follow them, engine by engine."""

import copy
import math
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from defense_scenes import flat, of_std, plan_of, setting
from dynamic_parameters_scenes import (
    BATCH,
    BOUND,
    ENGINES,
    FALL,
    FALLING,
    NO_NUMBA,
    SCALE,
    one_sentence,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import clip, gradient_of

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import Clip, Defense, PerExample, Schedule
from fl_privacy_lib.defenses.route import BatchNoise, ClipAndNoiseUpdate
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.defenses.schedule import SHAPES, value_at
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.sampling import Plan

# ---- values --------------------------------------------------------------------------------------


def by_hand(shape, start, end, rounds, cycles, t):
    """Return a round's value; exact fractions of time, so that no rounding decides on a cycle."""
    time = Fraction(t, rounds)
    if shape == "linear":
        return start * float(1 - time) + end * float(time)
    if shape == "exponential":
        return math.exp(math.log(start) * float(1 - time) + math.log(end) * float(time))
    if shape == "cyclic":
        length = -(-rounds // cycles)  # the last cycle may be cut off
        return (start + end) / 2 + (start - end) / 2 * math.cos(math.pi * (t % length) / length)
    if shape == "staircase":
        return start + (end - start) * float(Fraction(int(10 * time), 10))
    inside = time * cycles % 1  # from the start to the end and back
    way = 2 * inside if 2 * inside < 1 else 2 - 2 * inside
    return start + (end - start) * float(way)


@given(
    st.sampled_from(sorted(SHAPES)),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_a_schedules_values_are_its_formulas_and_its_end_is_kept(
    shape, start, end, rounds, cycles, t
):
    value = Schedule(start, end, rounds, shape, cycles).at(t)
    expected = end if t >= rounds else by_hand(shape, start, end, rounds, cycles, t)
    assert value == pytest.approx(expected, rel=1e-9)
    assert t < rounds or value == end


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("linear", [6, 5, 4, 3, 2, 2]),
        ("exponential", [6, 6 / 3**0.25, 6 / 3**0.5, 6 / 3**0.75, 2, 2]),
        ("staircase", [6, 5.2, 4, 3.2, 2, 2]),
        ("cyclic", [6, 4, 6, 4, 2, 2]),
        ("triangular", [6, 2, 6, 2, 2, 2]),
    ],
)
def test_four_rounds_of_every_shape(shape, values):
    schedule = Schedule(6.0, 2.0, 4, shape, cycles=2)
    assert [schedule.at(t) for t in range(6)] == pytest.approx(values)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_value_of_round_zero_is_the_start(shape):
    assert Schedule(6.0, 2.0, 8, shape, cycles=2).at(0) == 6.0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_of_epsilon_is_the_noise_scale_of_every_steps_epsilon(shape):
    ends, rounds = (0.3, 1.3), 10
    epsilons, noise = (
        Schedule(*ends, rounds, shape, cycles=2, of_epsilon=kind) for kind in (False, True)
    )
    for t in range(rounds + 3):
        printed = math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilons.at(t)
        assert noise.at(t) == pytest.approx(printed, rel=1e-12)
    assert noise.at(rounds) == pytest.approx(4.844805262605389 / 1.3)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        *(((6.0, 0.0, 8, shape), "= 0.0 must be") for shape in SHAPES),
        *(((0.0, 2.0, 8, shape), "= 0.0 must be") for shape in SHAPES),
        *(((6.0, 2.0, 0, shape), "= 0 must be a whole number") for shape in SHAPES),
        ((-1.0, 2.0), "= -1.0 must be"),
        ((math.inf, 2.0), "= inf must be"),
        ((6.0, 2.0, 2.5), "= 2.5 must be a whole number"),
        ((6.0, 2.0, 8, "lineer"), "shape = 'lineer' is not one of .* (did you mean linear?)"),
        ((6.0, 2.0, 8, "cyclic", 0), "cycles = 0 must be"),
        ((6.0, 2.0, 8, "triangular", 0), "cycles = 0 must be"),
        ((6.0, 0.0, 8, "linear", 1, True), "= 0.0 must be"),
    ],
    ids=str,
)
def test_a_bad_schedule_gets_one_sentence(values, word):
    with pytest.raises(InputError) as error:
        Schedule(*values)
    start, _, end = word.partition(" .* ")
    assert start in str(error.value) and end in str(error.value) and one_sentence(error)


def test_a_number_stays_and_a_bad_bound_or_scale_is_found_at_once():
    assert value_at(3.0, 0) == value_at(3.0, 1000) == 3.0
    assert value_at(Schedule(6.0, 2.0, 4), 1) == 5.0
    assert Clip(Schedule(6.0, 2.0, 4)).bound(1) == 5.0
    assert BatchNoise(Clip(1.0), Schedule(6.0, 2.0, 4)).sigma(3) == 3.0


# ---- noise that falls, in training ---------------------------------------------------------------


def is_only(noise, t, levels):
    """Return whether noise has the t-th of some standard deviations, and not that of another."""
    return [s for s, level in enumerate(levels) if of_std(noise, level)] == [t]


@pytest.mark.parametrize("kind", FALLING)
def test_scheduled_noise_stands_on_every_batch_with_its_rounds_level(kind):
    levels = [sigma * bound / BATCH for sigma, bound in FALL]
    taps = [Tap("batch", 1, t) for t in range(4)]
    model, train, partition = setting()
    plan = plan_of(BATCH, rounds=4, local_iterations=1)
    found = simulate(model, train, partition, plan, FALLING[kind], taps=taps)
    for tap in taps:
        assert is_only(flat(found.observations[tap].values), tap.round, levels)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FALLING)
def test_every_engines_updates_carry_their_rounds_noise(kind, engine):
    levels = [sigma * bound / BATCH for sigma, bound in FALL]
    taps = [Tap("update", c, t) for t in range(4) for c in (0, 3)]
    model, train, partition = setting()
    plan = Plan(4, 4, 4, 1, BATCH, local_lr=1.0)
    found = simulate(model, train, partition, plan, FALLING[kind], taps=taps, engine=engine)
    assert found.engine == engine
    for tap in taps:
        assert is_only(-flat(found.observations[tap].values), tap.round, levels)


@pytest.mark.parametrize(("stage", "tap"), [("per_client", "update"), ("on_arrival", "received")])
@pytest.mark.parametrize("engine", ENGINES)
def test_scheduled_noise_on_updates_has_its_rounds_level(stage, tap, engine):
    defense = Defense("sdp", **{stage: ClipAndNoiseUpdate(Clip(BOUND), SCALE, 0.5)})
    taps = [Tap(tap, 1, t) for t in range(4)]
    model, train, partition = setting()
    plan = plan_of(BATCH, rounds=4, local_iterations=1)
    found = simulate(model, train, partition, plan, defense, taps=taps, engine=engine)
    levels = [sigma * bound / 2 for sigma, bound in FALL]
    for tap in taps:
        assert is_only(flat(found.observations[tap].values), tap.round, levels)


def clipped(model, weights, examples, bound):
    """Return the mean's numerator, Σ clipped gradients, and [B, M] clipped norms, by a loop."""
    model = copy.deepcopy(model)
    model.load_state_dict(weights)
    each = [clip(gradient_of(model, x, y), bound, "layer") for x, y in zip(*examples, strict=True)]
    norms = np.array([[float(g.double().norm()) for g in one.values()] for one in each])
    return sum(flat(one) for one in each), norms


LEVELS = {"max": lambda norms: norms.max(), "mean": lambda norms: norms.max(1).mean()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("statistic", "bound"),
    [("max", 50.0), ("max", Schedule(9.0, 0.3, 3)), ("mean", Schedule(50.0, 1.5, 3))],
    ids=str,
)
def test_noise_of_the_largest_norm_follows_each_poisson_batch(statistic, bound, engine):
    model, (x, y), partition = setting(clients=1, examples_per_client=40)
    x = x * torch.linspace(0.3, 3, 40)[:, None]  # lengths differ
    plan = Plan(1, 1, 3, 1, 15, batch_sampling="poisson", local_lr=0.001)
    sigma = Schedule(2.0, 1.0, 3)
    noise = BatchNoise(LargestNorm(Clip(bound), statistic), sigma)
    taps = [Tap("update", 0, t) for t in range(3)]
    defense = Defense("l2max", PerExample(Clip(bound)), noise)
    found = simulate(model, (x, y), partition, plan, defense, taps=taps, engine=engine)
    assert found.engine == engine
    for tap, s in zip(taps, (2, 5 / 3, 4 / 3), strict=True):
        t = tap.round
        batch = partition.indices[0][plan.batches(0, 40, t)[0]]
        assert len(batch) != 15  # what divides is B, not the batch's own size
        seen, limit = found.observations[tap], bound if bound == 50.0 else bound.at(t)
        total, norms = clipped(model, seen.weights, (x[batch], y[batch]), limit)
        left = -flat(seen.values) / 0.001 - total / 15
        level = s * LEVELS[statistic](norms) / 15
        assert of_std(left, level)
        assert not of_std(left, 1.05 * level) and not of_std(left, level / 1.05)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_examples_are_clipped_at_their_rounds_bound(shape, engine):
    model, (x, y), partition = setting(clients=1, examples_per_client=40)
    fall = Schedule(1.6, 0.2, 4, shape, cycles=2)
    defense = Defense("clip", PerExample(Clip(fall)), BatchNoise(Clip(fall), 6.0)).noiseless()
    plan = Plan(1, 1, 5, 1, 15, batch_sampling="poisson", local_lr=0.1)
    taps = [Tap("update", 0, t) for t in range(5)]
    found = simulate(model, (x, y), partition, plan, defense, taps=taps, engine=engine)
    for tap in taps:
        batch = partition.indices[0][plan.batches(0, 40, tap.round)[0]]
        seen, bound = found.observations[tap], fall.at(tap.round)
        total, norms = clipped(model, seen.weights, (x[batch], y[batch]), bound)
        assert norms.max() == pytest.approx(bound)  # it does clip
        expected = -0.1 * total / 15
        assert float((flat(seen.values) - expected).norm() / expected.norm()) < 1e-4


def test_an_empty_batch_has_noise_of_the_bound_and_none_of_the_largest_norm():
    model, train, partition = setting(clients=1, examples_per_client=8)
    plan = Plan(1, 1, 1, 1, 1, batch_sampling="poisson", local_lr=1.0)
    seed = next(s for s in range(99) if not len(replace(plan, seed=s).batches(0, 8, 0)[0]))
    for engine in ("generic", "stacked", *(["compiled"] if find_spec("numba") else [])):
        for level, std in ((Clip(0.3), 0.6), (LargestNorm(Clip(0.3), floor=0.1), 0.2)):
            defense = Defense("x", PerExample(Clip(0.3)), BatchNoise(level, 2.0))
            tap = Tap("update")
            found = simulate(
                model, train, partition, replace(plan, seed=seed), defense, taps=[tap],
                engine=engine,
            )  # fmt: skip
            noise = flat(found.observations[tap].values)
            assert of_std(noise, std) and not of_std(noise, 1.05 * std)


# ---- the compiled engine, batches larger than a slice --------------------------------------------


@NO_NUMBA
@pytest.mark.parametrize("name", ["small", "adult"])
@pytest.mark.parametrize("scope", ["layer", "all"])
@pytest.mark.parametrize("batch", [5, 6, 7, 40, 70])
@pytest.mark.parametrize("at", ["batch", "both"])
def test_without_its_noise_a_rule_leaves_the_exact_gradients(name, scope, batch, at):
    from compiled_scenes import agrees
    from compiled_scenes import plan_of as compiled_plan

    bound = Clip(0.5, scope)
    rule = LargestNorm(bound)
    first = PerExample(bound if at == "batch" else rule)
    quiet = Defense("l2max", first, BatchNoise(rule, 6.0)).noiseless()
    sampling = "poisson" if batch == 40 else "one_pass_shuffled"
    plan = compiled_plan(1, batch_size=batch, batch_sampling=sampling, rounds=2)
    agrees(name, plan, quiet, examples=80)


@NO_NUMBA
@pytest.mark.parametrize("name", ["small", "adult"])
@pytest.mark.parametrize("place", [0, 20, 34, 39])
@pytest.mark.parametrize("statistic", ["max", "mean"])
def test_the_compiled_noise_knows_the_largest_norm_in_any_slice(name, place, statistic):
    """An outlier stands first, inside or last; three iterations with small steps add up."""
    from compiled_scenes import scene

    model, (x, y), partition = scene(name, 1, 130)
    plan = Plan(1, 1, 1, 3, 40, local_lr=1e-7)
    batches = [partition.indices[0][b] for b in plan.batches(0, 130, 0)]
    x[batches[1][place]] *= 10  # the second of three batches
    defense = Defense("l2max", PerExample(Clip(1e3)),
                      BatchNoise(LargestNorm(Clip(1e3), statistic), 2.0))  # fmt: skip
    tap = Tap("update")
    found = simulate(model, (x, y), partition, plan, defense, taps=[tap], engine="compiled")
    parts = [clipped(model, found.observations[tap].weights, (x[b], y[b]), 1e3) for b in batches]
    tops = np.sort(parts[1][1].max(1))
    assert tops[-1] > 1.5 * tops[-2]  # it is one
    left = -flat(found.observations[tap].values) / 1e-7 - sum(total for total, _ in parts) / 40
    level = 2 / 40 * math.hypot(*(LEVELS[statistic](norms) for _, norms in parts))
    assert of_std(left, level)
    assert not of_std(left, 1.05 * level) and not of_std(left, level / 1.05)
