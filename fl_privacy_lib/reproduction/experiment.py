"""An experiment: what a chapter measures or computes, and the one way to run it.

The same points serve a notebook's live run and the recording. They run side by side in processes,
each is kept as soon as it is done, and equal ones are computed once; a run that is interrupted goes
on where it stopped and loses at most the points under way.
"""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, NamedTuple

import joblib
import numpy as np
import pandas as pd
import torch

from fl_privacy_lib._checks import InputError, nearest
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.data import available
from fl_privacy_lib.federated.groups import end_with
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.loading import content_of, only_available
from fl_privacy_lib.reproduction.paths import MEASURED, data_root, point_cache
from fl_privacy_lib.reproduction.progress import report_progress, time_left
from fl_privacy_lib.reproduction.records import (
    Values,
    add_point,
    finished_point,
    point_path,
    recorded_rows,
    rows_of,
)
from fl_privacy_lib.reproduction.settings import FREE

Result = dict[str, np.ndarray]
CPU = torch.device("cpu")


class Row(NamedTuple):
    """A recorded point: what has to be measured, and what is read off the results.

    Parameters
    ----------
    key : the columns that name its rows: the published table's own, then the settings that ran
    points : what is measured; none for a value that is computed at once
    values : the points' results, in their order → metrics
    seeds : repetitions behind each value
    """

    key: dict[str, Any]
    points: tuple[Any, ...]
    values: Callable[[list[Result]], Values]
    seeds: int = 1


class Part(NamedTuple):
    """A part of a recording that can be started by itself.

    Parameters
    ----------
    table : 'paper/table'
    rows : the data sets that are recorded → rows, the ones that a verdict needs first; asked again
        when they are recorded, it may return more
    datasets : of the published table; none where no data set is needed
    name : of the part where a table has several; else the table's
    long : hours on a CPU: recorded where it is named, or on a CUDA device
    alone : its points are timed, one after the other
    """

    table: str
    rows: Callable[[tuple[str, ...]], list[Row]]
    datasets: tuple[str, ...] = ()
    name: str = ""
    long: bool = False
    alone: bool = False


class Experiment(ABC):
    """What a chapter measures. Instances travel to worker processes, so they hold settings only."""

    chapter: ClassVar[str]
    on_cpu: ClassVar[bool] = False  # nothing here runs faster on a GPU

    @abstractmethod
    def parts(self, settings: Any, folder: Path) -> list[Part]:
        """Return what is recorded at these settings, in order; `folder` has the measured tables."""

    def run(self, point: Any, device: torch.device) -> Result:
        """Measure a point; a result may count the `seconds` of interrupted runs itself."""
        raise TypeError(f"chapter {self.chapter} measures no points")

    def words(self, point: Any, result: Result) -> str:
        """Return a line of progress."""
        return shorten(" ".join(map(str, self.identity(point).values())), 160, placeholder=" …")

    def identity(self, point: Any) -> dict[str, object]:
        """Return every setting that a point's result depends on."""
        settings = asdict(point) | vars(self)
        dataset = next((part["dataset"] for part in (settings, *settings.values())
                        if isinstance(part, dict) and "dataset" in part), "")  # fmt: skip
        return {"kind": type(point).__name__} | settings | content_of(dataset)

    def representative(self, point: Any) -> Any:
        """Return the point that is measured for this one; both have the same result."""
        return point

    def finish(
        self,
        points: Sequence[Any],
        device: torch.device = CPU,
        label: str = "",
        workers: int | None = None,
    ) -> Iterator[tuple[Any, Result]]:
        """Yield every point with its result, in order; points finished before come at once.

        Parameters
        ----------
        points : hashable
        device : where they run; a GPU is used by one process
        label : stands before each line of progress
        workers : processes of one thread each, None: one a core. Two threads that wait for each
            other at every small operation lose more than they win.
        """
        started = time.perf_counter()
        measured = [self.representative(point) for point in points]
        distinct = list(dict.fromkeys(measured))
        missing = [p for p in distinct if not _path(self, p, device).exists()]
        if distinct:
            report_progress(f"{label}to compute: {len(missing)} of {len(distinct)} points")
        fresh = _run_in_order(self, missing, device, workers or os.cpu_count() or 1)
        results = {p: _compute(self, p, device) for p in distinct if p not in missing}  # kept
        for point, same in zip(points, measured, strict=True):
            if same not in results:
                results[same] = next(fresh)
                done = sum(p in results for p in missing)
                report_progress(
                    f"{label}{done}/{len(missing)} {self.words(same, results[same])}, "
                    f"{float(results[same]['seconds']):.0f} s; "
                    + time_left(started, done, len(missing))
                )
            yield point, results[same]


