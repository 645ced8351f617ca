"""Attacking and recording the cells of compensation (chapter 09)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.compensation import grid
from fl_privacy_lib.chapters.compensation.grid import ATTACKS, DATASETS, PAPER, row_of
from fl_privacy_lib.chapters.compensation.leaks import measure
from fl_privacy_lib.chapters.compensation.parameters import Compensation
from fl_privacy_lib.chapters.compensation.studies import Study, run_study
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row

PANELS = {f"table_3{panel}": partial(grid.table_3, f"table_3{panel}") for panel in "abce"}


@dataclass(frozen=True)
class CompensationExperiment(Experiment):
    """Chapter 09: attacks on updates with noisy slices, and studies of the mechanisms."""

    chapter = "09"

    def parts(self, settings: Compensation, folder: Path) -> list[Part]:
        """Return the mechanisms, then each table's attacks, those on LeNet before ConvNet's."""

        def studied(datasets: tuple[str, ...]) -> list[Row]:
            return [row_of(point) for d in datasets for point in grid.studies(settings, d)]

        def attacked(make: Any, attack: str, datasets: tuple[str, ...]) -> list[Row]:
            return [row_of(point) for d in datasets for point in make(settings, d, attack)]

        parts = [Part(f"{PAPER}/mechanisms", studied, ("mnist",), "mechanisms")]
        tables = {"table_2": grid.table_2, "adaptive": grid.adaptive} | PANELS
        for attack in ATTACKS:
            parts += [
                Part(f"{PAPER}/{table}", partial(attacked, make, attack), DATASETS,
                     f"{table}_{attack}", long=True)
                for table, make in tables.items()
            ]  # fmt: skip
        return parts

    def run(self, point: Any, device: torch.device) -> Result:
        """Attack a cell, or study a mechanism."""
        return run_study(point, device) if isinstance(point, Study) else measure(point, device)


EXPERIMENT = CompensationExperiment()
