"""Records: measured rows in CSV files, and finished points of a live run.

Both are written whole, to a temporary file that then takes the old one's place. A run that is
killed leaves the old file or the new one, never a half; what was finished is found again by its
key.
"""

import datetime
import functools
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import fl_privacy_lib
from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file, write_atomically

META = ["mean", "std", "n", "seeds", "profile", "device", "seconds", "version", "date"]
Values = dict[str, dict[str, Any]]  # metric → {mean, std, n}


def numbers(values: Any) -> dict[str, Any]:
    """Return mean, standard deviation and number of values.

    Parameters
    ----------
    values : one a run; a single value has standard deviation 0
    """
    array = np.asarray(values, dtype=float)
    return {
        "mean": float(array.mean()),
        "std": float(array.std(ddof=1)) if array.size > 1 else 0.0,
        "n": array.size,
    }


def read_record(
    path: Path, columns: Iterable[str] = ("metric", "mean", "std", "n")
) -> pd.DataFrame:
    """Return a record's rows: `mean`, `std` and `seconds` as numbers, all else as text.

    Raises
    ------
    InputError
        If the file is no table, lacks a column, or has a row that is cut off or not in numbers.
    """
    try:
        data = path.read_bytes()
        table = pd.read_csv(io.BytesIO(data), dtype=str, keep_default_na=False)
        missing = [c for c in columns if c not in table]
        if missing:
            raise ValueError(f"it lacks the column {missing[0]!r}")
        # no record has an empty field, and each ends its last line
        holes = (table == "").any(axis=1).to_numpy()
        if holes.any() or not data.endswith(b"\n"):
            row = int(holes.argmax()) if holes.any() else len(table) - 1
            raise ValueError(f"line {row + 2} is cut off")
        for column in {"mean", "std", "seconds"} & set(table):
            table[column] = pd.to_numeric(table[column])
        counts = table[[*({"n", "seeds"} & set(table))]].apply(pd.to_numeric)
        if (counts < 1).any(axis=None) or ("std" in table and (table["std"] < 0).any()):
            raise ValueError("a standard deviation is negative, or a count below 1")
    except ValueError as error:
        raise InputError(
            f"the record {path} is broken ({str(error).rstrip('.')}): restore it with git, "
            "or delete it and record again."
        ) from None
    return table


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV, whole or not at all."""
    write_atomically(path, table.to_csv(index=False, lineterminator="\n").encode())


def recorded_rows(path: Path, key: Iterable[str]) -> pd.DataFrame:
    """Return all rows of a record, none without a file: keys as text, `mean` and `std` as numbers.

    Parameters
    ----------
    path : the CSV file
    key : the columns that name its rows; `seeds` is a column of every record
    """
    columns = [*(name for name in key if name != "seeds"), "metric", *META]
    return read_record(path, columns) if path.exists() else pd.DataFrame(columns=columns)


def add_point(
    path: Path, key: dict[str, Any], metrics: dict[str, dict[str, Any]], **meta: Any
) -> None:
    """Add one finished point: a row for each metric, stamped with version and date.

    Parameters
    ----------
    path : the CSV file, created at the first point
    key : key column → value: the published table's keys, then the settings that really ran
    metrics : metric → {mean, std, n}
    meta : further columns of `META`
    """
    stamp = {
        "version": fl_privacy_lib.__version__,
        "date": datetime.date.today().isoformat(),
    } | meta
    rows = [{**key, "metric": metric, **numbers, **stamp} for metric, numbers in metrics.items()]
    known = recorded_rows(path, key)
    new = pd.DataFrame(
        [{c: _text(row.get(c, "not_applicable")) for c in known.columns} for row in rows]
    )
    table = pd.concat([known.map(_text), new], ignore_index=True) if len(known) else new
    write_table(path, table)


def rows_of(frame: pd.DataFrame, point: dict[str, Any]) -> pd.DataFrame:
    """Return the rows whose key columns equal the point's values, compared as text."""
    equal = [frame[name].to_numpy() == _text(value) for name, value in point.items()]
    return frame[np.logical_and.reduce(equal)]


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)


def point_path(folder: Path, settings: dict[str, Any]) -> Path:
    """Return the file that holds a finished point of a live run, which then goes on where it was.

    A point is found by its settings and by the source that computes results: a change of that
    computes it anew.
    """
    text = json.dumps(settings, sort_keys=True, default=str) + source_digest()
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.npz"


def finished_point(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a point's arrays from its file, or compute and store them.

    Parameters
    ----------
    path : from `point_path`
    compute : gives the arrays; without `seconds` among them, the time that it took is added
    """
    # a file that a crash of the machine itself has torn is computed again
    torn = suppress(OSError, ValueError, EOFError, zipfile.BadZipFile)
    with torn, np.load(path, allow_pickle=False) as stored:
        return dict(stored)
    started = time.perf_counter()
    result = {name: np.asarray(value) for name, value in compute().items()}
    result.setdefault("seconds", np.asarray(time.perf_counter() - started))
    with atomic_file(path) as stream:
        np.savez(stream, **result)
    return result


@functools.cache
def source_digest() -> str:
    """Return a digest of the source that computes results: other code, other results.

    What only shows them (the rest of ``reproduction``) does not count.
    """
    package = Path(fl_privacy_lib.__file__).parent
    shows = package / "reproduction"
    computes = [p for p in sorted(package.rglob("*.py")) if p.parent != shows]
    return hashlib.sha256(b"".join(p.read_bytes() for p in computes)).hexdigest()
