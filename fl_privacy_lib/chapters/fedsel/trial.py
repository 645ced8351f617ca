"""FedSel's fair trial: every arm at its best learning rate, and the departures (chapter 08).

The paper's numbers for η, b, μ and k are lost. η is searched for every arm; b = 0.01 n, μ = 0.1 and
k = 0.1 d are the readings that fit the text best, and the others are tried one at a time.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import t

from fl_privacy_lib.chapters.fedsel import grid
from fl_privacy_lib.chapters.fedsel.grid import Results
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.training import SELECTIONS, WHOLE, Training
from fl_privacy_lib.reproduction.experiment import Row
from fl_privacy_lib.reproduction.records import Values, numbers

Changes = dict[str, Any]
FULL: Changes = {"send": "full", "value": "none"}
FLAT: Changes = {"send": "flat", "raw": True}
RIVALS: dict[str, dict[str, Changes]] = {
    "two_stage": {"flat": FLAT, "full": FULL},
    "compressed": {"flat": FLAT, "compressed": {"send": "compressed"}},
    "other_perturbation": {"flat": FLAT},
    "two_epochs": {"flat": FLAT, "no_memory": {"memory": False}},
    "accumulation": {"flat": FLAT, "scaled": {"raw": False}},
    "selection_only": {name: {"send": name} for name in ("random", "top_k", "full", "exp")},
    "ratio": {"flat": FLAT, "large_share": {"ratio": 0.8}},
    "batch_size": {"flat": FLAT},
    "convergence": {"one_epoch": {"epochs": 1}},
}
"""Panel → the arms that each of its arms is compared with → what these do otherwise."""
BESIDES = {
    "selection_only": ("sure_early_lead", "sure_calm"),
    "ratio": ("possible_lead", "sure_calm"),
    "accumulation": ("sure_calm",),
    "other_perturbation": ("sure_calm",),
    "batch_size": ("sure_calm",),
}
"""Panel → what is recorded of its comparisons besides the lead."""
RATIOS = (0.02, 0.05, 0.1, 0.8)
REPETITIONS = 3  # of the judged rows: with five folds 15 runs an arm
DEPARTURES = {"batch_share": (0.005, 0.02), "ratio": (0.05, 0.2), "top_share": (0.05, 0.2)}
"""What else the text leaves out → its other readings, one at a time."""


def at_best_step(arm: Training) -> Training:
    """Return the arm with a learning rate of its own; arms that do the same become equal.

    A factor d is a step d times as long, so PM and HM over whole vectors are searched without it.
    """
    if arm.send not in SELECTIONS:
        arm = replace(arm, ratio=0.1, budget="within", memory=False, raw=True)
        if arm.value == "none":
            arm = replace(arm, epsilon=1.0)
        if arm.send != "top_k":
            arm = replace(arm, top_share=0.1)
        if arm.send == "flat" and arm.value in ("pm", "hm"):
            arm = replace(arm, send="flat_unscaled")
    repetitions = min(arm.repetitions, REPETITIONS)
    memory = arm.memory and arm.epochs > 1
    return replace(arm, tuned=True, memory=memory, repetitions=repetitions)


def least(values: np.ndarray) -> float:
    """Return the lower end of the mean's two-sided 95 % t-interval, values [runs]."""
    error = values.std(ddof=1) / len(values) ** 0.5
    return float(values.mean() - t.ppf(0.975, len(values) - 1) * error)


def leads(rivals: tuple[str, ...], besides: tuple[str, ...], results: Results) -> Values:
    """Return an arm's accuracies and its leads over other arms, in percentage points, run by run.

    Where both learn, also the lead that is sure, the one that is possible, the sure lead after a
    quarter of the rounds, and how much less the arm surely spreads over the runs, by two standard
    errors. An arm at the larger class neither wins nor loses.
    """
    arm, *others = results
    values = grid.accuracies([arm]) | {"learns": numbers([bool(arm["learns"])])}
    for name, other in zip(rivals, others, strict=True):
        runs = 100 * (arm["curve"] - other["curve"])
        last, early = runs[:, -1], runs[:, max(0, round(runs.shape[1] / 4) - 1)]
        values[f"lead_over_{name}"] = numbers(last)
        if arm["learns"] and other["learns"]:
            spread = [100 * numbers(r["curve"][:, -1])["std"] for r in (other, arm)]
            error = (sum(s**2 for s in spread) / (2 * len(last))) ** 0.5
            limits = {
                "sure_lead": least(last),
                "possible_lead": -least(-last),
                "sure_early_lead": least(early),
                "sure_calm": spread[0] - spread[1] - 2 * error,
            }
            kinds = ("sure_lead", *besides)
            values |= {f"{kind}_over_{name}": numbers([limits[kind]]) for kind in kinds}
    return values


