"""Chapter 02: the learned attacker's cells, the rest of Table 3, the page with any record."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fl_privacy_lib.attacks import reconstruct
from fl_privacy_lib.chapters.adaptive_attacks import grid as chapter
from fl_privacy_lib.chapters.adaptive_attacks import reading as adaptive_rows
from fl_privacy_lib.chapters.adaptive_attacks import run
from fl_privacy_lib.chapters.adaptive_attacks.parameters import AdaptiveAttacks
from fl_privacy_lib.chapters.threat_types import grid as threat_types
from fl_privacy_lib.data import load
from fl_privacy_lib.defenses import Clip, Defense, PerExample
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction import checks, claims, comparison, experiment
from fl_privacy_lib.reproduction.experiments import leakage, scoring
from fl_privacy_lib.reproduction.experiments.cells import Cell, ThreatCell, attack_of, scene
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.records import add_point
from fl_privacy_lib.reproduction.verdict import Status

FULL = AdaptiveAttacks.of_profile("full")
GRID = chapter.recorded_grid(FULL, ("mnist", "lfw", "cifar10"))
CPU = torch.device("cpu")
SMALL = {"victims": 3, "clients": 100, "max_iterations": 1}
LEARNER = chapter.LearnedCell(
    "digits",
    "gaussian",
    0.01,
    public_images=100,
    projection=32,
    views=1,
    hidden=32,
    epochs=2,
    **SMALL,
)


def digits():
    return load("digits", Path("/nowhere"))


def made_up(cell, rate=1.0):
    """Return a result of the right form with this success rate, with no attack at all."""
    n = cell.victims * cell.seeds
    result = {name: np.full((n, 1), 0.05) for name in ("mse", "ssim", "grey_mse", "mean_mse")}
    result |= {"success": np.arange(n)[:, None] < rate * n, "iterations": np.full((n, 1), 7)}
    result |= {name: np.zeros((n, 1), dtype=bool) for name in ("label_right", "mean_success")}
    return result | {
        "attack_iterations": np.ones(n),
        "status": np.full(n, "stalled"),
        "seconds": np.array(0.0),
    }


def record(folder, table, cells, rate=1.0, key=chapter.record_key):
    """Write made-up rows of these cells in the recording's own form."""
    for cell in cells:
        summary = scoring.summary(made_up(cell, rate), cell.seeds)
        meta = {"seeds": cell.seeds, "profile": "full", "device": "none", "seconds": 0.0}
        add_point(folder / f"{table}.csv", key(cell), summary, **meta)


def rest(**wanted):
    """Return the cells of Table 3's rest with these values."""
    cells = GRID["fed_alpha_cdp/table_3_rest"]
    return [c for c in cells if all(getattr(c, name) == value for name, value in wanted.items())]


@pytest.mark.parametrize("table", ["attacks/clipping", "attacks/noise"])
def test_recorded_rows_keep_their_key(table):
    columns = list(pd.read_csv(MEASURED / f"{table}.csv", nrows=0).columns)
    names = [name for name in chapter.record_key(GRID[table][0]) if name != "seeds"]
    assert columns[: len(names)] == names


def test_every_claim_finds_its_cells_in_the_grid(tmp_path):
    for table, cells in GRID.items():
        record(tmp_path, table, cells)
    for entry in (c for c in claims.load_claims() if c["chapter"] == "02"):
        verdict = claims.verdict(entry, tmp_path)
        assert verdict.cells or "test" not in entry, entry["id"]


def test_public_images_are_no_attacked_clients():
    data, cell = digits(), replace(LEARNER, public_images=10_000)
    public = run.public_images(cell, data, seed=0)
    held = np.unique(np.concatenate(list(leakage.attacked_clients(cell, data, 0).values())))
    assert not set(public) & set(held) and len(public) == len(data.train_y) - len(held)
    assert len(np.unique(public)) == len(public)
    assert len(run.public_images(LEARNER, data, seed=0)) == 100
    victims = scene(cell, data, 0, CPU).truth[:, 0]
    places = [
        {i for i, image in enumerate(data.train_x) if np.array_equal(image, victim)}
        for victim in victims
    ]
    assert all(place & set(held) for place in places)


