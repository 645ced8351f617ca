"""Attacking and recording the cells of chapter 01."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fl_privacy_lib.attacks import Attack
from fl_privacy_lib.chapters.threat_types.grid import Point, record_key, recorded_grid
from fl_privacy_lib.chapters.threat_types.parameters import ThreatTypes
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.reproduction.devices import pick_device
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.leakage import datasets_to_record, record_attacks
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.points import Result, content_of, finished, load_cached


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


def measure(
    point: Point, data: Dataset, device: torch.device, snapshots: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a point and score them; see `leakage.measure`."""
    return leakage.measure(point, data, device, snapshots, leakage.scene, attack_of)


def finished_points(
    points: Sequence[Point],
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    label: str = "",
    workers: int | None = None,
) -> Iterator[tuple[Point, Result]]:
    """Yield every cell of chapter 01 with its result; cells with the same observation are attacked once.

    Parameters
    ----------
    points : cells of the chapter's grid
    device : where attacks run
    snapshots : attack iterations whose images are kept with each result
    label, workers : as in `points.finished`; on a GPU a single process
    """

    def key(view: Point) -> dict[str, object]:
        own = {"device": device.type, "snapshots": snapshots}
        return asdict(view) | own | content_of(view.dataset)

    def words(view: Point, result: Result) -> str:
        rate = float(np.mean(result["success"]))
        return (
            f"{view.dataset} {view.threat_type} {view.method} {view.attacker}: success {rate:.2f}"
        )

    views = [point.view for point in points]
    count = 1 if device.type == "cuda" else workers
    compute = partial(_measure, device, snapshots)
    found = finished("01", views, compute, key=key, words=words, label=label, workers=count)
    return ((point, result) for point, (_, result) in zip(points, found, strict=True))


def _measure(device: torch.device, snapshots: tuple[int, ...], view: Point) -> Result:
    return measure(view, load_cached(view.dataset), device, snapshots)


def record(settings: ThreatTypes, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record Fed-CDP's Table VII and Fig. 1 at these settings.

    Parameters
    ----------
    settings : usually the `full` profile; `dataset` auto means every one of mnist, lfw, cifar10
        that is there
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    device, names = pick_device(settings.device), datasets_to_record(settings.dataset)
    record_attacks(recorded_grid(settings, names), record_key, settings.profile, "01", only, folder,
                   partial(finished_points, device=device), device)  # fmt: skip
