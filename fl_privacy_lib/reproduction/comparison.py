"""Recorded rows beside printed values: which cell answers which value, and whether it came out."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fl_privacy_lib.accounting import conventions
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.published import comparable, keys_of
from fl_privacy_lib.reproduction.records import META, read_record
from fl_privacy_lib.reproduction.verdict import (
    Outcome,
    agrees,
    at_setting,
    design_effect,
    learns,
    listed,
    published_setting,
    trial_of,
    why_unfair,
)

JUDGED = ["record", "at_setting", "judged", "unfair", "learns", "effective"]
"""What `measured` says of each row, beside its columns."""
METRIC_PARTS = {"": "mean", "_std": "std", "_n": "n", "_effective": "effective"}
SUCCESS_RATES = ("attack_success_rate", "success_by_50")
INNER_STEPS = 20  # of every optimiser in an attack iteration


def measured(table: str, folder: Path = MEASURED) -> pd.DataFrame:
    """Return a measured table ('paper/table') with the columns of `JUDGED`; it may be empty.

    record : the table asked for, also of rows that it reads in another chapter's record
    at_setting : whether a row ran at the table's published setting
    judged : whether it belongs to the reading that the table is judged by
    unfair : why its cell is no fair trial; '' where it is, or where nothing is searched
    learns : whether its cell ends above what has not learned
    effective : of a success rate, the number of images that count, `design_effect`; else n

    Raises
    ------
    InputError
        If the file is broken.
    """
    trial = trial_of(table)
    sources = {table: {}} | trial.get("also", {})
    parts = [
        part
        for name, source in sources.items()
        if len(part := _rows_of(folder / f"{name}.csv", **source))
    ]
    if not parts:
        return pd.DataFrame(columns=["metric", *JUDGED])
    rows = pd.concat(parts, ignore_index=True).fillna("") if len(parts) > 1 else parts[0]
    reading: dict[str, Any] = next(iter(trial.get("readings", {}).values()), {})
    rows = rows.assign(
        record=table,
        at_setting=at_setting(rows, published_setting(table)),
        judged=rows.index.isin(select(rows, reading).index),
    )
    if "readings" not in trial:
        return rows.assign(unfair="", learns=True)
    wide = cells(rows)
    reasons = {tuple(cell["key"].values()): (why_unfair(cell), learns(cell)) for cell in wide}
    keys = zip(*(rows[c] for c in wide[0]["key"]), strict=True)
    unfair, above = zip(*(reasons[key] for key in keys), strict=True)
    return rows.assign(unfair=unfair, learns=above)


def _rows_of(
    path: Path, rows: Mapping[str, Any] | None = None, columns: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """Return a record's rows, or those of a selection with further columns; none without a file."""
    if not path.exists():
        return pd.DataFrame()
    return select(_read(path, path.stat().st_mtime_ns), dict(rows or {})).assign(**(columns or {}))


def effective_images(rows: pd.DataFrame) -> "pd.Series[float]":
    """Return how many independent images each success rate rests on, [rows]; else n."""
    effective = rows["n"].astype(float)
    rates = rows[rows["metric"].isin(SUCCESS_RATES)] if "victims" in rows else rows.iloc[:0]
    for _, alike in rates.groupby("metric"):
        images = effective[alike.index] // alike["seeds"].astype(float)
        effective[alike.index] /= design_effect(alike["mean"], alike["std"], alike["seeds"], images)
    return effective


@functools.lru_cache(maxsize=128)
def _read(path: Path, changed: int) -> pd.DataFrame:  # many claims rest on one table
    rows = read_record(path)
    return rows.assign(effective=effective_images(rows))


