"""Fed-αCDP: noise by arm and reading, budgets of falling scales, cells, and what is read off."""

import itertools
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from defense_scenes import noise_of, of_std, plan_of, setting
from fed_cdp_scenes import EveryTry
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import clip, gradient_of
from scipy.optimize import brentq

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.gdp import gdp_delta
from fl_privacy_lib.accounting.recompute import EPSILON_SCHEDULES
from fl_privacy_lib.audit.arguments import (
    mixture_epsilon,
    participations,
    weighted_participations,
)
from fl_privacy_lib.chapters.fed_alpha_cdp import grid, run
from fl_privacy_lib.chapters.fed_alpha_cdp.parameters import FedAlphaCdp
from fl_privacy_lib.chapters.fed_alpha_cdp.training import (
    FALLING,
    AlphaTraining,
    Levels,
    level_values,
    measure_levels,
)
from fl_privacy_lib.defenses import Clip
from fl_privacy_lib.defenses.stage import Context
from fl_privacy_lib.federated import Tap
from fl_privacy_lib.reproduction.comparison import cells, measured, select
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import judged, searches
from fl_privacy_lib.reproduction.experiments.spending import spent
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.records import read_record
from fl_privacy_lib.reproduction.verdict import published_setting
from fl_privacy_lib.sampling import Plan

CPU = torch.device("cpu")
FULL = FedAlphaCdp.of_profile("full")
POLICIES = ("linear", "staircase", "exponential", "cyclic")
DIVIDED = {"printed": math.sqrt, "algorithm_1": lambda size: 1, "code": lambda size: size}
"""What divides σS on the batch mean, by B: section 5.2, Algorithm 1, the released code."""


# ---- arms ----------------------------------------------------------------------------------------


def batch_norms(size, bound):
    """Return the clipped norms [B, M] of client 1's first batch, by a loop over its examples."""
    model, (x, y), partition = setting()
    plan = plan_of(size, local_iterations=1)
    held = partition.indices[1]
    (batch,) = plan.batches(1, len(held), 0)
    each = [clip(gradient_of(model, x[i], y[i]), bound, "layer") for i in held[batch]]
    return np.array([[float(g.double().norm()) for g in one.values()] for one in each])


@pytest.mark.parametrize("reading", DIVIDED)
@pytest.mark.parametrize("bound", [0.05, 100.0])
@pytest.mark.parametrize(
    "method", ["fed_cdp", "fed_alpha_cdp", "fed_cdp_sigma_linear", "fed_alpha_cdp_sigma_linear"]
)
def test_an_arms_noise_has_its_sensitivity_scale_and_divisor(method, bound, reading):
    norms = batch_norms(4, bound)
    level = norms.max() if "alpha" in method else bound
    sigma = 3.0 / 6 * 4.844805262605389 / 0.30747 if "sigma" in method else 3.0
    point = AlphaTraining("mnist", method, reading, clip_norm=bound, noise_scale=3.0)
    tap = Tap("batch", 1, 0)
    noise = noise_of(point.defense, plan_of(4, local_iterations=1), [tap])[tap]
    expected = sigma * level / DIVIDED[reading](4)
    assert of_std(noise, expected) and not of_std(noise, 1.1 * expected)
    assert (norms.max() < bound) == (bound == 100)


@pytest.mark.parametrize("method", ["fed_alpha_cdp", "fed_alpha_cdp_sigma_exponential"])
def test_the_released_script_takes_the_mean_of_the_largest_norms_with_a_floor(method):
    norms = batch_norms(4, 32.0)
    point = AlphaTraining("mnist", method, "released", clip_norm=4.0, noise_scale=3.0)
    sigma = point.sigma.at(0) if "sigma" in method else 3.0
    tap = Tap("batch", 1, 0)
    noise = noise_of(point.defense, plan_of(4, local_iterations=1), [tap])[tap]
    assert of_std(noise, sigma * norms.max(1).clip(0.1).mean() / 4)
    assert point.defense.per_example.clip == Clip(32.0)


