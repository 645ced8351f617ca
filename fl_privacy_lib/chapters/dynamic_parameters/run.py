"""Training and recording Dynamic parameters' cells (chapter 06)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.dynamic_parameters.distinguishing import Game, measure_game
from fl_privacy_lib.chapters.dynamic_parameters.grid import PAPER, PARTS
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments import cells, training
from fl_privacy_lib.reproduction.experiments.cells import ThreatCell
from fl_privacy_lib.reproduction.experiments.searching import recorded_tries
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.paths import point_cache

SHOWN = {
    "dataset": "", "method": "", "arm": "", "noise_scale_policy": "", "batch_size": "B=",
    "clip_norm": "C=", "noise_scale": "σ=", "at_round": "after ", "rounds": "T=", "local_lr": "η=",
}  # fmt: skip
"""Setting → what stands before it in a line of progress."""


@dataclass(frozen=True)
class DynamicParametersExperiment(Experiment):
    """Chapter 06: central trainings."""

    chapter = "06"

    def parts(self, settings: DynamicParameters, folder: Path) -> list[Part]:
        """Return every search and table; what is read off the trainings costs nothing more."""

        def rows(make: Any, datasets: tuple[str, ...]) -> list[Row]:
            tried = recorded_tries(folder / PAPER / "search.csv", Central)
            return [row for d in datasets for row in make(settings, d, tried)]

        return [
            Part(f"{PAPER}/{table}", partial(rows, make), datasets, name, name != "distinguishing")
            for name, (table, datasets, make) in PARTS.items()
        ]

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds, attack it, or play a game."""
        if isinstance(point, Game):
            return measure_game(point, device)
        if isinstance(point, ThreatCell):
            return cells.measure(point, load_cached(point.dataset), device)
        return training.measure(point, device, point_cache(self.chapter) / "under_way")

    def words(self, point: Any, result: Result) -> str:
        """Return the setting, and the accuracy or the share that was told right or recovered."""
        found = next(name for name in ("accuracy", "hits", "success") if name in result)
        shown = [f"{sign}{vars(point)[n]}" for n, sign in SHOWN.items() if n in vars(point)]
        return f"{' '.join(shown)}: {found} {result[found].mean():.3f}"


EXPERIMENT = DynamicParametersExperiment()
