"""The page of claims: ``.. claims:: headlines``, ``papers`` and ``list``; the role ``claim``.

All of it is HTML that works without a script; ``claims.js`` adds the filter. The records, the
printed values and the list as CSV are copied beside the pages. ``{claim}`fed_cdp.table_7` `` links
to an entry of the list.
"""

import functools
import html
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import claim_files
import claim_rows
import claim_tables
from claim_rows import Claim
from claim_tables import Coverage
from docutils import nodes
from sphinx.util import logging
from sphinx.util.docutils import ReferenceRole, SphinxDirective

from fl_privacy_lib.chapters import CHAPTERS
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.paths import MEASURED, RESULTS
from fl_privacy_lib.reproduction.tables import summary_table
from fl_privacy_lib.reproduction.verdict import Status

PAGE, RECORDS = "book/claims", "records"
Link = Callable[[Claim], tuple[str, str]]
"""A claim → the address of the section that argues it, seen from the page of claims; its title."""


def text(words: str) -> str:
    """Return words as HTML, with the indices of symbols set below the line."""
    escaped = html.escape(words, quote=False)
    escaped = re.sub(r"(?<=\d) (?=%)", "\u00a0", escaped)
    return re.sub(r"\b([A-Za-zσεα])_([A-Za-z0-9])\b", r"\1<sub>\2</sub>", escaped)


def badge(status: Status) -> str:
    """Return a status as a badge."""
    return f'<span class="status status-{status.style}">{status}</span>'


def link(address: str, words: str, attributes: str = "") -> str:
    """Return a link."""
    return f'<a href="{html.escape(address)}"{attributes}>{text(words)}</a>'


def ours(claim: Claim) -> str:
    """Return what tells a finding of ours from a paper's claim."""
    return " <em>our finding</em>" if claim.entry["kind"] == "finding" else ""


def record_link(table: str, words: str) -> str:
    """Return a link to the local copy of a record, or words where nothing is recorded yet."""
    if not (MEASURED / f"{table}.csv").exists():
        return "no record yet"
    return link(f"../{RECORDS}/measured/{table}.csv", words, " download")


# ---- parts of the page ---------------------------------------------------------------------------


def headlines(claims: list[Claim], argued: Link) -> str:
    """Return the findings that matter most, each with its computed verdict."""
    items = []
    for claim in sorted(
        (c for c in claims if "headline" in c.entry), key=lambda c: int(c.entry["chapter"])
    ):
        address, title = argued(claim)
        items.append(
            f"<li><p>{text(claim.headline() or '')}</p>"
            f'<p class="claim-foot">{badge(claim.status)} {claim.counts} '
            f"<span>{link('#' + claim.id, claim.title)}{ours(claim)}</span> "
            f"<span>{link(address, title)}</span></p></li>"
        )
    return f'<ol class="claim-headlines">{"".join(items)}</ol>'


def papers(claims: list[Claim], argued: Link) -> str:
    """Return the counts of verdicts and, table by table, how much of each paper comes out."""
    rows = []
    for paper, tables in claim_tables.matrix(claims).items():
        cells = "".join(coverage_cell(table) for table in tables)
        rows.append(
            f'<div class="coverage-row"><p id="coverage-{paper}">{named(paper)}</p>'
            f'<ul aria-labelledby="coverage-{paper}">{cells}</ul></div>'
        )
    return f'{summary_table().html()}<div class="coverage">{"".join(rows)}</div>'


def coverage_cell(table: Coverage) -> str:
    """Return a published table as a cell of the grid: letter, word, and three counts."""
    letter, word = table.grade
    counts = [f"{table.printed} printed"]
    if table.measured:
        counts.insert(0, f"{table.come_out} of {table.at_setting or table.measured}")
    if table.exceeded:
        counts.append(f"{table.exceeded} exceeded")
    inside = (
        f'<span class="coverage-name">{table.title}</span> <span><b>{letter}</b> {word}</span> '
    )
    inside += " ".join(f"<span>{line}</span>" for line in counts)
    whole = f'<a href="#{table.claim}">{inside}</a>' if table.claim else f"<span>{inside}</span>"
    return f'<li class="coverage-{word.replace(" ", "-")}">{whole}</li>'


COLUMNS = (("Where", "text"), ("Claim", "text"), ("Verdict", "number"),
           ("Published or asked → measured", "none"), ("Deviation", "number"),
           ("Seeds", "text"))  # fmt: skip


