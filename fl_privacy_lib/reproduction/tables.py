"""Tables for the pages: measured beside published, a status badge on each row."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

import pandas as pd

from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.claims import (
    at_published_setting,
    compare_accounted,
    in_words,
    load_claims,
    measured,
    select,
    verdict,
)
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.published import MEASURED_AS, STATUSES, Value, load_published, reproduces


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
        head = "".join(f'<th scope="col">{escape(c)}</th>' for c in self.columns)
        body = "".join(f"<tr>{''.join(_cell(c, i) for i, c in enumerate(row))}</tr>" for row in self.rows)
        table = f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f'<div class="table-scroll">{table}</div>'

    _repr_html_ = html

    def __repr__(self) -> str:
        return pd.DataFrame(self.rows, columns=self.columns).to_string(index=False)

    def markdown(self) -> str:
        """Return the table as Markdown, for the README."""
        lines = [self.columns, ["---"] * len(self.columns), *[[str(c) for c in row] for row in self.rows]]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Badge(str):
    """A status word that a page shows as a badge."""


def _cell(cell: Any, column: int) -> str:
    if isinstance(cell, Badge):
        word = cell.partition(":")[0]
        # the style sheet's classes: reproduced, not-reproduced, reduced, refuted, not-run
        style = "reduced" if word == "reduced setting" else word.replace(" ", "-")
        return f'<td><span class="status status-{style}">{escape(cell)}</span></td>'
    tag = "th" if column == 0 else "td"
    scope = ' scope="row"' if column == 0 else ' class="value"' if "±" in str(cell) else ""
    return f"<{tag}{scope}>{escape(str(cell))}</{tag}>"


def rate(mean: float, n: int) -> str:
    """Return a success rate with its Wilson interval in percent.

    >>> rate(1.0, 16)
    '100 % [81, 100]'
    """
    low, high = wilson_interval(round(mean * n), n)
    return f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def number(value: float) -> str:
    """Return a number with three significant digits, plainly.

    >>> number(0.0000312), number(0.15489), number(23.04), number(1810.4)
    ('3.1e-05', '0.155', '23', '1,810')
    """
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.3g}"


def beside(table: str, setting: dict[str, Any], live: dict[tuple[str, ...], str] | None = None) -> Table:
    """Return a resilience table: published, measured (setting, seeds, mean ± std), this run, status.

    Parameters
    ----------
    table : str, e.g. 'fed_cdp/table_7'
    setting : the published setting, as in the claims ledger; rows at less are 'reduced setting'
    live : (dataset, threat type, arm, attacker) → this run's success rate
    """
    frame, printed = measured(table), load_published(table)
    rows = []
    keys = ["dataset", "threat_type", "method", "arm", "attacker"]
    cells = frame.drop_duplicates(keys)[keys] if len(frame) else pd.DataFrame(columns=keys)
    cells = cells.sort_values(keys[:2], key=_by_appearance, kind="stable")  # what was recorded later joins its like
    full = at_published_setting(frame, setting) if len(frame) else frame
    for cell in cells.to_dict("records"):
        key: dict[str, Any] = {str(name): value for name, value in cell.items()}
        own: Any = select(frame, key).set_index("metric")
        value = {m: Value(float(own.at[m, "mean"]), float(own.at[m, "std"]), int(own.at[m, "n"])) for m in own.index}
        there: Any = select(printed, {k: key[k] for k in ("dataset", "threat_type", "method")}).set_index("metric")
        outcomes, shown = [], {"resilient": "—", "rmse": "—", "attack_iterations": "—"}
        for metric in shown:
            if metric in there.index:
                text, unit = there.at[metric, "value"], there.at[metric, "unit"]
                source = "attack_success_rate" if unit == "boolean" else MEASURED_AS.get(metric, metric)
                outcomes.append(reproduces(text, value[source], unit))
                shown[metric] = {"true": "no", "false": "yes"}.get(text, text)
        status = _status(outcomes, not select(full, key).empty)
        success, error = value["attack_success_rate"], value["mse"]
        rows.append([
            f"{named(key['dataset'])}, {named(key['threat_type'])}", f"{named(key['arm'])}, {named(key['attacker'])}",
            shown["resilient"], rate(success.mean, success.n),
            shown["rmse"], f"{number(error.mean)} ± {number(error.std)}",
            f"{shown['attack_iterations']} / {number(value['attack_iterations'].mean)}",
            (live or {}).get((key["dataset"], key["threat_type"], key["arm"], key["attacker"]), "—"), status,
        ])  # fmt: skip
    columns = ["data, type", "method, attacker", "succeeds", "recovered", "distance", "MSE", "iterations", "this run",
               "status"]  # fmt: skip
    return Table(columns, rows)


def _by_appearance(column: pd.Series) -> pd.Series:
    return column.map({value: place for place, value in enumerate(dict.fromkeys(column))})


def beside_accounted(table: str, live: dict[tuple[str, ...], float]) -> Table:
    """Return an accounting table: published, recorded and this run's value of every cell, equal rows merged.

    Parameters
    ----------
    table : str, e.g. 'fed_cdp/table_6'
    live : published key columns of a cell → this run's value
    """
    keys = [c for c in load_published(table).columns if c not in ("unit", "value")]
    groups: dict[tuple[str, ...], list[str]] = {}
    for text, row, held in compare_accounted(table, measured(table)):
        where = {key: str(row[key]) for key in keys}
        now = live.get(tuple(where.values()))
        shown = [named(where["dataset"]), *(where[k] for k in keys if k not in ("dataset", "method"))]
        values = [text, f"{row['mean']:.6g}", "—" if now is None else f"{now:.6g}"]
        groups.setdefault((*shown, *values, "reproduced" if held else "not reproduced"), []).append(where["method"])
    rest = [k.replace("_", " ") for k in keys if k not in ("dataset", "method")]
    rows = [[cell[0], "; ".join(map(named, who)), *cell[1:-1], Badge(cell[-1])] for cell, who in groups.items()]
    return Table(["data", "method", *rest, "published", "recorded", "this run", "status"], rows)


def _status(outcomes: list[bool], full: bool) -> str:
    if not outcomes:
        return "not in the paper"
    if not full:
        return Badge("reduced setting")
    word = "reproduced" if all(outcomes) else "not reproduced"
    return Badge(f"{word}: {sum(outcomes)} of {len(outcomes)} values")


def claims_table(chapter: str | None = None) -> Table:
    """Return the ledger with computed verdicts, for one chapter or all."""
    rows = []
    for entry in load_claims():
        if chapter in (None, entry["chapter"]):
            found = verdict(entry)
            where = f"{named(entry['paper'])}: {entry['where']}"
            test = in_words(entry["test"]) if "test" in entry else "—"
            rows.append([where, entry["statement"], test, Badge(str(found)), found.note or "—"])
    return Table(["where", "claim, in our words", "test", "verdict", "note"], rows)


def summary_table() -> Table:
    """Return how many claims of each paper have which status."""
    counts = Counter((entry["paper"], verdict(entry).status) for entry in load_claims())
    papers = list(dict.fromkeys(paper for paper, _ in counts))
    rows = [[named(paper), *(counts[paper, status] for status in STATUSES)] for paper in papers]
    rows.append(["all", *(sum(n for (_, own), n in counts.items() if own == status) for status in STATUSES)])
    return Table(["paper", *STATUSES], rows)


def time_table(chapter: str) -> Table:
    """Return how long a chapter's notebook took at each profile, on which machine, as recorded."""
    path = MEASURED / "run_times.csv"
    columns = ["profile", "data", "seconds", "peak memory, MiB", "machine", "date"]
    frame = select(pd.read_csv(path, dtype=str), {"chapter": chapter}) if path.exists() else pd.DataFrame()
    if frame.empty:
        return Table(columns, [["any", "—", "not yet measured: make times", "—", "—", "—"]])
    return Table(columns, frame[["profile", "data", "seconds", "peak_mib", "device", "date"]].to_numpy().tolist())


def setting_table(settings: Any) -> Table:
    """Return a chapter's parameters with their meaning: the overview that a run prints before it starts."""
    rows = [[n, getattr(settings, n), f.description] for n, f in type(settings).model_fields.items()]
    return Table(["parameter", "value", "meaning"], rows)