def select(frame: pd.DataFrame, rows: dict[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the given value, or one of the given list of values."""
    for column, wanted in rows.items():
        if column not in frame:
            return frame.iloc[:0]
        frame = frame[frame[column].isin(listed(wanted))]
    return frame


def cells(frame: pd.DataFrame, rows: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return a dict for each recorded cell: key columns, then means, spreads and counts.

    >>> frame = pd.DataFrame({"dataset": ["a"] * 2, "metric": ["accuracy", "growth"],
    ...                       "mean": [0.9, 2.0],
    ...                       "std": [0.1, 0.0], "n": ["3", "3"], "seeds": ["3", "3"]})
    >>> [(c["accuracy"], c["accuracy_std"], c["growth"]) for c in cells(frame)]
    [(0.9, 0.1, 2.0)]
    """
    frame = select(frame, rows or {})
    keys = [c for c in frame.columns if c not in {"metric", *JUDGED, *META}]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values in frame.itertuples(index=False, name=None):
        row = dict(zip(frame, values, strict=True))
        key = {k: row[k] for k in keys}  # a budget is a key column and a metric of one name
        judged = {k: row[k] for k in ("seeds", *JUDGED) if k in row}
        cell = found.setdefault(tuple(key.values()), key | judged | {"key": key})
        cell |= {row["metric"] + name: row.get(part) for name, part in METRIC_PARTS.items()}
    return [_derived(cell) for cell in found.values()]


def compared(row: dict[str, Any], asked: Any, found: float, spread: float) -> dict[str, Any]:
    """Return a recorded row with what was asked of it, what was found and its spread."""
    return row | {"asked": asked, "found": found, "spread": spread}


def _derived(cell: dict[str, Any]) -> dict[str, Any]:
    """Return a cell with the metrics that follow from its own: root mean squares, inner steps."""
    if cell.get("mse", 0) > 0:
        cell["rmse"] = cell["mse"] ** 0.5
        cell |= {"rmse_std": cell["mse_std"] / (2 * cell["rmse"]), "rmse_n": cell["mse_n"]}
    if "attack_iterations" in cell:
        for end, factor in (("", INNER_STEPS), ("_std", INNER_STEPS), ("_n", 1)):
            cell["attack_steps" + end] = factor * cell["attack_iterations" + end]
    return cell


NO_FAILURE = "the spread of some values is so wide that hardly any would miss the printed one"
AT_LIMIT = ("attack_iterations", "300")  # printed of any failed attack: it says no more than that


class Comparison(NamedTuple):
    """A published value beside the recorded cell that answers it; either may be missing.

    Parameters
    ----------
    printed : the published row, or None for a cell that no paper prints
    cell : the recorded cell as `cells` returns it, or None where nothing is recorded
    outcome : whether the value came out; None without one of the two, and for `AT_LIMIT`
    """

    printed: dict[str, Any] | None
    cell: dict[str, Any] | None
    outcome: Outcome | None = None


def compare(
    table: str,
    frame: pd.DataFrame,
    metric: str = "",
    unpublished: bool = False,
    instead: Mapping[str, str] | None = None,
) -> list[Comparison]:
    """Return a table's published values, each with the recorded cells of the same keys.

    They stand in the printed order, values without a cell alone, and where they are asked for,
    cells without a value after them. A value whose convention is not understood
    (`accounting.conventions.UNREPRODUCED`) never comes out, even where it agrees. `instead` names
    another measured metric for a published one: a departure.
    """
    printed = select(comparable(table), {"metric": metric} if metric else {})
    printed["measured_as"] = printed["measured_as"].replace(dict(instead or {}))
    keys = keys_of(printed)
    of_keys: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells(frame):
        key = cell["key"] | {"dataset": cell["key"].get("dataset", "").removesuffix("_z")}
        of_keys.setdefault(tuple(key.get(k) for k in keys), []).append(cell)
    paper, _, name = table.partition("/")
    pairs, answered = [], set()
    for row in ({str(k): v for k, v in row.items()} for row in printed.to_dict("records")):
        answers = [  # with what was measured: a setting may have the name of a metric
            c
            for c in of_keys.get(tuple(row[k] for k in keys), [])
            if row["measured_as"] + "_std" in c
        ]
        answered |= {id(cell) for cell in answers}
        understood = not conventions.cause(paper, name, row)
        says = (row["metric"], row["value"]) != AT_LIMIT
        pairs += [
            Comparison(row, c, _outcome(row, c, understood) if says else None) for c in answers
        ] or [Comparison(row, None)]
    alone = (c for cells_ in of_keys.values() for c in cells_ if id(c) not in answered)
    return pairs + [Comparison(None, cell) for cell in alone if unpublished]


def _outcome(row: dict[str, Any], cell: dict[str, Any], understood: bool) -> Outcome:
    """Return whether a printed row came out in a cell; a value that was tuned may exceed it.

    Two deviations that are more than a third of the printed value agree with too much to count.
    """
    asked, printed = row["measured_as"], row["value"]
    spread = cell[f"{asked}_std"]
    close = agrees(printed, cell[asked], spread, row["unit"], row["metric"])
    gap = 0.0 if row["unit"] == "boolean" else cell[asked] - float(printed)
    data = compared(cell | row, printed, cell[asked], spread)
    if close and row["unit"] not in ("boolean", "ratio") and 6 * spread > abs(float(printed)):
        return Outcome(None, gap, NO_FAILURE, cell=data)
    if close and understood:
        return Outcome(True, gap, cell=data)
    if cell.get("unfair"):
        return Outcome(None, gap, cell["unfair"], cell=data)
    return Outcome(False, gap, exceeded=bool(cell.get("searched")) and gap > 0, cell=data)
