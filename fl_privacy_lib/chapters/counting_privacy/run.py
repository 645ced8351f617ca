"""Recording chapter 03: the papers' cells of ε, and the cases that the ledger's claims rest on.

Nothing is random here, so a row is one value: its standard deviation is 0 and its n is 1.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.counting_privacy import grid as chapter
from fl_privacy_lib.chapters.counting_privacy.parameters import CountingPrivacy
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import MeasuredTable

Points = list[tuple[dict[str, Any], dict[str, float]]]


def points_of(table: str) -> Points:
    """Return (key columns, metrics) of every point of a recorded table, in order.

    Parameters
    ----------
    table : str
        One of `counting_privacy.TABLES`, or `counting_privacy.STATEMENTS`.
    """
    if table == chapter.STATEMENTS:
        return [(case.key(), case.metrics()) for case in chapter.statement_rows()]
    found = []
    for cell in chapter.cells(table):
        row = chapter.cell_row(table, cell)
        metric = row.pop("metric")
        found.append((row, {metric: cell.ours}))
    return found


def record(settings: CountingPrivacy, only: str | None = None, folder: Path = MEASURED) -> None:
    """Record the accounting tables and the statements; rows that stand already are kept.

    Parameters
    ----------
    settings : its values change nothing recorded; the profile and the device are named in the rows
    only : 'paper/table' or None for all
    folder : where the measured tables lie
    """
    tables = (*chapter.TABLES, chapter.STATEMENTS)
    if only is not None and only not in tables:
        raise InputError(f"chapter 03 records no table {only!r}; it records {', '.join(tables)}.")
    device = device_name(pick_device(settings.device if settings.device != "auto" else "cpu"))
    for table in tables:
        if only in (None, table):
            _record(table, partial(points_of, table), folder, settings.profile, device)


def _record(
    table: str, points: Callable[[], Points], folder: Path, profile: str, device: str
) -> None:
    started = time.perf_counter()
    computed = points()
    seconds = (time.perf_counter() - started) / max(1, len(computed))
    first = list(computed[0][0])
    record = MeasuredTable(folder / f"{table}.csv", [*first, "metric"])
    missing = [(key, metrics) for key, metrics in computed if not _stands(record, key, metrics)]
    report_progress(
        f"{table}: {len(computed) - len(missing)} of {len(computed)} points are recorded already"
    )
    for key, metrics in missing:
        values = {name: {"mean": value, "std": 0.0, "n": 1} for name, value in metrics.items()}
        record.add(key, values, seeds=1, profile=profile, device=device, seconds=seconds)


def _stands(record: MeasuredTable, key: dict[str, Any], metrics: dict[str, float]) -> bool:
    return set(metrics) <= set(record.rows_of(key)["metric"])
