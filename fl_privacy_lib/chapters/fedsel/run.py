"""Recording chapter 08: FedSel's tables and figures, and the exact values beside its lemmas."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fedsel import grid as fedsel_grid
from fl_privacy_lib.chapters.fedsel import mechanisms as fedsel_mechanisms
from fl_privacy_lib.chapters.fedsel import training as fedsel
from fl_privacy_lib.chapters.fedsel.grid import Cell
from fl_privacy_lib.chapters.fedsel.parameters import FedSel
from fl_privacy_lib.chapters.fedsel.statements import statement_rows
from fl_privacy_lib.data import available
from fl_privacy_lib.reproduction.devices import device_name
from fl_privacy_lib.reproduction.paths import MEASURED, data_root
from fl_privacy_lib.reproduction.points import Result, finished, record_points
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import MeasuredTable

STATEMENTS = "fedsel/statements"
TIMED = "fedsel/selection_time"
WORKERS: int | None = None  # one a core


def finished_arms(
    arms: Sequence[Any], label: str = "", workers: int | None = None
) -> Iterator[tuple[Any, Result]]:
    """Yield every arm (or point without training) with its result, as `points.finished` does."""
    return finished("08", arms, _measure, key=_key, words=_words, label=label, workers=workers)


def finished_cells(
    cells: Sequence[Cell], label: str = "", workers: int | None = None
) -> Iterator[tuple[Cell, Any]]:
    """Yield every cell with {'values': its metrics, 'seconds'}; an arm that several cells use is measured once."""
    stream = finished_arms([arm for cell in cells for arm in cell.arms], label, workers)
    for cell in cells:
        results = [next(stream)[1] for _ in cell.arms]
        yield (
            cell,
            {"values": cell.summary(results), "seconds": sum(float(r["seconds"]) for r in results)},
        )


def _measure(arm: Any) -> Result:
    return (
        fedsel.measure(arm) if isinstance(arm, fedsel.Training) else fedsel_mechanisms.measure(arm)
    )


def _key(arm: Any) -> dict[str, object]:
    return {"kind": type(arm).__name__} | {
        name: getattr(arm, name) for name in arm.__dataclass_fields__
    }


def _words(arm: Any, result: Result) -> str:
    if isinstance(arm, fedsel.Training):
        accuracy = float(np.mean(result["curve"][:, -1]))
        setting = (
            f"{arm.dataset} {arm.model} {arm.method} ε = {arm.epsilon:g} η = {arm.server_lr:g}"
        )
        return f"{setting}: accuracy {accuracy:.4f}"
    told = (
        f"{value:g}" if isinstance(value, float) else str(value) for value in _key(arm).values()
    )
    return " ".join(told)


def record(settings: FedSel, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record every table of the chapter at these settings; rows that stand already are kept.

    Parameters
    ----------
    settings : usually the `full` profile. Each recorded panel has its own data sets, models and
        budgets, so `model`, `epsilon` and `value` change nothing and `dataset` is refused;
        `repetitions` and `folds` count.
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    if settings.dataset != "auto":
        raise InputError(
            f"dataset = {settings.dataset!r} restricts nothing here: every recorded panel has its own data. "
            "Leave it out, or record one table with --only."
        )
    grid = fedsel_grid.recorded_grid(settings)
    if only is not None and only not in (*grid, STATEMENTS):
        raise InputError(
            f"chapter 08 records no table {only!r}; it records {', '.join((*grid, STATEMENTS))}."
        )
    wanted = {table: cells for table, cells in grid.items() if only in (None, table)}
    _need_data(cell for cells in wanted.values() for cell in cells)
    torch.set_num_threads(1)
    meta = {"profile": settings.profile, "device": device_name(torch.device("cpu"))}
    if only in (None, STATEMENTS):
        _record_statements(folder, meta)
    for table, cells in wanted.items():
        record_points(
            table, folder, cells, Cell.key,
            # times are measured alone, one after the other
            partial(finished_cells, label=f"{table} ", workers=1 if table == TIMED else WORKERS),
            _values_of,
            lambda cell: {"seeds": getattr(cell.arms[0], "repetitions", 1), **meta},
        )  # fmt: skip


def _values_of(cell: Cell, result: Any) -> dict[str, dict[str, Any]]:
    return result["values"]


def _need_data(cells: Iterator[Cell]) -> None:
    """Raise `InputError`, before anything is trained, if a data set is not there."""
    names = {arm.dataset for cell in cells for arm in cell.arms if isinstance(arm, fedsel.Training)}
    missing = sorted(name for name in names if not available(name, data_root()))
    if missing:
        where = data_root()
        raise InputError(
            f"not in {where}: {', '.join(missing)}. Set FL_PRIVACY_DATA to a folder that holds them."
        )


def _record_statements(folder: Path, meta: dict[str, Any]) -> None:
    started = time.perf_counter()
    cases = statement_rows()
    seconds = (time.perf_counter() - started) / len(cases)
    record = MeasuredTable(folder / f"{STATEMENTS}.csv", [*cases[0].key(), "metric"])
    missing = [case for case in cases if record.rows_of(case.key()).empty]
    report_progress(
        f"{STATEMENTS}: {len(cases) - len(missing)} of {len(cases)} points are recorded already"
    )
    for case in missing:
        values = {
            name: {"mean": value, "std": 0.0, "n": 1} for name, value in case.metrics().items()
        }
        record.add(case.key(), values, seeds=1, seconds=seconds, **meta)
