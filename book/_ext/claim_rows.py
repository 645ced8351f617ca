"""What the page of claims says of each: text and numbers from the ledger and the records.

Nothing here chooses a status or knows HTML; ``claims`` draws what this gathers.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import yaml

from fl_privacy_lib.chapters import CHAPTERS, experiment
from fl_privacy_lib.reproduction.checks import PRINTED, in_words
from fl_privacy_lib.reproduction.claims import load_claims, verdict
from fl_privacy_lib.reproduction.comparison import SUCCESS_RATES, measured, select
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.names import NAMES, SETTINGS
from fl_privacy_lib.reproduction.paths import MEASURED, PUBLISHED
from fl_privacy_lib.reproduction.records import META
from fl_privacy_lib.reproduction.tables import coverage
from fl_privacy_lib.reproduction.verdict import Outcome, Status, Verdict, trial_of

PAPERS = ("fed_cdp", "fed_alpha_cdp", "dynamic_parameters", "fedsel", "compensation")
FINDINGS = "our findings"
EXACT = "exact"
COMPUTED = ("excess", "margin")
"""What a computed statement is judged by: found less claimed, and the reverse."""
WHY = {
    Status.REPRODUCED: "The test holds in every compared cell.",
    Status.EXCEEDED: "What differs lies above the printed value, at a tuned learning rate.",
    Status.REDUCED_SETTING: "Only a smaller setting than the published one is recorded, which "
    "decides nothing.",
}
ENDS = {"rate_above": "above", "rate_below": "below", "shown": "at least", "at_most": "at most"}


@dataclass(frozen=True)
class Part:
    """How a recorded table is measured again: its chapter, and the names of its parts."""

    chapter: str
    names: tuple[str, ...]
    long: bool


@functools.cache
def parts() -> dict[str, Part]:
    """Return 'paper/table' → what records it, from the chapters' experiments."""
    recorded: dict[str, Part] = {}
    for chapter, kind in CHAPTERS.items():
        for part in experiment(kind).parts(kind.of_profile("full"), MEASURED):
            known = recorded.get(part.table, Part(chapter, (), False))
            names = (*known.names, part.name) if part.name else known.names
            recorded[part.table] = Part(chapter, names, known.long or part.long)
    return recorded


def command(table: str) -> str:
    """Return the command that records a table; rows that are there are not measured again."""
    return f'make record NB={parts()[table].chapter} P="--only {table}"'


@functools.cache
def hours(table: str) -> str:
    """Return how long the recorded points of a table took, in words."""
    frame = measured(table)
    if frame.empty:
        return "no time yet"
    points = frame.drop_duplicates([c for c in frame.columns if c not in {"metric", *META}])
    seconds = float(points["seconds"].sum())
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


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
    "epsilon": "ε",
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


