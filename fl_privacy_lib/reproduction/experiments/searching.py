"""Searched cells: the trainings that choose a printed cell's learning rate, and its judged row.

A table's function makes `Cell`s; its two parts of a recording are their `searches`, which ask for
more as their rows are recorded, and the rows that are then `judged`. A fair trial (`verdict`) needs
the search: successive halving in the cell itself. `search` trains nothing: what was tried goes in,
and what is to be tried next, or the chosen rate, comes out, so a search that was interrupted goes
on. What is read off a training that was looked at along the way costs no training either.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fl_privacy_lib.reproduction.comparison import cells
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.training import SMALL, Training, fold_count, point_of
from fl_privacy_lib.reproduction.records import Values, numbers, read_record
from fl_privacy_lib.reproduction.verdict import learns

Tries = Mapping[tuple[int, float], "Try"]
"""(rounds, learning rate) → what came of it."""
STEPS = tuple(range(-4, 3))
"""The seven rates that a search begins with, in steps of √10 around 0.05, the released code's."""
EXTENSIONS = 2
SHORT = 10  # rounds up to which every rate is tried in full


def rate_at(step: int) -> float:
    """Return a learning rate, three digits of 0.05 · √10 to the step.

    >>> [rate_at(step) for step in STEPS]
    [0.0005, 0.00158, 0.005, 0.0158, 0.05, 0.158, 0.5]
    """
    return float(f"{0.05 * 10 ** (step / 2):.3g}")


def step_near(rate: float) -> int:
    """Return the step whose rate is nearest, by ratio.

    >>> step_near(0.0158), step_near(0.02)
    (-1, -1)
    """
    return round(2 * math.log10(rate / 0.05))


class Try(NamedTuple):
    """A training at one rate, on data held out for the search.

    Parameters
    ----------
    accuracy : in [0, 1]
    error : its standard error
    learns : whether it ended above the constant guess; a diverged one did not
    """

    accuracy: float
    error: float
    learns: bool


class Search(NamedTuple):
    """Where a search stands.

    Parameters
    ----------
    asked : (rounds, rate) of every training that it has asked for so far
    rate : the chosen rate; None while a training is missing
    learns : whether the chosen rate leaves the constant guess. If none does after the extensions,
        the guess is the result, and the trial counts as fair.
    """

    asked: tuple[tuple[int, float], ...]
    rate: float | None = None
    learns: bool = False


def stages_of(rounds: int) -> tuple[tuple[int, int], ...]:
    """Return (rounds, how many rates go on) of every stage; short trainings are all run in full.

    >>> stages_of(100), stages_of(10)
    (((10, 3), (34, 2), (100, 1)), ((10, 1),))
    """
    if rounds <= SHORT:
        return ((rounds, 1),)
    return (math.ceil(rounds / 10), 3), (math.ceil(rounds / 3), 2), (rounds, 1)


def search(tries: Tries, stages: Sequence[tuple[int, int]], steps: Sequence[int] = STEPS) -> Search:
    """Return what a search has asked for, and its choice where all of that was tried.

    Parameters
    ----------
    tries : what was tried in this cell
    stages : (rounds, how many rates go on), from `stages_of`
    steps : of the rates that it begins with; the others are extensions of an edge

    Notes
    -----
    The best of a stage that lies at the edge of the rates that the stage ran extends it there,
    twice at most, unless it gains less than its standard error over its neighbour. Noise adds up
    over the rounds, so short stages favour large steps: each longer one also runs the step below
    the smallest that goes on. A rate that does not learn
    comes after all that do, and is chosen only where none does. A stage in which none learns drops
    no rate: it has no evidence.
    """
    asked: list[tuple[int, float]] = []
    entered = list(steps)
    for rounds, going_on in stages:
        allowed = len(entered) + EXTENSIONS
        while True:
            asked += [p for s in entered if (p := (rounds, rate_at(s))) not in asked]
            if any(point not in tries for point in asked):
                return Search(tuple(asked))
            results = {s: tries[rounds, rate_at(s)] for s in entered}
            further = _edge(results)
            if rounds == stages[-1][0] and not any(t.learns for t in results.values()):
                # noise is the likelier reason, too small a step the next
                first = len(entered) == allowed - EXTENSIONS
                further = min(results) - 1 if first else max(results) + 1
            if further is None or len(entered) == allowed:
                break
            entered.append(further)
        entered = sorted(results, key=lambda s: _merit(results[s]), reverse=True)
        if results[entered[0]].learns:
            entered = entered[:going_on]
            if rounds != stages[-1][0]:
                entered.append(min(entered) - 1)
    return Search(tuple(asked), rate_at(entered[0]), results[entered[0]].learns)


