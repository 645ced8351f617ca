"""Running chapter 05: trainings and rounds of Fed-CDP, recorded part by part."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib.chapters.fed_cdp import utility as fed_cdp_utility
from fl_privacy_lib.chapters.fed_cdp.grid import PARTS, Column
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.rates import Recorded, best_rates
from fl_privacy_lib.chapters.fed_cdp.utility import Utility
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row, computed_row
from fl_privacy_lib.reproduction.experiments import training as fed_cdp
from fl_privacy_lib.reproduction.experiments.searching import tried_in
from fl_privacy_lib.reproduction.paths import MEASURED, point_cache

PAPER = "fed_cdp"


def recorded_rates(folder: Path = MEASURED) -> Recorded:
    """Return what is recorded of learning rates."""
    small, searched = (measured(f"{PAPER}/{name}", folder) for name in ("learning_rates", "search"))
    return Recorded(best_rates(small), tried_in(searched))


class FedCdpExperiment(Experiment):
    """Chapter 05: a point is a `Training` or a `Utility`."""

    chapter = "05"

    def parts(self, settings: FedCdp, folder: Path) -> list[Part]:
        """Return the statements and the parts of the grid.

        `rounds` and `local_iterations` cap the published ones, `seeds` repeats what is repeated;
        populations are the grid's own. A part reads what is recorded of learning rates; a search
        asks for more as its trainings are recorded.
        """

        def rows(column: Column, datasets: tuple[str, ...]) -> list[Row]:
            recorded = recorded_rates(folder)
            return [row for d in datasets for row in column.make(settings, d, recorded)]

        def statements(_: tuple[str, ...]) -> list[Row]:
            stated = fed_cdp_utility.statements()
            return [computed_row({"claim": claim}, metrics) for claim, metrics in stated.items()]

        return [Part(f"{PAPER}/statements", statements)] + [
            Part(
                f"{PAPER}/{column.table}", partial(rows, column), column.datasets, name, column.long
            )
            for name, column in PARTS.items()
        ]

    def run(self, point: Any, device: torch.device) -> Result:
        """Train a point with all its seeds, or measure one round."""
        if isinstance(point, Utility):
            return fed_cdp_utility.measure_utility(point, device)
        return fed_cdp.measure(point, device, point_cache(self.chapter) / "under_way")

    def words(self, point: Any, result: Result) -> str:
        """Return the setting, the accuracy, and the engine that trained."""
        arm = point.arm if isinstance(point, Utility) else point
        setting = (
            f"{arm.dataset} {arm.method} {arm.setting} C={arm.clip_norm:g} σ={arm.noise_scale:g} "
            f"K_t={arm.participants}"
        )
        if isinstance(point, Utility):
            return f"{setting}: bound and noise at round {point.at_round}"
        state = ", diverged" if result["diverged"].any() else ""
        engines = "".join(f", {name} engine" for name in sorted({*result["engine"]} - {""}))
        accuracy = float(result["accuracy"].mean())
        return f"{setting} η={arm.local_lr:g}: accuracy {accuracy:.3f}{state}{engines}"


EXPERIMENT = FedCdpExperiment()