@dataclass(frozen=True)
class Claim:
    """An entry of the ledger with its verdict, as a reader sees it."""

    entry: dict[str, Any]
    verdict: Verdict
    cells: tuple[Cell, ...]
    data: tuple[str, ...]

    @property
    def id(self) -> str:
        """Its anchor."""
        return str(self.entry["id"])

    @property
    def paper(self) -> str:
        """The paper's name, or that it is one of our findings."""
        return FINDINGS if self.entry["kind"] == "finding" else named(self.entry["paper"])

    @property
    def title(self) -> str:
        """Paper and place, as far as the first place."""
        place = re.split(r"[;,]", self.entry["where"])[0]
        return f"{named(self.entry['paper'])}, {place}"

    @property
    def status(self) -> Status:
        """The computed status."""
        return self.verdict.status

    @property
    def counts(self) -> str:
        """On how many cells it holds, in words."""
        if not self.verdict.cells:
            return ""
        what = "counter-example in " if self.status is Status.REFUTED else ""
        cells = "cell" if self.verdict.cells == 1 else "cells"
        return f"{what}{self.verdict.held} of {self.verdict.cells} {cells}"

    @property
    def tests(self) -> list[str]:
        """The test, and for a refuted claim that of its counter-example."""
        entry = self.entry
        if "test" not in entry:
            return []
        words = [f"{in_words(entry['test'])}."]
        if self.status is Status.REFUTED:
            words.append(f"Counter-example: {in_words(entry['refutation']['test'])}.")
        return [sentence[0].upper() + sentence[1:] for sentence in words]

    @property
    def why(self) -> str:
        """Why it has its status, in a sentence or two."""
        text = self.verdict.note or WHY.get(self.status, "")
        text = re.sub(r"([−+]\S+) to \1", r"\1", text)
        sentence = text[0].upper() + text[1:]
        return sentence if sentence.endswith((".", "?")) else sentence + "."

    @property
    def more(self) -> list[str]:
        """What was tried, other readings, data sets that lack: for who asks."""
        lines = [line for line in self.verdict.beside if not line.startswith("every rate tried")]
        readings = trial_of(self.entry.get("table", "")).get("readings", {})
        known = (*readings, "distances by the formula")
        return [
            f"Judged otherwise ({line.replace(': ', '): holds in ')} cells."
            if line.startswith(known)
            else f"{line[0].upper()}{line[1:]}."
            for line in lines
        ]

    @property
    def search(self) -> str | None:
        """The record of every learning rate that was tried, 'paper/table'."""
        return trial_of(self.entry.get("table", "")).get("search")

    @property
    def test(self) -> dict[str, Any]:
        """Its test, of a refuted claim that of the counter-example."""
        refuted = self.status is Status.REFUTED
        return dict(self.entry["refutation"]["test"] if refuted else self.entry.get("test", {}))

    @property
    def judged_by(self) -> str:
        """The kind of its test."""
        return str(self.test.get("check", ""))

    @property
    def worst(self) -> Cell | None:
        """The cell farthest off, one that fails first; the strongest counter-example."""
        return max(self.cells, key=self._off, default=None)

    def _off(self, cell: Cell) -> tuple[int, float]:
        if self.status is Status.REFUTED:
            return int(cell.held is True), cell.lead
        rank = {False: 2, None: 1, True: 0}[cell.held]
        if self.judged_by in PRINTED:
            return rank, abs(cell.gap if cell.relative is None else cell.relative)
        return rank, -cell.lead

    def _arm(self, side: str) -> str:
        """Return the name of a pair's arm, where the test compares pairs."""
        assert self.worst is not None
        pair = self.verdict.outcomes[self.cells.index(self.worst)].cell
        end, columns = ("", "rows") if side == "rows" else ("_than", "than")
        names = [setting(c, {c: pair.get(c + end, pair.get(c))}) for c in self.test[columns]]
        return ", ".join(name for name in names if name) + ": "

    @property
    def _left(self) -> str:
        """Say of iterations that are left over that they are."""
        return " left" * self.test.get("metric", "").endswith("_left")

    @property
    def published(self) -> str:
        """What its worst cell was asked for."""
        cell = self.worst
        if cell is None:
            return "—"
        if cell.asked in ("true", "false"):
            return "resists" if cell.asked == "true" else "does not resist"
        if computed(self.test, self.verdict.outcomes[0].cell):
            return cell.asked
        if "than" in self.test:
            return self._arm("than") + cell.asked + self._left
        share = self.judged_by.startswith("rate")
        asked = f"{100 * float(cell.asked):g} %" if share else cell.asked
        return f"{ENDS[self.judged_by]} {asked}" if self.judged_by in ENDS else asked

    @property
    def measured(self) -> str:
        """What was found in its worst cell, with the spread over seeds."""
        cell = self.worst
        if cell is None:
            return "—"
        if self.judged_by.startswith("rate") or cell.asked in ("true", "false"):
            spread = f" ± {100 * cell.spread:.0f}" if cell.spread else ""
            return f"{100 * cell.found:.0f}{spread} %"
        spread = f" ± {figure(float(f'{cell.spread:.2g}'))}" if cell.spread else ""
        arm = self._arm("rows") if "than" in self.test else ""
        return arm + figure(cell.found) + spread + self._left

    @property
    def which(self) -> str:
        """Which cell that is, where there are several."""
        cell = self.worst
        if cell is None or len(self.cells) < 2:
            return cell.words if cell else ""
        words = f": {cell.words}" if cell.words else ""
        kind = "farthest off"
        if self.status is Status.REFUTED:
            kind = "strongest"
        elif self.judged_by not in PRINTED and all(c.held for c in self.cells):
            kind = "nearest to the limit"
        return f"{kind}, of {len(self.cells)}{words}"

    @property
    def deviation(self) -> str:
        """Measured less published, over all cells: in per cent, in points, or as it is."""
        if not self.cells:
            return "—"
        units = {o.cell.get("unit") for o in self.verdict.outcomes}
        if self.judged_by in PRINTED and units != {"fraction"}:
            values = [100 * c.relative for c in self.cells if c.relative is not None]
            return span(values, " %") if values else "—"
        metric = self.test.get("metric", "attack_success_rate" if "bound" in self.test else "")
        share = units == {"fraction"} or metric in SHARES
        points = share or re.search("lead|gain|calm", metric) is not None
        unit = " points" if points else " iterations" * ("iterations" in metric) + self._left
        return span([(100 if share else 1) * c.gap for c in self.cells], unit)

    @property
    def size(self) -> float:
        """How far off it is, to sort by."""
        cell = self.worst
        if cell is None:
            return -1.0
        return abs(cell.gap if cell.relative is None else cell.relative)

    @property
    def seeds(self) -> str:
        """Seeds behind a cell, or that it is exact."""
        table = self.entry.get("table", "")
        if not self.cells:
            return "—"
        if self.judged_by == "accounted" or table.endswith("/statements"):
            return EXACT
        counts = sorted({cell.seeds for cell in self.cells})
        return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]

    def headline(self) -> str | None:
        """Return the sentence of the ledger for the status that was computed, with its numbers."""
        sentences = self.entry.get("headline")
        if sentences is None:
            return None
        if self.status not in sentences:
            return str(self.entry["statement"])
        found = [cell.found for cell in self.cells]
        gaps = sorted(abs(100 * cell.gap) for cell in self.cells if cell.held is False)
        numbers = {
            "held": self.verdict.held,
            "cells": self.verdict.cells,
            "least": min(found, default=0.0),
            "most": max(found, default=0.0),
            "asked": self.worst.found - self.worst.gap if self.worst else 0.0,
            "nearest": gaps[0] if gaps else 0.0,
            "farthest": gaps[-1] if gaps else 0.0,
        }
        text = str(sentences[self.status].format(**numbers))
        return re.sub(r"(?<=\d)%", " %", text)


