"""Chapter 05's grid: its cells, the searches behind them, and which rate a cell takes."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fed_cdp_scenes import EVERYTHING, NOTHING

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp import grid as fed_cdp_grid
from fl_privacy_lib.chapters.fed_cdp.grid import ARMS, PARTS
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.rates import RATES, Recorded, best_rates, with_rate
from fl_privacy_lib.reproduction.experiments.training import Training
from fl_privacy_lib.reproduction.published import load_published

FULL = FedCdp.of_profile("full")


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_cells_with_keys_of_their_own(name):
    part = PARTS[name]
    for dataset in part.datasets:
        cells = part.make(FULL, dataset, EVERYTHING)
        keys = [tuple(cell.key.items()) for cell in cells]
        assert keys and len(set(keys)) == len(keys)
        assert len({tuple(cell.key) for cell in cells}) == 1


def test_parts_of_one_table_have_the_same_columns():
    columns = {}
    for part in PARTS.values():
        for dataset in part.datasets:
            columns.setdefault(part.table, set()).add(
                tuple(part.make(FULL, dataset, EVERYTHING)[0].key)
            )
    assert all(len(layouts) == 1 for layouts in columns.values())


@pytest.mark.parametrize("table", ["table_1", "table_2", "table_4", "table_5"])
def test_every_published_accuracy_has_its_cells(table):
    printed = load_published(f"fed_cdp/{table}").query("metric == 'accuracy'")
    keys = [c for c in printed.columns if c not in ("metric", "unit", "value")]
    parts = [part for part in PARTS.values() if part.table == table]
    cells = {
        tuple(
            f"{cell.key[k]:g}"
            if isinstance(cell.key[k], float)
            else str(cell.key[k]).removesuffix("_z")
            for k in keys
        )
        for part in parts
        for d in part.datasets
        for cell in part.make(FULL, d, EVERYTHING)
    }
    assert {tuple(row) for row in printed[keys].to_numpy()} <= cells


def test_every_arm_gets_the_same_effort():
    cells = PARTS["learning_rates"].make(FULL, "mnist", NOTHING)
    tried = pd.DataFrame([cell.key for cell in cells]).groupby(
        ["method", "setting", "noise_scale", "local_iterations"]
    )
    assert all(tuple(sorted(rates)) == RATES for rates in tried["local_lr"].apply(list))
    assert {(m, s) for m, s, *_ in tried.groups} == set(ARMS)
    efforts = {(p.participants, p.rounds, p.held_out, p.seeds) for c in cells for p in c.points}
    assert efforts == {(5, 10, True, 1)}


def test_a_searched_cell_has_its_trainings_in_its_own_population():
    """Every rate is tried on held-out data in the cell itself; the row is judged at three seeds."""
    for name in ("table_2_100_20", "table_1", "table_4", "table_5", "table_4_large"):
        part, tries = PARTS[name], PARTS[f"search_{name}"]
        for dataset in part.datasets:
            judged = {row.points[0] for row in part.make(FULL, dataset, EVERYTHING)}
            tried = {row.points[0] for row in tries.make(FULL, dataset, EVERYTHING)}
            cells = {replace(p, local_lr=0.0, rounds=0, seeds=1, held_out=True) for p in tried}
            assert all(p.held_out for p in tried)
            for point in (p for p in judged if p.setting != "as_coded"):
                assert (point.seeds, point.held_out, point.local_lr) == (3, False, 0.0158)
                assert replace(point, local_lr=0.0, rounds=0, seeds=1, held_out=True) in cells


def test_nothing_is_judged_before_its_search_is_done():
    assert PARTS["table_4"].make(FULL, "cancer", NOTHING) == []
    asked = PARTS["search_table_4"].make(FULL, "cancer", NOTHING)
    # the middle cell in both readings, all seven rates in full, five folds; the others wait
    assert len(asked) == 2 * 7
    assert {(p.clip_norm, p.rounds, p.seeds) for row in asked for p in row.points} == {(4, 3, 5)}
    (first,) = {p.rounds for r in PARTS["search_table_2_100_10"].make(FULL, "mnist", NOTHING)
                for p in r.points}  # fmt: skip
    assert first == 10


def made_up_accuracy(value):
    names = "accuracy test_accuracy guess evaluated rounds_run diverged growth".split()
    return {name: np.array([value]) for name in names}


def test_a_large_round_takes_the_rate_of_the_largest_searched_cell():
    rows = PARTS["table_2_1000_200"].make(FULL, "mnist", EVERYTHING)
    assert {row.points[0].seeds for row in rows} == {1}
    assert "search_table_2_1000_200" not in PARTS
    assert rows[0].values([made_up_accuracy(0.5)])["searched"]["mean"] == 0


def rates_frame(scores, **changes):
    rows = [
        {
            "dataset": "mnist",
            "method": "fed_cdp",
            "setting": "code",
            "noise_scale": "6",
            "local_iterations": "100",
            "local_lr": f"{rate:g}",
            "metric": "accuracy",
            "mean": score,
        }
        | changes
        for rate, score in zip(RATES, scores, strict=False)
    ]
    return pd.DataFrame(rows)


def test_the_best_rate_is_the_smaller_of_equal_ones_and_needs_a_whole_grid():
    arm = ("mnist", "fed_cdp", "code", "6", "100")
    assert best_rates(rates_frame([0.1, 0.5, 0.5, 0.2, 0.1])) == {arm: RATES[1]}
    assert best_rates(rates_frame([0.1, 0.5, 0.5, 0.2])) == {}
    assert best_rates(rates_frame([])) == {}


def test_a_point_takes_its_arms_rate_or_says_what_is_missing():
    recorded = Recorded(best_rates(rates_frame([0.1, 0.2, 0.9, 0.2, 0.1])), {})
    point = Training("mnist", "fed_cdp", "code")
    assert with_rate(point, recorded).local_lr == RATES[2]
    assert with_rate(replace(point, method="median_clip"), recorded).local_lr == RATES[2]
    with pytest.raises(
        InputError, match="printed, 6, 100 is not chosen yet: record the part learning_rates"
    ):
        with_rate(replace(point, setting="printed"), recorded)


def test_norms_are_summed_up_by_tenths():
    norms = np.ones((20, 2, 3)) * np.arange(20, 0, -1)[:, None, None]
    values = fed_cdp_grid.norm_values(1, 0, {"norms": norms})
    assert values["norm_0"]["mean"] == 19.5 and values["norm_9"]["mean"] == 1.5
    assert values["late_over_early"]["mean"] == pytest.approx(1.5 / 19.5)
    assert fed_cdp_grid.norm_values(1, 1, {"norms": norms})["late_over_early"]["mean"] == 1
