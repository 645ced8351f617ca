"""The ledger of claims: each has a test on the measured rows, written down before the rows were.

``results/claims.yml`` holds one entry for every table, figure, proposition and stated claim. What
its test (`checks`) finds in the records is gathered here; `verdict` decides what that amounts to.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.reproduction.checks import CHECKS, PRINTED, check
from fl_privacy_lib.reproduction.comparison import Comparison, measured, select
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.paths import MEASURED, RESULTS
from fl_privacy_lib.reproduction.published import (
    MEAN_SQUARES,
    has_published,
    load_published,
)
from fl_privacy_lib.reproduction.verdict import (
    Outcome,
    Status,
    Verdict,
    at_setting,
    decide,
    listed,
    published_setting,
    trial_of,
)

_parsed = functools.cache(  # libyaml, where it is there, is ten times as fast
    functools.partial(yaml.load, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
)
FIELDS = set(
    "id paper where kind chapter statement table rows test setting refutation why because lost "
    "unfair tried headline section".split()
)
KINDS = ("table", "figure", "proposition", "claim", "finding")


def load_claims(path: Path = RESULTS / "claims.yml") -> list[dict[str, Any]]:
    """Return the ledger's entries, checked for form; what a caller changes in one stays its own."""
    entries = _parsed(path.read_text())
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
    return [dict(entry) for entry in entries]


def judge(compared: Iterable[Comparison], lost: str = "") -> Verdict:
    """Return the verdict on published values that stand together: a value, or a row of a table.

    Parameters
    ----------
    lost : what the paper leaves out that decides these values, see `deciding`
    """
    ran = [c for c in compared if c.cell and c.outcome and c.cell["judged"]]
    ran = [c for c in ran if c.cell and c.cell["at_setting"]] or ran  # what ran at less stands back
    full = all(c.cell["at_setting"] for c in ran if c.cell)
    return decide(bool(ran), full, [c.outcome for c in ran if c.outcome], lost=lost)


