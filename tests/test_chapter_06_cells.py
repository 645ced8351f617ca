"""Chapter 06, cells: the noise and bounds of each method, which data train and which judge."""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dynamic_parameters_scenes import CPU, FULL, TABLE_1, one_sentence
from fed_cdp_scenes import EveryTry

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.recompute import EPSILON_SCHEDULES
from fl_privacy_lib.chapters.dynamic_parameters import grid
from fl_privacy_lib.chapters.dynamic_parameters.training import RATES, Central
from fl_privacy_lib.data import load
from fl_privacy_lib.defenses import Clip, Holding, Schedule
from fl_privacy_lib.defenses.route import BatchNoise
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import judged
from fl_privacy_lib.sampling import Plan

DIVISORS = {"batch": "batch", "sqrt_batch": "sqrt_batch", "none": "none", "code": "batch"}


@pytest.mark.parametrize("method", TABLE_1)
@pytest.mark.parametrize("reading", DIVISORS)
@pytest.mark.parametrize("rounds", [30, 10_000])
def test_a_method_clips_and_scales_its_noise_as_table_1_says(method, reading, rounds):
    falls, largest = TABLE_1[method]
    point = Central("mnist", method, reading, rounds=rounds, clip_norm=6.0, noise_scale=5.0)
    first, late = point.defense.per_example, point.defense.per_batch
    assert point.defense._filled().keys() == {"per_example", "per_batch"}
    assert first.noise_scale == 0 and type(first.clip) is Clip
    assert isinstance(late.clip, LargestNorm) is largest
    bound = late.clip.clip if largest else late.clip
    for t in (0, 1, rounds // 2, rounds - 1, rounds):
        expected = 6 - 4 * t / rounds if falls else 6.0  # to a third
        assert first.clip.bound(t) == bound.bound(t) == pytest.approx(expected)
        assert late.sigma(t) == 5.0
    assert first.clip.scope == bound.scope == "layer"
    assert late.divide_by == DIVISORS[reading]
    if largest:
        assert (late.clip.statistic, late.clip.floor) == (
            "mean" if reading == "code" else "max",
            0.0,
        )


@pytest.mark.parametrize("method", TABLE_1)
def test_a_noise_of_fixed_variance_forgets_the_sensitivity(method):
    point = Central("mnist", method, variance="fixed", clip_norm=8.0)
    assert point.defense.per_batch == BatchNoise(Clip(8.0), 6.0, "batch")
    assert point.defense.per_example.clip.bound(10_000) == pytest.approx(
        8 / 3 if TABLE_1[method][0] else 8.0
    )


def test_the_end_of_the_bound_may_be_given():
    point = Central("mnist", "dp_dyns", clip_norm=6.0, clip_end=5.0, rounds=10)
    assert point.defense.per_example.clip.bound(10) == 5.0
    assert point.defense.per_batch.clip.clip.bound(5) == 5.5
    assert Central("mnist", "dp_baseline", clip_end=5.0).defense.per_example.clip == Clip(4.0)


@pytest.mark.parametrize("policy", ["linear", "exponential", "cyclic"])
def test_a_training_has_the_noise_whose_budget_decides_when_it_stops(policy):
    point = Central("mnist", "dp_dynsigma", noise_scale_policy=policy, rounds=1000)
    epsilons = EPSILON_SCHEDULES[policy](1000)
    sigma = point.defense.per_batch.noise_scale
    assert isinstance(sigma, Schedule)
    got = [sigma.at(t) * epsilons[t] for t in range(1000)]
    np.testing.assert_allclose(got, math.sqrt(2 * math.log(1.25e5)), rtol=1e-9)


def test_decaying_noise_scales_have_their_ends():
    """Linear and exponential ones start near 15.8 and end near 3.7 and 3.0; or as printed."""
    ends = {
        "linear": (4.8448053 / 0.30747, 4.8448053 / 1.30747),
        "exponential": (4.8448053 / math.exp(-1.1809), 4.8448053 / math.exp(0.4831)),
    }
    for policy, values in ends.items():
        point = Central("mnist", "dp_dyns_sigma", noise_scale_policy=policy, rounds=100)
        assert (point.sigma.at(0), point.sigma.at(100)) == pytest.approx(values)
    printed = {"linear": 9.925, "exponential": math.sqrt(15 * 4.85), "cyclic": 9.925}
    for policy, middle in printed.items():
        sigma = Central(
            "mnist", "dp_dynsigma", noise_scale_policy=policy, schedule="printed", rounds=100
        ).sigma
        assert [sigma.at(t) for t in (0, 50, 100)] == pytest.approx([15, middle, 4.85])


def test_the_other_methods_are_those_of_the_library():
    kept = Central("mnist", "non_private", "not_applicable").defense
    assert not kept._filled() and kept.name == "non_private"
    adaptive = Central("mnist", "quantile_clip", clip_norm=3.0, batch_size=500).defense
    rule = adaptive.per_example.clip
    assert (rule.clip, rule.count_scale) == (Clip(3.0, "layer"), 25.0)
    assert (adaptive.per_batch.noise_scale, adaptive.per_batch.divide_by) == (6.0, "batch")
    ada = Central("mnist", "adaclip", clip_norm=3.0).defense
    assert (ada.per_example.clip_norm, ada.per_example.scope) == (3.0, "layer")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "dp_dyn"}, "method = 'dp_dyn' is not one of"),
        ({"method": "fed_cdp"}, "method = 'fed_cdp' is not one of"),
        ({"setting": "printed"}, "setting = 'printed' is not one of"),
        ({"noise_scale_policy": "triangular"}, "noise_scale_policy = 'triangular' is not one of"),
        ({"schedule": "sigma"}, "schedule = 'sigma' is not one of"),
        ({"variance": "constant"}, "variance = 'constant' is not one of"),
    ],
    ids=str,
)
def test_a_bad_name_of_a_cell_gets_one_sentence(changes, word):
    with pytest.raises(InputError, match=word) as error:
        Central(**{"dataset": "mnist", "method": "dp_dyns"} | changes)
    assert one_sentence(error)