@pytest.mark.parametrize("method", ["non_private", "fed_sdp", "fed_cdp", "fed_cdp_decay"])
@pytest.mark.parametrize("reading", ["printed", "code"])
def test_an_arm_of_chapter_05_is_that_of_chapter_05(method, reading):
    end = {"clip_norm": 6.0, "clip_end": 2.0} if method == "fed_cdp_decay" else {}
    here = AlphaTraining("mnist", method, reading, **end)
    assert here.defense == training.Training("mnist", method, reading, **end).defense


@pytest.mark.parametrize("reading", DIVIDED)
def test_adaptive_clipping_has_the_same_noise_on_the_mean_as_the_others(reading):
    names = {"printed": "sqrt_batch", "algorithm_1": "none", "code": "batch"}
    quantile = AlphaTraining("mnist", "quantile_clip", reading, clip_norm=3.0).defense
    ada = AlphaTraining("mnist", "adaclip", reading, clip_norm=3.0).defense
    for defense in (quantile, ada):
        assert defense.per_batch.divide_by == names[reading]
        assert defense.per_batch.noise_scale == 6.0
    assert quantile.per_example.clip.clip == Clip(3.0, "layer")
    assert ada.per_example.clip_norm == 3.0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rounds", [3, 100])
@pytest.mark.parametrize("level", [6.0, 1.5])
def test_a_falling_scale_is_that_of_table_8_times_its_level(policy, rounds, level):
    point = AlphaTraining("mnist", f"fed_alpha_cdp_sigma_{policy}", "code", rounds=rounds,
                          noise_scale=level)  # fmt: skip
    found = [point.sigma.at(t) for t in range(rounds)]
    table_8 = math.sqrt(2 * math.log(1.25e5)) / EPSILON_SCHEDULES[policy](rounds)
    np.testing.assert_allclose(found, level / 6 * table_8, rtol=1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_printed_scale_falls_from_15_to_a_floor_of_a_third(policy):
    point = AlphaTraining("mnist", f"fed_cdp_sigma_{policy}", "code", schedule="printed")
    values = [point.sigma.at(t) for t in range(101)]
    assert (values[0], values[100]) == (15.0, 4.85)
    assert all(a >= b >= 4.85 for a, b in itertools.pairwise(values))
    middle = math.sqrt(15 * 4.85) if policy == "exponential" else (15 + 4.85) / 2
    assert values[50] == pytest.approx(middle)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "fed_alpha"}, "method = 'fed_alpha' is not one of"),
        ({"setting": "as_coded"}, "setting = 'as_coded' is not one of"),
        ({"schedule": "sigma"}, "schedule = 'sigma' is not one of"),
        ({"method": "fed_cdp", "setting": "released"}, "setting = 'released' is Fed-αCDP's script"),
    ],
    ids=str,
)
def test_a_bad_name_of_a_cell_gets_one_sentence(changes, words):
    with pytest.raises(InputError) as error:
        AlphaTraining(**{"dataset": "mnist", "method": "fed_alpha_cdp"} | changes)
    assert words in str(error.value) and str(error.value).endswith(".")


def test_a_judged_training_is_looked_at_in_every_round_and_one_of_a_search_is_not():
    point = AlphaTraining("mnist", "fed_alpha_cdp", "printed", rounds=60)
    assert point.looks() == (60, None)
    held = replace(point, held_out=True)
    assert held.looks() == training.Training("mnist", "fed_cdp", held_out=True).looks()


@pytest.mark.parametrize("method", ["fed_alpha_cdp", "fed_alpha_cdp_sigma_cyclic", "quantile_clip"])
def test_a_small_training_learns_under_little_noise(method, tmp_path):
    point = AlphaTraining("digits", method, "code", clients=20, participants=10, rounds=8,
                          local_iterations=20, noise_scale=0.05, local_lr=0.1)  # fmt: skip
    result = training.measure(point, CPU, tmp_path)
    assert result["curve"].shape == (1, 8) and result["accuracy"][0] == result["curve"][0, -1]
    assert result["accuracy"][0] > result["guess"][0] + 0.1


