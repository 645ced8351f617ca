"""Chapter 06, the grid: rows beside the printed tables, what is read off a training, searches."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from defense_scenes import flat, of_std
from dynamic_parameters_scenes import CPU, FULL, TABLE_1
from fed_cdp_scenes import EveryTry

from fl_privacy_lib.audit import statement
from fl_privacy_lib.chapters.dynamic_parameters import grid, run
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.data import load
from fl_privacy_lib.defenses import Holding
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.searching import judged, searches
from fl_privacy_lib.reproduction.paths import ROOT
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.verdict import learns, why_unfair


def test_linear_and_exponential_noise_spends_its_budget_at_the_printed_iteration():
    printed = load_published("dynamic_parameters/table_8").query("metric == 'iterations'")
    checked = 0
    for row in printed.to_dict("records"):
        key = (row["noise_scale_policy"], row["accounting"], row["target_epsilon"])
        if key[0] in ("linear", "exponential"):
            assert abs(grid.stops()[key] - int(row["value"])) <= 1
            checked += 1
    assert checked == 10
    assert {key[0] for key in grid.stops()} == {"linear", "exponential", "cyclic"}
    assert len(grid.stops()) == 15 and all(0 < stop <= 10_000 for stop in grid.stops().values())


def result_of(curve, accuracy=None, rounds=400):
    curve = np.array(curve, float)
    return {
        "curve": curve,
        "accuracy": curve[:, -1] if accuracy is None else np.array(accuracy),
        "rounds_run": np.full(len(curve), rounds),
        "guess": np.array([0.125, 0.25])[: len(curve)],
        "evaluated": np.array([1000] * len(curve)),
        "diverged": np.zeros(len(curve)),
    }


BASE = result_of([[0.1, 0.2, 0.3, 0.5], [0.1, 0.2, 0.3, 0.75]])  # the target is 0.625


def ended(curve):
    """Return the rounds that trainings ran, of which some diverged and ended."""
    return {"rounds_run": 100 * np.isfinite(curve).sum(1)}


@pytest.mark.parametrize(
    ("curve", "iterations", "reached"),
    [
        ([[0.5, 0.625, 0.5, 0.7], [0.1, 0.2, 0.7, 0.1]], [200, 300], [1, 1]),
        ([[0.9, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.6249]], [100, 400], [1, 0]),
        ([[0.1, 0.1, 0.1, 0.625], [0.7, math.nan, math.nan, math.nan]], [400, 100], [1, 1]),
        ([[math.nan] * 4, [0.1] * 4], [400, 400], [0, 0]),
        ([[0.1, 0.2, math.nan, math.nan], [0.1] * 4], [400, 400], [0, 0]),
    ],
)
def test_a_training_reaches_the_baselines_mean_at_its_first_look_there(curve, iterations, reached):
    values = grid.reached_values(400, [BASE, result_of(curve, [0.9, 0.9]) | ended(curve)])
    assert values["target_accuracy"]["mean"] == 0.625
    assert values["iterations"]["mean"] == np.mean(iterations)
    assert values["iterations"]["std"] == pytest.approx(np.std(iterations, ddof=1))
    assert values["iterations_left"]["mean"] == 400 - np.mean(iterations)
    assert values["reached"]["mean"] == np.mean(reached) and values["reached"]["n"] == 2
    assert values["accuracy"]["mean"] == pytest.approx(0.9) and "guess" in values  # who learns?
    assert values["diverged"]["mean"] == 0


def test_the_baseline_itself_takes_until_one_of_its_seeds_is_at_its_mean():
    values = grid.reached_values(400, [BASE, BASE])
    assert values["iterations"]["mean"] == 400 and values["reached"]["mean"] == 0.5


@pytest.mark.parametrize(
    ("share", "mean"), [(0.1, 0.1), (0.25, 0.1), (0.75, 0.3), (0.99, 0.3), (1.0, 0.625)]
)
def test_a_stopped_training_has_the_accuracy_of_the_look_before(share, mean):
    values = grid.stopped_values(share, [BASE])
    assert values["accuracy"]["mean"] == pytest.approx(mean) and values["accuracy"]["n"] == 2
    assert values["evaluated"]["mean"] == 1000 and values["searched"]["mean"] == 1


def test_a_stopped_training_of_which_a_seed_broke_is_no_fair_trial():
    """Of the broken seed no accuracy is left to look at, so that the mean is no number."""
    broken = result_of([[0.1, np.nan], [0.5, 0.6]], rounds=400) | {"diverged": np.array([1.0, 0.0])}
    values = grid.stopped_values(1.0, [broken])
    cell = {name: value["mean"] for name, value in values.items()}
    cell |= {"accuracy_std": values["accuracy"]["std"], "seeds": "2", "participants": "1000"}
    assert not learns(cell) and "diverged" in why_unfair(cell)


def test_a_stopped_row_reads_the_last_look_within_its_budget():
    hundred = result_of([np.arange(100) / 100] * 2, rounds=10_000)
    rows = grid.stopped(FULL, "mnist", EveryTry())
    for row in rows:
        (point,), stop = row.points, int(row.key["stopped_at"])
        look = round(row.values([hundred])["accuracy"]["mean"] * 100)
        assert (look + 1) * 100 <= stop < (look + 2) * 100  # looks come after 100, 200, …
        assert point.rounds == 10_000 and not point.held_out and point.clip_norm == 4
        budget = (row.key["accounting"], row.key["target_epsilon"])
        if point.noise_scale_policy == "fixed":
            assert stop == 10_000 and budget == ("all", "all")
        else:
            assert stop == grid.stops()[point.noise_scale_policy, *budget]
    fixed = {r.key["method"] for r in rows if r.key["noise_scale_policy"] == "fixed"}
    assert fixed == set(list(TABLE_1)[:4])


@pytest.mark.parametrize(
    ("table", "make", "names"),
    [
        ("table_4", "table_4", ("dataset", "method", "clip")),
        ("table_8", "stopped", ("dataset", "method", "noise_scale_policy", "accounting",
                                "target_epsilon")),
    ],
)  # fmt: skip
def test_every_published_accuracy_has_its_row(table, make, names):
    printed = load_published(f"dynamic_parameters/{table}").query("metric == 'accuracy'")
    if make == "stopped":
        rows = grid.stopped(FULL, "mnist", EveryTry())
    else:
        rows = [
            row
            for name, datasets, some in grid.COLUMNS.values()
            if name == make
            for d in datasets
            for row in grid.rows_of(judged, some, FULL, d, EveryTry())
        ]
    keys = {tuple(str(row.key[n]) for n in names) for row in rows}
    missing = {tuple(row) for row in printed[list(names)].to_numpy()} - keys
    # left out are the purchase data, and of CIFAR-10 all bounds but C = 4
    left_out = {("cifar10", m, f"{c:g}") for m in list(TABLE_1)[:4] for c in THREE if c != 4}
    missing = {cell for cell in missing if not cell[0].startswith("purchase")}
    assert missing == (left_out if table == "table_4" else set()) and len(printed) > 60


class OnlyTheBaseline(dict):
    """What was tried where only the baseline's own search is done; 0.0158 was its best."""

    def get(self, cell, default=None):
        middle = Central("mnist", "dp_baseline", rounds=0, local_lr=0.0, held_out=True)
        return EveryTry() if cell == middle else {}


