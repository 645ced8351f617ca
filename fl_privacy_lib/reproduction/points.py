"""Points of a grid, computed side by side in processes, kept as they finish, and written into a record."""

import contextlib
import functools
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import Dataset, available, load
from fl_privacy_lib.reproduction.paths import data_root, decoded_cache, point_cache
from fl_privacy_lib.reproduction.progress import report_progress, time_left
from fl_privacy_lib.reproduction.records import MeasuredTable, PointCache

P = TypeVar("P")
Result = dict[str, np.ndarray]


def finished(
    chapter: str,
    points: Sequence[P],
    compute: Callable[[P], Result],
    *,
    key: Callable[[P], dict[str, object]],
    words: Callable[[P, Result], str],
    label: str = "",
    workers: int | None = None,
) -> Iterator[tuple[P, Result]]:
    """Yield every point with its result, as soon as it is there; points that were finished before come at once.

    Parameters
    ----------
    chapter : number of the chapter, whose finished points are kept together
    points : cells of its grid, hashable; equal ones are computed once
    compute : a point → its arrays; importable by name, or a `functools.partial` of such, since
        workers call it
    key : a point → every setting that its result depends on
    words : a line of progress
    label : stands before each such line
    workers : processes of one thread each; None: one a core

    Notes
    -----
    Two threads that wait for each other at every small operation lose more than they win, above all
    on a busy machine; two processes win almost a factor of two.
    """
    cache, started = PointCache(point_cache(chapter)), time.perf_counter()
    distinct = list(dict.fromkeys(points))
    missing = [point for point in distinct if not cache.has(key(point))]
    count = min(workers or os.cpu_count() or 1, len(missing))
    task = functools.partial(_finish, chapter, compute)
    running: dict[P, Future[Any]] = {}
    if count > 1:
        with _interrupts_ignored():
            running = {point: _pool(count).submit(task, point, key(point)) for point in missing}
    seen: dict[P, Result] = {}
    for point in points:
        if point not in seen:
            seen[point] = running[point].result() if point in running else task(point, key(point))
            fresh = len(set(seen).intersection(missing))
            remaining = (
                time_left(started, fresh, len(missing)) if point in missing else "kept from before"
            )
            seconds = float(seen[point]["seconds"])
            report_progress(
                f"{label}{len(seen)}/{len(distinct)} {words(point, seen[point])}, {seconds:.0f} s; {remaining}"
            )
        yield point, seen[point]


def _finish(
    chapter: str, compute: Callable[[Any], Result], point: Any, key: dict[str, object]
) -> Result:
    """Return one point's result, from the cache or computed and cached. Runs in a worker or in the caller."""
    return PointCache(point_cache(chapter)).get(key, lambda: compute(point))


@functools.cache
def _pool(workers: int) -> ProcessPoolExecutor:
    # spawned, not forked: a fork of a process that has run torch may hang; kept, since each start
    # costs seconds
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),)
    )


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that start meanwhile inherit that Ctrl-C is not for them, before they can say so themselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker(parent: int) -> None:
    """Use one thread, leave Ctrl-C to the parent, and end when the parent has ended, however it did."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@functools.cache
def load_cached(name: str, train_only: bool = True) -> Dataset:
    """Return a data set, once a process; with `train_only` only its training part, since every worker holds a copy."""
    data = load(name, data_root(), decoded_cache())
    if not train_only:
        return data
    return replace(data, validation_x=data.validation_x[:0].copy(), test_x=data.test_x[:0].copy())


@functools.cache
def labelled(name: str) -> Dataset:
    """Return a data set without its inputs, which are large: what a split or a count of classes needs."""
    data = load(name, data_root(), decoded_cache())
    none = data.train_x[:0].copy()
    return replace(data, train_x=none, validation_x=none, test_x=none)


def load_if_available(name: str) -> Dataset | None:
    """Return a data set without its inputs, or None where its files are absent or damaged."""
    try:
        return labelled(name) if available(name, data_root()) else None
    except InputError:
        return None


def content_of(dataset: str) -> dict[str, object]:
    """Return what tells a reader's own file from a later one of the same name; nothing for known data sets."""
    if not dataset.startswith("npz:"):
        return {}
    path = data_root() / Path(dataset.removeprefix("npz:")).expanduser()
    return {"content": hashlib.sha256(path.read_bytes()).hexdigest()}


def record_points(
    table: str,
    folder: Path,
    points: Sequence[P],
    keys: Callable[[P], dict[str, Any]],
    run: Callable[[Sequence[P]], Iterable[tuple[P, Result]]],
    metrics: Callable[[P, Result], dict[str, dict[str, Any]]],
    meta: Callable[[P], dict[str, Any]],
) -> None:
    """Write one row for each metric of every point that the record lacks, as soon as the point is finished.

    Parameters
    ----------
    table : 'paper/table'
    folder : where the measured tables lie
    keys : a point → the columns that name its rows, in order
    run : the missing points → finished ones, usually `finished`
    metrics : a result → metric → {mean, std, n}
    meta : a point → seeds, profile, device
    """
    own = {"seeds"}  # stands among the record's own columns
    record = MeasuredTable(
        folder / f"{table}.csv", [k for k in (*keys(points[0]), "metric") if k not in own]
    )
    missing = [point for point in points if record.rows_of(keys(point)).empty]
    report_progress(
        f"{table}: {len(points) - len(missing)} of {len(points)} points are recorded already"
    )
    for point, result in run(missing):
        record.add(
            keys(point), metrics(point, result), seconds=float(result["seconds"]), **meta(point)
        )