def claim_list(claims: list[Claim], argued: Link) -> str:
    """Return the filter and the list of all claims."""
    head = "".join(
        f'<th scope="col" role="columnheader" data-sort="{kind}">{name}</th>'
        for name, kind in COLUMNS
    )
    rows = "".join(claim_row(claim, argued) for claim in claims)
    files = {"claims.csv": "this list (CSV)", "cells.csv": "every compared cell (CSV)"}
    links = [link(f"../{RECORDS}/{name}", words, " download") for name, words in files.items()]
    return (
        f"<p>Download {' or '.join(links)}.</p>{claim_filter(claims)}"
        '<table class="claim-list" role="table" '
        f'aria-label="All claims"><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{rows}</tbody></table>'
    )


def claim_filter(claims: list[Claim]) -> str:
    """Return the form that `claims.js` shows and serves."""
    options = {
        "paper": list(dict.fromkeys(c.paper for c in claims)),
        "chapter": sorted({str(int(c.entry["chapter"])) for c in claims}, key=int),
        "status": [str(s) for s in Status if any(c.status is s for c in claims)],
        "data": sorted({name for c in claims for name in c.data}, key=str.lower) + [NO_DATA],
    }
    labels = {"paper": "Paper", "chapter": "Chapter", "status": "Verdict", "data": "Data set"}
    selects = "".join(
        f'<label>{labels[name]} <select name="{name}"><option value="">all</option>'
        + "".join(f"<option>{html.escape(o)}</option>" for o in values)
        + "</select></label>"
        for name, values in options.items()
    )
    return (
        f'<form class="claim-filter" id="claim-filter" hidden>{selects}'
        '<label>Words <input type="search" name="words" autocomplete="off"></label>'
        '<button type="reset">Show all</button>'
        f'<p role="status" id="claim-count">{len(claims)} of {len(claims)} claims</p></form>'
    )


NO_DATA = "none (computed)"


def claim_row(claim: Claim, argued: Link) -> str:
    """Return a claim as a row of the list."""
    entry = claim.entry
    data = "|".join(claim.data or (NO_DATA,))
    keys = {"paper": claim.paper, "chapter": str(int(entry["chapter"])),
            "status": str(claim.status), "data": data}  # fmt: skip
    attributes = "".join(f' data-{k}="{html.escape(v)}"' for k, v in keys.items())
    order = list(Status).index(claim.status)
    cells = (
        (f"<b>{link('#' + claim.id, named(entry['paper']))}</b>{ours(claim)}"
         f"<br>{text(entry['where'])}",
         claim.title),
        (claim_text(claim, argued), entry["statement"]),
        (f"{badge(claim.status)}<br>{claim.counts}", order),
        (f"{text(claim.published)} → <b>{text(claim.measured)}</b>"
         f'<br><span class="claim-which">{text(claim.which)}</span>' if claim.cells else "—", ""),
        (text(claim.deviation), f"{claim.size:g}"),
        (text(claim.seeds), claim.seeds),
    )  # fmt: skip
    tds = ""
    for (name, _), (inside, key) in zip(COLUMNS, cells, strict=True):
        tag, role = ("th scope=row", "rowheader") if name == "Where" else ("td", "cell")
        tds += (
            f'<{tag} role="{role}" data-label="{name}" data-key="{html.escape(str(key))}">'
            f"{inside}</{tag[:2]}>"
        )
    return f'<tr role="row" id="{claim.id}"{attributes}>{tds}</tr>'


def claim_text(claim: Claim, argued: Link) -> str:
    """Return what is claimed, how it is tested, why it has its verdict, and where to look."""
    entry = claim.entry
    parts = [f"<p>{text(entry['statement'])}</p>"]
    if claim.tests:
        parts.append(f"<p><b>Test.</b> {text(' '.join(claim.tests))}</p>")
    parts.append(f"<p><b>Why.</b> {text(claim.why)}</p>")
    if claim.more:
        items = "".join(f"<li>{text(line)}</li>" for line in claim.more)
        summary = "What was tried, and other readings"
        parts.append(f"<details><summary>{summary}</summary><ul>{items}</ul></details>")
    address, title = argued(claim)
    links = [link(address, title)]
    table = entry.get("table")
    if table:
        links.append(record_link(table, "record (CSV)"))
        if claim.search:
            links.append(record_link(claim.search, "every learning rate tried (CSV)"))
    parts.append(f'<p class="claim-links">{" · ".join(links)}</p>')
    if table:
        parts.append(how_to_record(table, claim.search))
    return "".join(parts)


