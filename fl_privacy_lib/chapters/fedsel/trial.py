"""FedSel's fair trial: every arm at its best learning rate, and the departures (chapter 08).

The paper's numbers for η, b, μ and k are lost. η is searched for every arm; b = 0.01 n, μ = 0.1 and
k = 0.1 d are the readings that fit the text best, and the others are tried one at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fl_privacy_lib.chapters.fedsel import grid
from fl_privacy_lib.chapters.fedsel.grid import Results
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.training import SELECTIONS, WHOLE, Training
from fl_privacy_lib.reproduction.experiment import Row
from fl_privacy_lib.reproduction.records import Values, numbers

Changes = dict[str, Any]
FULL: Changes = {"send": "full", "value": "none"}
WHOLE_VECTOR: Changes = {"ratio": 0.1, "budget": "within", "memory": False, "raw": True}
FLAT: Changes = {"send": "flat", "raw": True}
RIVALS: dict[str, dict[str, Changes]] = {
    "two_stage": {"flat": FLAT, "full": FULL},
    "compressed": {"flat": FLAT, "compressed": {"send": "compressed"}},
    "other_perturbation": {"flat": FLAT},
    "two_epochs": {"flat": FLAT, "no_memory": {"memory": False}},
    "accumulation": {"flat": FLAT, "scaled": {"raw": False}},
    "selection_only": {name: {"send": name} for name in ("random", "top_k", "full", "exp")},
    "top_one": {"top_one": {"send": "top_k", "top_share": 1e-3}},
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
        factor = arm.send == "flat" and arm.value in ("pm", "hm")
        arm = replace(
            arm,
            send="flat_unscaled" if factor else arm.send,
            epsilon=1.0 if arm.value == "none" else arm.epsilon,
            top_share=arm.top_share if arm.send == "top_k" else 0.1,
            **WHOLE_VECTOR,
        )
    memory = arm.memory and arm.epochs > 1
    return replace(arm, tuned=True, memory=memory, repetitions=min(arm.repetitions, REPETITIONS))


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
            limits = {
                "sure_lead": grid.least(last),
                "possible_lead": -grid.least(-last),
                "sure_early_lead": grid.least(early),
                "sure_calm": spread[0] - spread[1] - 2 * np.hypot(*spread) / (2 * len(last)) ** 0.5,
            }
            values |= {
                f"{kind}_over_{name}": numbers([limits[kind]]) for kind in ("sure_lead", *besides)
            }
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


def _compare(arm: Training, rivals: dict[str, Changes], **keys: str) -> Row:
    """Return the row of an arm beside those of its rivals that are other arms."""
    arm = at_best_step(arm)
    others = {
        name: at_best_step(other)
        for name, changes in rivals.items()
        if (other := replace(arm, **changes)).value != "none" or other.send not in WHOLE
    }
    others = {name: other for name, other in others.items() if other != arm}
    values = partial(leads, tuple(others), BESIDES.get(keys.get("panel", ""), ()))
    return _row((arm, *others.values()), values, **keys, method=arm.method)


def _tuned(settings: FedSel) -> list[Row]:
    twice = [replace(grid.base(settings, *row), epochs=2, **FULL) for row in grid.ROWS]
    panels = grid.figure_2(settings) | grid.figure_3(settings) | {"convergence": twice}
    # a reader's note has k = 1 for NP-K
    panels["top_one"] = [arm for arm in panels["selection_only"] if arm.epsilon == 8]
    # at ε = 1 no arm of this panel learns, whatever its step
    panels["batch_size"] = grid.combine(panels["batch_size"], epsilon=(1.0, 4.0))
    compared = {
        (panel, at_best_step(arm)): None
        for panel, arms in panels.items()
        for arm in arms
        if arm.budget != "control" and arm.ratio in RATIOS
    }
    return [_compare(arm, RIVALS[panel], panel=panel) for panel, arm in compared]


def _table_3(settings: FedSel) -> list[Row]:
    shared = grid.table_3(settings)
    both = [*shared, *(tuple(map(at_best_step, arms)) for arms in shared)]
    return [grid.row_of(arms, grid.gain_and_loss, method=arms[0].send) for arms in both]


def _departures(settings: FedSel) -> list[Row]:
    rows = [replace(grid.base(settings, name), repetitions=1) for name in dict(grid.ROWS)]
    return [
        _compare(arm, {"flat": FLAT}, departure=name)
        for name, readings in DEPARTURES.items()
        for arm in grid.combine(rows, epsilon=(1.0, 4.0), **{name: readings})
    ]


def _search(settings: FedSel) -> list[Row]:
    rows = (*_tuned(settings), *_table_3(settings), *_departures(settings))
    arms = dict.fromkeys(arm for row in rows for arm in row.points if arm.tuned)
    return [_row((arm,), tried, method=arm.method) for arm in arms]


TABLES: dict[str, Callable[[FedSel], list[Row]]] = {
    "fedsel/table_3": _table_3,
    "fedsel/tuned": _tuned,
    "fedsel/departures": _departures,
    "fedsel/search": _search,
}
"""Table → its rows at some settings: the judged ones, the departures, and every arm's search."""
