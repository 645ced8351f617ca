"""The ledger of claims: each has a test on the measured rows, written down before the rows were.

``results/claims.yml`` holds one entry for every table, figure, proposition and stated claim. What
its test finds in the records is gathered here; `reproduction.verdict` decides what that amounts to.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.accounting.conventions import UNREPRODUCED
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.paths import MEASURED, RESULTS
from fl_privacy_lib.reproduction.published import comparable, has_published, keys_of, load_published
from fl_privacy_lib.reproduction.records import META, read_record
from fl_privacy_lib.reproduction.verdict import (
    RATIO_FACTOR,
    Evidence,
    Status,
    Verdict,
    agrees,
    at_setting,
    decide,
    published_setting,
)

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
FIELDS = set("id paper where kind chapter statement table rows test setting refutation why".split())
FIELDS |= {"because", "lost"}
KINDS = ("table", "figure", "proposition", "claim")
CHECKS = (
    "values",
    "accounted",
    "rate_above",
    "rate_below",
    "fewer_iterations",
    "shown",
    "at_most",
    "ratio",
    "ahead",
    "best",
)


def load_claims(path: Path = RESULTS / "claims.yml") -> list[dict[str, Any]]:
    """Return the ledger's entries, checked for form."""
    entries = yaml.load(path.read_text(), Loader=LOADER)
    seen: set[str] = set()
    for entry in entries:
        name = entry.get("id", "?")
        if unknown := set(entry) - FIELDS:
            raise InputError(
                f"claim {name} has the unknown field {min(unknown)!r}: "
                f"use {', '.join(sorted(FIELDS))}."
            )
        if name in seen:
            raise InputError(f"claim {name} stands twice in {path}: give each an id of its own.")
        seen.add(name)
        one_of(KINDS, kind=entry["kind"])
        if "test" in entry:
            one_of(CHECKS, check=entry["test"]["check"])
        elif "why" not in entry:
            raise InputError(
                f"claim {name} has neither a test nor a reason why it is not run: give one."
            )
    return entries


def measured(table: str, folder: Path = MEASURED) -> pd.DataFrame:
    """Return a measured table ('paper/table') with the column `at_setting`; it may be empty.

    `at_setting` says whether a row ran at the table's published setting. A broken file is an
    `InputError`.
    """
    path = folder / f"{table}.csv"
    if not path.exists():
        return pd.DataFrame(columns=["metric", "at_setting"])
    rows = _read(path, path.stat().st_mtime_ns)
    return rows.assign(at_setting=at_setting(rows, published_setting(table)))


@functools.lru_cache(maxsize=128)
def _read(path: Path, changed: int) -> pd.DataFrame:  # many claims rest on one table
    return read_record(path)


def select(frame: pd.DataFrame, rows: dict[str, Any]) -> pd.DataFrame:
    """Return the rows whose columns have the given value, or one of the given list of values."""
    for column, wanted in rows.items():
        allowed = [str(w) for w in (wanted if isinstance(wanted, list) else [wanted])]
        if column not in frame:
            return frame.iloc[:0]
        frame = frame[frame[column].isin(allowed)]
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
    keys = [c for c in frame.columns if c not in {"metric", "at_setting", *META}]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in frame.to_dict("records"):
        there = {k: row[k] for k in (*keys, "seeds", "at_setting") if k in row}
        there["key"] = {
            k: row[k] for k in keys
        }  # a budget is a key column and a metric of one name
        cell = found.setdefault(tuple(row[k] for k in keys), there)
        cell |= {
            row["metric"] + name: row.get(part)
            for name, part in (("", "mean"), ("_std", "std"), ("_n", "n"))
        }
    return list(found.values())


@dataclass(frozen=True)
class Comparison:
    """A published value beside the recorded cell that answers it; either may be missing.

    Parameters
    ----------
    printed : the published row, or None for a cell that no paper prints
    cell : the recorded cell as `cells` returns it, or None where nothing is recorded
    held : whether the value came out
    """

    printed: dict[str, Any] | None
    cell: dict[str, Any] | None
    held: bool = False