def test_the_learned_attacker_meets_the_same_victims_and_fills_the_same_columns():
    learned = run.EXPERIMENT.run(LEARNER, CPU)
    naive = run.EXPERIMENT.run(Cell("digits", "gaussian", 0.01, **SMALL, seeds=LEARNER.seeds), CPU)
    np.testing.assert_array_equal(learned["truth"], naive["truth"])
    for guess in ("grey_mse", "mean_mse"):
        np.testing.assert_array_equal(learned[guess], naive[guess])
    assert learned["images"].shape == naive["images"].shape
    assert {n: v.shape for n, v in learned.items()} == {n: v.shape for n, v in naive.items()}
    assert scoring.summary(learned, 5).keys() == scoring.summary(naive, 5).keys()
    assert all(np.isfinite(v["mean"]) for v in scoring.summary(learned, 5).values())
    wanted = np.where(learned["success"], 0, LEARNER.max_iterations)
    np.testing.assert_array_equal(learned["iterations"], wanted)


def test_types_0_and_1_are_two_names_of_one_attack(tmp_path, monkeypatch):
    one, zero = rest(dataset="mnist", method="adaclip", arm="naive", threat_type="type_1") + rest(
        dataset="mnist", method="adaclip", arm="naive", threat_type="type_0"
    )
    assert one == zero and hash(one) == hash(zero)
    assert one != rest(dataset="mnist", method="adaclip", arm="naive", threat_type="type_2")[0]
    assert chapter.record_key(one) != chapter.record_key(zero)
    calls = []
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path)
    monkeypatch.setattr(run, "load_cached", lambda name: None)  # no file of MNIST is needed
    monkeypatch.setattr(run, "measure", lambda c, *_: calls.append(c) or made_up(c))
    results = run.EXPERIMENT.finish([one, zero], workers=1)
    assert [c.threat_type for c, _ in results] == ["type_1", "type_0"] and len(calls) == 1


@pytest.mark.parametrize(
    "method", ["quantile_clip", "adaclip", "fed_alpha_cdp_example", "fed_alpha_cdp_batch"]
)
def test_the_server_receives_what_left_the_client(method):
    cell = chapter.ThreatCell(
        "digits", method, tap="update", batch_size=2, noise_scale=6.0, **SMALL
    )
    data = digits()
    seen = [
        leakage.scene(replace(cell, tap=tap), data, 0, CPU).observations
        for tap in ("update", "received")
    ]
    for left, arrived in zip(*seen, strict=True):
        assert all(torch.equal(v, arrived.values[name]) for name, v in left.values.items())


@pytest.mark.parametrize("method", ["quantile_clip", "adaclip"])
def test_in_the_first_round_adaptive_clipping_is_clipping_at_its_first_bound(method, monkeypatch):
    """The tap example holds the bare gradient clipped to C₀ = 0.5, the update noise of lr·σC₀/B."""
    data, cell = (
        digits(),
        chapter.ThreatCell("digits", method, batch_size=2, clip_norm=0.5, **SMALL),
    )
    flat = Defense("flat", per_example=PerExample(Clip(0.5, "all")))
    observed = leakage.scene(cell, data, 0, CPU).observations
    noisy = leakage.scene(replace(cell, tap="update"), data, 0, CPU).observations
    monkeypatch.setattr(chapter.ThreatCell, "defense", flat)
    expected = leakage.scene(cell, data, 0, CPU).observations
    quiet = leakage.scene(replace(cell, tap="update"), data, 0, CPU).observations
    for mine, its in zip(observed, expected, strict=True):
        for name, value in mine.values.items():
            torch.testing.assert_close(value, its.values[name], rtol=1e-4, atol=1e-7)
    parts = [
        (m.values[n] - q.values[n]).flatten()
        for m, q in zip(noisy, quiet, strict=True)
        for n in q.values
    ]
    draws = torch.cat(parts)
    # 51,114 draws: the estimate's standard error is 0.32 %, so 2 % is six of them (wrong alarm:
    # 2e-9)
    assert len(draws) > 51_000
    assert float(draws.std()) == pytest.approx(cell.local_lr * 6 * 0.5 / 2, rel=0.02)


