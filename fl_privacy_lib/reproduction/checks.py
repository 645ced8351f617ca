"""The tests of the ledger's claims: what each finds in the recorded rows, cell by cell."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.comparison import cells, compare, compared, select
from fl_privacy_lib.reproduction.figures import named
from fl_privacy_lib.reproduction.names import METRICS, SETTINGS
from fl_privacy_lib.reproduction.verdict import RATIO_FACTOR, SEEDS, Outcome

Test = dict[str, Any]
TOO_WIDE = "the intervals of some differences include what was asked for: more seeds would tell"
NO_LEARNING = "an arm has not learned, and neither wins nor loses: no learning"


def check(test: Test, table: str, frame: pd.DataFrame) -> list[Outcome]:
    """Return what a test finds in each recorded cell; see the function of its name in `CHECKS`.

    Parameters
    ----------
    test : of the ledger: 'check' names it, the rest are its parameters
    table : 'paper/table', whose printed values are compared with
    frame : the recorded rows, from `measured`
    """
    return list(CHECKS[test["check"]](test, table, frame))


def _values(test: Test, table: str, frame: pd.DataFrame) -> list[Outcome]:
    """Compare with the printed value of the same keys, a time as a ratio to the non-private one.

    `published` names the table where it is another, `instead` a metric that a departure measures.
    """
    return [
        pair.outcome
        for pair in compare(test.get("published", table), frame, instead=test.get("instead"))
        if pair.outcome is not None
    ]


def _rate(test: Test, table: str, frame: pd.DataFrame) -> Iterator[Outcome]:
    """Ask for a success rate, with its interval, above or below `bound`."""
    rates = frame[frame["metric"] == test.get("metric", "attack_success_rate")]
    above = test["check"] == "rate_above"
    for row in rates.to_dict("records"):
        count = row["effective"]  # images of one network count less than independent ones
        cell = compared(row, test["bound"], row["mean"], row["std"])
        low, high = wilson_interval(row["mean"] * count, count)
        gap, wide = row["mean"] - test["bound"], low <= test["bound"] <= high
        why = f"the interval of a rate, {low:.2f} to {high:.2f}, includes {test['bound']:g}"
        yield Outcome(None if wide else (gap > 0) == above, gap,
                      f"{why}; more networks would tell" if wide else "", cell=cell)  # fmt: skip


def _ahead(test: Test, table: str, frame: pd.DataFrame) -> Iterator[Outcome]:
    """Ask that `rows` be ahead of `than` at equal values of the columns `on`, by more than `by`.

    Three seeds a side decide by the t-interval of the difference; with one seed it has to be more
    than three times the arms' largest spread elsewhere in the table. `by` is negative where the
    claim is that `rows` are not so far behind.
    """
    rows = frame[frame["metric"] == test["metric"]]
    one, other = select(rows, test["rows"]), select(rows, test["than"])
    pairs = one.merge(other, on=test["on"], suffixes=("", "_than"))
    by = test.get("by", 0.0)
    for pair in pairs.to_dict("records"):
        gap = pair["mean"] - pair["mean_than"] - by
        unfair = pair["unfair"] or pair["unfair_than"]
        if unfair or (by >= 0 and not (pair["learns"] and pair["learns_than"])):
            yield Outcome(None, gap, unfair or NO_LEARNING, cell=_pair(pair))
        elif abs(gap) <= _half_width(pair, pd.concat([one, other])):
            yield Outcome(None, gap, TOO_WIDE, cell=_pair(pair))
        else:
            yield Outcome(gap > 0, gap, cell=_pair(pair))


def _pair(pair: dict[str, Any]) -> dict[str, Any]:
    """Return a compared pair as a cell: what the one has to beat is what was asked."""
    return compared(pair, pair["mean_than"], pair["mean"], pair["std"])


def _squared_error(row: dict[str, Any], std: str, n: str, seeds: str) -> tuple[float, int]:
    """Return the squared standard error of a mean, and how many repetitions are behind it.

    Those of attacks are networks, whose deviation is recorded in population form.
    """
    count, of_attacks = int(row[seeds if "victims" in row else n]), "victims" in row
    return row[std] ** 2 / max(1, count - of_attacks), count


def _half_width(pair: dict[str, Any], arms: pd.DataFrame) -> float:
    """Return half the width of a difference's 95 % interval: Welch's t; of one seed, see above."""
    sides = [_squared_error(pair, f"std{e}", f"n{e}", f"seeds{e}") for e in ("", "_than")]
    if min(n for _, n in sides) < SEEDS:
        spreads = arms["std"][arms["seeds" if "victims" in arms else "n"].astype(int) >= SEEDS]
        return 3 * float(spreads.max()) if len(spreads) else np.inf
    if not (total := sum(square for square, _ in sides)):
        return 0.0
    freedom = total**2 / sum(square**2 / (n - 1) for square, n in sides)
    return float(stats.t.ppf(0.975, freedom) * total**0.5)


def _best(test: Test, table: str, frame: pd.DataFrame) -> Iterator[Outcome]:
    """Ask that the metric be highest, beyond chance, where the column `over` is one of `at`.

    Compared are rows with equal values of the columns `on` that have all of `levels`.
    """
    rows = frame[frame["metric"] == test["metric"]]
    for _, group in rows.groupby(test["on"]):
        means = group.set_index(test["over"])["mean"]
        if not {str(level) for level in test["levels"]} <= set(means.index):
            continue
        here = means.index.isin([str(level) for level in test["at"]])
        gap = float(means[here].max() - means[~here].max())
        best, rival = (group.set_index(test["over"]).loc[means[m].idxmax()] for m in (here, ~here))
        pair = dict(best) | {f"{name}_than": value for name, value in rival.items()}
        tied = abs(gap) <= (half := _half_width(pair, group)) and half > 0
        why = max(group["unfair"]) or (
            TOO_WIDE if tied else "" if (best if gap > 0 else rival)["learns"] else NO_LEARNING
        )
        yield Outcome(None if why else gap >= 0, gap, why, cell=_pair(pair))


def _bounded(test: Test, table: str, frame: pd.DataFrame) -> Iterator[Outcome]:
    """Ask that a metric be at least, or at most, a number or another metric of its cell.

    A metric `sure_…` is the lower end of an interval around the metric of that name: where it has
    to be at least a bound that the interval includes, the cell is undecided. So is any that lies no
    further from its bound than chance, by Student's t of its repetitions.
    """
    metric, most = test["metric"], test["check"] == "at_most"
    for cell in (c for c in cells(frame) if metric in c):
        # an ε of ∞ has no metric
        bound = cell.get(test["bound"], np.inf) if isinstance(test["bound"], str) else test["bound"]
        gap, std = cell[metric] - bound, cell[f"{metric}_std"]
        square, n = _squared_error(cell, f"{metric}_std", f"{metric}_n", "seeds")
        upper = 2 * cell.get(metric.removeprefix("sure_"), cell[metric]) - cell[metric] - bound
        chance = stats.t.ppf(0.975, n - 1) * square**0.5 if n > 1 else 0.0
        tied = 0 < chance >= abs(gap) or (gap < 0 <= upper and not most)
        why = cell.get("unfair", "") or (TOO_WIDE if tied else "")
        held = None if why else gap <= 0 if most else gap >= 0
        yield Outcome(held, gap, why, cell=compared(cell, bound, cell[metric], std))


PRINTED = ("values", "accounted", "ratio")
"""The tests that compare with printed values."""
CHECKS: dict[str, Callable[[Test, str, pd.DataFrame], Iterable[Outcome]]] = {
    **dict.fromkeys(PRINTED, _values),
    "rate_above": _rate,
    "rate_below": _rate,
    "ahead": _ahead,
    "best": _best,
    "shown": _bounded,
    "at_most": _bounded,
}


WORDS = {
    "values": "each printed value is met within its tolerance",
    "accounted": "each printed ε, budget and round is met",
    "ratio": f"each printed ratio of times is met within a factor of {RATIO_FACTOR}",
    "rate_above": "the {metric} is above {share}, with its whole interval",
    "rate_below": "the {metric} is below {share}, with its whole interval",
    "shown": "the {metric} is at least {bound}",
    "at_most": "the {metric} is at most {bound}",
    "margin": "what is found does not exceed what is claimed",
    "excess": "what is found exceeds what is claimed",
    "best": "the {metric} is highest at {at}",
    "ahead": "the {metric} for {rows} is {above} that for {than}",
}


def in_words(test: dict[str, Any]) -> str:
    """Return a claim's test as a reader's words; `check` has their exact meaning.

    >>> in_words({"check": "at_most", "metric": "slope", "bound": 1.25})
    'the measured exponent is at most 1.25'
    """
    kind, metric = test["check"], test.get("metric", "attack_success_rate")
    bound, by = test.get("bound", 0), test.get("by", 0)
    tiny = not isinstance(bound, str) and 0 < abs(bound) < 1e-5  # the rounding of a record
    number = f"the {METRICS[bound]}" if isinstance(bound, str) else f"{bound:g}".replace("-", "−")
    above = ["above", f"more than {by:g} above",
             f"no more than {-by:g} below"][(by > 0) + 2 * (by < 0)]  # fmt: skip
    template = metric if metric == "margin" or (tiny and metric == "excess") else kind
    return (
        WORDS[template]
        .format(
            metric=METRICS[metric],
            bound="0, apart from rounding" if tiny else number,
            share=f"{100 * bound:g} %" if kind.startswith("rate") else "",
            at=_row_label({test["over"]: test["at"]}) if "over" in test else "",
            above=above,
            **{side: _row_label(test[side]) for side in ("rows", "than") if side in test},
        )
        .replace("% p", " % p")
    )


def _row_label(rows: dict[str, Any]) -> str:
    return ", ".join(
        " or ".join(
            SETTINGS.get(column, "{}").format(named(str(v)) if isinstance(v, str) else v)
            for v in (values if isinstance(values, list) else [values])
        )
        for column, values in rows.items()
    )