def gain_and_loss(results: Results) -> Values:
    """Return Table 3's quantities, in percentage points, and the steps of the three arms.

    Parameters
    ----------
    results : of the arms within, control and flat, see `grid.gain_and_loss`
    """
    within, control, flat = grid.points_of(results)
    learn = all(r["learns"] for r in results)
    values = {
        "gain": numbers(control - flat),
        "loss": numbers(control - within),
        "gain_over_loss": numbers(within - flat),
        "learns": numbers([learn]),
    }
    if learn:
        values["sure_gain"] = numbers([least(control - flat)])
        values["sure_gain_over_loss"] = numbers([least(within - flat)])
    for end, result in zip(("", "_control", "_flat"), results, strict=True):
        values[f"learning_rate{end}"] = numbers([float(result["server_lr"])])
    return values


def tried(results: Results) -> Values:
    """Return the accuracy at every step that was tried for an arm, and the chosen step."""
    (result,) = results
    return {
        f"accuracy_at_{step:g}": numbers(scores[~np.isnan(scores)])
        for step, scores in zip(result["steps"], result["scores"], strict=True)
    } | {
        "chosen": numbers([float(result["server_lr"])]),
        "learns": numbers([bool(result["learns"])]),
    }


def _row(arms: tuple[Training, ...], values: Callable[[Results], Values], **keys: str) -> Row:
    """Return a recorded row without the columns that are the same in all."""
    row = grid.row_of(arms, values, **keys)
    for name in ("server_lr", "tuned", "discount", "l2", "seed"):
        del row.key[name]
    return row


def _table_3(arm: Training, **keys: str) -> Row:
    arms = (arm, replace(arm, budget="control"), replace(arm, **FLAT))
    return _row(tuple(map(at_best_step, arms)), gain_and_loss, **keys, method=arm.send)


def _tuned(settings: FedSel) -> list[Row]:
    panels: dict[str, dict[Training, None]] = {panel: {} for panel in RIVALS}
    for row in (*grid.figure_2(settings), *grid.figure_3(settings)):
        if row.points[0].budget != "control" and row.points[0].ratio in RATIOS:
            panels[row.key["panel"]][at_best_step(row.points[0])] = None
    for dataset, model in grid.ROWS:
        arm = replace(grid.base(settings, dataset, model), epochs=2, **FULL)
        panels["convergence"][at_best_step(arm)] = None
    cells = []
    for panel, arms in panels.items():
        for arm in sorted(arms, key=lambda arm: arm.epsilon not in (1.0, 4.0)):
            others = {n: at_best_step(replace(arm, **c)) for n, c in RIVALS[panel].items()}
            rivals = {
                n: other
                for n, other in others.items()
                if other != arm and not (other.value == "none" and other.send in WHOLE)
            }
            values = partial(leads, tuple(rivals), BESIDES.get(panel, ()))
            cells.append(_row((arm, *rivals.values()), values, panel=panel, method=arm.method))
        if panel == "two_stage":
            cells += [_table_3(r.points[0], panel="table_3") for r in grid.table_3(settings)]
    return cells


def _departures(settings: FedSel) -> list[Row]:
    changes: list[Changes] = [{name: r} for name, rs in DEPARTURES.items() for r in rs]
    cells = []
    for epsilon, (dataset, model) in itertools.product((1.0, 4.0), grid.ROWS):
        arm = replace(grid.base(settings, dataset, model), epsilon=epsilon, repetitions=1)
        for change in changes:
            arms = [at_best_step(replace(arm, **change, **c)) for c in ({}, FLAT)]
            values, keys = partial(leads, ("flat",), ()), {"departure": next(iter(change))}
            cells.append(_row(tuple(arms), values, **keys, method=arm.method))
    return cells


def _search(settings: FedSel) -> list[Row]:
    arms = dict.fromkeys(
        arm for row in (*_tuned(settings), *_departures(settings)) for arm in row.points
    )
    return [_row((arm,), tried, method=arm.method) for arm in arms]


TABLES: dict[str, Callable[[FedSel], list[Row]]] = {
    "fedsel/tuned": _tuned,
    "fedsel/departures": _departures,
    "fedsel/search": _search,
}
"""Table → its rows at some settings: the judged ones, the departures, and every arm's search."""