def test_the_whole_of_table_3_stands_with_any_part_of_the_records(tmp_path):
    empty = adaptive_rows.table_3(tmp_path)
    assert len(empty.rows) == 36 and {row[-1].status for row in empty.rows} == {Status.NOT_RUN}
    record(tmp_path, "fed_alpha_cdp/table_3_rest", GRID["fed_alpha_cdp/table_3_rest"], rate=0.02)
    rows = adaptive_rows.table_3(tmp_path).rows
    assert len(rows) == 36 + 4
    # 12 and 8 with two readings
    assert sum(row[-1].status is not Status.NOT_RUN for row in rows) == 20
    here = {(row[0], row[1]): row for row in rows}
    quantile = here["MNIST, type 1", "quantile clipping"]
    # five networks of 20 images, one of which gives its images away
    assert quantile[2:8] == [
        "yes", "2 % [0, 10]", "0.5113", "0.224 ± 0.000", "0.050 ± 0.000", "9 / 7",
    ]  # fmt: skip
    assert str(quantile[-1]) == "undecided: 0 of 3 hold"  # its first bound is not printed
    record(
        tmp_path,
        "fed_alpha_cdp/table_3",
        [replace(c, victims=1) for c in GRID["fed_alpha_cdp/table_3"]],
    )
    rows = adaptive_rows.table_3(tmp_path).rows
    assert [row[-1].status for row in rows if row[0] == "LFW, type 2"].count(
        Status.REDUCED_SETTING
    ) == 2


def test_table_3_takes_fed_sdp_from_table_vii(tmp_path):
    point = threat_types.Point(
        "mnist", "type_1", "fed_sdp_client", "naive", victims=20, seeds=5, batch_size=5
    )
    record(tmp_path, "fed_cdp/table_7", [point], key=threat_types.record_key)
    rows = adaptive_rows.table_3(tmp_path).rows
    measured = [[*row[:4], row[8]] for row in rows if row[-1].status is not Status.NOT_RUN]
    assert measured == [
        [f"MNIST, type {t}", "Fed-SDP at client", "no", "100 % [57, 100]", "—"] for t in (0, 1)
    ]


def test_published_successes_are_counted_against_the_guesses(tmp_path):
    assert adaptive_rows.guessed(tmp_path) == {"grey": (0, 0), "class mean": (0, 0)}
    record(tmp_path, "fed_alpha_cdp/table_3_rest", rest(method="adaclip"))
    # all above 0.05
    assert adaptive_rows.guessed(tmp_path) == {"grey": (6, 6), "class mean": (6, 6)}


def test_curves_keep_the_cell_with_most_trials(tmp_path):
    cells = [c for c in GRID["attacks/noise"] if c.arm == "naive"][:2]
    record(tmp_path, "attacks/noise", [replace(c, seeds=2) for c in cells], rate=0.5)
    record(tmp_path, "attacks/noise", cells[:1], rate=1.0)
    drawn = adaptive_rows.curves("attacks/noise", {"method": "gaussian"}, "arm", folder=tmp_path)
    assert [(x, y) for x, y, *_ in drawn["naive"]] == [(1e-4, 1.0), (1e-3, 0.5)]
    assert [band[2:] for band in drawn["naive"]] == [
        wilson_interval(5, 5),  # five networks, by the correlation that the other cell shows
        wilson_interval(1, 2),  # two networks: all images of one, none of the other
    ]
    assert adaptive_rows.curves("attacks/none", {}, "arm", folder=tmp_path) == {}


@pytest.mark.parametrize("metric", ["attack_success_rate", "ssim"])
def test_a_live_curve_is_what_would_be_recorded(tmp_path, metric):
    cell = next(c for c in GRID["attacks/noise"] if c.arm == "naive")
    record(tmp_path, "attacks/noise", [cell], rate=0.5)
    live = adaptive_rows.live_curve({cell: made_up(cell, 0.5)}, metric)
    (recorded,) = adaptive_rows.curves("attacks/noise", {}, "arm", metric, folder=tmp_path).values()
    np.testing.assert_allclose(recorded, live, rtol=1e-5)