# ---- S -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1.0, 100.0])
def test_the_levels_are_the_largest_norms_of_a_loop_over_each_batch(bound):
    arm = AlphaTraining("digits", "fed_alpha_cdp", "code", clients=10, participants=3, rounds=1,
                        local_iterations=1, batch_size=4, clip_norm=bound, seed=3)  # fmt: skip
    levels = measure_levels(Levels(arm), CPU)["levels"]
    start, plan = training.scene(arm, 3, CPU), arm.plan(3)
    x, y = start.train
    expected = []
    for client in plan.participants_of(0):
        held = start.partition.indices[client]
        (batch,) = plan.batches(int(client), len(held), 0)
        each = [gradient_of(start.model, x[i], y[i]) for i in held[batch]]
        expected.append(min(bound, max(float(g.norm()) for one in each for g in one.values())))
    assert levels.shape == (1, 3)
    np.testing.assert_allclose(sorted(levels[0]), sorted(expected), rtol=1e-4)


def test_levels_are_read_early_and_late():
    levels = np.ones((20, 6))
    levels[:2], levels[-2:] = 4.0, np.tile([2.0, 4.0], (2, 3))
    point = Levels(AlphaTraining("mnist", "fed_alpha_cdp", "code", clip_norm=4.0))
    values = {n: v["mean"] for n, v in level_values(point, {"levels": levels}).items()}
    assert values == {"early_level": 4.0, "late_level": 3.0, "early_at_bound": 1.0,
                      "late_at_bound": 0.5, "level_over_early": 0.75,
                      "asked_noise": 6.0}  # fmt: skip


# ---- budgets -------------------------------------------------------------------------------------


def exact_epsilon(rate, shifts, delta):
    """Return ε over all subsets of rounds, each with its probability, one by one."""
    mixed = []
    for drawn in itertools.product((0, 1), repeat=len(shifts)):
        weight = math.prod(rate if one else 1 - rate for one in drawn)
        total = sum(one * s**2 for one, s in zip(drawn, shifts, strict=True))
        mixed.append((weight, math.sqrt(total)))

    def excess(epsilon):
        return sum(w * float(gdp_delta(epsilon, mu)) for w, mu in mixed if mu) - delta

    return brentq(excess, 0.0, 60.0) if excess(0.0) > 0 else 0.0


@given(
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(0.2, 1.5), min_size=1, max_size=6),
    st.sampled_from(["fixed", "poisson"]),
)
@settings(max_examples=25, deadline=None)
def test_the_epsilon_of_changing_rounds_bounds_the_exact_one_closely(participants, shifts, how):
    plan = Plan(4, participants, len(shifts), 1, 1, how, local_lr=0.1)
    probabilities, mu = weighted_participations(plan, 1, shifts)
    assert probabilities.sum() == pytest.approx(1)
    found = mixture_epsilon(probabilities, mu, 1e-3)
    exact = exact_epsilon(participants / 4, shifts, 1e-3)
    # a participation's μ² is rounded up by at most a 50th of the dearest one
    most = exact_epsilon(
        participants / 4, [math.sqrt(s**2 + max(shifts) ** 2 / 50) for s in shifts], 1e-3
    )
    assert exact - 1e-6 <= found <= most + 1e-6