def compare(
    table: str, frame: pd.DataFrame, metric: str = "", unpublished: bool = False
) -> list[Comparison]:
    """Return a table's published values, each with the recorded cells of the same keys.

    They stand in the printed order, values without a cell alone, and where they are asked for,
    cells without a value after them. A value whose convention is not understood
    (`accounting.conventions.UNREPRODUCED`) never comes out, even where it agrees.
    """
    printed = select(comparable(table), {"metric": metric} if metric else {})
    keys = keys_of(printed)
    of_keys: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells(frame):
        of_keys.setdefault(tuple(cell["key"].get(k) for k in keys), []).append(cell)
    paper, _, name = table.partition("/")
    found, answered = [], set()
    for row in ({str(k): v for k, v in row.items()} for row in printed.to_dict("records")):
        asked, unit = row["measured_as"], row["unit"]
        own = [cell for cell in of_keys.get(tuple(row[k] for k in keys), []) if asked in cell]
        answered |= {id(cell) for cell in own}
        close = [
            agrees(row["value"], cell[asked], cell[f"{asked}_std"], unit, row["metric"])
            for cell in own
        ]
        understood = not any(entry.covers(paper, name, row) for entry in UNREPRODUCED)
        pairs = zip(own, close, strict=True)
        found += [Comparison(row, cell, c and understood) for cell, c in pairs] or [
            Comparison(row, None)
        ]
    alone = (cell for own in of_keys.values() for cell in own if id(cell) not in answered)
    return found + [Comparison(None, cell) for cell in alone if unpublished]


def judge(compared: Iterable[Comparison]) -> Verdict:
    """Return the verdict on published values that stand together: a value, or a row of a table."""
    ran = [(c.cell["at_setting"], c.held) for c in compared if c.cell and c.printed]
    return decide(Evidence(bool(ran), all(full for full, _ in ran), tuple(held for _, held in ran)))


def verdict(entry: dict[str, Any], folder: Path = MEASURED) -> Verdict:
    """Return the verdict on a claim, computed from the records.

    What counts are the rows at the table's published setting, with the departures that the entry
    names. A claim is refuted by a counter-example in such rows, together with the argument that the
    entry gives.
    """
    if "test" not in entry:
        return replace(decide(Evidence(recorded=False)), note=entry["why"])
    frame, setting = measured(entry["table"], folder), published_setting(entry["table"])
    if setting is not None and "setting" in entry:
        frame["at_setting"] = at_setting(frame, setting | entry["setting"])
    rows = select(frame, entry.get("rows", {}))
    full = rows[rows["at_setting"].astype(bool)]
    held = check(entry["test"], entry, full) if len(full) else []
    counter, refutation = [], entry.get("refutation", {})
    if len(full) and refutation:
        rest = frame[frame["at_setting"].astype(bool)]
        counter = check(refutation["test"], entry, select(rest, refutation["rows"]))
    found = decide(Evidence(len(rows) > 0, len(full) > 0, tuple(held), tuple(counter)))
    notes = {
        Status.NOT_RUN: "the cells it compares are not all recorded yet"
        if len(rows)
        else "nothing recorded yet",
        Status.REDUCED_SETTING: "" if setting is not None else "no published setting is known",
        Status.REFUTED: refutation.get("argument", ""),
    }
    return replace(found, note=notes.get(found.status, _coverage(entry, full)))


def _coverage(entry: dict[str, Any], frame: pd.DataFrame) -> str:
    """Return the recorded data sets, where some are missing and the claim names none."""
    if (
        "dataset" in entry.get("rows", {})
        or "dataset" not in frame
        or not has_published(entry["table"])
    ):
        return ""
    names, own = (
        sorted(set(f.get("dataset", ()))) for f in (load_published(entry["table"]), frame)
    )
    return (
        f"{len(own)} of {len(names)} data sets: {', '.join(own)}" if set(own) < set(names) else ""
    )


def in_words(test: dict[str, Any]) -> str:
    """Return a claim's test as a reader's words; `check` has their exact meaning.

    >>> in_words({"check": "at_most", "metric": "slope", "bound": 1.25})
    'slope ≤ 1.25'
    """
    return _words(test).replace("_", " ")


