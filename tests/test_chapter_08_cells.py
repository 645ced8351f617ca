"""Chapter 08's cells: keys, what a comparison differs by, gains and leads by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from fl_privacy_lib.chapters.fedsel import grid as fedsel_grid
from fl_privacy_lib.chapters.fedsel import mechanisms as mechanisms
from fl_privacy_lib.chapters.fedsel import run, trial
from fl_privacy_lib.chapters.fedsel import training as fedsel
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.statements import statement_rows
from fl_privacy_lib.chapters.fedsel.training import Training
from fl_privacy_lib.reproduction.published import load_published

ARM = Training("cancer", repetitions=2, folds=3, batch_share=0.05)


@pytest.fixture(scope="module")
def grid():
    return {table: make(FedSel.of_profile("full")) for table, make in run.TABLES.items()}


def test_cells_have_keys_of_their_own_and_equal_columns(grid):
    for table, cells in grid.items():
        keys = [cell.key for cell in cells]
        assert len({tuple(key) for key in keys}) == 1, table
        assert len({tuple(key.values()) for key in keys}) == len(keys), table


def test_table_3_has_a_cell_for_every_published_one_at_every_budget(grid):
    published = load_published("fedsel/table_3")
    wanted = set(published[["dataset", "model", "method"]].itertuples(index=False, name=None))
    keys = [cell.key for cell in grid["fedsel/table_3"]]
    for epsilon, tuned in itertools.product(fedsel_grid.BUDGETS, (True, False)):
        assert {
            (k["dataset"], k["model"], k["method"])
            for k in keys
            if (k["epsilon"], k["tuned"]) == (epsilon, tuned)
        } == wanted
    assert len(wanted) == 24 and len(keys) == 24 * len(fedsel_grid.BUDGETS) * 2


def test_only_what_a_comparison_names_differs_between_its_arms(grid):
    for cell in grid["fedsel/tuned"]:
        assert all(a.tuned and (a.repetitions, a.folds) == (3, 5) for a in cell.points)
        assert len({(a.dataset, a.model) for a in cell.points}) == 1
        assert "flat" not in {a.send for a in cell.points if a.value in ("pm", "hm")}
    for cell in grid["fedsel/table_3"]:
        within, control, flat = cell.points
        assert replace(within, budget="control") == control
        tuned = within.tuned
        assert (control.tuned, flat.tuned) == (tuned, tuned)
        assert flat == (trial.at_best_step if tuned else replace)(replace(within, send="flat"))
    two = [c for c in grid["fedsel/tuned"] if c.key["panel"] == "two_epochs" and c.key["memory"]]
    rivals = [cell.points[2] for cell in two]
    assert two and [replace(c.points[0], memory=False) for c in two] == rivals
    one = [c.points for c in grid["fedsel/tuned"] if c.key["panel"] == "top_one"]
    assert len(one) == 9 and {(arm.epsilon, arm.top_share) for arm, _ in one} == {(8, 0.1)}
    assert {rival.send for _, rival in one} == {"top_k"}
    assert {fedsel.top(rival.top_share, d) for _, rival in one for d in (100, 1_000)} == {1}


def test_every_departure_changes_one_setting_and_stands_beside_the_flat_solution(grid):
    defaults = {"batch_share": 0.01, "ratio": 0.1, "top_share": 0.1}
    seen = set()
    for cell in grid["fedsel/departures"]:
        arm, flat = cell.points
        changed = {n: v for n, v in defaults.items() if getattr(arm, n) != v}
        assert list(changed) == [cell.key["departure"]] and (arm.send, flat.send) == (
            "ps",
            "flat_unscaled",
        )
        seen.add((cell.key["departure"], getattr(arm, cell.key["departure"])))
    wanted = {(name, value) for name, values in trial.DEPARTURES.items() for value in values}
    assert seen == wanted and len(grid["fedsel/departures"]) == 6 * 4 * 2


def test_arms_that_do_the_same_are_searched_once(grid):
    arms = [cell.points[0] for cell in grid["fedsel/search"]]
    assert len(set(arms)) == len(arms)
    tables = ("tuned", "table_3", "departures")
    compared = {a for t in tables for c in grid[f"fedsel/{t}"] for a in c.points if a.tuned}
    assert set(arms) == compared
    flat = replace(ARM, send="flat", raw=False, ratio=0.4, memory=True, epochs=2)
    same = replace(ARM, send="flat_unscaled", epochs=2)
    assert trial.at_best_step(flat) == trial.at_best_step(same)
    one = replace(ARM, memory=True)
    assert trial.at_best_step(one) == trial.at_best_step(replace(one, memory=False))
    assert trial.at_best_step(replace(flat, value="duchi")).send == "flat"


def test_a_recorded_row_can_be_read_as_its_claims_read_it(grid):
    """Every value that a claim filters rows by is in the grid: a misspelt one is never measured."""
    from fl_privacy_lib.reproduction.claims import load_claims
    from fl_privacy_lib.reproduction.records import _text
    from fl_privacy_lib.reproduction.verdict import listed, published_setting

    columns = {
        table: {name: {_text(cell.key[name]) for cell in cells} for name in cells[0].key}
        for table, cells in grid.items()
    }
    statement_keys = [case.row().key for case in statement_rows()]
    columns["fedsel/statements"] = {
        name: {_text(key[name]) for key in statement_keys} for name in statement_keys[0]
    }
    for entry in load_claims():
        if entry["chapter"] != "08" or "test" not in entry:
            continue
        there = columns[entry["table"]]
        test = entry["test"]
        filters = [entry.get("rows", {}), test.get("rows", {}), test.get("than", {})]
        assert set(published_setting(entry["table"])) <= {*there, "profile"}, entry["id"]
        for name, wanted in itertools.chain.from_iterable(f.items() for f in filters):
            values = set(listed(wanted))
            assert values <= there[name], (entry["id"], name, values - there[name])
        assert set(test.get("on", [])) <= set(there), entry["id"]


def results(*rows, learn=True):
    return [
        {
            "curve": np.array([[0.1, value] for value in row]),
            "server_lr": np.array(0.3),
            "learns": np.array(learn),
        }
        for row in rows
    ]


def lower_end(values):
    return ttest_1samp(values, 0).confidence_interval(0.95).low


def test_gain_and_loss_by_hand():
    rows = ([0.80, 0.82, 0.83], [0.84, 0.86, 0.86], [0.70, 0.71, 0.74])
    metrics = fedsel_grid.gain_and_loss(results(*rows))
    assert metrics["gain"]["mean"] == pytest.approx(41 / 3) and metrics["gain"]["n"] == 3
    assert metrics["gain"]["std"] == pytest.approx(np.std([14, 15, 12], ddof=1))
    assert metrics["loss"]["mean"] == pytest.approx(11 / 3)
    assert metrics["gain_over_loss"]["mean"] == pytest.approx(30 / 3)
    assert metrics["sure_gain"]["mean"] == pytest.approx(lower_end([14, 15, 12]))
    assert metrics["sure_gain_over_loss"]["mean"] == pytest.approx(lower_end([10, 11, 9]))
    assert metrics["learning_rate_flat"]["mean"] == 0.3
    guessing = fedsel_grid.gain_and_loss(results(*rows, learn=False))
    assert guessing["gain"] == metrics["gain"] and "sure_gain" not in guessing


def test_leads_are_paired_and_an_arm_at_the_larger_class_has_no_sure_one():
    one, other = [0.80, 0.90, 0.85], [0.79, 0.88, 0.84]
    rows, besides = results(one, other), ("possible_lead", "sure_early_lead", "sure_calm")
    metrics = trial.leads(("flat",), besides, rows)
    assert metrics["lead_over_flat"]["mean"] == pytest.approx(4 / 3)
    assert metrics["sure_lead_over_flat"]["mean"] == pytest.approx(lower_end([1, 2, 1]))
    assert metrics["possible_lead_over_flat"]["mean"] == pytest.approx(-lower_end([-1, -2, -1]))
    assert metrics["sure_early_lead_over_flat"]["mean"] == 0  # both begin at 0.1
    spreads = [100 * np.std(row, ddof=1) for row in (other, one)]
    calm = spreads[0] - spreads[1] - 2 * math.hypot(*spreads) / math.sqrt(6)
    assert metrics["sure_calm_over_flat"]["mean"] == pytest.approx(calm)
    assert "possible_lead_over_flat" not in trial.leads(("flat",), (), rows)
    for who in (0, 1):
        guessing = [r | {"learns": i != who} for i, r in enumerate(rows)]
        metrics = trial.leads(("flat",), besides, guessing)
        assert metrics["lead_over_flat"]["mean"] == pytest.approx(4 / 3)
        assert not [name for name in metrics if name.startswith(("sure", "possible"))]


def test_what_was_tried_is_recorded_step_by_step():
    tried = {
        "steps": np.array([0.1, 3.0]),
        "scores": np.array([[0.6, np.nan, np.nan], [0.7, 0.8, 0.9]]),
        "server_lr": np.array(3.0),
        "learns": np.array(True),
    }
    metrics = trial.tried([tried])
    assert metrics["accuracy_at_0.1"] == {"mean": 0.6, "std": 0.0, "n": 1}
    assert metrics["accuracy_at_3"]["mean"] == pytest.approx(0.8)
    assert metrics["accuracy_at_3"]["n"] == 3
    assert metrics["chosen"]["mean"] == 3 and metrics["learns"]["mean"] == 1


def test_accuracies_of_a_curve():
    curve = np.array(
        [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.1, 0.4, 0.3, 0.4, 0.5, 0.6, 0.7, 0.6]]
    )
    metrics = fedsel_grid.accuracies([{"curve": curve, "server_lr": np.array(0.3)}])
    assert metrics["accuracy"]["mean"] == pytest.approx(0.7)
    assert metrics["accuracy_at_a_quarter"]["mean"] == pytest.approx(0.3)
    assert (
        metrics["spread"]["mean"]
        == metrics["accuracy"]["std"]
        == pytest.approx(np.std([0.8, 0.6], ddof=1))
    )
    assert metrics["learning_rate"]["mean"] == 0.3
