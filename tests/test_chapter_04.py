"""Chapter 04: engines give the loop's update, records are whole, exercises can be failed."""

import json
import re
from functools import partial

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_privacy_lib.chapters.fast_training import engines as chapter
from fl_privacy_lib.chapters.fast_training import grid, speed
from fl_privacy_lib.chapters.fast_training.multiplications import multiplications
from fl_privacy_lib.chapters.fast_training.parameters import FastTraining
from fl_privacy_lib.chapters.fast_training.run import EXPERIMENT
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.models import training_cnn
from fl_privacy_lib.reproduction import experiment
from fl_privacy_lib.reproduction.claims import load_claims, verdict
from fl_privacy_lib.reproduction.comparison import cells, compare, measured, select
from fl_privacy_lib.reproduction.paths import MEASURED, ROOT
from fl_privacy_lib.reproduction.records import recorded_rows
from tools import bench, bench_record

KEYS = list(grid.rows_of("fed_cdp/table_3", 1)[0].key)
record = partial(experiment.record, EXPERIMENT)


@pytest.mark.parametrize("dataset", grid.FEDERATED)
@pytest.mark.parametrize("clip_norm", [4.0, 0.05, None])
def test_the_fast_engine_gives_the_update_of_the_loop_as_written(dataset, clip_norm):
    double = chapter.doubled(grid.FEDERATED[dataset].scene(3, 2, seed=1))
    defense = fed_cdp(clip_norm=clip_norm, noise_scale=0.0) if clip_norm else non_private()
    exact = chapter.Written(clip_norm, noise_scale=0.0)(double)
    assert chapter.distance(chapter.fast(defense)(double), exact) < 1e-10
    wrong = chapter.Written(3.9 if clip_norm == 0.05 else 0.05, noise_scale=0.0)(double)
    assert chapter.distance(wrong, exact) > 1e-3, "the distance sees another clip"


@pytest.mark.parametrize(
    "largest, on_batch", [(False, False), (True, False), (False, True), (True, True)]
)
def test_the_loop_s_noise_has_the_spread_it_says(largest, on_batch):
    scene, sigma, bound = grid.FEDERATED["cancer"].scene(1, 1), 2.0, 50.0
    quiet = chapter.Written(bound, 0.0)(scene)
    loud = chapter.Written(bound, sigma, largest=largest, on_batch=on_batch)(scene)
    noise = torch.cat([(loud[n] - quiet[n]).flatten() for n in quiet])
    scale = bound
    if largest:
        norms = []
        for x, y in zip(*(v[scene.batches()[0][0]] for v in (scene.x, scene.y)), strict=True):
            loss = torch.nn.functional.cross_entropy(scene.model(x[None]), y[None])
            norms += [
                float(g.norm()) for g in torch.autograd.grad(loss, list(scene.model.parameters()))
            ]
        scale = max(norms)
    batch = scene.plan.batch_size
    expected = scene.plan.local_lr * sigma * scale * (1 if on_batch else batch**0.5) / batch
    # 78,200 draws: below 1e-12 to fail by chance
    assert float(noise.std()) == pytest.approx(expected, rel=0.02)


def test_fed_sdp_clips_and_noises_the_update_once():
    scene = grid.FEDERATED["cancer"].scene(2, 2)
    plain = chapter.Written(None)(scene)
    tight = chapter.Written(1e-3, 0.0, at_update=True)(scene)
    assert all(float(t.norm()) <= 1e-3 * (1 + 1e-4) for t in tight.values())
    loose = chapter.Written(1e3, 0.0, at_update=True)(scene)
    assert chapter.distance(loose, plain) < 1e-6


def test_a_participation_is_timed_over_the_paper_s_hundred_iterations():
    whole, short = (grid.Timing(t, "lfw", 1) for t in (grid.PARTICIPATION, "fed_cdp/table_3"))
    assert [len(t.workload.scene(*t.sizes).batches()[0]) for t in (whole, short)] == [100, 10]
    rows = grid.rows_of(whole.table, 1)
    assert {row.key["local_iterations"] for row in rows} == {100}
    assert {row.key["dataset"] for row in rows} == set(grid.FEDERATED)


