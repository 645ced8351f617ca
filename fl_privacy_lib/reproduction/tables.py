"""Tables for the pages: published beside measured, with a status badge on each row."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.checks import in_words
from fl_privacy_lib.reproduction.claims import deciding, entries_of, judge, load_claims, verdict
from fl_privacy_lib.reproduction.comparison import Comparison, compare, measured, select
from fl_privacy_lib.reproduction.devices import device_name, pick_device
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.records import read_record
from fl_privacy_lib.reproduction.verdict import Status, learns


class Table:
    """Rows of cells that render as an HTML table in a notebook and as text elsewhere.

    Parameters
    ----------
    columns : names of the columns
    rows : cells, text or `Badge`
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.columns, self.rows = list(columns), [list(row) for row in rows]

    def html(self) -> str:
        """Return the table as HTML."""
        # a corner without a word is no header
        head = "".join(
            f'<th scope="col">{escape(c)}</th>' if c else "<td></td>" for c in self.columns
        )
        body = "".join(
            f"<tr>{''.join(_cell(c, i) for i, c in enumerate(row))}</tr>" for row in self.rows
        )
        return (
            '<div class="table-scroll"><table class="dataframe">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    _repr_html_ = html

    def __repr__(self) -> str:
        return pd.DataFrame(self.rows, columns=self.columns).to_string(index=False)

    def markdown(self) -> str:
        """Return the table as Markdown, for the README."""
        lines = [
            self.columns,
            ["---"] * len(self.columns),
            *[[str(c) for c in row] for row in self.rows],
        ]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@dataclass(frozen=True)
class Badge:
    """A status that a page shows as a badge, with what stands behind it."""

    status: Status
    text: str

    def __str__(self) -> str:
        return self.text


def _cell(cell: Any, column: int) -> str:
    if isinstance(cell, Badge):
        return (
            f'<td><span class="status status-{cell.status.style}">{escape(cell.text)}</span></td>'
        )
    tag = "th" if column == 0 else "td"
    scope = ' scope="row"' if column == 0 else ' class="value"' if "±" in str(cell) else ""
    return f"<{tag}{scope}>{escape(str(cell))}</{tag}>"


def rate(mean: float, n: float) -> str:
    """Return a success rate with its Wilson interval in percent, at its effective number of images.

    >>> rate(1.0, 16)
    '100 % [81, 100]'
    """
    low, high = wilson_interval(mean * n, n)
    return f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def spread(mean: float, std: float, seeds: int | str) -> str:
    """Return an accuracy with its standard deviation over seeds, where there are some."""
    return f"{mean:.3f} ± {std:.3f}" if int(seeds) > 1 else f"{mean:.3f}"


def outcome(cell: Mapping[str, Any]) -> str:
    """Return a recorded accuracy with its spread and marks.

    † it diverged in a seed; ‡ it has not learned; ○ its rate is another cell's.
    """
    reached = spread(cell["accuracy"], cell["accuracy_std"], cell["seeds"])
    return (
        f"{reached} {'†' * bool(cell.get('diverged', 0))}{'‡' * (not learns(cell))}"
        f"{'○' * (cell.get('searched') == 0)}"
    ).rstrip()


def number(value: float) -> str:
    """Return a number plainly: three significant digits, or whole from a thousand on.

    >>> number(0.0000312), number(0.15489), number(23.04), number(1810.4)
    ('3.1e-05', '0.155', '23', '1,810')
    """
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


@dataclass(frozen=True)
class Row:
    """The published values in one row of a table, each beside the recorded cell that answers it."""

    values: tuple[Comparison, ...]
    lost: str = ""  # what the paper leaves out that decides them

    @property
    def cell(self) -> dict[str, Any] | None:
        """The row's first recorded cell; None where nothing is recorded."""
        return next((c.cell for c in self.values if c.cell), None)

    def __getitem__(self, column: str) -> str:
        """Return a key column's value as text, 'not_applicable' where the row has none."""
        keys = (self.values[0].printed or {}) | (self.cell or {"key": {}})["key"]
        return keys.get(column, "not_applicable")

    def published(self, metric: str = "") -> str:
        """Return the printed text of a metric, or the only one there is; a dash for none."""
        texts = (
            c.printed["value"]
            for c in self.values
            if c.printed and metric in ("", c.printed["metric"])
        )
        return next(texts, "—")

    def mean(self, metric: str) -> str:
        """Return a measured mean; a dash where nothing is recorded."""
        return number(self.cell[metric]) if self.cell else "—"

    def spread(self, metric: str) -> str:
        """Return a measured mean ± its deviation over seeds; a dash where nothing is recorded."""
        return f"{self.mean(metric)} ± {number(self.cell[metric + '_std'])}" if self.cell else "—"

    def rate(self) -> str:
        """Return the measured success rate with its interval; a dash where nothing is recorded."""
        mean = "attack_success_rate"
        return rate(self.cell[mean], self.cell[f"{mean}_effective"]) if self.cell else "—"

    @property
    def status(self) -> "Badge | str":
        """The row's status; of several values, with the number that hold."""
        if not any(c.printed for c in self.values):
            return "not in the paper"
        if all(c.cell and not c.cell["judged"] for c in self.values):
            return "another version"
        outcome = judge(self.values, self.lost)
        many = f": {outcome.held} of {outcome.cells} hold" if outcome.cells > 1 else ""
        return Badge(outcome.status, outcome.status + many)


Columns = Mapping[str, Callable[[Row], Any]]

RESILIENCE: Columns = {
    "succeeds": lambda row: {"true": "no", "false": "yes"}.get(row.published("resilient"), "—"),
    "recovered": Row.rate,
    "distance": lambda row: row.published("rmse"),
    "RMSE": lambda row: row.spread("rmse") if row.cell and "rmse" in row.cell else "—",
    "MSE": lambda row: row.spread("mse"),
    "iterations": lambda row: (
        f"{row.published('attack_iterations')} / {row.mean('attack_iterations')}"
    ),
}
"""The columns of a table of attacks: what is published and what was measured."""


def beside(
    table: str,
    columns: Columns,
    by: Sequence[str] | Callable[[Row], Any],
    *,
    metric: str = "",
    frame: pd.DataFrame | None = None,
    unrecorded: bool = False,
    unpublished: bool = False,
    below: Callable[[Row], Sequence[Columns]] = lambda row: (),
) -> Table:
    """Return a published table beside what was measured, with the status of each row last.

    Parameters
    ----------
    table : 'paper/table', e.g. 'fed_cdp/table_7'
    columns : title → what it shows of a row
    by : the key columns, or what else is equal for the values that share a row
    metric : the only published metric that is shown, or any
    frame : the recorded rows, where they are not those of the table's own record
    unrecorded, unpublished : whether published values without a recorded cell are shown, and cells
        without a value
    below : the columns of the further lines that a row has, with the same titles and no status
    """
    groups: dict[Any, list[Comparison]] = {}
    frame = measured(table) if frame is None else frame
    for comparison in compare(table, frame, metric, unpublished):
        if comparison.cell or unrecorded:
            row = Row((comparison,))
            key = by(row) if callable(by) else tuple(row[c] for c in by)
            groups.setdefault(key, []).append(comparison)
    ledger = load_claims()
    rows = [Row(tuple(group), deciding(ledger, group[0].cell)) for group in groups.values()]
    # like stands by like, in the order of first appearance
    for column in ("threat_type", "dataset"):
        order = list(dict.fromkeys(row[column] for row in rows))
        rows.sort(key=lambda row: order.index(row[column]))
    shown = []
    for row in rows:
        shown.append([*(show(row) for show in columns.values()), row.status])
        shown += [[*(show(row) for show in line.values()), "—"] for line in below(row)]
    if not shown:
        return Table(["recorded"], [["nothing yet: make record"]])
    return Table([*columns, "status"], shown)


def claims_table(chapter: str | None = None) -> Table:
    """Return the ledger with computed verdicts, for one chapter or all."""
    rows = []
    for entry in load_claims():
        if chapter in (None, entry["chapter"]):
            outcome = verdict(entry)
            rows.append([
                f"{named(entry['paper'])}: {entry['where']}"
                + " (our finding)" * (entry["kind"] == "finding"),
                entry["statement"],
                in_words(entry["test"]) if "test" in entry else "—",
                Badge(outcome.status, str(outcome)),
                "; ".join(p.rstrip(".") for p in (outcome.note, *outcome.beside) if p) or "—",
            ])  # fmt: skip
    return Table(["where", "claim, in our words", "test", "verdict", "note"], rows)


def claims_summary(chapter: str) -> str:
    """Return how many claims of a chapter have which status, in words; our own findings apart."""
    counts = Counter((e["kind"] == "finding", verdict(e).status)
                     for e in load_claims() if e["chapter"] == chapter)  # fmt: skip
    papers, own = (", ".join(f"{n} {s}" for (mine, s), n in counts.items() if mine == kind)
                   for kind in (False, True))  # fmt: skip
    return papers + "; " * bool(papers and own) + f"our own findings: {own}" * bool(own)


def summary_table() -> Table:
    """Return how many claims of each paper have which status, and our own findings apart."""
    counts = Counter(
        ("our findings" if entry["kind"] == "finding" else named(entry["paper"]), found.status)
        for entry in load_claims()
        for found in [verdict(entry)]
    )
    papers = [p for p in dict.fromkeys(paper for paper, _ in counts) if p != "our findings"]
    rows = [[paper, *(counts[paper, status] for status in Status)] for paper in papers]
    rows.append(
        ["all claims", *(sum(counts[paper, status] for paper in papers) for status in Status)]
    )
    rows.append(["our findings", *(counts["our findings", status] for status in Status)])
    return Table(["paper", *Status], rows)


def coverage(table: str, ledger: Sequence[dict[str, Any]]) -> list[int]:
    """Return how many values a table prints, and how many of them its entries in a ledger judge.

    After them come those at the printed setting, that come out, and that are exceeded. A budget in
    a header is compared, and is not one of the values.
    """
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for entry in entries_of(table, ledger):
        for c in compare(table, select(measured(entry["table"]), entry.get("rows", {}))):
            if (
                c.printed
                and c.cell
                and c.cell["judged"]
                and c.printed["metric"] != "target_epsilon"
            ):
                groups.setdefault(tuple(map(str, c.printed.values())), []).append(c)
    counts = Counter(judge(group).status for group in groups.values())
    return [
        len(load_published(table)), counts.total(), counts.total() - counts[Status.REDUCED_SETTING],
        counts[Status.REPRODUCED], counts[Status.EXCEEDED],
    ]  # fmt: skip


def time_table(chapter: str) -> Table:
    """Return how long a chapter's notebook took at each profile, on which machine, as recorded."""
    columns = ["profile", "data", "seconds", "peak memory, MiB", "machine", "date"]
    frame = select(read_record(MEASURED / "run_times.csv", ["chapter"]), {"chapter": chapter})
    if frame.empty:
        return Table(columns, [["any", "—", "not yet measured: make times", "—", "—", "—"]])
    return Table(
        columns,
        frame[["profile", "data", "seconds", "peak_mib", "device", "date"]].to_numpy().tolist(),
    )


def setting_table(settings: Any) -> Table:
    """Return a chapter's parameters, values and meanings, and the device: what a run has."""
    rows = [
        [n, getattr(settings, n), f.description] for n, f in type(settings).model_fields.items()
    ]
    here = device_name(pick_device(getattr(settings, "device", "cpu")))
    rows.append(["computed on", here, "the machine of this run"])
    return Table(["parameter", "value", "meaning"], rows)