SHARES = ("accuracy", *SUCCESS_RATES)


def span(values: list[float], unit: str) -> str:
    """Return the range of some deviations, with signs."""
    ends = []
    for value in (min(values), max(values)):
        rounded = round(value, 1) if abs(value) >= 1 else float(f"{value:.2g}")
        text = figure(rounded if abs(value) > 1e-9 else 0.0)
        ends.append(f"+{text}" if value > 1e-9 else text)
    return ends[0] + unit if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}{unit}"


DATA = {NAMES[code] for code in "mnist lfw cifar10 adult cancer".split()}


def data_of(entry: dict[str, Any], outcomes: tuple[Outcome, ...]) -> tuple[str, ...]:
    """Return the names of the data sets that a claim's recorded cells are on."""
    codes = [str(o.cell["dataset"]) for o in outcomes if "dataset" in o.cell]
    for outcome in outcomes:
        codes += re.findall(r"dataset=(\w+)", str(outcome.cell.get("setting", "")))
        codes += [w for w in re.findall(r"[\w-]+", str(outcome.cell.get("case"))) if w in DATA]
    if not outcomes and "table" in entry:
        rows = select(measured(entry["table"]), entry.get("rows", {}))
        codes = list(rows["dataset"]) if "dataset" in rows else []
    names = {named(code.removesuffix("_z").removesuffix("_123")) for code in codes}
    return tuple(sorted(names - {"—"}))