@pytest.mark.parametrize("table", grid.WRITTEN)
def test_every_compiled_cell_is_trained_by_the_compiled_engine(table):
    pytest.importorskip("numba", reason="the compiled engine")
    scene = grid.Timing(table, "lfw", 1).workload.scene(1, 1)
    for name in grid.COMPILED.keys() & grid.WRITTEN[table].keys():
        defense = grid.COMPILED[name]
        run = simulate(
            scene.model, (scene.x, scene.y), scene.partition, scene.plan, defense, engine="auto"
        )
        assert run.engine == "compiled", name


def test_an_engine_that_joins_later_adds_its_rows_and_changes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path / "points")
    pytest.importorskip("numba", reason="the engine that joins")
    monkeypatch.setattr(grid, "FEDERATED", {"cancer": grid.FEDERATED["cancer"]})
    settings, path = FastTraining(repetitions=1), tmp_path / "fed_cdp" / "table_3.csv"
    with monkeypatch.context() as without:
        without.setattr(grid, "compiled_here", lambda: False)
        record(settings, "fed_cdp/table_3", tmp_path)
    before = path.read_text()
    assert "compiled" not in before
    record(settings, "fed_cdp/table_3", tmp_path)
    after = recorded_rows(path, KEYS)
    assert path.read_text().startswith(before)
    assert set(after[len(before.splitlines()) - 1 :]["engine"]) == {"compiled"}


def test_a_recording_is_whole_resumes_and_names_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "point_cache", lambda chapter: tmp_path / "points")
    monkeypatch.setattr(grid, "FEDERATED", {"cancer": grid.FEDERATED["cancer"]})
    settings = FastTraining(repetitions=1)
    record(settings, "fed_cdp/table_3", tmp_path)
    path = tmp_path / "fed_cdp" / "table_3.csv"
    text, frame = path.read_text(), recorded_rows(path, KEYS)
    methods = grid.WRITTEN["fed_cdp/table_3"]
    assert {(r["engine"], r["method"]) for _, r in frame.iterrows()} == {
        *(("as_written", m) for m in grid.WRITTEN["fed_cdp/table_3"]),
        *(("stacked", m) for m in grid.STACKED if m in methods),
        *(("compiled", m) for m in grid.COMPILED if m in methods),
    }
    base = frame[(frame["method"] == "non_private") & (frame["metric"] == "ratio_to_non_private")]
    assert (base["mean"] == 1).all() and len(base) == 3
    monkeypatch.setattr(grid, "measure", lambda *_: pytest.fail("recorded again"))
    record(settings, "fed_cdp/table_3", tmp_path)
    assert path.read_text() == text


def test_the_recorded_tables_give_every_verdict():
    for claim in load_claims():
        if claim["chapter"] == "04":
            assert verdict(claim).cells, claim["id"]


def test_the_bench_s_record_has_every_engine_and_workload():
    frame = pd.read_csv(MEASURED / "performance.csv")
    assert list(frame.columns) == bench_record.COLUMNS
    for workload in bench.WORKLOADS:
        rows = frame[frame["workload"] == workload]
        expected = {e for e in bench.ENGINES if not e.startswith("opacus_")} | {"opacus"}
        expected -= {"products_alone"}  # it stands in the floor
        assert set(rows["engine"]) - set(bench.COMPILED) - {"floor"} == expected
        private = rows[rows["engine"] == "ours_private"][["participants", "workers"]]
        sizes = set(private[["participants", "workers"]].itertuples(index=False, name=None))
        assert {(20, 1), (100, 1), (100, 2), (1000, 1)} <= sizes


# ---- the bench ----------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """Let the bench measure few clients of a small workload, and no memory."""
    monkeypatch.setattr(bench, "WORKLOADS", {"tiny": grid.FEDERATED["cancer"]})
    monkeypatch.setattr(bench, "peak_mib", lambda *_: 100.0)
    monkeypatch.setattr(
        bench, "engine_times", partial(bench.engine_times, participants=2, iterations=2)
    )