def test_a_cells_plan_is_that_of_one_client_that_never_leaves():
    plan = Central("mnist", "dp_dyns", rounds=50, batch_size=30, local_lr=0.2, seed=9).plan(3)
    assert plan == Plan(1, 1, 50, 1, 30, batch_sampling="poisson", local_lr=0.2, seed=3)
    sizes = [len(plan.batches(0, 900, t)[0]) for t in range(50)]
    # a Poisson batch's size varies by √(B (1 − q))
    assert len(set(sizes)) > 5 and abs(np.mean(sizes) - 30) < 6 * math.sqrt(29 / 50)
    assert Central("mnist", "dp_dyns", rounds=50).plan(3, 7).rounds == 7


def test_a_judged_training_is_looked_at_a_hundred_times_on_everything():
    judged_one, tried_one = (Central("mnist", "dp_dyns", held_out=h) for h in (False, True))
    assert judged_one.looks() == (100, None) and tried_one.looks() == (20, 1000)
    # the shortest that can stop is the grid's 6,000; those of a page are short
    assert replace(judged_one, rounds=1000).looks() == (100, None)
    assert replace(judged_one, rounds=999).looks() == (20, 1000)


def small_data(tmp_path, test):
    """Return six training, four validation and some test images; each pixel says which it is."""
    digits = load("digits", tmp_path)
    images = digits.train_x[: 10 + test] * 0 + np.arange(10 + test).reshape(-1, 1, 1, 1)
    images = images.astype(digits.train_x.dtype)
    labels = np.arange(10 + test).astype(digits.train_y.dtype) % 10
    return replace(
        digits, train_x=images[:6], train_y=labels[:6], validation_x=images[6:10],
        validation_y=labels[6:10], test_x=images[10:], test_y=labels[10:],
    )  # fmt: skip


def first_pixels(x):
    return [int(v) for v in np.asarray(x)[:, 0, 0, 0]]


@pytest.mark.parametrize("test", [0, 5])
def test_all_training_data_train_and_the_test_data_measure(test, monkeypatch, tmp_path):
    data, asked = small_data(tmp_path, test), []
    monkeypatch.setattr(
        training, "load_cached", lambda name, train_only: asked.append((name, train_only)) or data
    )
    point = Central("mnist", "dp_dyns", batch_size=2)
    here = point.data()
    assert asked == [("mnist", False)]
    expected = (range(10), range(10, 15)) if test else (range(6), range(6, 10))
    for (x, y), ids in zip(
        ((here.train_x, here.train_y), (here.validation_x, here.validation_y)), expected,
        strict=True,
    ):  # fmt: skip
        assert first_pixels(x) == list(ids) and y.tolist() == [i % 10 for i in ids]
    assert len(here.test_x) == len(here.test_y) == 0
    scene = training.scene(point, 0, CPU)
    assert [index.tolist() for index in scene.partition.indices] == [list(range(len(expected[0])))]
    assert first_pixels(scene.evaluation[0]) == list(expected[1])