@functools.cache
def titles(paper: str) -> dict[str, str]:
    """Return file → the paper's own name of a published table, 'Table VII'."""
    index = yaml.safe_load((PUBLISHED / paper / "index.yaml").read_text())
    return {t["file"]: t["id"] for t in index["tables"] if t["file"]}


def gather() -> list[Claim]:
    """Return all claims, chapter by chapter in the ledger's order."""
    claims = []
    for entry in sorted(load_claims(), key=lambda entry: str(entry["chapter"])):
        found = verdict(entry)
        refuted = found.status is Status.REFUTED
        test = entry["refutation"]["test"] if refuted else entry.get("test", {})
        columns = varying(found.outcomes)
        cells = tuple(cell_of(outcome, test, columns) for outcome in found.outcomes)
        claims.append(Claim(entry, found, cells, data_of(entry, found.outcomes)))
    return claims


@dataclass(frozen=True)
class Coverage:
    """How much of a published table is measured, and how much of that comes out."""

    title: str
    printed: int
    measured: int
    at_setting: int
    come_out: int
    exceeded: int
    claim: str | None

    @property
    def grade(self) -> tuple[str, str]:
        """A letter and a word: all, most, some or none of what was measured comes out."""
        if not self.measured:
            return "–", "not measured"
        if not self.at_setting:
            return "R", "reduced"
        share = self.come_out / self.at_setting
        if share in (0, 1):
            return ("A", "all") if share else ("N", "none")
        return ("M", "most") if share > 0.5 else ("S", "some")


def matrix(claims: list[Claim]) -> dict[str, list[Coverage]]:
    """Return paper → the coverage of each of its published tables."""
    rows: dict[str, list[Coverage]] = {}
    for paper in PAPERS:
        files = [path.stem for path in (PUBLISHED / paper).glob("table_*.csv")]
        for stem in sorted(files, key=lambda s: (int(re.sub(r"\D", "", s)), s)):
            counts = coverage(f"{paper}/{stem}", [claim.entry for claim in claims])
            first = claim_of(claims, paper, stem)
            rows.setdefault(paper, []).append(
                Coverage(titles(paper)[f"{stem}.csv"], *counts, first)
            )
    return rows


def claim_of(claims: list[Claim], paper: str, stem: str) -> str | None:
    """Return the id of the first claim about a published table."""
    name, table = f"{paper}.{stem}", f"{paper}/{stem}"
    about = [c.id for c in claims if c.id == name or c.id.startswith(name + ".")]
    about += [c.id for c in claims if c.entry.get("table") == table]
    return about[0] if about else None


# ---- files ---------------------------------------------------------------------------------------


def claims_csv(claims: list[Claim]) -> str:
    """Return the list as CSV, a line a claim."""
    rows = [
        {
            "id": c.id,
            "paper": named(c.entry["paper"]),
            "where": c.entry["where"],
            "kind": c.entry["kind"],
            "chapter": c.entry["chapter"],
            "statement": c.entry["statement"],
            "test": " ".join(c.tests),
            "status": str(c.status),
            "held": c.verdict.held,
            "cells": c.verdict.cells,
            "published": c.published,
            "measured": c.measured,
            "of": c.which,
            "deviation": c.deviation,
            "seeds": c.seeds,
            "data": ", ".join(c.data),
            "why": c.why,
            "more": " ".join(c.more),
            "record": f"results/measured/{c.entry['table']}.csv" if "table" in c.entry else "",
            "command": command(c.entry["table"]) if "table" in c.entry else "",
        }
        for c in claims
    ]
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")


def cells_csv(claims: list[Claim]) -> str:
    """Return every compared cell as CSV."""
    words = {True: "yes", False: "no", None: "undecided"}
    rows = [
        {"id": c.id, "cell": cell.words, "asked": cell.asked, "found": f"{cell.found:.6g}",
         "spread": f"{cell.spread:.3g}", "deviation": f"{cell.gap:.3g}", "seeds": cell.seeds,
         "holds": words[cell.held]}
        for c in claims for cell in c.cells
    ]  # fmt: skip
    return pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