def _words(test: dict[str, Any]) -> str:
    kind, metric = test["check"], test.get("metric", "success rate")
    match kind:
        case "values":
            return "each printed value comes out"
        case "accounted":
            return "each printed ε comes out"
        case "rate_above" | "rate_below":
            return f"{metric} {kind.removeprefix('rate_')} {test['bound']}, with its interval"
        case "fewer_iterations":
            return (
                f"{_row_label(test['rows'])} needs fewer iterations than {_row_label(test['than'])}"
            )
        case "shown" | "at_most":
            return f"{metric} {'≥' if kind == 'shown' else '≤'} {test['bound']}"
        case "ratio":
            return f"printed ratio within a factor of {RATIO_FACTOR}"
        case "best":
            return f"{metric} highest at {test['over']} = {' or '.join(map(str, test['at']))}"
        case "ahead":
            by, errors = test.get("by", 0), test.get("errors")
            margin = f" less {-by}" if by < 0 else f" by {by}" if by else ""
            margin += f" by {errors} standard errors" if errors else ""
            rows, than = _row_label(test["rows"]), _row_label(test["than"])
            return f"{metric} of {rows} above that of {than}{margin}"
    raise AssertionError(
        f"the check {kind!r} has no words"
    )  # a programmer's mistake: the ledger's form is checked


def _row_label(rows: dict[str, Any]) -> str:
    return ", ".join(
        " or ".join(map(str, v)) if isinstance(v, list) else str(v) for v in rows.values()
    )


def check(test: dict[str, Any], entry: dict[str, Any], frame: pd.DataFrame) -> list[bool]:
    """Return, for each recorded cell, whether the test holds there.

    values, accounted, ratio : the published value of the same keys comes out, a time as a ratio to
        the non-private one; `published` names the table where it is another
    rate_above, rate_below : the Wilson interval of the success rate lies above, or below, `bound`
    fewer_iterations : `rows` needs fewer attack iterations to success than `than`, data set by data
        set
    shown : the metric `metric` is at least `bound`: a number, or the name of another metric of the
        same cell
    at_most : the metric `metric` is at most `bound`
    ahead : the metric of `rows` is above that of `than`, both at equal values of the columns `on`,
        by more than `errors` standard errors of the difference and `by` besides (negative: it is
        not that far behind)
    best : among the rows with equal values of the columns `on`, where the column `over` has all of
        `levels`, the metric is highest at one of `at`
    """
    kind = test["check"]
    if kind in ("values", "accounted", "ratio"):
        compared = compare(test.get("published", entry["table"]), frame)
        return [c.held for c in compared if c.cell]
    if kind in ("rate_above", "rate_below"):
        rates = frame[frame["metric"] == test.get("metric", "attack_success_rate")]
        bounds = [
            wilson_interval(round(r["mean"] * int(r["n"])), int(r["n"]))
            for _, r in rates.iterrows()
        ]
        return [
            low > test["bound"] if kind == "rate_above" else high < test["bound"]
            for low, high in bounds
        ]
    if kind == "fewer_iterations":
        needed = frame[frame["metric"] == "attack_iterations"]
        small, large = select(needed, test["rows"]), select(needed, test["than"])
        pairs = small.merge(large, on="dataset", suffixes=("", "_than"))
        return list(pairs["mean"] < pairs["mean_than"])
    own = frame[frame["metric"] == test["metric"]]
    if kind == "ahead":
        one, other = select(own, test["rows"]), select(own, test["than"])
        pairs = one.merge(other, on=test["on"], suffixes=("", "_than"))
        squares = [
            pairs["std" + part] ** 2 / pairs["n" + part].astype(int) for part in ("", "_than")
        ]
        needed = test["errors"] * (squares[0] + squares[1]) ** 0.5 + test.get("by", 0.0)
        return list(pairs["mean"] - pairs["mean_than"] > needed)
    if kind == "best":
        groups: list[Any] = [
            group.set_index(test["over"])["mean"] for _, group in own.groupby(test["on"])
        ]
        whole = [
            group
            for group in groups
            if {str(level) for level in test["levels"]} <= set(group.index)
        ]
        return [
            bool(group.index[group == group.max()].isin([str(level) for level in test["at"]]).any())
            for group in whole
        ]
    values, bound = own["mean"].to_numpy(), test["bound"]
    if isinstance(
        bound, str
    ):  # the rows of a cell stand together, so both metrics come in the cells' order
        bound = frame[frame["metric"] == bound]["mean"].to_numpy()
    return list(values <= bound if kind == "at_most" else values >= bound)
