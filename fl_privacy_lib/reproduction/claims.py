"""The ledger of claims: each has a test on the measured rows, written down before the rows were.

``results/claims.yml`` holds one entry for every table, figure, proposition and stated claim. Its status is
computed here from the records, never typed.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.accounting.conventions import UNREPRODUCED
from fl_privacy_lib.accounting.recompute import epsilon_tolerance
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.paths import MEASURED, RESULTS
from fl_privacy_lib.reproduction.published import MEASURED_AS, Value, has_published, load_published, reproduces
from fl_privacy_lib.reproduction.records import read_record

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where libyaml is there
FIELDS = set("id paper where kind chapter statement table rows test setting refutation why".split())
KINDS = ("table", "figure", "proposition", "claim")
CHECKS = (
    "values", "accounted", "rate_above", "rate_below", "fewer_iterations", "shown", "at_most", "ratio", "ahead", "best",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """The computed status of a claim: on how many recorded cells its test held, or its counter-example; and why."""

    status: str
    held: int
    cells: int
    note: str = ""

    def __str__(self) -> str:
        what = "its counter-example holds" if self.status == "refuted" else "holds"
        return self.status + (f": {what} on {self.held} of {self.cells} recorded cells" if self.cells else "")


def load_claims(path: Path = RESULTS / "claims.yml") -> list[dict[str, Any]]:
    """Return the ledger's entries, checked for form."""
    entries = yaml.load(path.read_text(), Loader=LOADER)
    seen: set[str] = set()
    for entry in entries:
        name = entry.get("id", "?")
        if unknown := set(entry) - FIELDS:
            raise InputError(f"claim {name} has the unknown field {min(unknown)!r}: use {', '.join(sorted(FIELDS))}.")
        if name in seen:
            raise InputError(f"claim {name} stands twice in {path}: give each an id of its own.")
        seen.add(name)
        one_of(KINDS, kind=entry["kind"])
        if "test" in entry:
            one_of(CHECKS, check=entry["test"]["check"])
        elif "why" not in entry:
            raise InputError(f"claim {name} has neither a test nor a reason why it is not run: give one.")
    return entries


def measured(table: str, folder: Path = MEASURED) -> pd.DataFrame:
    """Return a measured table ('paper/table'), empty if nothing is recorded; a broken file is an `InputError`."""
    path = folder / f"{table}.csv"
    if not path.exists():
        return pd.DataFrame(columns=["metric"])
    return _read(path, path.stat().st_mtime_ns).copy()


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


def at_published_setting(frame: pd.DataFrame, setting: dict[str, Any]) -> pd.DataFrame:
    """Return the rows that ran at the published setting.

    Each column must equal what is named, data set by data set where a mapping names it; `victims`, over all seeds,
    must be at least as many.
    """
    for column, wanted in setting.items():
        if isinstance(wanted, dict):
            allowed = frame["dataset"].map(lambda name, wanted=wanted: str(wanted.get(name, "")))
            frame = frame[frame[column] == allowed]
            continue
        if column == "victims":
            total = frame["victims"].astype(int) * frame["seeds"].astype(int)
            frame = frame[total >= int(wanted)]
        else:
            frame = select(frame, {column: wanted})
    return frame


def verdict(entry: dict[str, Any], folder: Path = MEASURED) -> Verdict:
    """Compute a claim's status from the records.

    *not run* without rows; *reduced setting* if no row ran at the published setting; *refuted* if the entry's
    refutation (an argument and a test of its counter-example) holds in a recorded cell; else *reproduced* if the test
    held on every cell, *not reproduced* otherwise.
    """
    if "test" not in entry:
        return Verdict("not run", 0, 0, entry["why"])
    frame = select(measured(entry["table"], folder), entry.get("rows", {}))
    if frame.empty:
        return Verdict("not run", 0, 0, entry.get("why", "nothing recorded yet"))
    full = at_published_setting(frame, entry.get("setting", {}))
    if full.empty:
        return Verdict("reduced setting", 0, 0)
    held = check(entry["test"], entry, full)
    if not held:
        return Verdict("not run", 0, 0, "the cells it compares are not all recorded yet")
    if "refutation" in entry:
        counter = select(measured(entry["table"], folder), entry["refutation"]["rows"])
        found = check(entry["refutation"]["test"], entry, at_published_setting(counter, entry.get("setting", {})))
        if any(found):
            return Verdict("refuted", sum(found), len(found), entry["refutation"]["argument"])
    status = "reproduced" if all(held) else "not reproduced"
    asked = "dataset" in entry.get("rows", {})
    return Verdict(status, sum(held), len(held), "" if asked else _coverage(entry["table"], full))