@pytest.mark.parametrize("how", ["fixed", "poisson"])
@pytest.mark.parametrize("holders", [1, 3])
def test_equal_rounds_are_counted_as_before(holders, how):
    plan = Plan(10, 4, 7, 1, 1, how, local_lr=0.1)
    probabilities, mu = weighted_participations(plan, holders, [0.4] * 7)
    before = mixture_epsilon(participations(plan, holders), 0.4, 1e-5)
    assert mixture_epsilon(probabilities, mu, 1e-5) == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_falling_scale_is_proved_between_its_loudest_and_its_quietest_round(policy):
    sizes = {"clients": 100, "participants": 20, "local_iterations": 100, "rounds": 20}
    falls = AlphaTraining("mnist", f"fed_cdp_sigma_{policy}", "code", **sizes)
    values = [falls.sigma.at(t) for t in range(20)]
    proved = spent(falls).proved.epsilon
    ends = [spent(AlphaTraining("mnist", "fed_cdp", "code", noise_scale=s, **sizes)).proved.epsilon
            for s in (max(values), min(values))]  # fmt: skip
    assert ends[0] < proved < ends[1]
    # the mean of 1/σ² is a lower bound: which rounds a client draws adds to it
    alike = float(np.mean(np.square(values) ** -1.0) ** -0.5)
    same = spent(replace(falls, method="fed_cdp", noise_scale=alike)).proved.epsilon
    assert same < proved < 1.3 * same


def test_noise_on_examples_is_noise_on_the_batch_with_a_larger_scale():
    sizes = {"clients": 100, "participants": 20, "batch_size": 5}
    batch = AlphaTraining("mnist", "fed_cdp", "code", noise_scale=6.0, **sizes)
    example = AlphaTraining("mnist", "fed_cdp", "printed", noise_scale=6 / math.sqrt(5), **sizes)
    undivided = AlphaTraining("mnist", "fed_cdp", "algorithm_1", noise_scale=6 / 5, **sizes)
    proved = [spent(one).proved.epsilon for one in (batch, example, undivided)]
    assert proved == pytest.approx([proved[0]] * 3)
    inside = [spent(one, "example").proved.epsilon for one in (batch, example, undivided)]
    assert math.isinf(inside[0]) and math.isfinite(inside[1]) and math.isinf(inside[2])


@pytest.mark.parametrize("method", ["fed_alpha_cdp", *FALLING])
def test_the_largest_norm_has_no_proof_and_the_count_of_fed_cdp(method):
    sizes = {"clients": 100, "participants": 20, "setting": "code"}
    alpha = spent(AlphaTraining("mnist", method, **sizes))
    plain = spent(AlphaTraining("mnist", method.replace("alpha_", ""), **sizes))
    assert math.isinf(alpha.proved.epsilon) and math.isfinite(plain.proved.epsilon)
    assert alpha.paper.epsilon == plain.paper.epsilon


@pytest.mark.parametrize("panel", ["claimed", "proved"])
def test_the_arms_of_the_ablation_spend_what_their_panel_says(panel):
    rows = [c for c in grid.ablation(FULL, "mnist") if c.keys["panel"] == panel]
    budget = AlphaTraining("mnist", "fed_cdp", "code", clients=100, participants=20)
    names = {"claimed": "paper", "proved": "proved"}
    target = getattr(spent(budget), names[panel]).epsilon
    for cell in rows:
        assert getattr(spent(cell.point), names[panel]).epsilon == pytest.approx(target, rel=2e-3)
        assert (cell.point.clients, cell.point.participants, cell.point.rounds) == (100, 20, 100)
    arms = {(c.point.method, c.point.setting) for c in rows}
    factors = set(itertools.product(grid.FACTORS, DIVIDED))
    sound = {("fed_cdp_decay", "code"), ("quantile_clip", "code")}
    if panel == "claimed":
        assert arms == factors | sound
    else:
        assert arms == sound | {("fed_cdp", "code"), ("fed_cdp_sigma_exponential", "code")}


# ---- the grid ------------------------------------------------------------------------------------


def rows_of(*names, kind=judged):
    columns = {n: c for n, c in grid.COLUMNS.items() if not names or c.table in names}
    return [(c.table, row) for c in columns.values() for d in c.datasets
            for row in c.rows(kind, FULL, d, EveryTry())]  # fmt: skip


