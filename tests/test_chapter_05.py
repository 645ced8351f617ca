"""Chapter 05: records are read back as what they are, and the page stands with any part of them."""

import json
import math
import re
import types
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from fed_cdp_scenes import EVERYTHING

from fl_privacy_lib import audit
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp import reading as fed_cdp_rows
from fl_privacy_lib.chapters.fed_cdp import run
from fl_privacy_lib.chapters.fed_cdp import utility as fed_cdp_utility
from fl_privacy_lib.chapters.fed_cdp.grid import ARMS, PARTS
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.rates import RATES
from fl_privacy_lib.data import available
from fl_privacy_lib.defenses import Holding, fed_cdp, fed_sdp
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.reproduction import claims, comparison, experiment, loading, paths
from fl_privacy_lib.reproduction.comparison import compare, measured, select
from fl_privacy_lib.reproduction.experiments import spending
from fl_privacy_lib.reproduction.experiments import training as training
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.training import Training
from fl_privacy_lib.reproduction.paths import ROOT
from fl_privacy_lib.reproduction.verdict import Status

FULL = FedCdp.of_profile("full")
PAGE = ROOT / "notebooks" / "05_fed_cdp.ipynb"


def accuracy_at(point):
    """Return a made-up accuracy that falls with a round's noise, from 0.97 to 0.5 at z/√K_t = 1."""
    return 0.1 + 0.87 / (1 + point.multiplier / math.sqrt(point.participants))


def made_up(point):
    """Return a result of the right form for any point of the grid, with no training at all."""
    if isinstance(point, fed_cdp_utility.Utility):
        result = {name: np.array([1.0, 2.0, 3.0]) for name in ("noise", "predicted_noise")} | {
            "signal": np.array([0.01, 0.02, 0.03])
        }
        result |= {"bounds": np.array([0.1, 0.2]), "flipped": np.array([False, True])}
        return result | {
            name: np.array(2.0) for name in ("gradient_noise", "step_noise", "seconds")
        }
    accuracy = np.full(point.seeds, accuracy_at(point))
    result = {
        "accuracy": accuracy,
        "test_accuracy": accuracy,
        "guess": np.full(point.seeds, 0.1),
        "evaluated": np.full(point.seeds, 10_000),
        "rounds_run": np.full(point.seeds, point.rounds),
    }
    result |= {
        "diverged": np.zeros(point.seeds),
        "growth": np.ones(point.seeds),
        "seconds": np.array(0.0),
    }
    return result | {"norms": np.ones((point.rounds, point.local_iterations, 3))}