def _merit(result: Try) -> tuple[bool, float]:
    return result.learns, result.accuracy


def _edge(results: Mapping[int, Try]) -> int | None:
    """Return the step beyond the edge at which a stage's best rate lies, or None."""
    best = max(results, key=lambda s: _merit(results[s]))
    for edge, outward in ((min(results), -1), (max(results), 1)):
        inside = results.get(edge - outward)
        gain = math.inf if inside is None else results[best].accuracy - inside.accuracy
        if best == edge and results[best].learns and gain >= results[best].error:
            return edge + outward
    return None


def training_values(result: Result, **beside: Any) -> Values:
    """Return a training's accuracies over the seeds, how long it ran and whether it diverged.

    `beside`: `searched`, how many trainings of its cell chose its learning rate; none did where the
    rate was taken over from a smaller cell.
    """
    names = (
        "accuracy", "test_accuracy", "guess", "evaluated", "rounds_run", "diverged", "growth",
    )  # fmt: skip
    return {n: numbers(result[n]) for n in names if np.isfinite(result[n]).all()} | beside


def row_of(point: Any, values: Callable[[Result], Values] = training_values, **keys: str) -> Row:
    """Return a point's recorded row; `keys` are key columns before those of its settings."""
    settings = asdict(point)
    return Row(keys | settings.pop("arm", {}) | settings, (point,),
               lambda results: values(results[0]), getattr(point, "seeds", 1))  # fmt: skip


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


class Cell(NamedTuple):
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
            return middle._replace(asked=())
        step = step_near(middle.rate * self.factor)
        return _search(self.point, tried, (step - 1, step, step + 1))


def _search(point: Training, tried: Tried, steps: Sequence[int] = ()) -> Search:
    """Return where a cell's search stands: of some steps, all in full; of none, by halving."""
    stages = ((point.rounds, 1),) if steps else stages_of(point.rounds)
    return search(tried.get(_without_rate(point), {}), stages, steps or STEPS)


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
    return [row_of(point) for point in dict.fromkeys(points)]


def judged(table: Iterable[Cell], tried: Tried) -> list[Row]:
    """Return the rows of a printed table, of each cell whose learning rate is chosen."""
    rows = []
    for cell in table:
        chosen = cell.search(tried)
        if chosen.rate is not None:
            beside: Any = {} if cell.fixed else {"searched": numbers([len(chosen.asked)])}
            point = replace(cell.point, local_lr=chosen.rate)
            rows.append(row_of(point, partial(training_values, **beside), **cell.keys))
    return rows


def judged_values(result: Result, **values: Any) -> Values:
    """Return some of a training's values with what says whether it was a fair trial."""
    beside = {n: result[n] for n in ("guess", "evaluated") if "accuracy" in values}
    return {n: numbers(value) for n, value in (values | beside | {"searched": [1]}).items()}


def stopped_values(share: float, results: Sequence[Result]) -> Values:
    """Return the accuracy at the last look before a training has run a share of its rounds."""
    curve = results[0]["curve"]  # [seeds, looks]
    at = max(1, int(share * curve.shape[1] + 1e-9)) - 1
    return judged_values(results[0], accuracy=curve[:, at], diverged=results[0]["diverged"])


def reached_values(
    rounds: int, results: Sequence[Result], unit: str = "iterations", target: float | None = None
) -> Values:
    """Return when the last training first reaches a target.

    Parameters
    ----------
    rounds : of the whole training; one that diverges ends before, and counts with all if it never
        reaches the target
    results : of the training that sets the target, then of the one that has to reach it
    unit : what its rounds are called; `…_left` of them are not run, 0 where it never reaches it
    target : an accuracy; None: that which the first training ends with
    """
    target = float(results[0]["accuracy"].mean()) if target is None else target
    met = results[-1]["curve"] >= target  # [seeds, looks]
    run = np.where(met.any(1), (met.argmax(1) + 1) * rounds / met.shape[1], rounds)
    values = {unit: run, f"{unit}_left": rounds - run, "reached": met.any(1)}
    values |= {name: results[-1][name] for name in ("accuracy", "diverged")}
    return judged_values(results[-1], **values, target_accuracy=[target])
