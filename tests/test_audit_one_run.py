"""Auditing in one run: the theorem, and canaries on the route with who watches for them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from defense_scenes import setting
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.audit.canaries import Canaries
from fl_privacy_lib.audit.local import selection_epsilon
from fl_privacy_lib.audit.one_run import (
    audited_epsilon,
    epsilon_of_advantage,
    p_value,
    right_guesses,
)
from fl_privacy_lib.chapters.what_works import audited
from fl_privacy_lib.chapters.what_works.parameters import WhatWorks
from fl_privacy_lib.chapters.what_works.training import SummedTraining
from fl_privacy_lib.data.partition import full_copies
from fl_privacy_lib.defenses import fed_cdp
from fl_privacy_lib.defenses.selection import PerturbedEncoding
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiments.auditing import Audit, audit_row, measure
from fl_privacy_lib.sampling import Plan

LEVEL = 0.05

# ---- the theorem ---------------------------------------------------------------------------------


def naive_p_value(right, guesses, canaries, epsilon, delta):
    """Return the theorem's value from sums of whole numbers, term by term."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    pmf = [math.comb(guesses, k) * p**k * (1 - p) ** (guesses - k) for k in range(guesses + 1)]
    alpha = max((sum(pmf[right - i : right]) / i for i in range(1, right + 1)), default=0.0)
    return min(1.0, sum(pmf[right:]) + 2 * canaries * delta * alpha)


@given(st.integers(1, 60), st.data(), st.floats(0, 4), st.sampled_from([0.0, 1e-5, 1e-2]))
@settings(max_examples=100, deadline=None)
def test_the_p_value_is_the_theorems(guesses, data, epsilon, delta):
    right, canaries = data.draw(st.integers(0, guesses)), guesses + data.draw(st.integers(0, 50))
    ours = p_value(right, guesses, canaries, epsilon, delta)
    assert ours == pytest.approx(naive_p_value(right, guesses, canaries, epsilon, delta), rel=1e-9)


@given(st.integers(1, 400), st.data(), st.sampled_from([0.0, 1e-5, 1e-3]))
@settings(max_examples=100, deadline=None)
def test_the_bound_is_the_last_epsilon_that_is_ruled_out(guesses, data, delta):
    right = data.draw(st.integers(0, guesses))
    bound = audited_epsilon(right, guesses, guesses, delta)
    assert p_value(right, guesses, guesses, bound + 1e-4, delta) > LEVEL
    assert bound == 0 or p_value(right, guesses, guesses, bound, delta) <= LEVEL * (1 + 1e-4)
    if right:  # a right guess more never proves less; δ never proves more
        assert audited_epsilon(right - 1, guesses, guesses, delta) <= bound + 1e-5
    assert audited_epsilon(right, guesses, guesses, 2 * delta) <= bound + 1e-5


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_randomised_response_is_overstated_in_one_draw_of_twenty_at_most(epsilon):
    m, draws = 2000, 3000
    right = np.random.default_rng(3).binomial(m, 1 / (1 + math.exp(-epsilon)), draws)
    bound = {v: audited_epsilon(int(v), m, m, 0.0) for v in np.unique(right)}
    found = np.array([bound[v] for v in right])
    wrong = int((found > epsilon).sum())
    assert stats.binom.sf(wrong - 1, draws, LEVEL) > WRONG_ALARM
    assert wrong > 0  # and it is not idle: nearly that many are overstated
    assert stats.binom.cdf(wrong, draws, LEVEL / 2) > WRONG_ALARM


def test_the_bound_comes_near_as_canaries_are_added():
    gaps = []
    for m in (100, 1000, 10_000, 1_000_000):
        right = round(m / (1 + math.exp(-1.0)))
        gaps.append(1.0 - audited_epsilon(right, m, m, 0.0))
    assert all(gaps[i] > gaps[i + 1] > 0 for i in range(3)) and gaps[-1] < 0.005


def test_delta_pays_for_who_is_told_some_coins_for_certain():
    m, epsilon, delta, draws, rng = 300, 0.5, 2e-3, 400, np.random.default_rng(5)
    told = rng.binomial(m, delta, draws)
    right = told + rng.binomial(m - told, 1 / (1 + math.exp(-epsilon)))
    wrong = sum(audited_epsilon(int(v), m, m, delta) > epsilon for v in right)
    assert stats.binom.sf(wrong - 1, draws, LEVEL) > WRONG_ALARM


