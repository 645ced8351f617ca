"""What the page of claims says of each: text and numbers from the ledger and the records.

Nothing here chooses a status or knows HTML; ``claims`` draws what this gathers.
"""

import re
from dataclasses import dataclass
from typing import Any

from claim_cells import Cell, cell_of, computed, figure, setting, span, varying

from fl_privacy_lib.reproduction.checks import PRINTED, in_words
from fl_privacy_lib.reproduction.claims import load_claims, verdict
from fl_privacy_lib.reproduction.comparison import SUCCESS_RATES, measured, select
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.names import NAMES
from fl_privacy_lib.reproduction.verdict import Outcome, Status, Verdict, trial_of

FINDINGS = "our findings"
EXACT = "exact"
SHARES = ("accuracy", *SUCCESS_RATES)
WHY = {
    Status.REPRODUCED: "The test holds in every compared cell.",
    Status.EXCEEDED: "What differs lies above the printed value, at a tuned learning rate.",
    Status.REDUCED_SETTING: "Only a smaller setting than the published one is recorded, which "
    "decides nothing.",
}
ENDS = {"rate_above": "above", "rate_below": "below", "shown": "at least", "at_most": "at most"}


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
        none = ", none of them decided" if self.verdict.open else ""
        return f"{what}{self.verdict.held} of {self.verdict.cells} {cells}{none}"

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
        row = self.verdict.outcomes[0].cell
        if computed(self.test, row):
            return f"{named(row['quantity'])}: {cell.asked}"
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