def test_the_bench_writes_every_engine_and_every_ratio(few, tmp_path):
    pytest.importorskip("numba", reason="the compiled engine is among them")
    path = tmp_path / "performance.csv"
    bench.bench(["tiny"], 2, path, ["engines"])
    engines, ratios = pd.read_csv(path), pd.read_csv(tmp_path / "performance_ratios.csv")
    assert (
        list(engines.columns) == bench_record.COLUMNS
        and list(ratios.columns) == bench_record.RATIO_COLUMNS
    )
    expected = set(bench.engines()) - {"opacus_hooks", "opacus_ew", "products_alone"} | {
        "opacus",
        "floor",
    }
    assert set(engines["engine"]) == expected
    expected = {f"{a} / {b}" for a, b in bench_record.RATIOS} | {
        f"share of {stage}" for stage in bench_record.STAGES
    }
    assert set(ratios["ratio"]) == expected
    bench.bench(["tiny"], 1, path, ["engines"])
    assert len(pd.read_csv(path)) == len(engines), (
        "a row that is measured again takes the place of the old one"
    )


def test_a_stage_s_share_is_what_the_kernel_takes_with_it_and_not_without(tmp_path):
    record = bench_record.Record(tmp_path / "performance.csv", 1)
    took = {"forward": 1.0, "non_private": 3.0, "noiseless": 3.5, "private": 4.0}
    record.ratios("tiny", {f"compiled_{name}": [time] for name, time in took.items()})
    rows = pd.read_csv(tmp_path / "performance_ratios.csv").set_index("ratio")["median"]
    shares = {stage: rows[f"share of {stage}"] for stage in bench_record.STAGES}
    assert shares == {"forward": 0.25, "backward": 0.5, "noise": 0.125}


def test_a_ratio_is_taken_pair_by_pair_and_judged_by_its_bound(tmp_path, capsys):
    record = bench_record.Record(tmp_path / "performance.csv", 3)
    times = {"naive": [1.0, 10.0, 100.0], "compiled_private": [0.1, 2.0, 5.0]}
    record.ratios("mnist_cnn", times)
    row = (
        pd.read_csv(tmp_path / "performance_ratios.csv")
        .set_index("ratio")
        .loc["naive / compiled_private"]
    )
    assert row["median"] == 10 and row["goal"] == "≥ 9"  # the ratio of the medians would be 5
    assert "holds" in capsys.readouterr().err
    record.ratio("mnist_cnn", "naive / compiled_private", (8.9, 0.0))
    assert "MISSED" in capsys.readouterr().err
    assert len(pd.read_csv(tmp_path / "performance_ratios.csv")) == 1


def test_every_bound_is_one_of_a_ratio_that_the_bench_measures():
    source = (ROOT / "tools" / "bench.py").read_text()
    pairs = {f"{a} / {b}" for a, b in bench_record.RATIOS}
    engines = {*bench.ENGINES, *bench.COMPILED, "opacus", "floor", "ours_non_private_and_noise"}
    assert {name for pair in bench_record.RATIOS for name in pair} <= engines
    for ratio, goals in bench_record.GOALS.items():
        assert ratio in pairs or ratio.partition(", ")[2] in source, ratio
        assert goals.keys() <= bench.WORKLOADS.keys()


def test_a_row_takes_the_place_of_the_one_with_its_keys_and_no_other(tmp_path):
    path, keys = tmp_path / "t.csv", ["a", "b"]
    for a, b, value in ((1, 1, "x"), (1, 2, "y"), (1, 1, "z")):
        bench_record.put(path, [*keys, "value"], keys, {"a": a, "b": b, "value": value})
    assert path.read_text() == "a,b,value\n1,1,z\n1,2,y\n"


def test_gains_are_read_from_the_record_step_by_step(tmp_path):
    keys = bench_record.RATIO_KEYS
    for ratio, width, median in (
        ("naive / compiled_private", "native", 9.0),
        ("naive / compiled_private", "8", 5.0),  # narrower registers
        ("naive / opacus", "native", 1.5),
        ("opacus / compiled_private", "native", 6.0),
    ):
        row = {"workload": "adult_mlp", "ratio": ratio, "vector_width": width, "median": median}
        row |= {"std": 0.1, "repetitions": 5, "goal": "none", "version": "0", "date": "d"}
        bench_record.put(tmp_path / "performance_ratios.csv", bench_record.RATIO_COLUMNS, keys, row)
    steps = speed.STEPS
    assert speed.gains(tmp_path) == [
        (steps["opacus"], 1.5, "Adult", 0.1),
        (steps["compiled_private"], 9.0, "Adult", 0.1),
    ]
    assert speed.gains(tmp_path / "nothing") == []
    assert speed.recorded_ratios("another", tmp_path) == {}