def how_to_record(table: str, search: str | None) -> str:
    """Return the commands that record a table, folded, with the time that they took."""
    commands = [claim_tables.command(name) for name in (search, table) if name]
    lines = "".join(f"<pre><code>{html.escape(line)}</code></pre>" for line in commands)
    part = claim_tables.parts()[table]
    note = f"Rows that stand are kept. The recorded points took {claim_tables.hours(table)}."
    if part.names:
        note += f" In parts: {', '.join(f'<code>{name}</code>' for name in part.names)}."
    summary = "<summary>How to record it</summary>"
    return f'<details class="claim-command">{summary}{lines}<p>{note}</p></details>'


PARTS = {"headlines": headlines, "papers": papers, "list": claim_list}


def chapter_top(claim: Claim) -> tuple[str, str]:
    """Return the link to a claim's chapter, where its sections are not known."""
    number = claim.entry["chapter"]
    return f"../notebooks/{CHAPTERS[number].notebook}.html", f"chapter {int(number)}"


def whole_page() -> str:
    """Return all generated parts of the page, computed now."""
    claims = claim_rows.gather()
    return "\n".join(part(claims, chapter_top) for part in PARTS.values())


# ---- Sphinx --------------------------------------------------------------------------------------


class ClaimsPart(nodes.General, nodes.Element):
    """A part of the page, drawn when all other pages are known."""


class Claims(SphinxDirective):
    """``.. claims:: headlines``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Put a placeholder for the named part."""
        self.env.note_dependency(str(RESULTS / "claims.yml"))
        return [ClaimsPart(part=self.arguments[0])]


class ClaimRole(ReferenceRole):
    """``{claim}`fed_cdp.table_7` ``."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Link to the list; warn, which ends the strict build, where there is no such claim."""
        known = {claim.id: claim for claim in computed()}
        if self.target not in known:
            logging.getLogger(__name__).warning(
                "no such claim: %s", self.target, location=self.get_location()
            )
            return [nodes.literal(text=self.title)], []
        up = "../" * self.env.docname.count("/")
        words = self.title if self.has_explicit_title else known[self.target].title
        address = f"{up}{PAGE}.html#{quote(self.target)}"
        return [nodes.reference("", words, internal=True, refuri=address)], []


@functools.cache
def computed() -> list[Claim]:
    """Return the claims, gathered once a build."""
    return claim_rows.gather()


def slug(title: str) -> str:
    """Return a title's letters and digits alone, which typesetting does not change."""
    return re.sub(r"[\W_]+", "", title.lower())


def argued_in(app) -> Link:
    """Return where each claim is argued: the section that the ledger names, else the chapter's top.

    A section that neither the chapter nor its appendix has ends the strict build.
    """
    sections: dict[tuple[str, str], tuple[str, str]] = {}
    for number, kind in CHAPTERS.items():
        for page in (f"{kind.notebook}_appendix", kind.notebook):  # the chapter's own come last
            toc = app.env.tocs.get(f"notebooks/{page}")
            for heading in toc.findall(nodes.reference) if toc else ():
                address = f"../notebooks/{page}.html{heading['anchorname']}"
                sections[number, slug(heading.astext())] = address, heading.astext()

    def argued(claim: Claim) -> tuple[str, str]:
        top, words = chapter_top(claim)
        name = claim.entry.get("section")
        if name is None:
            return top, words
        if (claim.entry["chapter"], slug(name)) not in sections:
            message = "%s names the section %r, which its chapter does not have: correct it."
            logging.getLogger(__name__).warning(message, claim.id, name)
            return top, words
        address, title = sections[claim.entry["chapter"], slug(name)]
        return address, f"{words}: {title}"

    return argued


def draw(app, doctree, docname) -> None:
    """Put the parts in the place of their placeholders."""
    for node in list(doctree.findall(ClaimsPart)):
        inside = PARTS[node["part"]](computed(), argued_in(app))
        node.replace_self(nodes.raw("", inside, format="html"))


def copy_files(app, exception) -> None:
    """Copy the records and the printed values beside the pages, and write the two lists."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir, RECORDS)
    for name in ("measured", "published"):
        shutil.copytree(RESULTS / name, folder / name, dirs_exist_ok=True)
    (folder / "claims.csv").write_text(claim_files.claims_csv(computed()), encoding="utf-8")
    (folder / "cells.csv").write_text(claim_files.cells_csv(computed()), encoding="utf-8")


def setup(app) -> dict[str, object]:
    """Register the directive, the role and the files."""
    app.add_node(ClaimsPart)
    app.add_directive("claims", Claims)
    app.add_role("claim", ClaimRole())
    app.connect("doctree-resolved", draw)
    app.connect("build-finished", copy_files)
    return {"version": "1", "env_version": 1}
