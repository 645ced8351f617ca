"""Attacking and recording the cells of compensation (chapter 09)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.compensation import grid
from fl_privacy_lib.chapters.compensation.grid import DATASETS, PAPER, row_of
from fl_privacy_lib.chapters.compensation.leaks import measure
from fl_privacy_lib.chapters.compensation.parameters import Compensation
from fl_privacy_lib.chapters.compensation.studies import Study, run_study
from fl_privacy_lib.chapters.compensation.training import Federated, Rounds, time_rounds, train
from fl_privacy_lib.defenses.descent import Descent
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row

TRAINED = {"dga": ("mnist", "fashion_mnist"), "gia": ("mnist", "fashion_mnist")}
"""Attack whose γ it is → data sets of the trainings; those on CIFAR-10 ask for a GPU."""
TABLES: dict[str, Any] = {"table_2": grid.table_2, "adaptive": grid.adaptive} | {
    f"table_3{panel}": partial(grid.table_3, f"table_3{panel}") for panel in "abce"
} | {"training": grid.trainings}  # fmt: skip


@dataclass(frozen=True)
class CompensationExperiment(Experiment):
    """Chapter 09: attacks on updates with noisy slices, trainings, studies of the mechanisms."""

    chapter = "09"

    def parts(self, settings: Compensation, folder: Path) -> list[Part]:
        """Return the mechanisms, then each table's attacks, those on LeNet before ConvNet's."""

        def rows(make: Any, datasets: tuple[str, ...]) -> list[Row]:
            return [row_of(point) for d in datasets for point in make(settings, d)]

        parts = [
            Part(f"{PAPER}/mechanisms", partial(rows, grid.studies), ("mnist",), "mechanisms"),
            Part(f"{PAPER}/convergence", lambda _: grid.descents(settings), name="convergence"),
            Part(
                f"{PAPER}/width", partial(rows, partial(grid.table_3, "width", attack="gia")),
                ("mnist",), "width_gia", long=True,
            ),
            Part(
                f"{PAPER}/round_time", partial(grid.round_times, settings), ("mnist",),
                "round_time", alone=True,
            ),
        ]  # fmt: skip
        for attack, trained in TRAINED.items():
            parts += [
                Part(f"{PAPER}/{table}", partial(rows, partial(make, attack=attack)),
                     trained if table == "training" else DATASETS, f"{table}_{attack}", long=True)
                for table, make in TABLES.items()
            ]  # fmt: skip
        return parts

    def run(self, point: Any, device: torch.device) -> Result:
        """Attack a cell, study a mechanism, train or descend under it, or time its rounds."""
        runs: Any = {Study: run_study, Federated: train, Rounds: time_rounds,
                     Descent: lambda descent, _: descent.run()}  # fmt: skip
        return runs.get(type(point), measure)(point, device)


EXPERIMENT = CompensationExperiment()