@pytest.mark.parametrize("test", [0, 5])
def test_a_search_never_sees_the_data_that_judge(test, monkeypatch, tmp_path):
    data = small_data(tmp_path, test)
    monkeypatch.setattr(training, "load_cached", lambda name, train_only: data)
    judging = set(range(10, 15)) if test else set(range(6, 10))
    for seed in range(5):
        scene = training.scene(Central("mnist", "dp_dyns", held_out=True), seed, CPU)
        train, out = (set(first_pixels(x)) for x in (scene.train[0], scene.evaluation[0]))
        assert out and not train & out and not (train | out) & judging
        assert train | out == (set(range(10)) if test else set(range(6)))
        assert scene.partition.clients == 1 and scene.partition.examples == len(train)


SMALL = Central("digits", "dp_dyns_sigma", rounds=3, batch_size=100, local_lr=0.01,
                noise_scale_policy="exponential")  # fmt: skip


def test_a_training_on_digits_has_a_look_a_round(tmp_path):
    result = training.measure(replace(SMALL, seeds=2), CPU, tmp_path)
    assert result["curve"].shape == (2, 3) and result["rounds_run"].tolist() == [3, 3]
    assert (result["evaluated"] == 450).all() and np.isnan(result["test_accuracy"]).all()
    # of all 450, not of a part
    assert np.allclose(result["curve"] * 450, np.round(result["curve"] * 450), atol=1e-6)
    np.testing.assert_allclose(result["curve"][:, -1], result["accuracy"], atol=2.1 / 450)
    assert not list(tmp_path.iterdir())


def test_a_training_on_digits_learns_without_noise_and_not_under_much(tmp_path):
    quiet = replace(SMALL, method="non_private", setting="not_applicable", rounds=15, local_lr=0.3,
                    noise_scale_policy="fixed")  # fmt: skip
    loud = replace(quiet, method="dp_baseline", setting="none")
    learned, lost = (training.measure(p, CPU, tmp_path) for p in (quiet, loud))
    assert learned["accuracy"][0] > 0.5 > 0.3 > lost["accuracy"][0]


def test_under_a_bound_that_clips_everything_a_decaying_rate_is_a_decaying_bound(tmp_path):
    """clip(g, C_t) = C_t/C_0 · clip(g, C_0) where ‖g‖ ≥ C_0, and the noise follows the bound."""
    arm = functools.partial(
        Central, "digits", batch_size=100, rounds=6, clip_norm=1e-6, noise_scale=2.0, local_lr=5e4
    )
    device = torch.device("cpu")
    rate, bound, fixed = (
        training.measure(arm(method), device, tmp_path)["weights"]
        for method in ("dp_rate_decay", "dp_dyns_cdecay", "dp_baseline")
    )
    moved = np.abs(fixed - rate).max()
    assert np.abs(bound - rate).max() < 1e-3 * moved and moved > 1e-3


def test_two_thirds_of_the_rate_are_the_mean_of_the_decaying_one(tmp_path):
    shares = (Schedule(*RATES[m], 3000) for m in ("dp_rate_decay", "dp_short_steps"))
    falling, constant = (np.mean([s.at(t) for t in range(3000)]) for s in shares)
    assert abs(falling - constant) < 1e-3
    arm = functools.partial(Central, "digits", batch_size=100, rounds=3, noise_scale=2.0)
    device = torch.device("cpu")
    short, plain = (
        training.measure(arm(method, local_lr=rate), device, tmp_path)["weights"]
        for method, rate in (("dp_short_steps", 0.3), ("dp_baseline", 0.2))
    )
    np.testing.assert_allclose(short, plain, atol=1e-5)


@pytest.mark.parametrize("method", RATES)
def test_a_share_of_the_rate_costs_no_epsilon(method):
    baseline, shorter = (
        replace(grid.training(FULL, "mnist", name), local_lr=0.05)
        for name in ("dp_baseline", method)
    )
    holding = Holding(60_000, 60_000, 3)
    assert shorter.defense.events(shorter.plan(0), holding) == baseline.defense.events(
        baseline.plan(0), holding
    )


def test_a_recorded_row_names_its_training():
    points = [
        *itertools.chain.from_iterable(
            [row.points[0] for row in grid.rows_of(judged, some, FULL, d, EveryTry())]
            for _, datasets, some in grid.COLUMNS.values()
            for d in datasets
        )
    ]
    for point in points:  # as a record writes them: a search finds its own tries there
        row = grid.row_of(point, dict).key
        text = {k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in row.items()}
        assert training.point_of(text, Central) == point