@pytest.mark.parametrize("dataset", ["mnist", "adult", "cancer"])
def test_every_accuracy_of_table_5_has_its_row_here_or_in_chapter_05(dataset):
    printed = load_published("fed_alpha_cdp/table_5").query("dataset == @dataset")
    here = {(r.key["method"], r.key["clip"]) for _, r in rows_of("table_5")
            if r.key["dataset"].removesuffix("_z") == dataset}  # fmt: skip
    there = {("fed_cdp", f"{c:g}") for c in (0.5, 1, 2, 4, 8)} | {("non_private", "all")}
    assert not here & there
    assert set(printed[["method", "clip"]].itertuples(index=False, name=None)) == here | there


def test_rows_have_the_papers_setting():
    sizes = {"mnist": (5, 100), "cifar10": (4, 100), "lfw": (3, 60), "adult": (3, 10),
             "cancer": (4, 3)}  # fmt: skip
    for table, row in rows_of("table_5", "noise_scales", "table_10", "table_4"):
        (point,) = row.points
        assert (point.noise_scale, point.local_iterations, point.held_out) == (6.0, 100, False)
        reduced = point.method == "adaclip"
        size, rounds = sizes[point.dataset.removesuffix("_z")]
        assert (point.batch_size, point.rounds) == (size, min(10, rounds) if reduced else rounds)
        if table != "table_4":
            sizes_of = (100, 5) if reduced else (1000, 100)
            assert (point.clients, point.participants) == sizes_of
        assert point.seeds == (1 if point.participants >= 200 else 3)
        assert point.clip_norm == float(row.key.get("clip", 4))


def test_rows_of_one_table_have_keys_of_their_own_and_the_same_columns():
    tables = {}
    for table, row in rows_of():
        tables.setdefault(table, []).append(row)
    for make in (grid.stopped, grid.reached):
        tables[make.__name__] = [r for d in ("mnist", "adult_z", "cancer_z", "lfw")
                                 for r in make(FULL, d, EveryTry())]  # fmt: skip
    tables["levels"] = grid.levels(FULL, "mnist", {})
    for rows in tables.values():
        keys = [tuple(map(str, row.key.values())) for row in rows]
        assert keys and len(set(keys)) == len(keys)
        assert len({tuple(row.key) for row in rows}) == 1


def test_linear_staircase_and_exponential_scales_stop_at_the_printed_rounds():
    checked = 0
    for name in ("table_8", "table_11"):
        printed = load_published(f"fed_alpha_cdp/{name}").query("metric == 'rounds'")
        for row in printed.to_dict("records"):
            policy = row["method"].rpartition("_")[2]
            if row["dataset"] in ("mnist", "cifar10") and policy in POLICIES[:3]:
                accounting = row.get("accounting", "moments_accountant")
                key = (row["dataset"], row["method"], accounting, row["target_epsilon"])
                assert grid.stops(name)[key] == int(row["value"])
                checked += 1
    assert checked == 6 + 12


def result_of(curve, accuracy):
    curve = np.array(curve, float)
    ran = {"rounds_run": np.full(len(curve), 100), "guess": np.full(len(curve), 0.1)}
    ran |= {"evaluated": np.full(2, 1000), "diverged": np.zeros(2)}
    return {"curve": curve, "accuracy": np.array(accuracy)} | ran


def test_a_stopped_row_has_the_accuracy_of_its_round():
    rounds = result_of([np.arange(1, 101) / 100] * 2, [1.0, 1.0])
    rows = grid.stopped(FULL, "mnist", EveryTry())
    for row in rows:
        assert row.values([rounds])["accuracy"]["mean"] == int(row.key["stopped_at"]) / 100
    keys = {(r.key["method"], r.key["accounting"]) for r in rows}
    every = set(itertools.product(FALLING, ("base", "advanced", "zcdp", "moments_accountant")))
    assert keys == every | {("fed_alpha_cdp", "moments_accountant"), ("fed_alpha_cdp", "all")}


