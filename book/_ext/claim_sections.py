"""Where a chapter argues a claim: the section named in the ledger, or that shows its record.

A chapter's headings may change: where none begins with the entry's `section`, the one that shows
its record or names its table is taken, and where there is none, the chapter's top.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.names import NAMES

HEADING = re.compile(r"^#{1,4} +(.+)$", re.M)
PLACE = re.compile(r"(?:Table|Fig\.|Lemma|Theorem|Proposition|Algorithm)s? [\w.]*\w")
LISTS = re.compile(r"what holds|ledger|all claims|differences|exercises|objectives|prerequisites|"
                   r"time and hardware|parameters|further reading|what you learned|what to do|"
                   r"appendix to", re.I)  # fmt: skip
"""Sections that list claims, or prepare for the others."""


@dataclass(frozen=True)
class Section:
    """A heading of a chapter, the page on which it stands, and all that is written below it."""

    page: str
    title: str
    text: str

    @property
    def slug(self) -> str:
        """The title without anything that typesetting may change."""
        return slug(self.title)


def slug(title: str) -> str:
    """Return a title's letters and digits alone."""
    return re.sub(r"[\W_]+", "", title.lower())


def sections_of(folder: Path, notebook: str) -> list[Section]:
    """Return the sections of a chapter and of its appendix, in order, without the chapter's top."""
    found: list[Section] = []
    for page in (notebook, f"{notebook}_appendix"):
        path = folder / f"{page}.ipynb"
        if not path.exists():
            continue
        title, text, above = "", "", len(found)
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            pieces = [source]
            if cell["cell_type"] == "markdown":
                pieces = HEADING.split(source)
            text += pieces[0]
            for heading, below in zip(pieces[1::2], pieces[2::2], strict=True):
                found.append(Section(page, title, text))
                title, text = heading.strip(), below
        found.append(Section(page, title, text))
        del found[above : above + 2]  # what stands above the page's title, and below it
    return found


def score(section: Section, entry: dict[str, Any]) -> float:
    """Return how well a section fits a claim; 0 and less: it says nothing of it."""
    if LISTS.search(section.title):
        return 0.0
    text, title = section.text, section.title
    points = 6.0 * (entry["id"] in text)
    rows = entry.get("rows", {})
    if isinstance(rows.get("claim"), str):
        points += 5 * (f'"{rows["claim"]}"' in text)
    elif "table" in entry:
        points += 3 * (f'"{entry["table"]}"' in text)
    if "panel" in rows:
        points += 3 * (f'"{rows["panel"]}"' in text)
    papers = {name for code in ("fed_cdp", "fed_alpha_cdp", "dynamic_parameters")
              if (name := NAMES.get(code) or named(code)) in title}  # fmt: skip
    for place in PLACE.findall(entry["where"]):
        whole = re.compile(rf"{re.escape(place)}\b")
        if whole.search(title) and (not papers or named(entry["paper"]) in papers):
            points += 5
        points += bool(whole.search(text))
    aside = section.page.endswith("_appendix") or title.startswith("Published beside")
    return points - (0.5 if aside else 0)


def section_of(sections: list[Section], entry: dict[str, Any]) -> Section | None:
    """Return the named section, else the first that fits a claim best; None for the top."""
    words = slug(str(entry.get("section", "")))
    for section in sections:
        if words and section.slug.startswith(words):
            return section
    best = max(sections, key=lambda section: score(section, entry), default=None)
    return best if best is not None and score(best, entry) > 0.5 else None
