"""Recording: run a chapter's grid at a profile and write one row per finished point and metric.

Plain Python, no notebook. A point that stands in the record is not run again, so that an interrupted recording goes
on where it stopped and loses at most the point under way.
"""

import functools
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import Dataset, available, load
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.experiments import threat_types
from fl_privacy_lib.reproduction.paths import MEASURED, data_root, decoded_cache, point_cache
from fl_privacy_lib.reproduction.progress import left, say
from fl_privacy_lib.reproduction.recording_accounting import record_counting_privacy
from fl_privacy_lib.reproduction.records import MeasuredTable, PointCache
from fl_privacy_lib.reproduction.settings import ThreatTypes


def finished_points(
    points: Sequence[threat_types.Point],
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    label: str = "",
    workers: int | None = None,
) -> Iterator[tuple[threat_types.Point, dict[str, np.ndarray]]]:
    """Yield every point with its result, as soon as it is there; points that were finished before come at once.

    Parameters
    ----------
    points : cells of a chapter's grid
    device : where attacks run
    snapshots : attack iterations whose images are kept with each result
    label : stands before each line of progress
    workers : processes of one thread each; None: one a core on a CPU, a single one on a GPU

    Notes
    -----
    Attacks are many tiny operations. Two threads that wait for each other at every one of them lose more than they
    win, above all on a busy machine; two processes win almost a factor of two.
    """
    cache, started = PointCache(point_cache("01")), time.perf_counter()
    views = list(dict.fromkeys(point.view for point in points))
    missing = [view for view in views if not cache.has(_key(view, device, snapshots))]
    count = workers or (1 if device.type == "cuda" else os.cpu_count() or 1)
    running: dict[threat_types.Point, Future[Any]] = {}
    if min(count, len(missing)) > 1:
        running = {view: _pool(count).submit(_finish, view, device, snapshots) for view in missing}
    seen: set[threat_types.Point] = set()
    for point in points:
        view = point.view
        result = running[view].result() if view in running else _finish(view, device, snapshots)
        if view not in seen:
            seen.add(view)
            rate, seconds = float(np.mean(result["success"])), float(result["seconds"])
            words = f"{label}{len(seen)}/{len(views)} {view.dataset} {view.threat_type} {view.method} {view.attacker}"
            fresh = len(seen.intersection(missing))
            time_left = left(started, fresh, len(missing)) if view in missing else "kept from before"
            say(f"{words}: success {rate:.2f}, {seconds:.0f} s; {time_left}")
        yield point, result


@functools.cache
def _pool(workers: int) -> ProcessPoolExecutor:
    # spawned, not forked: a fork of a process that has run torch may hang; kept, since each start costs seconds
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),))


def _start_worker(parent: int) -> None:
    """Use one thread, leave Ctrl-C to the parent, and end when the parent has ended, however it did."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _key(view: threat_types.Point, device: torch.device, snapshots: tuple[int, ...]) -> dict[str, object]:
    own = {"device": device.type, "snapshots": snapshots}
    if view.dataset.startswith("npz:"):  # a reader's own file may change under the same name
        path = data_root() / Path(view.dataset.removeprefix("npz:")).expanduser()
        own["content"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return threat_types.settings_of(view) | own


def _finish(view: threat_types.Point, device: torch.device, snapshots: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return one point's result, from the cache or computed and cached. Runs in a worker or in the caller."""

    def compute() -> dict[str, np.ndarray]:
        return threat_types.measure(view, _loaded(view.dataset), device, snapshots)

    return PointCache(point_cache("01")).get(_key(view, device, snapshots), compute)


@functools.cache
def _loaded(name: str) -> Dataset:
    data = load(name, data_root(), decoded_cache())
    # attacks need the training images alone, and every worker holds a copy
    return replace(data, validation_x=data.validation_x[:0].copy(), test_x=data.test_x[:0].copy())


def record_threat_types(settings: ThreatTypes, only: str | None = None, folder: Path = MEASURED) -> None:
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
    for table, points in grid.items():
        if only not in (None, table):
            continue
        # seeds stands among the record's own columns
        keys = [k for k in (*threat_types.record_key(points[0]), "metric") if k != "seeds"]
        record = MeasuredTable(folder / f"{table}.csv", keys)
        missing = [p for p in points if record.rows_of(threat_types.record_key(p)).empty]
        say(f"{table}: {len(points) - len(missing)} of {len(points)} points are recorded already")
        for point, result in finished_points(missing, device, label=f"{table} "):
            record.add(
                threat_types.record_key(point),
                threat_types.summary(result, point.seeds),
                seeds=point.seeds,
                profile=settings.profile,
                device=device_name(device),
                seconds=float(result["seconds"]),
            )


RECORDERS: dict[str, Callable[..., None]] = {"01": record_threat_types, "03": record_counting_privacy}
"""Chapter → its recording."""