@pytest.mark.parametrize(("target", "rounds"), [("measured", 31.0), ("printed", 93.5)])
def test_a_training_reaches_our_target_or_the_printed_one(target, rounds):
    rows = grid.reached(FULL, "mnist", EveryTry())
    (row,) = [r for r in rows if (r.key["target"], r.key["method"]) == (target, "fed_alpha_cdp")]
    sdp = result_of([np.zeros(100)] * 2, [0.3, 0.32])  # the target is 0.31
    alpha = result_of([np.arange(1, 101) / 100, np.arange(1, 101) / 100], [1.0, 1.0])
    alpha["curve"][1] = np.where(alpha["curve"][1] < 0.94, alpha["curve"][1], 1.0)
    values = row.values([sdp, alpha])
    assert values["target_accuracy"]["mean"] == (0.31 if target == "measured" else 0.928)
    assert values["rounds"]["mean"] == (31.0 if target == "measured" else 93.0)
    assert values["rounds_left"]["mean"] == 100 - values["rounds"]["mean"]
    assert values["printed_rounds"]["mean"] == 11 and values["reached"]["mean"] == 1


@pytest.mark.parametrize("method", ["fed_sdp", "fed_cdp", "fed_alpha_cdp"])
def test_a_cell_of_table_5_searches_around_the_middle_of_its_method(method):
    every = grid.table_5(grid.MIDDLE, FULL, "mnist") + grid.table_5(grid.OTHER_CLIPS, FULL, "mnist")
    table = [c for c in every if c.point.method == method]
    assert {c.point.clip_norm for c in table} == {*grid.MIDDLE, *grid.OTHER_CLIPS} - (
        set(grid.FED_CDP_RECORDED) if method == "fed_cdp" else set()
    )
    for cell in table:
        if cell.point.clip_norm == 4:
            assert cell.around is None and len({r for _, r in cell.search({}).asked}) == 7
        else:
            factor = 1.0 if method == "fed_sdp" else 4 / cell.point.clip_norm
            assert cell.around == replace(cell.point, clip_norm=4.0)
            assert cell.factor == pytest.approx(factor) and cell.search({}).asked == ()


def test_searches_of_fed_cdp_are_read_in_chapter_05(tmp_path):
    (tmp_path / "fed_cdp").mkdir()
    assert run.tried(tmp_path) == {}
    shutil.copy(MEASURED / "fed_cdp/search.csv", tmp_path / "fed_cdp/search.csv")
    known = run.tried(tmp_path)
    middle = grid.training(FULL, "cancer_z", "fed_cdp")
    (cell,) = [c for c in grid.table_5((16.0,), FULL, "cancer_z")
               if (c.point.method, c.point.clip_norm) == ("fed_cdp", 16.0)]  # fmt: skip
    assert cell.around == middle and len(cell.search(known).asked) == 3


# ---- records of another chapter ------------------------------------------------------------------


def test_rows_of_chapter_05_stand_in_table_5_at_the_papers_population(tmp_path):
    assert measured("fed_alpha_cdp/table_5", tmp_path).empty
    (tmp_path / "fed_cdp").mkdir()
    for name in ("table_4", "table_1"):
        shutil.copy(MEASURED / f"fed_cdp/{name}.csv", tmp_path / f"fed_cdp/{name}.csv")
    joined = measured("fed_alpha_cdp/table_5", tmp_path)
    source = read_record(MEASURED / "fed_cdp/table_4.csv")
    kept = select(source, {"clients": 1000, "participants": 100})
    assert 0 < len(kept) < len(source)
    there = joined[joined["method"] == "fed_cdp"]
    columns = ["dataset", "setting", "clip", "metric", "mean", "std"]
    assert (there[columns].to_numpy() == kept[columns].to_numpy()).all()
    plain = joined[joined["method"] == "non_private"]
    assert len(plain) and set(plain["clip"]) == {"all"} and set(joined["schedule"]) == {"epsilon"}
    for cell in cells(joined):
        assert training.point_of(cell, AlphaTraining).method == cell["method"]


