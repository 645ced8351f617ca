"""Running chapter 08: FedSel's arms, and the exact values beside its lemmas."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.chapters.fedsel import grid, mechanisms, trial
from fl_privacy_lib.chapters.fedsel import training as fedsel
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.statements import statement_rows
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row

TABLES = grid.TABLES | trial.TABLES


class FedSelExperiment(Experiment):
    """Chapter 08: a point is an arm's training, or a mechanism's error or time."""

    chapter = "08"
    on_cpu = True

    def parts(self, settings: FedSel, folder: Path) -> list[Part]:
        """Return the statements and the tables.

        Each panel has its own models and budgets, so `model`, `epsilon` and `value` change nothing;
        `repetitions` and `folds` count.
        """

        def rows(table: str, datasets: tuple[str, ...]) -> list[Row]:
            return [row for row in TABLES[table](settings) if _datasets([row]) <= set(datasets)]

        statements = Part("fedsel/statements", lambda _: [case.row() for case in statement_rows()])
        return [statements] + [
            Part(
                table,
                partial(rows, table),
                tuple(sorted(_datasets(make(settings)))),
                alone=table == "fedsel/selection_time",
            )
            for table, make in TABLES.items()
        ]

    def run(self, point: Any, device: torch.device) -> Result:
        """Train an arm on every fold of every repetition, or measure a mechanism."""
        return (fedsel if isinstance(point, fedsel.Training) else mechanisms).measure(point)

    def words(self, point: Any, result: Result) -> str:
        """Return the arm and its accuracy, or the mechanism's settings."""
        if not isinstance(point, fedsel.Training):
            return super().words(point, result)
        accuracy = float(np.mean(result["curve"][:, -1]))
        setting = f"{point.dataset} {point.model} {point.method} ε = {point.epsilon:g}"
        return f"{setting} η = {float(result['server_lr']):g}: accuracy {accuracy:.4f}"


def _datasets(rows: list[Row]) -> set[str]:
    return {arm.dataset for row in rows for arm in row.points if isinstance(arm, fedsel.Training)}


EXPERIMENT = FedSelExperiment()