THREE = {
    1.0: (0.0158, 0.05, 0.158),  # 0.0158 · 4 = 0.063
    2.0: (0.0158, 0.05, 0.158),  # 0.032
    4.0: (0.005, 0.0158, 0.05),
    8.0: (0.00158, 0.005, 0.0158),  # 0.0079
    16.0: (0.00158, 0.005, 0.0158),  # 0.0040
    32.0: (0.0005, 0.00158, 0.005),  # 0.0020
}


@pytest.mark.parametrize("method", ["dp_baseline", "dp_dyns_cdecay", "dp_dyns_l2max", "dp_dyns"])
@pytest.mark.parametrize("bound", THREE)
def test_a_cell_of_table_4_tries_three_rates_around_the_baselines(method, bound):
    arms = grid.COLUMNS["table_4"][2] + grid.COLUMNS["table_4_clips"][2]
    (arm,) = [a for a in arms if a[0] == method and a[1].get("clip_norm", 4.0) == bound]
    cell = grid.cell(FULL, "mnist", arm)
    assert (cell.point.clip_norm, cell.point.method, cell.point.setting) == (bound, method, "batch")
    asked = cell.search(OnlyTheBaseline()).asked
    if (method, bound) == ("dp_baseline", 4.0):
        assert len({rate for rounds, rate in asked if rounds == 1000}) == 7  # its own search
        return
    assert asked == tuple((10_000, rate) for rate in THREE[bound])
    assert cell.search({}).asked == ()  # not before the baseline has its rate


def test_readings_and_training_without_noise_are_searched_by_themselves():
    arms = [*grid.COLUMNS["readings"][2], ("non_private", {})]
    for cell in (grid.cell(FULL, "mnist", arm) for arm in arms):
        assert cell.around is None and len(cell.search({}).asked) == 7
    readings = {a[1]["setting"] for a in grid.COLUMNS["readings"][2]}
    assert readings == {"sqrt_batch", "none", "code"}


