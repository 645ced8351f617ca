"""Recording: run a chapter's grid at a profile and write one row per finished point and metric.

Plain Python, no notebook. A point that stands in the record is not run again, so that an interrupted recording goes
on where it stopped and loses at most the point under way.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import available, load
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.experiments import threat_types
from fl_privacy_lib.reproduction.paths import MEASURED, data_root, decoded_cache, point_cache
from fl_privacy_lib.reproduction.records import MeasuredTable, PointCache
from fl_privacy_lib.reproduction.settings import ThreatTypes

Say = Callable[[str], None]


def say(text: str) -> None:
    """Write a line of progress where it disturbs no output."""
    print(f"· {text}", file=sys.stderr, flush=True)


def record_threat_types(settings: ThreatTypes, only: str | None = None, folder: Any = MEASURED, say: Say = say) -> None:
    """Record Fed-CDP's Table VII and Fig. 1 at these settings.

    Parameters
    ----------
    settings : usually the `full` profile; `dataset` auto means every one of mnist, lfw, cifar10 that is there
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    root, device = data_root(), pick_device(settings.device)
    wanted = ("mnist", "lfw", "cifar10") if settings.dataset == "auto" else (settings.dataset,)
    names = tuple(name for name in wanted if available(name, root))
    if not names:
        raise InputError(f"none of {', '.join(wanted)} is in {root}: set FL_PRIVACY_DATA to a folder that holds them.")
    grid = threat_types.recorded_grid(settings, names)
    if only is not None and only not in grid:
        raise InputError(f"chapter 01 records no table {only!r}; it records {', '.join(grid)}.")
    loaded: dict[str, Any] = {}
    cache = PointCache(point_cache("01"))
    for table, points in grid.items():
        if only in (None, table):
            _record_table(table, points, settings, folder, loaded, cache, device, say)


def _record_table(
    table: str,
    points: list[threat_types.Point],
    settings: ThreatTypes,
    folder: Any,
    loaded: dict[str, Any],
    cache: PointCache,
    device: torch.device,
    say: Say,
) -> None:
    keys = [*threat_types.record_key(points[0]), "metric"]
    # seeds stands among the record's own columns
    record = MeasuredTable(folder / f"{table}.csv", [k for k in keys if k != "seeds"])
    started, ran = time.perf_counter(), 0
    for number, point in enumerate(points, 1):
        key = threat_types.record_key(point)
        label = f"{table} {number}/{len(points)} {point.dataset} {point.threat_type} {point.method} {point.attacker}"
        if len(record.rows_of(key)):
            say(f"{label}: already recorded")
            continue
        if point.dataset not in loaded:
            loaded[point.dataset] = load(point.dataset, data_root(), decoded_cache())
        data = loaded[point.dataset]
        view = point.view

        def compute(view: threat_types.Point = view, data: Any = data) -> dict[str, Any]:
            return threat_types.measure(view, data, device)

        result = cache.get(threat_types.settings_of(view) | {"device": device.type}, compute)
        metrics = threat_types.summary(result, point.seeds)
        record.add(
            key, metrics, seeds=point.seeds, profile=settings.profile, device=device_name(device),
            seconds=float(result["seconds"]),
        )  # fmt: skip
        ran += 1
        left = (time.perf_counter() - started) / ran * (len(points) - number)
        rate, seconds = metrics["attack_success_rate"]["mean"], float(result["seconds"])
        say(f"{label}: success {rate:.2f}, {seconds:.0f} s; about {left:.0f} s left")


RECORDERS: dict[str, Callable[..., None]] = {"01": record_threat_types}
"""Chapter → its recording."""