@pytest.mark.parametrize(
    ("values", "word"),
    [((5, 4, 10), "right = 5 must lie between 0 and 4"), ((1, 11, 10), "guesses = 11")],
)
def test_more_guesses_than_canaries_get_one_sentence(values, word):
    with pytest.raises(InputError, match=word):
        p_value(*values, 1.0, 0.0)


def test_a_wrong_delta_or_level_or_number_of_guesses_gets_one_sentence():
    """A δ below 0 would raise the bound above what the canaries show."""
    with pytest.raises(InputError, match="delta = -1"):
        audited_epsilon(70, 100, 100, -1.0)
    with pytest.raises(InputError, match="level = 0"):
        audited_epsilon(70, 100, 100, 0.0, 0.0)
    with pytest.raises(InputError, match="guesses = 10 must lie between 0 and 4"):
        right_guesses(np.arange(4.0), np.array([False, False, True, True]), 10)


def test_half_of_the_guesses_go_to_each_end():
    present = np.array([True, False, True, False, True, True])
    scores = np.array([5.0, -3.0, -9.0, 0.0, 0.1, 4.0])
    assert right_guesses(scores, present, 4) == 3  # the canary with the lowest score is there
    assert right_guesses(scores, present, 1) == 0  # half of one guess is none


@pytest.mark.parametrize("epsilon", [0.1, 0.8, 6.0])
def test_an_advantage_gives_back_its_epsilon(epsilon):
    # the best test against randomised response that also tells a coin for certain, δ of the times
    most = (math.expm1(epsilon) + 2 * DELTA) / (math.exp(epsilon) + 1)
    assert epsilon_of_advantage(most, DELTA) == pytest.approx(epsilon)
    assert epsilon_of_advantage(0.0, DELTA) == 0.0
    assert epsilon_of_advantage(1.0, DELTA) == math.inf


# ---- canaries ------------------------------------------------------------------------------------


def stage_of(defense, m, homes=None, **other):
    present = np.random.default_rng(1).random(m) < 0.5
    places = np.zeros((m, 2), int) if homes is None else homes
    clip, noise = defense.per_example.clip, defense.per_batch
    return Canaries(clip, noise, present, places, np.zeros(m), **other)


def play(stage, sizes, rounds, size):
    """Pass zero batches through a stage, and return what is released in the last round."""
    released = {}
    for t in range(rounds):
        generator = torch.Generator().manual_seed(t)
        ctx = ClientContext(t, (0,), [generator], batch_size=size)
        released = stage({name: torch.zeros(1, n) for name, n in sizes.items()}, ctx)
    return released


@pytest.mark.parametrize(("scope", "tensors"), [("all", 1), ("layer", 2)])
def test_a_canary_moves_the_sum_as_far_as_its_clip_allows(scope, tensors):
    stage = stage_of(fed_cdp("batch", clip_norm=2.0, noise_scale=1e-3, scope=scope), 6)
    released = play(stage, {"a": 40, "b": 50}, 1, size=8)
    moved = [8 * value[0] for value in released.values()]
    # the norm of the sum of orthogonal canaries, each of norm C, or C√M
    norm = 2.0 * math.sqrt(tensors * stage.present.sum())
    assert float(torch.cat(moved).norm()) == pytest.approx(norm, rel=0.01)
    assert np.allclose(moved[1][:6], 2.0 * stage.present, atol=0.02)
    assert sum(float(part.norm()) > 1 for part in moved) == tensors


@pytest.mark.parametrize("scope", ["all", "layer"])
def test_scores_have_the_moments_of_a_likelihood_ratio(scope):
    m, rounds, sizes = 3000, 3, {"a": 3000, "b": 5000}
    stage = stage_of(fed_cdp("batch", clip_norm=0.5, noise_scale=2.0, scope=scope), m)
    play(stage, sizes, rounds, size=16)
    mu2 = rounds * (1 if scope == "all" else 2) / 4  # μ² of the Gaussian shift
    for sign, part in ((1, stage.scores[stage.present]), (-1, stage.scores[~stage.present])):
        error = math.sqrt(mu2 / len(part))
        assert abs(part.mean() - sign * mu2 / 2) < stats.norm.isf(WRONG_ALARM) * error
        low, high = stats.chi2.ppf([WRONG_ALARM, 1 - WRONG_ALARM], len(part) - 1)
        assert low < part.var(ddof=1) * (len(part) - 1) / mu2 < high