def test_a_method_with_a_falling_noise_scale_has_a_policy_and_no_other_has():
    for table, datasets, some in grid.COLUMNS.values():
        for dataset in datasets:
            for row in grid.rows_of(judged, some, FULL, dataset, EveryTry()):
                (point,) = row.points
                assert point.method.endswith("sigma") == (point.noise_scale_policy != "fixed")
                most = 2000 if point.method == "adaclip" else 10_000
                assert point.rounds == (6000 if dataset == "lfw" else most)
                assert point.batch_size == {"lfw": 22, "cifar10": 500}.get(dataset, 600)
                assert (point.seeds, point.held_out) == (3, False)
                assert (point.noise_scale == 6.0) == (table != "repairs" or point.clip_end > 0)


def test_rows_of_one_table_have_keys_of_their_own_and_the_same_columns():
    tables = {}
    for table, datasets, some in grid.COLUMNS.values():
        for d in datasets:
            rows = grid.rows_of(judged, some, FULL, d, EveryTry())
            assert rows and grid.rows_of(searches, some, FULL, d, EveryTry())
            tables.setdefault(table, []).extend(rows)
    for make in (grid.stopped, grid.reached, grid.curves, grid.kept_rate, grid.distinguishing,
                 grid.table_3):  # fmt: skip
        tables[make.__name__] = make(FULL, "mnist", EveryTry())
    tables["fit"] = grid.fit(FULL, "fashion_mnist", EveryTry())
    for rows in tables.values():
        keys = [tuple(map(str, row.key.values())) for row in rows]
        assert keys and len(set(keys)) == len(keys)
        assert len({tuple(row.key) for row in rows}) == 1


def test_every_repair_has_the_epsilon_that_is_proved_of_the_baseline():
    def proved(arm):
        point = replace(grid.training(FULL, "mnist", arm[0], **arm[1]), local_lr=0.05)
        return statement(
            point.defense, point.plan(0), Holding(60_000, 60_000, 3), delta=1e-5
        ).proved.epsilon

    baseline = proved(("dp_baseline", {}))
    assert 1.0 < baseline < 1.3
    for arm in grid.REPAIRS:
        assert proved(arm) == pytest.approx(baseline, rel=1e-3), arm
    assert proved(("dp_flat", {})) < proved(("quantile_clip", {})) > 1.001 * baseline


def test_the_control_of_a_large_bound_has_the_rate_that_was_chosen_for_the_small_one():
    (row,) = grid.rows_of(judged, grid.arms(("dp_baseline",)), FULL, "mnist", EveryTry())
    (control,) = grid.kept_rate(FULL, "mnist", EveryTry())
    (small,), (kept,) = row.points, control.points
    assert kept == replace(small, clip_norm=32.0) and kept.local_lr > 0 and small.clip_norm == 4


def test_the_fitted_schedule_is_the_best_of_the_record():
    record = measured("dynamic_parameters/fit")
    if record.empty:
        pytest.skip("not recorded yet: make record NB=06 P='--only fit'")
    best = record[record["metric"] == "accuracy"].sort_values("mean").iloc[-1]
    assert grid.FITTED == pytest.approx((float(best["clip_norm"]), float(best["clip_end"])))


SIGMA = {"non_private": 0.0, "dp_baseline": 6.0, "quantile_clip": 6.0, "dp_dyns_sigma": 15.0}


