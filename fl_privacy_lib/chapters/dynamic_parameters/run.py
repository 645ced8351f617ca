"""Training and recording Dynamic parameters' cells (chapter 06)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.dynamic_parameters import grid
from fl_privacy_lib.chapters.dynamic_parameters.grid import COLUMNS, PAPER
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import tried_in
from fl_privacy_lib.reproduction.paths import point_cache
from fl_privacy_lib.reproduction.records import read_record


@dataclass(frozen=True)
class DynamicParametersExperiment(Experiment):
    """Chapter 06: central trainings."""

    chapter = "06"

    def parts(self, settings: DynamicParameters, folder: Path) -> list[Part]:
        """Return every search and table; what is read off the trainings costs nothing more."""
        searched = folder / PAPER / "search.csv"

        def collect(make: Any, datasets: tuple[str, ...]) -> list[Row]:
            tried = tried_in(read_record(searched), Central) if searched.exists() else {}
            return [row for d in datasets for row in make(settings, d, tried)]

        parts = []
        for name, column in COLUMNS.items():
            asked, rows = (
                partial(collect, partial(make, column)) for make in (grid.asked, grid.rows)
            )
            about = (column.datasets, f"search_{name}", column.long)
            parts.append(Part(f"{PAPER}/search", asked, *about))
            parts.append(Part(f"{PAPER}/{column.table}", rows, column.datasets, name, column.long))
        for make in (grid.stopped, grid.reached, grid.curves):
            name = make.__name__
            parts.append(
                Part(f"{PAPER}/{name}", partial(collect, make), ("mnist",), name, long=True)
            )
        return parts

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds."""
        return training.measure(point, device, point_cache(self.chapter) / "under_way")

    def words(self, point: Any, result: Result) -> str:
        """Return the setting, the accuracy, and the engine that trained."""
        state = ", diverged" if result["diverged"].any() else ""
        accuracy = float(result["accuracy"].mean())
        return (
            f"{point.dataset} {point.method} {point.noise_scale_policy} C={point.clip_norm:g} "
            f"T={point.rounds} η={point.local_lr:g}: accuracy {accuracy:.3f}{state}"
        )


EXPERIMENT = DynamicParametersExperiment()
