"""Running chapter 04: the papers' tables of time, as ratios to non-private training."""

from functools import partial
from pathlib import Path

import torch

from fl_privacy_lib.chapters.fast_training import grid
from fl_privacy_lib.chapters.fast_training.parameters import FastTraining
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row


class FastTrainingExperiment(Experiment):
    """Chapter 04: a point is one interleaved run, from which a data set's rows are read."""

    chapter = "04"
    on_cpu = True

    def parts(self, settings: FastTraining, folder: Path) -> list[Part]:
        """Return a part for each table; its rows repeat as often as the settings say."""

        def rows(table: str, _: tuple[str, ...]) -> list[Row]:
            return grid.rows_of(table, settings.repetitions)

        return [Part(table, partial(rows, table), alone=True) for table in grid.WRITTEN]

    def run(self, point: grid.Timing, device: torch.device) -> Result:
        """Time every engine in every repetition."""
        return grid.measure(point)

    def words(self, point: grid.Timing, result: Result) -> str:
        """Return what was timed."""
        return f"{point.data}: {len(result)} engines and methods, {point.repetitions} times"


EXPERIMENT = FastTrainingExperiment()