@pytest.mark.parametrize("dataset", ["mnist", "lfw"])
def test_table_3_has_every_printed_method_at_every_place(dataset):
    rows = grid.table_3(FULL, dataset, {})
    methods = set(load_published("dynamic_parameters/table_3")["method"])
    both = {(m, arm) for m in methods for arm in ("naive", "clip_aware")}
    expected = set(itertools.product(("example", "noised_example", "batch"),
                                     both - {("non_private", "clip_aware")}))  # fmt: skip
    assert {(r.key["place"], (r.key["method"], r.key["arm"])) for r in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        (cell,) = row.points
        noisy = row.key["method"] != "non_private" and row.key["place"] != "example"
        # equal for all methods, and enough for an interval below one tenth
        assert (cell.victims, cell.seeds) == ((3, 35) if noisy else (8, 4))
        assert (cell.clip_norm, cell.arm) == (4.0, row.key["arm"])


def test_table_3_has_the_noise_of_its_places(monkeypatch, tmp_path):
    digits = load("digits", tmp_path)
    divided = {"noised_example": 600, "batch": 5}
    small = {"dataset": "digits", "clients": 100, "victims": 2, "seeds": 1, "clip_norm": 0.01}
    for row in grid.table_3(FULL, "mnist", {}):
        method, place = row.key["method"], row.key["place"]
        if row.key["arm"] != "naive" or method not in SIGMA:
            continue
        cell = replace(row.points[0], **small)
        noisy = leakage.scene(cell, digits, 0, CPU).observations
        with monkeypatch.context() as patch:
            patch.setattr(type(cell), "defense", cell.defense.noiseless())
            clear = leakage.scene(cell, digits, 0, CPU).observations
        pairs = zip(noisy, clear, strict=True)
        noise = torch.cat([flat(a.values) - flat(b.values) for a, b in pairs])
        if place == "example" or method == "non_private":
            assert not noise.any()
        else:
            assert of_std(noise, SIGMA[method] * 0.01 / divided[place]), (method, place)


def test_a_quantile_that_starts_at_c_is_the_baseline_in_its_first_iteration():
    rows = {(r.key["method"], r.key["place"], r.key["arm"]): r.points for r in
            grid.table_3(FULL, "mnist", {})}  # fmt: skip
    for (method, *where), points in rows.items():
        if method == "quantile_clip":
            assert points == rows["dp_baseline", *where]


def test_attacks_are_counted_by_the_papers_threshold_too():
    n = 8
    result = {
        "success": np.arange(n) < 2, "iterations": np.full(n, 9), "ssim": np.ones(n),
        "mse": np.linspace(0.1, 0.8, n), "label_right": np.ones(n), "attack_iterations": np.ones(n),
        "status": np.full(n, "done"), "grey_mse": np.full(n, 0.2), "mean_mse": np.full(n, 0.1),
        "mean_success": np.zeros(n),
    }  # fmt: skip
    values = grid.attack_values(4, [result])
    assert values["attack_success_rate"]["mean"] == 0.25
    two = grid.attack_values(2, [result])["attack_success_rate"]
    assert two["std"] == 0.25  # over the networks that were attacked: 1/2 and none
    assert values["mse_below_threshold"]["mean"] == 0.75  # .1 … .6; .7 is not below
    assert values["grey_mse_below_threshold"]["mean"] == 1


def test_a_methods_target_is_the_baseline_at_its_own_bound():
    rows = grid.reached(FULL, "mnist", EveryTry())
    for row in rows:
        base, point = row.points
        assert (base.method, base.setting, base.noise_scale_policy) == (
            "dp_baseline",
            "batch",
            "fixed",
        )
        assert base.clip_norm == point.clip_norm and point.method in TABLE_1
        assert row.key["method"] == point.method
    fixed = {(p.method, p.clip_norm) for _, p in (r.points for r in rows)
             if p.noise_scale_policy == "fixed"}  # fmt: skip
    assert fixed == set(itertools.product(list(TABLE_1)[:4], THREE))


def test_parts_have_names_of_their_own_and_tables_that_are_judged(tmp_path):
    parts = run.EXPERIMENT.parts(FULL, tmp_path)
    names = [part.name for part in parts]
    assert all(names) and len(set(names)) == len(names)
    recorded = {part.table for part in parts}
    known = yaml.safe_load((ROOT / "results/settings.yml").read_text())
    claims = yaml.safe_load((ROOT / "results/claims.yml").read_text())
    claims = claims["claims"] if isinstance(claims, dict) else claims
    wanted = {c["table"] for c in claims if c.get("chapter") == "06" and "table" in c}
    assert wanted and wanted <= recorded and wanted <= set(known)
    # a table whose setting is written down for this chapter is recorded by a part
    trained = {name for name, s in known.items() if name.startswith("dynamic_parameters/")
               and (s.get("trial") or "games" in s)}  # fmt: skip
    assert trained and trained <= recorded
    trials = {known[name]["trial"]["search"] for name in trained if "trial" in known[name]}
    assert trials <= recorded


def test_parts_ask_for_searches_before_there_are_rates_and_for_nothing_to_judge(tmp_path):
    parts = {part.name: part for part in run.EXPERIMENT.parts(FULL, tmp_path)}
    assert parts["table_4"].rows(("mnist",)) == parts["reached"].rows(("mnist",)) == []
    asked = parts["search_table_4"].rows(("mnist",))
    # the baseline and the training without noise; the others wait for the baseline
    assert {(p.method, p.rounds, p.held_out) for row in asked for p in row.points} == {
        ("dp_baseline", 1000, True),
        ("non_private", 1000, True),
    }
    assert len(asked) == 2 * 7
    assert {p.rounds for row in parts["search_table_4_lfw"].rows(("lfw",)) for p in row.points} == {
        600
    }