def record(folder, names):
    """Write made-up records of these parts at the full settings, as a recording would."""
    rows = {}
    for name in names:
        part = PARTS[name]
        for cell in (c for dataset in part.datasets for c in part.make(FULL, dataset, EVERYTHING)):
            keys = {k: v for k, v in cell.key.items() if k != "seeds"}
            for metric, values in cell.values([made_up(cell.points[0])]).items():
                meta = {"seeds": cell.seeds, "seconds": 0.0}
                rows.setdefault(part.table, []).append(keys | {"metric": metric} | values | meta)
    for table, table_rows in rows.items():
        path = folder / "fed_cdp" / f"{table}.csv"
        path.parent.mkdir(exist_ok=True)
        pd.DataFrame(table_rows).to_csv(path, index=False, float_format="%.6g")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with made-up records of the parts that tables and curve are read from."""
    root = tmp_path_factory.mktemp("records")
    names = "learning_rates table_2_100_5 table_2_100_10 noise table_4 table_4_mnist utility"
    record(root, names.split())
    return root


# ---- reading rows --------------------------------------------------------------------------------


def test_a_recorded_row_is_read_back_as_the_point_it_was_made_of(folder):
    for name in ("table_2_100_5", "noise", "table_4"):
        part = PARTS[name]
        wanted = {cell.points[0] for d in part.datasets for cell in part.make(FULL, d, EVERYTHING)}
        points = {
            training.point_of(c)
            for c in comparison.cells(measured(f"fed_cdp/{part.table}", folder))
        }
        assert wanted <= points
    held = comparison.cells(measured("fed_cdp/learning_rates", folder))
    assert all(training.point_of(c).held_out for c in held)


def test_cells_hold_every_metric_of_their_rows(folder):
    frame = measured("fed_cdp/table_2", folder)
    for cell in comparison.cells(frame):
        assert cell["accuracy"] == pytest.approx(accuracy_at(training.point_of(cell)), rel=1e-4)
        assert cell["diverged"] == 0 and cell["rounds_run"] == 100
    coded = frame["setting"] == "as_coded"  # no search there
    metrics = frame["metric"].nunique()
    assert len(comparison.cells(frame)) == len(frame[~coded]) / metrics + coded.sum() / (
        metrics - 1
    )
    assert comparison.cells(frame, {"method": "no such"}) == []


def test_the_nearest_rate_is_of_the_same_data_and_arm_then_noise():
    near = {
        ("mnist", "fed_cdp", "code", "6", "100"): 0.01,
        ("mnist", "fed_cdp", "code", "1", "100"): 0.05,
        ("cancer", "fed_cdp", "code", "6", "100"): 0.25,
        ("mnist", "fed_cdp", "printed", "6", "100"): 0.002,
        ("mnist", "fed_cdp", "code", "6", "1"): 0.0004,
    }
    point = Training("mnist", "fed_cdp", "code", local_iterations=50)
    assert fed_cdp_rows.nearest_rate(point, near) == 0.01
    assert fed_cdp_rows.nearest_rate(replace(point, noise_scale=0.8), near) == 0.05
    assert fed_cdp_rows.nearest_rate(replace(point, local_iterations=2), near) == 0.0004
    assert fed_cdp_rows.nearest_rate(replace(point, dataset="cancer"), near) == 0.25
    assert fed_cdp_rows.nearest_rate(replace(point, setting="printed"), near) == 0.002
    assert fed_cdp_rows.nearest_rate(replace(point, setting="as_coded"), near) == 0.05
    untried = (replace(point, dataset="digits"), replace(point, method="fed_sdp"))
    for other in untried:  # MNIST's rates are not taken over, nor another method's
        with pytest.raises(InputError, match=r"no learning rate is chosen .* held-out data first"):
            fed_cdp_rows.nearest_rate(other, near)


def test_every_arm_of_the_page_has_a_recorded_rate_on_the_embedded_data():
    rates = run.recorded_rates().rates
    for dataset in FedCdp.auto_datasets:
        for arm in ARMS:
            assert fed_cdp_rows.nearest_rate(Training(dataset, *arm), rates) in RATES


# ---- ε -------------------------------------------------------------------------------------------


def test_epsilons_are_those_of_the_audit_for_the_right_unit(monkeypatch):
    held = Holding(50_000, 500, 3)
    monkeypatch.setattr(spending, "holding", lambda *_: held)
    spending.spent.cache_clear()
    arms = (
        ("fed_cdp", "example", fed_cdp("batch")),
        ("fed_sdp", "client", fed_sdp(participants=5)),
    )
    for method, unit, defense in arms:
        point = Training("mnist", method, "code")
        both = audit.statement(defense, point.plan(0), held, delta=1e-5, unit=unit)
        assert both.proved.unit == unit
        assert spending.epsilons(point) == f"{both.paper.epsilon:.3g} / {both.proved.epsilon:.3g}"
        tight = replace(point, clip_norm=0.5)  # noise is in units of C
        stated = audit.statement(tight.defense, tight.plan(0), held, delta=1e-5, unit=unit)
        assert (
            stated.proved.epsilon == both.proved.epsilon
            and stated.paper.epsilon == both.paper.epsilon
        )
        computed = spending.spent.cache_info().misses
        assert spending.epsilons(tight) == spending.epsilons(point)
        assert spending.spent.cache_info().misses == computed, "one computation serves every C"
    assert spending.epsilons(Training("mnist", "non_private")) == "—"
    assert spending.epsilons(Training("mnist", "median_clip", "code")).endswith("/ ∞")
    spending.spent.cache_clear()


@pytest.mark.parametrize(("dataset", "clients"), spending.HELD)
def test_what_is_stored_of_the_data_is_what_a_split_gives(dataset, clients):
    known = spending.HELD[dataset, clients]
    assert known.examples == setup_of(dataset).examples
    if not available(dataset, paths.data_root()):
        pytest.skip(f"the files of {dataset} are not here")
    data = loading.load_cached(dataset, train_only=False)
    split = setup_of(dataset).split(data, clients, np.random.default_rng([0, 1]))
    assert known == Holding.of(split, spending.TENSORS)
    shares = np.bincount(data.validation_y) / len(data.validation_y)
    assert fed_cdp_rows.GUESSES[dataset] == pytest.approx(shares.max(), abs=1e-12)


def test_records_show_their_epsilon_without_the_data(monkeypatch):
    """Every recorded private training has an ε that needs no file, and every table its guess."""

    def absent(name, *_):
        raise AssertionError(f"the files of {name} were asked for")

    monkeypatch.setattr(spending, "load", absent)
    spending.holding.cache_clear()
    for table in ("table_1", "table_2", "table_4", "table_5", "variants"):
        for cell in comparison.cells(measured(f"fed_cdp/{table}")):
            point = training.point_of(cell)
            assert spending.holding(point.dataset, point.clients).examples > 0
            assert point.dataset.removesuffix("_z") in fed_cdp_rows.GUESSES
    spending.holding.cache_clear()
    digits = np.bincount(loading.load_cached("digits", train_only=False).validation_y)
    assert fed_cdp_rows.GUESSES["digits"] == digits.max() / digits.sum()


# ---- published beside measured -------------------------------------------------------------------


def test_every_published_accuracy_is_met_once_or_is_not_run(folder):
    frame = select(measured("fed_cdp/table_2", folder), {"local_iterations": "100"})
    comparisons = compare("fed_cdp/table_2", frame)
    ran = [c for c in comparisons if c.cell is not None]
    assert {(c.printed["clients"], c.printed["participation"]) for c in ran} == {
        ("100", "0.05"),
        ("100", "0.10"),
    }
    assert len(ran) == 2 * 9 and len(comparisons) - len(ran) == 48 - 2 * 4
    assert {claims.judge([c]).status for c in comparisons if c.cell is None} == {Status.NOT_RUN}
    for c in ran:
        gap, printed = c.cell["accuracy"] - float(c.printed["value"]), c.cell["setting"] != "code"
        held = abs(gap) <= max(2 * c.cell["accuracy_std"], 0.01)
        status = (
            Status.REPRODUCED if held else Status.EXCEEDED if gap > 0 else Status.NOT_REPRODUCED
        )
        if not c.cell["judged"]:  # another reading than the one that judges the table
            status = Status.NOT_RUN
        assert claims.judge([c]).status is status and c.cell["judged"] in (printed, False)
        assert c.cell["method"] == c.printed["method"]
    assert {claims.judge([c]).status for c in ran} >= {Status.NOT_REPRODUCED, Status.NOT_RUN}
    empty = compare("fed_cdp/table_2", frame.iloc[:0])
    assert len(empty) == 48 and all(c.cell is None for c in empty)


def test_a_smaller_population_is_a_reduced_setting(folder):
    comparisons = compare("fed_cdp/table_4", measured("fed_cdp/table_4", folder))
    words = {
        (c.printed["dataset"], claims.judge([c]).status is Status.REDUCED_SETTING)
        for c in comparisons
        if c.cell
    }
    assert words == {("mnist", False), ("adult", False), ("cancer", False)}
    images = [
        cell for part in ("table_4_images",) for cell in PARTS[part].make(FULL, "lfw", EVERYTHING)
    ]
    assert {cell.points[0].clients for cell in images} == {100}


# ---- the curve -----------------------------------------------------------------------------------


def test_the_curve_holds_each_training_once_in_the_order_of_its_noise(folder):
    tables = {name: measured(f"fed_cdp/{name}", folder) for name in ("noise", "table_2")}
    points = fed_cdp_rows.noise_points(tables)
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert len({p.point for p in points}) == len(points)
    assert {p.point.method for p in points} == {"fed_cdp"} and {
        p.point.local_iterations for p in points
    } == {100}
    for p in points:
        assert p.accuracy == pytest.approx(accuracy_at(p.point), rel=1e-4)
        assert p.x == pytest.approx(p.point.multiplier / p.point.participants**0.5)
    # 0.1 + 0.87 / (1 + x) ≥ 0.9 up to x = 0.0875: of the recorded z/√10 that is z = 0.1, and z =
    # 0.5 misses it
    assert fed_cdp_rows.bracket(points, 0.9) == pytest.approx(
        (0.1 / math.sqrt(10), 0.5 / math.sqrt(10))
    )
    assert fed_cdp_rows.bracket(points, 0.99) == (None, 0.0)
    assert fed_cdp_rows.bracket(points, 0.0) == (points[-1].x, None)
    assert fed_cdp_rows.bracket([], 0.9) == (None, None)
    low, *_, high = (p for p in points if 0.01 < p.x < 1)  # a miss below a hit widens the range
    torn = [replace(low, accuracy=0.0), replace(high, accuracy=1.0)]
    assert fed_cdp_rows.bracket([replace(points[0], x=0.0, accuracy=1.0), *torn], 0.5) == (
        0.0,
        None,
    )
    assert fed_cdp_rows.bracket([*torn, replace(high, x=5.0, accuracy=0.0)], 0.5) == (None, 5.0)
    assert fed_cdp_rows.noise_points({name: t.iloc[:0] for name, t in tables.items()}) == []


def test_only_a_rate_that_was_searched_in_its_cell_is_called_tuned():
    row = {
        "dataset": "mnist",
        "method": "fed_cdp",
        "setting": "code",
        "metric": "accuracy",
        "mean": 0.5,
        "std": 0.0,
    }
    point = Training("mnist", "fed_cdp", "code", participants=10)

    def frame(scale):
        settings = vars(replace(point, noise_scale=scale))
        keys = {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in settings.items()}
        return pd.DataFrame([keys | row])[[*keys, "metric", "mean", "std"]]

    def searched(rows):
        return pd.concat([rows, rows.assign(metric="searched", mean=12.0)])

    one = frame(2.0)
    assert [p.rate for p in fed_cdp_rows.noise_points({"noise": searched(one)})] == ["searched"]
    assert [p.tuned for p in fed_cdp_rows.noise_points({"noise": one})] == [False]
    both = {"noise": searched(one), "table_2": searched(one.assign(participants="20"))}
    assert len(fed_cdp_rows.noise_points(both)) == 2
    often = frame(6.0).assign(seeds="3", mean=0.6)
    for tables in (
        {"noise": frame(6.0), "table_2": often},
        {"table_2": often, "noise": frame(6.0)},
    ):
        assert [p.accuracy for p in fed_cdp_rows.noise_points(tables)] == [0.6], (
            "the one of more seeds stands"
        )
    coded = frame(0.5).assign(setting="as_coded")
    assert [p.tuned for p in fed_cdp_rows.noise_points({"table_2": coded})] == [False]


def test_the_clients_needed_put_a_round_where_the_level_was_missed_and_reached():
    low, high = fed_cdp_rows.clients_needed(6.0, (0.2, 0.5))
    assert (6 / math.sqrt(low), 6 / math.sqrt(high)) == pytest.approx((0.5, 0.2))
    assert fed_cdp_rows.clients_needed(6.0, (None, 0.0)) == (math.inf, math.inf)
    assert fed_cdp_rows.clients_needed(6.0, (2.0, None)) == (0.0, 9.0)


def test_the_break_even_noise_makes_the_ratio_one():
    cells = [
        {"multiplier": "6", "participants": "9", "signal_to_noise": 0.1, "at_round": at}
        for at in ("0", "20")
    ]
    cells[1]["signal_to_noise"] = 5.0
    assert fed_cdp_rows.break_even(cells) == pytest.approx(0.2)
    assert fed_cdp_rows.break_even([]) is None


# ---- the page ------------------------------------------------------------------------------------


def sources():
    return [("".join(c["source"]), c["metadata"].get("tags", []))
            for c in json.loads(PAGE.read_text())["cells"] if c["cell_type"] == "code"]  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder of finished points that the runs of the page share."""
    return tmp_path_factory.mktemp("points")


