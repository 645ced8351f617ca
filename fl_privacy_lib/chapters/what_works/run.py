"""Training and recording the cells of what works (chapter 10)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.what_works.grid import PAPER, PARTS
from fl_privacy_lib.chapters.what_works.parameters import WhatWorks
from fl_privacy_lib.chapters.what_works.training import ClientTraining, SummedTraining
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments import auditing, training
from fl_privacy_lib.reproduction.experiments.searching import recorded_tries
from fl_privacy_lib.reproduction.paths import point_cache

SHOWN = {
    "dataset": "", "setting": "", "clients": "K=", "summed": "K=", "epsilon": "ε=",
    "scope": "clip ", "noise_at": "noise at ", "batch_size": "B=", "clip_norm": "C=",
    "noise_scale": "σ=", "rounds": "T=", "local_lr": "η=", "momentum": "γ=",
}  # fmt: skip
"""Setting → what stands before it in a line of progress."""


@dataclass(frozen=True)
class WhatWorksExperiment(Experiment):
    """Chapter 10: trainings at an ε that is proved."""

    chapter = "10"

    def parts(self, settings: WhatWorks, folder: Path) -> list[Part]:
        """Return every search and table."""

        def rows(make: Any, kind: Any, datasets: tuple[str, ...]) -> list[Row]:
            tried = recorded_tries(folder / PAPER / "search.csv", SummedTraining)
            tried |= recorded_tries(folder / PAPER / "search_clients.csv", ClientTraining)
            return [row for d in datasets for row in kind(make(settings, d), tried)]

        return [
            Part(f"{PAPER}/{table}", partial(rows, make, kind), datasets, name)
            for name, (table, datasets, make, kind) in PARTS.items()
        ]

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds, or audit a training."""
        return (
            auditing.measure(point, device)
            if isinstance(point, auditing.Audit)
            else training.measure(point, device, point_cache(self.chapter) / "under_way")
        )

    def words(self, point: Any, result: Result) -> str:
        """Return the setting and the accuracy, or the audited ε."""
        known = dict(vars(getattr(point, "training", point)))
        if "summed" in known:  # trains as one client that holds what all of them have
            del known["clients"], known["setting"]
        return " ".join(f"{sign}{known[n]}" for n, sign in SHOWN.items() if n in known) + next(
            f": {name} {value.mean():.4f}" for name, value in result.items()
        )


EXPERIMENT = WhatWorksExperiment()
