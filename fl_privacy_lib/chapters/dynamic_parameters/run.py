"""Training and recording Dynamic parameters' cells (chapter 06)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.dynamic_parameters import grid
from fl_privacy_lib.chapters.dynamic_parameters.distinguishing import Game, measure_game
from fl_privacy_lib.chapters.dynamic_parameters.grid import COLUMNS, PAPER
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import judged, searches, tried_in
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
            for table, part, rows in (("search", f"search_{name}", searches),
                                      (column.table, name, judged)):  # fmt: skip
                make = partial(collect, partial(column.rows, rows))
                parts.append(Part(f"{PAPER}/{table}", make, column.datasets, part, long=True))
        for read in (grid.distinguishing, grid.stopped, grid.reached, grid.curves):
            name, long = read.__name__, read is not grid.distinguishing
            parts.append(Part(f"{PAPER}/{name}", partial(collect, read), ("mnist",), name, long))
        return parts

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds, or play a game."""
        if isinstance(point, Game):
            return measure_game(point, device)
        return training.measure(point, device, point_cache(self.chapter) / "under_way")

    def words(self, point: Any, result: Result) -> str:
        """Return the setting, and the accuracy or the share of releases told right."""
        if isinstance(point, Game):
            return f"game after {point.at_round}: {result['hits'].mean():.2f} told right"
        return (
            f"{point.dataset} {point.method} {point.noise_scale_policy} C={point.clip_norm:g} "
            f"T={point.rounds} η={point.local_lr:g}: accuracy {result['accuracy'].mean():.3f}"
        )


EXPERIMENT = DynamicParametersExperiment()