# all but K = 10,000, whose exact ε take seconds each
MANY = tuple(name for name in PARTS if not name.startswith("table_2_10000"))


@pytest.mark.parametrize(
    "parts", [(), ("learning_rates", "noise"), MANY], ids=["nothing", "some", "most"]
)
def test_the_page_stands_with_any_part_of_the_records(parts, tmp_path, kept, monkeypatch):
    """Every cell runs on digits at the smallest settings, whatever is recorded; all is trained."""
    record(tmp_path, parts)
    for function in (measured, claims.verdict, run.recorded_rates):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    for module in (experiment, run):
        monkeypatch.setattr(module, "point_cache", lambda chapter: kept)
    monkeypatch.setattr(plt, "show", lambda: None)
    monkeypatch.setattr(experiment.os, "cpu_count", lambda: 1)
    small = FedCdp.of_profile("smoke", dataset="digits", device="cpu").model_dump()
    page = types.ModuleType("page")
    for source, tags in sources():
        exec(source, page.__dict__)
        if "parameters" in tags:
            page.__dict__.update(small)
    plt.close("all")
    crossed = page.crossed("fed_cdp/table_4", "clip", "C")
    assert ("status" in crossed.columns) == (parts == MANY)
    if parts == MANY:
        statuses = Counter(str(row[-1]) for row in crossed.rows)
        assert statuses.keys() == {"undecided", "reduced setting", "another version"}
        assert page.searched_trainings() and page.rows
        assert len(page.noisy) > 5 and page.figure.axes
    else:
        assert not page.searched_trainings()
    text = page.tables.beside(
        "fed_cdp/table_2", page.ACCURACIES, page.one_cell, frame=page.frame
    ).html()
    assert ("reproduced</span>" in text) == (parts == MANY)
    assert ("0.924" in text) == (parts == MANY)
    arms = {arm[:3] for arm in page.RATES}  # what was not recorded was searched before it was shown
    assert {("digits", *arm) for arm in ARMS} <= arms


