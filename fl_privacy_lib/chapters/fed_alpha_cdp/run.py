"""Training and recording Fed-αCDP's cells (chapter 07)."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from fl_privacy_lib.chapters.fed_alpha_cdp import grid
from fl_privacy_lib.chapters.fed_alpha_cdp.grid import BY_RANGE, COLUMNS, PAPER, Z_SCORED
from fl_privacy_lib.chapters.fed_alpha_cdp.parameters import FedAlphaCdp
from fl_privacy_lib.chapters.fed_alpha_cdp.training import AlphaTraining, Levels, measure_levels
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.searching import Tried, judged, searches, tried_in
from fl_privacy_lib.reproduction.paths import point_cache
from fl_privacy_lib.reproduction.records import read_record


def tried(folder: Path) -> Tried:
    """Return what the searches of this chapter tried, and those of Fed-CDP that chapter 05 did."""
    found = []
    for paper, lacking in ((PAPER, {}), ("fed_cdp", {"schedule": "epsilon"})):
        path = folder / paper / "search.csv"
        if path.exists():
            found.append(read_record(path).assign(**lacking))
    rows = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=["method"])
    if "setting" in rows:
        known = rows["method"].isin(AlphaTraining.methods)
        rows = rows[known & rows["setting"].isin(AlphaTraining.readings)]
    return tried_in(rows, AlphaTraining) if len(rows) else {}


class FedAlphaCdpExperiment(Experiment):
    """Chapter 07: a point is an `AlphaTraining` or `Levels`."""

    chapter = "07"

    def parts(self, settings: FedAlphaCdp, folder: Path) -> list[Part]:
        """Return every search and table; what is read off the trainings costs nothing more."""

        def collect(make: Any, datasets: tuple[str, ...]) -> list[Row]:
            known = tried(folder)
            return [row for d in datasets for row in make(settings, d, known)]

        parts = []
        for name, column in COLUMNS.items():
            for table, part, rows in (("search", f"search_{name}", searches),
                                      (column.table, name, judged)):  # fmt: skip
                make = partial(collect, partial(column.rows, rows))
                parts.append(Part(f"{PAPER}/{table}", make, column.datasets, part, long=True))
        everywhere = (*Z_SCORED, *BY_RANGE, "mnist", *grid.IMAGES)
        for read in (grid.stopped, grid.reached, grid.levels):
            name, all_data = read.__name__, read is not grid.levels
            data = everywhere if all_data else ("mnist",)
            parts.append(Part(f"{PAPER}/{name}", partial(collect, read), data, name, all_data))
        return parts

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds, or read S off a training."""
        if isinstance(point, Levels):
            return measure_levels(point, device)
        return training.measure(point, device, point_cache(self.chapter) / "under_way")

    def words(self, point: Any, result: Result) -> str:
        """Return the setting, and the accuracy or the mean of S."""
        arm = point.arm if isinstance(point, Levels) else point
        setting = (
            f"{arm.dataset} {arm.method} {arm.setting} C={arm.clip_norm:g} K_t={arm.participants} "
            f"T={arm.rounds} η={arm.local_lr:g}"
        )
        if isinstance(point, Levels):
            return f"{setting}: S {result['levels'].mean():.3g} on average"
        return f"{setting}: accuracy {result['accuracy'].mean():.3f}"


EXPERIMENT = FedAlphaCdpExperiment()