def test_a_drawn_canarys_score_is_the_mixtures_likelihood():
    m, q, z = 400, 0.3, 1.5
    defense = fed_cdp("batch", clip_norm=1.0, noise_scale=z, scope="all")
    stage = stage_of(defense, m, rate=q, seed=4)
    released = play(stage, {"a": m}, 1, size=4)
    x = 4 * released["a"][0].numpy().astype(float)
    with_it = q * stats.norm.pdf(x, 1, z) + (1 - q) * stats.norm.pdf(x, 0, z)
    assert np.allclose(stage.scores, np.log(with_it / stats.norm.pdf(x, 0, z)), atol=1e-4)


def test_canaries_are_met_at_home_and_in_their_turn_only():
    model, train, _ = setting(clients=3, examples_per_client=8)
    homes = np.array([[k, i] for k in range(3) for i in range(2)] * 2)
    defense = fed_cdp("batch", clip_norm=1.0, noise_scale=1.0, scope="all")
    stage = stage_of(defense, 12, homes, every=4)
    plan = Plan(3, 3, 3, 2, 4, local_lr=0.1)
    partition = replace(full_copies(24, 1), indices=tuple(np.split(np.arange(24), 3)))
    simulate(model, train, partition, plan, replace(defense, per_batch=stage), engine="stacked")
    turns = [sum((j + t) % 4 == 0 for t in range(3)) for j in range(12)]
    assert [bool(s) for s in stage.scores != 0] == [n > 0 for n in turns]


@pytest.mark.parametrize("engine", ["stacked", "generic"])
def test_too_little_noise_is_found_out(engine):
    point = SummedTraining("digits", rounds=12, batch_size=200, noise_scale=0.5, local_lr=0.1)
    (event,) = point.events(1347)
    claimed = spend(replace(event, noise_multiplier=2.0), "pld", DELTA).epsilon  # of four times it
    found = float(measure(Audit(point, canaries=2000, guesses=200), torch.device("cpu"))["audited"])
    assert claimed < found < spend(event, "pld", DELTA).epsilon


# ---- what is recorded ----------------------------------------------------------------------------


def test_every_audit_has_its_claimed_and_its_proved_epsilon():
    rows = {}
    for row in audited.audits(WhatWorks.of_profile("full"), "mnist"):
        results = [{"audited": np.array(0.5)}, {"audited": np.array(0.25)}]
        values = row.values(results if row.points else [])
        rows.setdefault(row.key["route"], []).append((row, values))
        assert values["claimed"]["mean"] == row.key["epsilon"]
        seeds = [point.seed for point in row.points]
        assert len(set(seeds)) == len(seeds) and 0 not in seeds  # whose run was looked at before
    for row, values in rows["distributed_noise"]:
        assert len(row.points) == 20 and values["audited"]["n"] == 2
        assert (values["most_audited"]["mean"], values["least_audited"]["mean"]) == (0.5, 0.25)
        assert 0.995 * row.key["epsilon"] < values["proved"]["mean"] <= row.key["epsilon"]
    for route in ("fixed_order", "fed_cdp", "pe"):
        ((_, values),) = rows[route]
        assert values["proved"]["mean"] > values["claimed"]["mean"]
    ((row, values),) = rows["dp_dyns_l2max"]
    assert "proved" not in values and values["audited"]["mean"] > 5 and row.key["unit"] == "example"


def test_the_worst_reports_of_pe_are_guessed_as_often_as_its_exact_epsilon_says():
    select, m = PerturbedEncoding(1.0, k=1, reading="e_eps"), 40_000
    generator = torch.Generator().manual_seed(0)
    coins = torch.rand(m, generator=generator) < 0.5
    chosen = select(torch.stack([~coins, coins], 1).double(), generator)  # the largest is at coin
    sent, right = int((chosen >= 0).sum()), int((chosen == coins).sum())
    assert 1.0 < audited_epsilon(right, sent, m, 0.0) < selection_epsilon(select, 2)


def test_a_row_without_runs_keeps_what_it_was_given():
    row = audit_row("pe", "sees_reports", 1.0, math.inf, exact=2.0, clip_norm="4")
    assert row.key["clip_norm"] == "4" and row.key["rounds"] == "not_applicable"
    assert {n: v["mean"] for n, v in row.values([]).items()} == {
        "claimed": 1.0, "audited": 2.0, "most_audited": 2.0, "least_audited": 2.0}  # fmt: skip