def test_the_exercise_says_what_is_wrong(capsys):
    module = exercise()
    for sentence, function in (
        ("expected a vector of 30 numbers, got 1", lambda gradient: 0),
        ("expected a vector of 30 numbers, got NoneType", lambda gradient: None),
        ("expected a vector of 30 numbers, got 600", lambda gradient: torch.zeros(600)),
        ("got a vector that begins [0.0, 0.0, 0.0]", lambda gradient: torch.zeros(30)),
    ):
        assert module.check_my_record(function) is False
        said = capsys.readouterr().out
        assert "client 0: the input was the gradient" in said and sentence in said


def exercise():
    """Return a module with the exercise's check and its published solution."""
    check = next(source for source, _ in sources() if "def check_my_record" in source)
    solutions = (ROOT / "book" / "solutions_05.md").read_text()
    solution = re.search(r"```python\n(def my_record.*?)```", solutions, re.S).group(1)
    module = types.ModuleType("exercise")
    module.__dict__.update(
        {
            "torch": torch,
            "np": np,
            "chapter": training,
            "Tap": Tap,
            "simulate": simulate,
            "fed_cdp": fed_cdp,
            "fed_sdp": fed_sdp,
        }
    )
    exec(check.partition("\n\n\ntry:")[0] + "\n" + solution, module.__dict__)
    return module


def test_the_coding_exercise_can_be_solved_and_failed():
    module = exercise()
    assert module.check_my_record(module.my_record)
    assert not module.check_my_record(lambda gradient: next(iter(gradient.values()))[0] * 0 + 1)
    assert not module.check_my_record(lambda gradient: list(gradient.values())[-1].flatten()[:30])
    # what the solution says of Fed-CDP: as coded it breaks too; as printed the cosine is that of
    # random directions
    assert module.similarity(module.my_record, fed_cdp("batch")) > 0.999
    assert module.similarity(module.my_record, fed_cdp("example")) < 0.5