def test_thresholds_judge_the_guesses():
    rows = adaptive_rows.thresholds(grey=0.23, mean=0.005).rows
    assert [row[2:] for row in rows] == [["—", "—"], ["yes", "yes"], ["no", "yes"]]


def test_a_bound_may_be_another_metric_of_the_same_cell():
    rows = [
        {"level": level, "metric": m, "mean": v, "n": "3", "std": 0.0, "seeds": "3"}
        for level, a, b in (("1", 0.1, 0.2), ("2", 0.3, 0.2))
        for m, v in (("mse", a), ("guess", b))
    ]
    for check, expected in (("at_most", [True, False]), ("shown", [False, True])):
        test = {"check": check, "metric": "mse", "bound": "guess"}
        assert [o.held for o in checks.check(test, "", pd.DataFrame(rows))] == expected


@pytest.mark.parametrize(("sure", "middle", "held"), [(0.1, 0.2, True), (-0.1, 0.1, None),
                                                      (-0.3, -0.2, False)])  # fmt: skip
def test_an_interval_around_the_bound_leaves_a_lead_undecided(sure, middle, held):
    rows = [{"level": "1", "metric": m, "mean": v, "n": "3", "std": 0.0, "seeds": "3"}
            for m, v in (("lead", middle), ("sure_lead", sure))]  # fmt: skip
    test = {"check": "shown", "metric": "sure_lead", "bound": 0}
    (outcome,) = checks.check(test, "", pd.DataFrame(rows))
    assert outcome.held is held


def test_values_may_be_published_under_another_name(tmp_path):
    record(
        tmp_path, "fed_alpha_cdp/table_3_rest", rest(dataset="lfw", method="adaclip", arm="naive")
    )
    frame = comparison.measured("fed_alpha_cdp/table_3_rest", tmp_path)
    test = {"check": "values", "published": "fed_alpha_cdp/table_3"}
    held = [o.held for o in checks.check(test, "fed_alpha_cdp/table_3_rest", frame)]
    # all three types succeed; no distance and no iterations
    assert len(held) == 9 and sum(held) == 3


# ---- GradInv's settings


def test_gradinv_runs_in_table_1_with_the_pair_that_recovers_most_in_its_search():
    for dataset, pairs in (("cifar10", 10), ("lfw", 4)):
        published, *tried = chapter._gradinv_search((dataset,), {"victims": 20, "seed": 0})
        assert published.arm == "naive" and len({c.arm for c in tried}) == len(tried) == pairs
        assert all(c.seed >= published.seed + 5 for c in tried)  # other networks than the judged
        found = comparison.cells(comparison.measured("attacks/gradinv"), {"dataset": dataset})
        search = [c for c in found if c["arm"] != "naive"]
        assert len(search) == pairs
        best = max(search, key=lambda c: (c["attack_success_rate"], -c["mse"]))
        assert chapter.TUNED[dataset] == best["arm"]
    judged = {c.dataset: c.arm for c in GRID["fed_alpha_cdp/table_1"] if c.attack != "cpl"}
    assert judged["mnist"] == "naive" and judged.items() >= chapter.TUNED.items()


# ---- one dummy image for a batch


def test_one_dummy_is_the_iterate_nearest_to_the_whole_batch():
    cell = ThreatCell(
        "digits", "non_private", arm="one_dummy", tap="update", threat_type="type_0_1",
        batch_size=2, victims=2, seeds=1, clients=100, max_iterations=4,
    )  # fmt: skip
    view = leakage.scene(cell, digits(), 0, CPU)
    iterates = []
    reconstruct(
        view.model, view.observations, (1, 28, 28), attack_of(cell, 0),
        on_iteration=lambda iteration, rows, images: iterates.append(images.clone().numpy()),
    )  # fmt: skip
    images, went, _ = run.blend_of(cell, 0)(view, digits())
    for victim, truth in enumerate(view.truth):  # [2, 1, 28, 28]
        far = [sum(((shot[victim, 0] - x) ** 2).sum() for x in truth) for shot in iterates]
        assert went["attack_iterations"][victim] == 1 + int(np.argmin(far))
        for image in images[victim]:
            assert np.array_equal(image, iterates[int(np.argmin(far))][victim, 0])
    assert images.shape == view.truth.shape and went["label_right"].shape == (2, 2)