def _path(experiment: Experiment, point: Any, device: torch.device) -> Path:
    key = experiment.identity(point) | {"device": device.type}
    return point_path(point_cache(experiment.chapter), key)


def _compute(experiment: Experiment, point: Any, device: torch.device) -> Result:
    """Return a point's result, from the cache or measured and kept. Runs in a worker or here."""
    return finished_point(_path(experiment, point, device), lambda: experiment.run(point, device))


def _run_in_order(
    experiment: Experiment, points: Sequence[Any], device: torch.device, workers: int
) -> Iterator[Result]:
    if min(workers, len(points)) < 2 or device.type != "cpu":
        return (_compute(experiment, point, device) for point in points)
    with joblib.parallel_config("loky", initializer=_start_worker, initargs=(os.getpid(),)):
        pool = joblib.Parallel(
            min(workers, len(points)), return_as="generator", batch_size=1, pre_dispatch="all"
        )
        return pool(joblib.delayed(_compute)(experiment, point, device) for point in points)


def _start_worker(parent: int) -> None:
    """Use one thread, leave Ctrl-C to the parent, and end whenever the parent has ended."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def record(
    experiment: Experiment,
    settings: Any,
    only: str | None = None,
    folder: Path = MEASURED,
    plain: Any = None,
) -> None:
    """Write the rows that the record lacks, each as soon as its points are finished.

    Parameters
    ----------
    settings : usually the `full` profile. `dataset` restricts the recording to one data set; one
        that a table does not have in its paper is recorded there where the table is named.
    only : a part's name, 'paper/table' or 'table'; None: all, the long ones only on a CUDA device
    folder : where the measured tables lie
    plain : the profile's own settings, where a reader has changed some

    Raises
    ------
    InputError
        If there is no such part, none of its data sets is here, the seed is another, or a changed
        setting changes no point.
    """
    # with another seed its rows would count as further cells
    if plain is not None and getattr(settings, "seed", 0) != getattr(plain, "seed", 0):
        raise InputError(f"records have seed = {plain.seed}: give seed = {settings.seed} to a run.")
    if (named := getattr(settings, "dataset", "auto")) != "auto":
        available(named, data_root())  # refuses a misspelt name
    device = CPU if experiment.on_cpu else pick_device(settings.device)
    parts = experiment.parts(settings, folder)
    wanted = _wanted(parts, only, device)
    if not wanted:
        known = list(dict.fromkeys(name for p in parts for name in (p.table, p.name or p.table)))
        raise InputError(
            f"chapter {experiment.chapter} records no {only!r}{nearest(str(only), known)}; it "
            f"records {', '.join(known)}. The book's page on claims names each table's command."
        )

    @cache  # a data set that is not here is named once
    def here_of(datasets: tuple[str, ...]) -> tuple[str, ...]:
        if named != "auto" and datasets:
            datasets = (named,) if named in datasets or only is not None else ()
        return only_available(datasets)

    def begin(part: Part) -> tuple[tuple[str, ...], list[Row]]:
        here = here_of(part.datasets)
        return here, part.rows(here) if here or not part.datasets else []

    changed = vars(settings).items() - vars(plain or settings).items()
    changed = {(name, value) for name, value in changed if name not in FREE}
    mine = _cells(wanted, begin) if changed else []
    for name, value in sorted(changed):
        usual = experiment.parts(settings.model_copy(update={name: getattr(plain, name)}), folder)
        if mine and mine == _cells(_wanted(usual, only, device), begin):
            raise InputError(
                f"{name} = {value} changes nothing that chapter {experiment.chapter} records here: "
                f"leave it out, or give it to a run: make run NB={experiment.chapter} "
                f'P="{name}={value}".'
            )
    torch.set_num_threads(1)
    meta = {"profile": settings.profile, "device": device_name(device)}
    recorded = 0
    for part in wanted:
        here, rows = begin(part)
        recorded += bool(here or rows)
        if here and not rows:
            report_progress(f"{part.name or part.table}: nothing of it is on these data, or its "
                            "search has chosen no rate yet: record that first")  # fmt: skip
        while rows:
            _record_rows(experiment, part, rows, device, folder, meta)
            rows = more if len(more := part.rows(here)) > len(rows) else []  # of a search
    if left_out := [p.name or p.table for p in parts if only is None and p not in wanted]:
        report_progress(f"left out without a GPU; --only records one: {', '.join(left_out)}")
    if not recorded:
        raise InputError(
            f"nothing was recorded: the data of {only or 'this chapter'}, dataset = {named}, are "
            f"not in {data_root()}: set FL_PRIVACY_DATA to a folder that has them."
        )


def _wanted(parts: list[Part], only: str | None, device: torch.device) -> list[Part]:
    return [
        p for p in parts
        if only in (p.name, p.table, p.table.partition("/")[2])
        or (only is None and (device.type == "cuda" or not p.long))
    ]  # fmt: skip


def _cells(
    parts: list[Part], begin: Callable[[Part], tuple[tuple[str, ...], list[Row]]]
) -> list[Any]:
    """Return what would be recorded; nothing where a search or a record has to come first."""
    with suppress(InputError):
        begun = [begin(part) for part in parts]
        if all(rows or not here for here, rows in begun):
            return [(row.key, row.points) for _, rows in begun for row in rows]
    return []


def _record_rows(
    experiment: Experiment, part: Part, rows: list[Row], device: torch.device, folder: Path,
    meta: dict[str, Any],
) -> None:  # fmt: skip
    path = folder / f"{part.table}.csv"
    known = recorded_rows(path, rows[0].key)
    missing = [row for row in rows if not is_recorded(known, row)]
    report_progress(f"{part.name or part.table}: {len(rows) - len(missing)} of {len(rows)} rows "
                    f"are recorded already, in {path}" + (
                    f"; rows there took {known.seconds.min():.0f} to {known.seconds.max():.0f} s"
                    if missing and len(known) else ""))  # fmt: skip
    points = [point for row in missing for point in row.points]
    stream = experiment.finish(points, device, f"{part.name or part.table} ",
                               1 if part.alone else None)  # fmt: skip
    for row in missing:
        started = time.perf_counter()
        results = [next(stream)[1] for _ in row.points]
        values = row.values(results)
        seconds = sum(float(r["seconds"]) for r in results) or time.perf_counter() - started
        add_point(path, row.key, values, seconds=seconds, seeds=row.seeds, **meta)


def is_recorded(frame: pd.DataFrame, row: Row) -> bool:
    """Return whether a record has a row; of a computed one, whether it has all of its metrics."""
    metrics = set(rows_of(frame, row.key)["metric"])
    return set(row.values([])) <= metrics if not row.points else bool(metrics)


# ---- statements that are computed, not run -----------------------------------------------------


def computed_row(key: dict[str, Any], metrics: dict[str, float]) -> Row:
    """Return a recorded row of values that are not random: standard deviation 0, n = 1."""
    values = {name: {"mean": value, "std": 0.0, "n": 1} for name, value in metrics.items()}
    return Row(key, (), lambda _: values)


@dataclass(frozen=True)
class Case:
    """A claimed number beside a computed one, with the reading of both.

    ``found`` is what holds: exact, or a lower bound for a counter-example.
    """

    claim: str
    case: str
    claimed: float
    found: float
    quantity: str = "epsilon"
    privacy_unit: str = "example"
    relation: str = "add_remove"
    sampling: str = "poisson"
    accountant: str = "moments_accountant"
    delta: float = DELTA
    setting: dict[str, Any] = field(default_factory=dict)

    def row(self) -> Row:
        """Return the recorded row: both numbers, and by how much one exceeds the other."""
        words = " ".join(f"{name}={value}" for name, value in self.setting.items())
        named = {n: v for n, v in vars(self).items() if n not in ("claimed", "found", "setting")}
        key = named | {
            "local_iterations": self.setting.get("local_iterations", "not_applicable"),
            "setting": words or "not_applicable",
        }
        return computed_row(key, {"claimed": self.claimed, "found": self.found,
                                  "margin": -self.excess, "excess": self.excess})  # fmt: skip

    @property
    def excess(self) -> float:
        """By how much what is found exceeds what is claimed."""
        return self.found - self.claimed