def _coverage(table: str, frame: pd.DataFrame) -> str:
    """Return which data sets of a published table are recorded, where some are not."""
    if "dataset" not in frame or not has_published(table):
        return ""
    printed = load_published(table)
    names = sorted(set(printed["dataset"])) if "dataset" in printed else []
    own = sorted(set(frame["dataset"]))
    return f"{len(own)} of {len(names)} data sets: {', '.join(own)}" if set(own) < set(names) else ""


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
            return f"{_told(test['rows'])} needs fewer iterations than {_told(test['than'])}"
        case "shown" | "at_most":
            return f"{metric} {'≥' if kind == 'shown' else '≤'} {test['bound']}"
        case "ratio":
            return f"printed ratio within a factor of {test['factor']}"
        case "best":
            return f"{metric} highest at {test['over']} = {' or '.join(map(str, test['at']))}"
        case "ahead":
            by, errors = test.get("by", 0), test.get("errors")
            margin = f" less {-by}" if by < 0 else f" by {by}" if by else ""
            margin += f" by {errors} standard errors" if errors else ""
            return f"{metric} of {_told(test['rows'])} above that of {_told(test['than'])}{margin}"
    raise AssertionError(f"the check {kind!r} has no words")  # a programmer's mistake: the ledger's form is checked


def _told(rows: dict[str, Any]) -> str:
    return ", ".join(" or ".join(map(str, v)) if isinstance(v, list) else str(v) for v in rows.values())


def check(test: dict[str, Any], entry: dict[str, Any], frame: pd.DataFrame) -> list[bool]:
    """Return, for each recorded cell, whether the test holds there.

    values : the published cell of the same keys is reproduced; `published` names the table where it is another
    accounted : the published ε, budget or stopping time of the same keys comes out, see `compare_accounted`
    rate_above, rate_below : the Wilson interval of the success rate lies above, or below, `bound`
    fewer_iterations : `rows` needs fewer attack iterations to success than `than`, data set by data set
    shown : the metric `metric` is at least `bound`: a number, or the name of another metric of the same cell
    at_most : the metric `metric` is at most `bound`
    ratio : a method's cost over the non-private one is the published ratio within the factor `factor`
    ahead : the metric of `rows` is above that of `than`, both at equal values of the columns `on`, by more than
        `errors` standard errors of the difference and `by` besides (negative: it is not that far behind)
    best : among the rows with equal values of the columns `on`, where the column `over` has all of `levels`, the metric
        is highest at one of `at`
    """
    kind = test["check"]
    if kind == "values":
        return [held for *_, held in compare_values(test.get("published", entry["table"]), frame)]
    if kind == "accounted":
        return [held for *_, held in compare_accounted(entry["table"], frame)]
    if kind in ("rate_above", "rate_below"):
        rates = frame[frame["metric"] == test.get("metric", "attack_success_rate")]
        bounds = [wilson_interval(round(r["mean"] * int(r["n"])), int(r["n"])) for _, r in rates.iterrows()]
        return [low > test["bound"] if kind == "rate_above" else high < test["bound"] for low, high in bounds]
    if kind == "fewer_iterations":
        needed = frame[frame["metric"] == "attack_iterations"]
        small, large = select(needed, test["rows"]), select(needed, test["than"])
        pairs = small.merge(large, on="dataset", suffixes=("", "_than"))
        return list(pairs["mean"] < pairs["mean_than"])
    if kind == "ratio":
        widest = test["factor"]
        return [1 / widest <= own / printed <= widest for *_, printed, own in compare_ratios(entry["table"], frame)]
    own = frame[frame["metric"] == test["metric"]]
    if kind == "ahead":
        one, other = select(own, test["rows"]), select(own, test["than"])
        pairs = one.merge(other, on=test["on"], suffixes=("", "_than"))
        squares = [pairs["std" + part] ** 2 / pairs["n" + part].astype(int) for part in ("", "_than")]
        needed = test["errors"] * (squares[0] + squares[1]) ** 0.5 + test.get("by", 0.0)
        return list(pairs["mean"] - pairs["mean_than"] > needed)
    if kind == "best":
        groups: list[Any] = [group.set_index(test["over"])["mean"] for _, group in own.groupby(test["on"])]
        whole = [group for group in groups if {str(level) for level in test["levels"]} <= set(group.index)]
        return [bool(group.index[group == group.max()].isin([str(level) for level in test["at"]]).any())
                for group in whole]  # fmt: skip
    values, bound = own["mean"].to_numpy(), test["bound"]
    if isinstance(bound, str):  # the rows of a cell stand together, so both metrics come in the cells' order
        bound = frame[frame["metric"] == bound]["mean"].to_numpy()
    return list(values <= bound if kind == "at_most" else values >= bound)


