"""Recording the chapters on gradient leakage: attacks, one point a cell."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import available
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.experiments import adaptive_attacks, scoring, threat_types
from fl_privacy_lib.reproduction.parameters import AdaptiveAttacks, ThreatTypes
from fl_privacy_lib.reproduction.paths import MEASURED, data_root
from fl_privacy_lib.reproduction.points import Result, content_of, finished, loaded, record_points


def finished_points(
    points: Sequence[threat_types.Point],
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    label: str = "",
    workers: int | None = None,
) -> Iterator[tuple[threat_types.Point, Result]]:
    """Yield every cell of chapter 01 with its result; cells with the same observation are attacked once.

    Parameters
    ----------
    points : cells of the chapter's grid
    device : where attacks run
    snapshots : attack iterations whose images are kept with each result
    label, workers : as in `points.finished`; on a GPU a single process
    """

    def key(view: threat_types.Point) -> dict[str, object]:
        own = {"device": device.type, "snapshots": snapshots}
        return threat_types.settings_of(view) | own | content_of(view.dataset)

    def words(view: threat_types.Point, result: Result) -> str:
        rate = float(np.mean(result["success"]))
        return f"{view.dataset} {view.threat_type} {view.method} {view.attacker}: success {rate:.2f}"

    views = [point.view for point in points]
    count = 1 if device.type == "cuda" else workers
    compute = partial(_measure, device, snapshots)
    found = finished("01", views, compute, key=key, words=words, label=label, workers=count)
    return ((point, result) for point, (_, result) in zip(points, found, strict=True))


def _measure(device: torch.device, snapshots: tuple[int, ...], view: threat_types.Point) -> Result:
    return threat_types.measure(view, loaded(view.dataset), device, snapshots)


def finished_cells(
    cells: Sequence[adaptive_attacks.Cell],
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    label: str = "",
    workers: int | None = None,
    chapter: str = "02",
) -> Iterator[tuple[adaptive_attacks.Cell, Result]]:
    """Yield every cell of chapter 02 with its result, as `finished_points` does for chapter 01.

    Another chapter that attacks such cells names itself, so that its points are kept with its own.
    """

    def key(cell: adaptive_attacks.Cell) -> dict[str, object]:
        return asdict(cell) | {"device": device.type, "snapshots": snapshots} | content_of(cell.dataset)

    def words(cell: adaptive_attacks.Cell, result: Result) -> str:
        what = f"{cell.dataset} {cell.method} {cell.level:g} {cell.attack} {cell.arm}"
        return f"{what}: success {float(np.mean(result['success'])):.2f}"

    count = 1 if device.type == "cuda" else workers
    compute = partial(_measure_cell, device, snapshots)
    return finished(chapter, cells, compute, key=key, words=words, label=label, workers=count)


def _measure_cell(device: torch.device, snapshots: tuple[int, ...], cell: adaptive_attacks.Cell) -> Result:
    return adaptive_attacks.measure(cell, loaded(cell.dataset), device, snapshots)


def record_adaptive_attacks(settings: AdaptiveAttacks, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record the tables of chapter 02 at these settings; see `adaptive_attacks.recorded_grid`."""
    device, names = pick_device(settings.device), _datasets(settings.dataset)
    _record(adaptive_attacks, adaptive_attacks.recorded_grid(settings, names), settings.profile, "02", only, folder,
            partial(finished_cells, device=device), device)  # fmt: skip


def record_threat_types(settings: ThreatTypes, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record Fed-CDP's Table VII and Fig. 1 at these settings.

    Parameters
    ----------
    settings : usually the `full` profile; `dataset` auto means every one of mnist, lfw, cifar10 that is there
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    device, names = pick_device(settings.device), _datasets(settings.dataset)
    _record(threat_types, threat_types.recorded_grid(settings, names), settings.profile, "01", only, folder,
            partial(finished_points, device=device), device)  # fmt: skip


def _datasets(name: str) -> tuple[str, ...]:
    """Return the data sets that are recorded: the one named, or every one of the papers' that is there."""
    wanted = ("mnist", "lfw", "cifar10") if name == "auto" else (name,)
    names = tuple(name for name in wanted if available(name, data_root()))
    if not names:
        raise InputError(
            f"none of {', '.join(wanted)} is in {data_root()}: set FL_PRIVACY_DATA to a folder that holds them."
        )
    return names


def _record(
    experiment: Any, grid: dict[str, list[Any]], profile: str, chapter: str, only: str | None, folder: Path,
    run: Callable[..., Iterator[tuple[Any, Result]]], device: torch.device,
) -> None:
    if only is not None and only not in grid:
        raise InputError(f"chapter {chapter} records no table {only!r}; it records {', '.join(grid)}.")
    for table, points in grid.items():
        if only in (None, table):
            record_points(
                table, folder, points, experiment.record_key, partial(run, label=f"{table} "),
                lambda point, result: scoring.summary(result, point.seeds),
                lambda point: {"seeds": point.seeds, "profile": profile, "device": device_name(device)},
            )  # fmt: skip