def test_a_table_without_other_sources_is_as_it_was():
    path = MEASURED / "fed_cdp/table_2.csv"
    frame = measured("fed_cdp/table_2")
    assert len(frame) == len(read_record(path)) and not frame.isna().any().any()


def test_parts_have_names_of_their_own_and_ask_for_searches_first(tmp_path):
    parts = run.EXPERIMENT.parts(FULL, tmp_path)
    names = [part.name for part in parts]
    assert all(names) and len(set(names)) == len(names)
    by_name = {part.name: part for part in parts}
    assert by_name["table_5"].rows(("cancer_z",)) == by_name["reached"].rows(("cancer_z",)) == []
    asked = by_name["search_table_5"].rows(("cancer_z",))
    # Fed-CDP's middle is chapter 05's to search; the bounds wait for their middles
    assert {row.points[0].method for row in asked} == {"fed_sdp", "fed_alpha_cdp"}
    assert all(row.points[0].held_out for row in asked) and len(asked) == 14
    assert [p.name for p in parts if not p.long] == ["levels"]
    assert {row.points[0].method for _, row in rows_of("table_4", kind=searches)} == {
        "fed_alpha_cdp"
    }


def test_the_levels_that_judge_have_the_rate_that_fed_cdp_chose():
    rows = grid.levels(FULL, "mnist", run.tried(MEASURED))
    arms = {(p.noise_scale, p.local_lr) for p in (row.points[0].arm for row in rows)}
    known = published_setting("fed_alpha_cdp/levels")
    assert len(rows) == 8 and (6.0, known["local_lr"]) in arms
    assert {rate for scale, rate in arms if scale == 6} == {0.05, 0.005, known["local_lr"]}
    assert {rate for scale, rate in arms if scale < 1} == {0.158}  # of non-private training


# ---- figure 3 ------------------------------------------------------------------------------------


def test_the_accuracies_of_figure_3_are_those_of_the_published_figure_in_its_order():
    figures = load_published("fed_alpha_cdp/figures")
    of_3 = (figures["figure"] == "Fig. 3") & figures["what"].str.endswith("metric=accuracy")
    printed = load_published("fed_alpha_cdp/figure_3")
    assert list(printed["value"]) == list(figures["value"][of_3])
    for arm, what in zip(printed["arm"], figures["what"][of_3], strict=True):
        digits = set(re.findall(r"[1-9]", arm))
        assert digits <= set(re.findall(r"[1-9]", what)) | {"C", "σ"}, (arm, what)


def test_every_printed_arm_of_figure_3_but_noisy_dssgd_has_a_training_with_its_defence():
    printed = load_published("fed_alpha_cdp/figure_3")
    asked = set(zip(printed["method"], printed["arm"], strict=True))
    found = {(c.point.method, c.keys["arm"]): c.point for c in grid.figure_3(FULL, "lfw")}
    assert asked - set(found) == {("dssgd", "with noise")} and set(found) <= asked
    values = {"w": torch.linspace(-1, 1, 20_001)[None]}
    context = Context(0, [0], [torch.Generator().manual_seed(0)], batch_size=1)
    kept, moved = {}, {}
    for (_, arm), point in found.items():
        if stage := point.defense.per_client:
            after = stage(values, context)["w"]
            kept[arm], moved[arm] = float((after != 0).double().mean()), after - values["w"]
    assert kept["10 % pruned"] == pytest.approx(0.9, abs=1e-3)
    for arm in ("90 % pruned", "without noise"):
        assert kept[arm] == pytest.approx(0.1, abs=1e-3)
    assert of_std(moved["variance 0.001"], math.sqrt(0.001))
    assert of_std(moved["variance 0.01"], math.sqrt(0.01))
    at = {arm: point.defense for (_, arm), point in found.items()}
    assert at["at the server"].on_arrival and not at["at the server"].per_client
    assert at["C = 1, σ = 2"].per_example.clip.clip_norm == 1.0
    assert at["C = 1, σ = 2"].per_example.noise_scale == 2.0