def compare_ratios(table: str, frame: pd.DataFrame) -> list[tuple[str, str, float, float]]:
    """Return (data set, method, published ratio, measured ratio) of a method's time over the non-private one's.

    Times of different machines compare only so.
    """
    printed = load_published(table)
    times = printed[printed["unit"].isin(["ms", "s"])].set_index(["dataset", "method"])["value"].astype(float)
    own = frame[(frame["metric"] == "ratio_to_non_private") & (frame["method"] != "non_private")]
    found = []
    for _, r in own.iterrows():
        dataset, method = r["dataset"], r["method"]
        found.append((dataset, method, times[dataset, method] / times[dataset, "non_private"], float(r["mean"])))
    return found


def compare_values(table: str, frame: pd.DataFrame) -> list[tuple[pd.Series, pd.Series, bool]]:
    """Return (published row, measured row, reproduced?) for every published cell that has a measured row.

    Rows are joined on the published key columns; the metric through `MEASURED_AS`, and the boolean `resilient`
    through the success rate.
    """
    published = load_published(table)
    keys = [c for c in published.columns if c not in ("metric", "unit", "value")]
    pairs = []
    for _, row in published.iterrows():
        metric = "attack_success_rate" if row["unit"] == "boolean" else MEASURED_AS.get(row["metric"], row["metric"])
        match = select(frame, {key: row[key] for key in keys} | {"metric": metric})
        for _, found in match.iterrows():
            value = Value(float(found["mean"]), float(found["std"]), int(found["n"]))
            pairs.append((row, found, reproduces(row["value"], value, row["unit"])))
    return pairs


def compare_accounted(table: str, frame: pd.DataFrame) -> list[tuple[str, pd.Series, bool]]:
    """Return (printed value, recorded row, does it come out?) for every recorded cell of a table of ε.

    ε comes out within 0.1 % or one unit of the last printed digit, whichever is more; iterations within one; rounds
    exactly. A cell that is listed as not understood (`accounting.conventions.UNREPRODUCED`) never counts, even where
    its value happens to agree. A budget in a header is its own printed value.
    """
    printed = load_published(table)
    keys = [c for c in printed.columns if c not in ("unit", "value")]
    texts = printed.set_index(keys)["value"].to_dict()
    paper, _, name = table.partition("/")
    found = []
    for _, row in frame.iterrows():
        where = {key: str(row[key]) for key in keys}
        text = where["target_epsilon"] if row["metric"] == "target_epsilon" else texts[tuple(where.values())]
        width = {"iterations": 1.0, "rounds": 0.0}.get(row["metric"])
        width = epsilon_tolerance(text) if width is None else width
        known = not any(entry.covers(paper, name, where) for entry in UNREPRODUCED)
        found.append((text, row, known and abs(float(row["mean"]) - float(text)) <= width * (1 + 1e-9)))
    return found
