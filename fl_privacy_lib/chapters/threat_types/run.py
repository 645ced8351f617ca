"""Attacking and recording the cells of chapter 01."""

from dataclasses import dataclass
from typing import Any

import torch

from fl_privacy_lib.attacks import Attack
from fl_privacy_lib.chapters.threat_types.grid import Point, record_key, recorded_grid
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments import cells, leakage
from fl_privacy_lib.reproduction.experiments.leakage import LeakageExperiment
from fl_privacy_lib.reproduction.loading import load_cached


def attack_of(point: Point, seed: int) -> Attack:
    """Return the attack's settings at this point."""
    return Attack(
        start=point.start,
        optimiser=point.optimiser,
        learning_rate=1.0 if point.optimiser == "lbfgs" else 0.1,
        max_iterations=point.max_iterations,
        clip_aware=point.attacker == "clip_aware",
        seed=seed,
    )


@dataclass(frozen=True)
class ThreatTypesExperiment(LeakageExperiment):
    """Chapter 01: its own points, and cells with another attack or start for the live run."""

    chapter = "01"

    def grid(self, settings: ThreatTypes, datasets: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the recorded points: Fed-CDP's Table VII and Fig. 1."""
        return recorded_grid(settings, datasets)

    def key(self, point: Point) -> dict[str, Any]:
        """Return a recorded row's key columns."""
        return record_key(point)

    def representative(self, point: Any) -> Any:
        """Return the point whose observation is the same; see `Point.view`."""
        return point.view if isinstance(point, Point) else point

    def run(self, point: Any, device: torch.device) -> Result:
        """Attack all victims of all seeds of a point and score them; see `leakage.measure`."""
        data = load_cached(point.dataset)
        if isinstance(point, cells.Cell):
            return cells.measure(point, data, device, self.snapshots)
        return leakage.measure(point, data, device, self.snapshots, leakage.scene, attack_of)


EXPERIMENT = ThreatTypesExperiment()
