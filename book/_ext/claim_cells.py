"""A compared cell in a reader's words: which it is, what was asked of it and what was found."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fl_privacy_lib.reproduction.checks import PRINTED
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.names import SETTINGS
from fl_privacy_lib.reproduction.verdict import Outcome

COMPUTED = ("excess", "margin")
"""What a computed statement is judged by: found less claimed, and the reverse."""


def figure(value: float) -> str:
    """Return a number with three significant digits, plainly; less than rounding is 0.

    >>> figure(0.0), figure(-0.66812), figure(0.0008), figure(5856.2), figure(4.4e-16)
    ('0', '−0.668', '0.0008', '5,856', '0')
    """
    size = abs(value)
    if size < 1e-12:
        return "0"
    if size >= 1000:
        text = f"{size:,.0f}"
    else:
        text = f"{size:.3g}" if size >= 1e-4 else f"{size:.1e}"
    return text if value > 0 else f"−{text}"


@dataclass(frozen=True)
class Cell:
    """A compared cell: what was asked of it, what was found, and by how much they differ.

    `lead` is by how much it holds, in the direction of the test; `relative` is the deviation of a
    printed value that is neither a fraction nor a word.
    """

    words: str
    asked: str
    found: float
    spread: float
    gap: float
    lead: float
    held: bool | None
    seeds: str
    relative: float | None


def computed(test: dict[str, Any], row: Mapping[str, Any]) -> bool:
    """Return whether a row is a computed statement's, judged by a difference."""
    return "claimed" in row and test.get("metric") in COMPUTED


def cell_of(outcome: Outcome, test: dict[str, Any], columns: tuple[str, ...]) -> Cell:
    """Return an outcome as a cell; a computed statement shows the values behind its margin."""
    row, kind = outcome.cell, test["check"]
    asked, found, gap = row["asked"], float(row["found"]), outcome.gap
    if computed(test, row):
        asked = row["claimed"]
        gap = found if test["metric"] == "excess" else -found
        found = asked + gap
    relative = None
    if kind in PRINTED and row.get("unit") not in ("boolean", "fraction"):
        relative = gap / abs(float(asked)) if float(asked) else None
    printed = isinstance(asked, str) and len(asked) < 10  # a ratio of two printed times is longer
    return Cell(
        words=", ".join(dict.fromkeys(w for c in columns if (w := setting(c, row)))),
        asked=asked if printed else figure(float(asked)),
        found=found,
        spread=float(row["spread"]),
        gap=gap,
        lead=-outcome.gap if kind in ("rate_below", "at_most") else outcome.gap,
        held=outcome.held,
        seeds=seeds_of(row),
        relative=relative,
    )


def seeds_of(row: Mapping[str, Any]) -> str:
    """Return what a cell was repeated over."""
    seeds = f"{float(row.get('seeds', 1)):.0f}"
    if "victims" in row:
        return f"{seeds} × {row['victims']} images"
    if "folds" in row:
        return f"{seeds} × {row['folds']} folds"
    for name in ("repetitions", "draws"):
        if name in row:
            return f"{row[name]} {name}"
    return seeds


SHOWN = ("metric dataset defense method arm attacker attack threat_type level accounting model "
         "value epsilon ratio noise_scale_policy noise_scale clip clip_norm clients participants "
         "local_iterations pruned setting solution varied dimensions case").split()  # fmt: skip
WORDS = {
    "printed": "printed noise",
    "code": "noise as coded",
    "as_coded": "scale and rate as coded",
    "rmse": "distance",
    "mse": "squared distance",
    "attack_iterations": "iterations",
    "resilient": "outcome",
    "target_epsilon": "budget",
    "hm": "HM",
    "duchi": "Duchi",
    "laplace": "Laplace",
    "sigma": "σ",
    "two_stage": "two-stage",
}
"""Code words of records that are not in the library's own names."""


def spelled(code: str) -> str:
    """Return a code word as a reader sees it: by its name, else without underscores."""
    name = WORDS.get(code) or named(code)
    if name == code and re.fullmatch(r"(exp|pe|ps)_\w+", code):
        return code.upper().replace("_", "-")
    return re.sub(r"\b[a-z0-9]+(_[a-z0-9]+)+\b", lambda m: m[0].replace("_", " "), name)


def setting(column: str, row: Mapping[str, Any]) -> str:
    """Return a key column's value in a reader's words; '' for one that says nothing here."""
    text = str(row.get("key", {}).get(column, row.get(column)))
    if text in ("not_applicable", "nan", "none", "None") or ("=" in text and column == "setting"):
        return ""
    if column == "case":
        return re.sub(r"[a-z][a-z0-9_]+", lambda m: spelled(m[0]), text)
    if column == "level":
        percent = row.get("method") == "pruned"
        noise = f"noise of {float(text):g}" if float(text) else ""
        return f"{100 * float(text):g} % pruned" if percent else noise
    if column in SETTINGS and re.fullmatch(r"[\d.]+", text):
        share = "%" in SETTINGS[column]
        return SETTINGS[column].format(float(text) if share else text).replace("% ", " % ")
    return spelled(text.removesuffix("_z") if column == "dataset" else text)


def varying(outcomes: tuple[Outcome, ...]) -> tuple[str, ...]:
    """Return the key columns that tell a claim's cells apart, the data set always."""
    rows = [o.cell.get("key", {}) | {"metric": o.cell.get("metric", "")} if "key" in o.cell
            else o.cell for o in outcomes]  # fmt: skip
    columns = [c for c in SHOWN if all(c in row for row in rows)]
    several = [c for c in columns if len({str(row[c]) for row in rows}) > 1]
    return tuple(c for c in columns if c in several or c == "dataset")


def span(values: list[float], unit: str) -> str:
    """Return the range of some deviations, with signs."""
    ends = []
    for value in (min(values), max(values)):
        rounded = round(value, 1) if abs(value) >= 1 else float(f"{value:.2g}")
        text = figure(rounded if abs(value) > 1e-9 else 0.0)
        ends.append(f"+{text}" if value > 1e-9 else text)
    return ends[0] + unit if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}{unit}"