def entries_of(table: str, ledger: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a ledger's entries on a published table's values; `table` is 'paper/table'."""
    return [
        entry
        for entry in ledger
        if entry.get("test", {}).get("check") in PRINTED
        and entry["test"].get("published", entry["table"]) == table
    ]


def deciding(ledger: Iterable[dict[str, Any]], cell: dict[str, Any] | None) -> str:
    """Return what a paper leaves out that decides a recorded cell's values; '' for nothing.

    An entry speaks for its cells in every table that prints their values again. A cell that no
    entry is about lacks what all entries on its record lack.
    """
    near = [
        (
            all(cell["key"].get(c) in listed(w) for c, w in e.get("rows", {}).items()),
            e.get("lost", e.get("unfair")),
        )
        for e in ledger
        if cell and e.get("test", {}).get("check") in PRINTED and e["table"] == cell.get("record")
    ]
    alone = all(lost and not about for about, lost in near)
    return next((lost for about, lost in near if lost and (about or alone)), "")


def verdict(entry: dict[str, Any], folder: Path = MEASURED) -> Verdict:
    """Return the verdict on a claim, computed from the records, with why and what else to know.

    What counts are the rows at the table's published setting, with the departures that the entry
    names, in the reading that the table is judged by. A claim is refuted by a counter-example in
    such rows, together with the argument that the entry gives.
    """
    if "test" not in entry:
        return replace(decide(recorded=False), note=entry["why"])
    table = entry["table"]
    frame, setting = measured(table, folder), published_setting(table)
    if setting is not None and "setting" in entry:
        frame["at_setting"] = at_setting(frame, setting | entry["setting"])
    rows = select(frame, entry.get("rows", {}))
    full = rows[rows["at_setting"].astype(bool)]
    judged = full[full["judged"].astype(bool)]
    outcomes = check(entry["test"], table, judged) if len(judged) else []
    counter: list[Outcome] = []
    refutation = entry.get("refutation", {})
    if len(full) and refutation:
        counter = check(
            refutation["test"],
            table,
            select(frame[frame["at_setting"].astype(bool)], refutation["rows"]),
        )
    lost = entry.get("lost", entry.get("unfair", ""))
    if not outcomes and entry["test"]["check"] in PRINTED:
        lost = ""  # a table of which no cell is recorded has not run, whatever it leaves out
    if "unfair" in entry:  # the trial decides nothing, whichever way it went
        outcomes = [replace(o, held=None, why=lost) for o in outcomes]
    held = [bool(o.held) for o in counter]
    found = decide(len(rows) > 0, len(judged) > 0, outcomes, held, lost)
    found = replace(found, outcomes=tuple(counter if found.status is Status.REFUTED else outcomes))
    why = {
        Status.NOT_RUN: "the cells it compares are not all recorded yet"
        if len(full)
        else "nothing recorded yet",
        Status.REDUCED_SETTING: "" if setting is not None else "no published setting is known",
        Status.REFUTED: str(refutation.get("argument", "")),
        Status.NOT_REPRODUCED: entry.get("because") or _gaps(outcomes),
        Status.UNDECIDED: found.note,
    }
    return replace(
        found,
        note=why.get(found.status, ""),
        beside=() if found.status in BARE else _beside(found, entry, full),
    )


BARE = (Status.NOT_RUN, Status.REDUCED_SETTING, Status.REFUTED)
"""What has one of these needs no more words than why."""


def _beside(found: Verdict, entry: dict[str, Any], full: pd.DataFrame) -> tuple[str, ...]:
    """Return what a reader has to know besides why a claim has its status."""
    search = "" if found.status is Status.REPRODUCED else trial_of(entry["table"]).get("search")
    idle = sum(bool(o.held) and not o.cell.get("learns", True) for o in found.outcomes)
    return tuple(filter(None, (
        f"tried: {entry['tried']}" if "tried" in entry else "",
        f"{idle} of those that hold have not learned" if idle else "",
        *_departures(entry, full),
        _coverage(entry, found),
        f"every rate tried: results/measured/{search}.csv" if search else "",
    )))  # fmt: skip


def _gaps(outcomes: list[Outcome]) -> str:
    """Return by how much the failing cells miss what was asked for."""
    gaps = [o.gap for o in outcomes if o.held is False and not o.exceeded and o.gap]
    span = f"{min(gaps, default=0):+.3g} to {max(gaps, default=0):+.3g}".replace("-", "−")
    return f"the cells that fail in a fair trial are off by {span}" if gaps else ""


def _departures(entry: dict[str, Any], full: pd.DataFrame) -> Iterator[str]:
    """Yield on how many cells the test holds in each reading that the table is not judged by.

    A cell that decides nothing, for example because it was no fair trial, is open.
    """
    test, table = entry["test"], entry["table"]
    readings = {
        name: (test, select(full, columns))
        for name, columns in list(trial_of(table).get("readings", {}).items())[1:]
    }
    if test["check"] == "values" and "mse" in set(full["metric"]):
        squares = test | {"instead": MEAN_SQUARES}
        readings["distances by the formula, without the root"] = squares, full
    for name, (other, rows) in readings.items():
        if other == test and rows["judged"].all():
            continue
        if held := [o.held for o in check(other, table, rows)]:
            yield f"{name}: {held.count(True)} of {len(held)}" + (
                f" ({held.count(None)} open)" if None in held else ""
            )


def _coverage(entry: dict[str, Any], found: Verdict) -> str:
    """Return the data sets that were compared, where some are missing and the claim names none."""
    if "dataset" in entry.get("rows", {}) or not has_published(entry["table"]):
        return ""
    here = {o.cell.get("dataset", "all").removesuffix("_z") for o in found.outcomes} - {"all"}
    names = set(load_published(entry["table"]).get("dataset", ())) - {"all"}
    counts = f"{len(here)} of {len(names)} data sets: "
    return counts + ", ".join(map(named, sorted(here))) if here and here < names else ""
