"""Searched cells: the trainings that choose a printed cell's learning rate, and its judged row.

A table's function makes `Cell`s; its two parts of a recording are their `searches`, which ask for
more as their rows are recorded, and the rows that are then `judged`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_privacy_lib.reproduction.comparison import cells
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.training import SMALL, Training, fold_count, point_of
from fl_privacy_lib.reproduction.records import Values, numbers, read_record
from fl_privacy_lib.reproduction.search import Search, Tries, Try, search, stages_of, step_near
from fl_privacy_lib.reproduction.verdict import learns


def row_of(point: Any, values: Callable[[Result], Values], **keys: str) -> Row:
    """Return a point's recorded row; `keys` are key columns before those of its settings."""
    settings = asdict(point)
    key = keys | settings.pop("arm", {}) | settings
    return Row(key, (point,), lambda results: values(results[0]), getattr(point, "seeds", 1))


def training_values(result: Result) -> Values:
    """Return a training's accuracies over the seeds, how long it ran and whether it diverged."""
    names = (
        "accuracy", "test_accuracy", "guess", "evaluated", "rounds_run", "diverged", "growth",
    )  # fmt: skip
    return {name: numbers(result[name]) for name in names if np.isfinite(result[name]).all()}


def training_row(point: Training, **keys: str) -> Row:
    """Return a training's recorded row."""
    return row_of(point, training_values, **keys)


Tried = dict[Training, Tries]
"""A training without its rate and rounds → what was tried in its cell."""


def tried_in(searched: pd.DataFrame, kind: type[Training] = Training) -> Tried:
    """Return what the recorded rows of searches say, of trainings of a kind."""
    tried: dict[Training, dict[tuple[int, float], Try]] = {}
    for cell in cells(searched):
        point = point_of(cell, kind)
        accuracy, error = cell["accuracy"], cell["accuracy_std"] / point.seeds**0.5
        if point.seeds == 1:
            error = (accuracy * (1 - accuracy) / cell["evaluated"]) ** 0.5
        tries = tried.setdefault(_without_rate(point), {})
        tries[point.rounds, point.local_lr] = Try(
            accuracy, error, cell["diverged"] == 0 and learns(cell)
        )
    return dict(tried)


def recorded_tries(path: Path, kind: type[Training]) -> Tried:
    """Return what a record of searches says; nothing where there is none yet."""
    return tried_in(read_record(path), kind) if path.exists() else {}


def _without_rate(point: Training) -> Training:
    return replace(point, rounds=0, local_lr=0.0, held_out=True, seeds=1)


@dataclass(frozen=True)
class Cell:
    """A cell of a printed table.

    Parameters
    ----------
    point : with the seeds of the row that is judged; its learning rate counts where it is `fixed`
    keys : key columns before those of its settings
    around : the cell whose chosen rate this one goes by; None: it has a whole search of its own
    factor : that rate times this is the middle of the three that are tried; 0: it is taken over
    fixed : the rate is given, and nothing is searched
    """

    point: Training
    keys: dict[str, str]
    around: Training | None = None
    factor: float = 0.0
    fixed: bool = False

    def search(self, tried: Tried) -> Search:
        """Return where the search for its rate stands."""
        if self.fixed:
            return Search((), self.point.local_lr)
        if self.around is None:
            return _search(self.point, tried)
        middle = _search(self.around, tried)
        if middle.rate is None:
            return Search(())
        if not self.factor:
            return replace(middle, asked=())
        step = step_near(middle.rate * self.factor)
        return _search(self.point, tried, (step - 1, step, step + 1))


def _search(point: Training, tried: Tried, steps: Sequence[int] = ()) -> Search:
    """Return where a cell's search stands: of some steps, all in full; of none, by halving."""
    tries = tried.get(_without_rate(point), {})
    if steps:
        return search(tries, ((point.rounds, 1),), steps)
    return search(tries, stages_of(point.rounds))


def searches(table: Iterable[Cell], tried: Tried) -> list[Row]:
    """Return every training that the searches of some cells have asked for so far."""
    points = []
    for cell in table:
        examples = setup_of(cell.point.dataset).examples
        seeds = fold_count(examples) if examples < SMALL else 1
        points += [
            replace(cell.point, rounds=rounds, local_lr=rate, held_out=True, seeds=seeds)
            for rounds, rate in cell.search(tried).asked
        ]
    return [training_row(point) for point in dict.fromkeys(points)]


def judged(table: Iterable[Cell], tried: Tried) -> list[Row]:
    """Return the rows of a printed table, of each cell whose learning rate is chosen."""
    rows = []
    for cell in table:
        chosen = cell.search(tried)
        if chosen.rate is not None:
            values = partial(_searched_values, len(chosen.asked))
            point = replace(cell.point, local_lr=chosen.rate)
            rows.append(row_of(point, training_values if cell.fixed else values, **cell.keys))
    return rows


def _searched_values(tries: int, result: Result) -> Values:
    """Return a training's values, and how many trainings of its cell chose its learning rate.

    None did where the rate was taken over from a smaller cell.
    """
    return training_values(result) | {"searched": numbers([tries])}