def test_the_record_shows_what_the_page_says_of_it():
    gains = speed.gains()
    assert {step for step, *_ in gains} == set(speed.STEPS.values())
    for network in speed.NETWORKS.values():
        medians = [median for _, median, data, _ in gains if data == network]
        assert medians == sorted(medians) and medians[0] > 1, "every step is a gain"
    for workload in speed.NETWORKS:
        recorded = speed.recorded_ratios(workload)
        shares = {stage: recorded[f"share of {stage}"] for stage in bench_record.STAGES}
        assert max(shares, key=lambda stage: shares[stage][0]) == "backward"


def test_the_kernel_s_cost_of_privacy_is_below_the_printed_and_the_largest_norm_costs_nothing():
    over = "ratio_to_non_private"
    for table, method in (
        ("fed_cdp/table_3", "fed_cdp"),
        ("dynamic_parameters/table_10", "dp_baseline"),
    ):
        of = {
            (c["engine"], c["dataset"]): c[over] for c in cells(measured(table), {"method": method})
        }
        for c in compare(
            table, select(measured(table), {"engine": "as_written", "method": method})
        ):
            if c.cell:
                data = c.printed["dataset"]
                assert of["compiled", data] < float(c.printed["value"])
                assert of["compiled", data] < of["as_written", data] or method == "dp_baseline"
    for table, method, base in (
        ("fed_alpha_cdp/table_9", "fed_alpha_cdp", "ratio_to_fed_cdp"),
        ("dynamic_parameters/table_10", "dp_dyns_l2max", "ratio_to_dp_baseline"),
    ):
        for cell in cells(measured(table), {"method": method}):
            assert abs(cell[base] - 1) < 0.05


@pytest.mark.parametrize("dataset", grid.FEDERATED)
def test_a_library_s_multiplications_are_those_that_torch_counts(dataset):
    scene = grid.FEDERATED[dataset].scene(1, 1)
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(scene.model(scene.x), scene.y).backward()
    work = multiplications(scene.model, scene.x)
    assert 2 * len(scene.x) * sum(w.library for w in work) == counter.get_total_flops()
    assert all(0 < w.kernel <= w.library for w in work)


def test_the_kernel_s_multiplications_follow_the_zeros():
    model = training_cnn((1, 28, 28), 10)
    second = "second convolution, input gradient"
    for bias, active in ((-1.0, 0.0), (1.0, 64 * 25.0)):
        with torch.no_grad():
            for p in model[3].parameters():
                p.fill_(bias)
            model[0].weight.fill_(1.0)
        counts = {w.name: w.kernel for w in multiplications(model, torch.ones(2, 1, 28, 28))}
        assert counts[second] == active * 9 * 32
    # Winograd: 16 products a window, by 25 windows
    assert counts["second convolution, forward"] == 16 * 25 * 32 * 64


@pytest.fixture
def check_my_norms():
    notebook = json.loads((ROOT / "notebooks" / "04_fast_private_training.ipynb").read_text())
    check = next(
        "".join(c["source"])
        for c in notebook["cells"]
        if "def check_my_norms" in "".join(c["source"])
    )
    names = {"torch": torch}
    exec(check.partition("\n\n\ntry:")[0], names)
    return names["check_my_norms"]


def test_a_ghost_norm_that_forgets_the_bias_is_told_so(check_my_norms, capsys):
    assert not check_my_norms(lambda g, x: g.norm(dim=2) * x.norm(dim=2))
    assert re.search(r"expected \d+\.\d+ for client 0, example 0, got \d", capsys.readouterr().out)


def test_norms_of_gradients_that_were_formed_are_refused(check_my_norms, capsys):
    def formed(g, x):
        return torch.cat([(g[..., None] * x[:, :, None]).flatten(2), g], dim=2).norm(dim=2)

    assert not check_my_norms(formed)
    assert "expected no tensor above 426 numbers, got one of 21,300" in capsys.readouterr().out
