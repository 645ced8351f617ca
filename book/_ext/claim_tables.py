"""What the page of claims says of a table: how it is recorded, and how much of it comes out."""

import functools
import re
from dataclasses import dataclass

import yaml
from claim_rows import Claim

from fl_privacy_lib.chapters import CHAPTERS, experiment
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.paths import MEASURED, PUBLISHED
from fl_privacy_lib.reproduction.records import META
from fl_privacy_lib.reproduction.tables import coverage

PAPERS = ("fed_cdp", "fed_alpha_cdp", "dynamic_parameters", "fedsel", "compensation")


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


@functools.cache
def titles(paper: str) -> dict[str, str]:
    """Return file → the paper's own name of a published table, 'Table VII'."""
    index = yaml.safe_load((PUBLISHED / paper / "index.yaml").read_text())
    return {t["file"]: t["id"] for t in index["tables"] if t["file"]}


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
