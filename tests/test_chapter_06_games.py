"""Chapter 06, games: how far two noise levels and a shift tell, against integrals and loops."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from defense_scenes import flat
from dynamic_parameters_scenes import CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM, clip, gradient_of
from scipy import integrate, stats

from fl_privacy_lib.chapters.dynamic_parameters import distinguishing
from fl_privacy_lib.chapters.dynamic_parameters.distinguishing import (
    Game,
    allowed_advantage,
    level_advantage,
    measure_game,
    play,
)
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.defenses import Clip, Defense, PerExample
from fl_privacy_lib.defenses.route import BatchNoise
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.sampling import Plan


@pytest.mark.parametrize("ratio", [1.01, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("dimension", [1, 2, 10, 100])
def test_the_level_advantage_is_half_the_area_between_two_densities(ratio, dimension):
    one = stats.chi2(dimension)
    other = stats.chi2(dimension, scale=ratio**2)

    def gap(u):  # x = u², so that one dimension's density has no pole
        return abs(one.pdf(u * u) - other.pdf(u * u)) * 2 * u

    edge = math.sqrt(other.ppf(1 - 1e-14))
    pieces = np.linspace(1e-12, edge, 41)
    area = sum(
        integrate.quad(gap, *ends, epsabs=1e-12, limit=200)[0]
        for ends in itertools.pairwise(pieces)
    )
    assert level_advantage(ratio, dimension) == pytest.approx(area / 2, abs=1e-7)


def test_the_level_advantage_in_one_and_two_dimensions_has_closed_forms():
    for r in (1.02, 1.3, 2.0, 5.0):
        u = math.sqrt(2 * math.log(r) / (1 - r**-2))  # where two normal densities cross
        two_sided = 2 * (stats.norm.cdf(u) - stats.norm.cdf(u / r))
        assert level_advantage(r, 1) == pytest.approx(two_sided)
        # e^{−x/2} against e^{−x/(2r²)} at the crossing
        edge = 2 * math.log(r**2) / (1 - r**-2)
        exact = math.exp(-edge / (2 * r * r)) - math.exp(-edge / 2)
        assert level_advantage(r, 2) == pytest.approx(exact)


@given(st.floats(1e-4, 4), st.floats(1e-4, 4), st.integers(1, 3000), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_the_level_advantage_grows_with_the_ratio_and_the_dimension(more, further, d, added):
    r, tiny = 1 + more, 1e-9
    here = level_advantage(r, d)
    assert 0 < here <= 1
    assert level_advantage(r + further, d) >= here - tiny
    assert level_advantage(r, d + added) >= here - tiny
    assert level_advantage(1.0, d) == 0.0


@pytest.mark.parametrize(
    ("ratio", "d", "value"), [(1 + 1e-7, 1, 0), (20, 3000, 1), (1.05, 2, 0.04)]
)
def test_the_level_advantage_at_its_ends(ratio, d, value):
    assert level_advantage(ratio, d) == pytest.approx(value, abs=0.01)


def fits(hits, probability):
    """Return whether so many hits come of a probability, with WRONG_ALARM."""
    return stats.binomtest(int(hits.sum()), len(hits), probability).pvalue > WRONG_ALARM


@pytest.mark.parametrize("shift_by", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("std", [0.3, 1.0])
def test_between_equal_levels_the_shift_alone_tells(shift_by, std):
    direction = torch.tensor([0.6, 0.0, -0.8])
    hits = play(direction * shift_by * std, std, std, 4000, seed=1)
    half = stats.norm.cdf(shift_by / 2)
    assert hits.shape == (4000,) and hits.dtype == bool
    for part in (hits[:2000], hits[2000:]):
        assert fits(part, half)
    assert not fits(hits, stats.norm.cdf(shift_by)) or shift_by > 3
    assert 2 * hits.mean() - 1 == pytest.approx(
        2 * stats.norm.cdf(shift_by / 2) - 1, abs=6 * math.sqrt(half * (1 - half) / 1000)
    )


@pytest.mark.parametrize(("ratio", "d"), [(1.5, 1), (1.2, 10), (1.05, 500), (1.1, 500)])
def test_without_a_shift_the_levels_alone_tell(ratio, d):
    hits = play(torch.zeros(d), ratio * 0.1, 0.1, 4000, seed=2)
    assert fits(hits, (1 + level_advantage(ratio, d)) / 2)
    edge = d * math.log(ratio**2) / (1 - ratio**-2)
    # a release with the example is told by its length
    assert fits(hits[:2000], stats.chi2.sf(edge / ratio**2, d))
    assert fits(hits[2000:], stats.chi2.cdf(edge, d))


def test_a_shift_and_two_levels_together_tell_as_much_as_the_densities_differ():
    with_it, without, shift = 1.4, 1.0, 1.2
    gap = integrate.quad(
        lambda x: abs(stats.norm.pdf(x, shift, with_it) - stats.norm.pdf(x, 0, without)),
        -12, 14, limit=500, points=[-3, -1, 0, 0.5, 1, 3],
    )[0]  # fmt: skip
    hits = play(torch.tensor([shift]), with_it, without, 6000, seed=3)
    assert fits(hits, (1 + gap / 2) / 2)
    assert not fits(hits, (1 + level_advantage(1.4, 1)) / 2)


def test_what_is_the_same_on_both_sides_is_told_by_chance_and_seeds_differ():
    assert fits(play(torch.zeros(3), 1.0, 1.0, 2000, seed=0), 0.5)
    one, same, other = (play(torch.ones(2), 1.1, 1.0, 300, seed=s) for s in (0, 0, 1))
    assert (one == same).all() and (one != other).any()


@pytest.mark.parametrize(
    ("at_round", "bound"), [(0, 100.0), (2, 100.0), (0, "between"), (2, "between"), (0, 0.5)]
)
def test_the_games_norms_are_those_of_a_loop_over_the_batch(at_round, bound, monkeypatch):
    played = []

    def told(shift, with_it, without, games, seed):
        played.append((shift, with_it, without, games, seed))
        return np.ones(games, bool)

    monkeypatch.setattr(distinguishing, "play", told)
    game = Game("digits", at_round=at_round, batch_size=20, noise_scale=3.0, batches=3, games=10,
                seed=4, local_lr=0.02)  # fmt: skip
    if bound == "between":  # of a batch's two largest norms, so that one is clipped alone
        free = measure_game(replace(game, clip_norm=100.0), CPU)
        top = int((free["largest"] / free["without"]).argmax())
        bound = float(free["largest"][top] + free["without"][top]) / 2
        played.clear()
    game = replace(game, clip_norm=bound)
    result = measure_game(game, CPU)
    start = training.scene(Central("digits", "dp_baseline", batch_size=20), 4, CPU)
    (x, y), weights = start.train, start.model.state_dict()
    if at_round:
        plan = Plan(1, 1, 2, 1, 20, batch_sampling="poisson", local_lr=0.02, seed=4)
        baseline = Defense("baseline", PerExample(Clip(4.0)), BatchNoise(Clip(4.0), 6.0, "batch"))
        weights = simulate(
            start.model, start.train, start.partition, plan, baseline, engine="auto"
        ).weights
    draws = Plan(1, 1, 3, 1, 20, batch_sampling="poisson", local_lr=1.0, seed=5)
    ratios, shifts, largest = [], [], []
    for t in range(3):
        (batch,) = draws.batches(0, len(y), t)
        model = copy.deepcopy(start.model)
        model.load_state_dict(weights)
        each = [gradient_of(model, x[i], y[i]) for i in batch]
        raw = [max(float(g.norm()) for g in one.values()) for one in each]
        norms = [min(norm, bound) for norm in raw]
        who = int(np.argmax(raw))
        left = max(norm for i, norm in enumerate(norms) if i != who)
        assert result["unclipped"][t] == pytest.approx(max(raw), rel=1e-4)
        assert result["largest"][t] == pytest.approx(max(norms), rel=1e-4)
        assert result["without"][t] == pytest.approx(left, rel=1e-4)
        ratios.append(max(norms) / left)
        largest.append(max(norms))
        shifts.append(flat(clip(each[who], bound, "layer")) / 20)
    ((shift, with_it, without, games, seed),) = played
    assert (games, seed, result["dimension"].tolist()) == (10, 4, [len(shift)])
    assert with_it / without == pytest.approx(max(ratios), rel=1e-4)
    if bound > 0.5:  # else all are at the bound, and it is open whose they are
        worst = int(np.argmax(ratios))
        assert with_it == pytest.approx(3.0 * largest[worst] / 20, rel=1e-4)
        assert float((shift - shifts[worst]).norm() / shifts[worst].norm()) < 1e-3
    else:
        assert with_it == without == pytest.approx(3.0 * 0.5 / 20)
        assert result["hits"].all()


def test_a_games_values_are_read_off_its_results():
    result = {
        "largest": np.array([4.0, 4.0, 3.0, 2.0]),
        "without": np.array([4.0, 3.2, 3.0, 1.9]),
        "unclipped": np.array([9.0, 5.0, 3.0, 2.0]),
        "hits": np.array([True] * 90 + [False] * 10),
        "dimension": np.array([34_720]),
    }
    game = Game("mnist", clip_norm=4.0, noise_scale=6.0)
    values = {n: v["mean"] for n, v in distinguishing.game_values(game, 1e-5, result).items()}
    epsilon = math.sqrt(2 * math.log(1.25e5)) / 6
    # e^ε-times as likely, and δ more: the most is where both sides meet that bound
    claimed = (math.exp(epsilon) - 1 + 2e-5) / (math.exp(epsilon) + 1)
    assert (values["at_bound"], values["silent"], values["ratio"]) == (0.5, 0.5, 1.25)
    assert values["advantage"] == pytest.approx(0.8)
    assert values["claimed_advantage"] == pytest.approx(claimed)
    assert values["level_advantage"] == pytest.approx(1)
    sure = stats.binomtest(90, 100).proportion_ci(method="wilson").low
    assert values["sure_advantage"] == pytest.approx(2 * sure - 1, abs=1e-6)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, 4.0])
def test_the_allowed_advantage_is_that_of_randomised_response_with_delta(threshold):
    # with probability δ all is told, else the truth with probability e^ε/(1 + e^ε): nothing under
    # the same guarantee tells more
    delta = 1e-3
    truth = delta + (1 - delta) * math.exp(threshold) / (1 + math.exp(threshold))
    assert allowed_advantage(threshold, delta) == pytest.approx(2 * truth - 1, abs=1e-12)
