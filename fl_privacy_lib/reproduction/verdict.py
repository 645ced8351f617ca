"""Every status, of a value, of a row of values and of a claim, is decided here and nowhere else.

Others compare and gather: `agrees` says whether one value came out, `at_setting` which rows ran at
the published setting, `why_unfair` which of them are no fair trial. `decide` turns each `Outcome`
that they gathered into a status. A further status is one more rule there.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fl_privacy_lib.accounting.recompute import epsilon_tolerance
from fl_privacy_lib.reproduction.paths import RESULTS

RATIO_FACTOR = 1.25
"""A ratio of two times agrees within this factor: other hardware moves even ratios."""
SEEDS = 3
"""Of a fair trial, at the chosen rate."""
TAKEN_OVER_FROM = 200
"""Clients a round from which one seed counts, at the rate of the largest cell that was searched."""


class Status(StrEnum):
    """What a value, a row of values or a claim amounts to, in a reader's words."""

    REPRODUCED = "reproduced"
    EXCEEDED = "exceeded"
    NOT_REPRODUCED = "not reproduced"
    UNDECIDED = "undecided"
    REDUCED_SETTING = "reduced setting"
    REFUTED = "refuted"
    NOT_RUN = "not run"

    @property
    def style(self) -> str:
        """The end of the style sheet's class: 'not-run', and 'reduced' for a reduced setting."""
        return self.removesuffix(" setting").replace(" ", "-")


# ---- a value --------------------------------------------------------------------------------


def last_digit(printed: str) -> float:
    """Return one unit of the last printed digit.

    >>> last_digit("0.1549"), last_digit("300"), last_digit("1.50E-05")
    (0.0001, 1.0, 1e-07)
    """
    return float(Decimal(1).scaleb(int(Decimal(printed).as_tuple().exponent)))


def agrees(printed: str, mean: float, std: float, unit: str, metric: str = "") -> bool:
    """Return whether a measured value is within the tolerance of a printed one.

    Two standard deviations over seeds, one unit of the last printed digit, or 0.01 for a fraction,
    whichever is more. An ε may be 0.1 % off, a round at which a budget is spent not at all, a ratio
    of times by `RATIO_FACTOR`. An agreement counts only where two deviations are at most a third of
    the printed value, see `comparison.NO_FAILURE`.

    Parameters
    ----------
    printed : str, as in the paper; 'true' and 'false' for a boolean
    mean, std : measured, over seeds; for a boolean the mean is the success rate, and an attack that
        recovers fewer than a tenth of its images counts as resisted
    unit : str, the published unit, or 'ratio'
    metric : str, the published metric

    Examples
    --------
    >>> agrees("0.1549", 0.16, 0.004, "dimensionless"), agrees("0.95", 0.957, 0.0, "fraction")
    (True, True)
    """
    if unit == "boolean":
        return (mean < 0.1) == (printed == "true")
    if unit == "ratio":
        return 1 / RATIO_FACTOR <= mean / float(printed) <= RATIO_FACTOR
    if metric in ("epsilon", "target_epsilon"):
        tolerance = epsilon_tolerance(printed)
    elif metric == "rounds":
        tolerance = 0.0
    else:
        tolerance = max(2 * std, last_digit(printed), 0.01 if unit == "fraction" else 0.0)
    return abs(mean - float(printed)) <= tolerance * (1 + 1e-9)  # 0.2 - 0.1 is not 0.1


def at_guess(accuracy: float, std: float, seeds: int, guess: float, examples: float) -> bool:
    """Return whether an accuracy is no better than that of what has not learned.

    It has to be more than three standard errors above it: its own over the seeds, or that of the
    guess on so many examples, whichever is larger.

    Parameters
    ----------
    accuracy, std, seeds : mean and standard deviation over so many seeds
    guess : accuracy of the best constant guess, or of the first weights
    examples : behind each of the two

    Examples
    --------
    >>> at_guess(0.115, 0.0, 1, 0.11, 10_000), at_guess(0.13, 0.0, 1, 0.11, 10_000)
    (True, False)
    >>> at_guess(0.13, 0.02, 3, 0.11, 10_000)
    True
    """
    of_guess = (guess * (1 - guess) / (examples * seeds)) ** 0.5
    return not accuracy > guess + 3 * max(of_guess, std / seeds**0.5)  # nor is what is no number


# ---- the published setting ------------------------------------------------------------------


@functools.cache
def _settings() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((RESULTS / "settings.yml").read_text()))


def published_setting(table: str) -> dict[str, Any] | None:
    """Return the setting that a table's rows must have run at, column → value; None if unknown."""
    setting = _settings().get(table)
    return None if setting is None else {c: v for c, v in setting.items() if c != "trial"}


def trial_of(table: str) -> dict[str, Any]:
    """Return how a table that is trained for is judged; empty where nothing is searched.

    Returns
    -------
    search : the record of the tries, 'paper/table'
    also : 'paper/table' → the rows of another chapter's record that belong to the table, and the
        columns that they lack
    readings : name → column → the values of its rows. The first one judges the table; the others
        depart from it in one thing.
    """
    return dict(_settings().get(table, {}).get("trial", {}))


def at_setting(rows: pd.DataFrame, setting: dict[str, Any] | None) -> "pd.Series[bool]":
    """Return which rows ran at a setting, [rows]; none of them where no setting is known.

    Parameters
    ----------
    rows : a measured table
    setting : column → a value, a list of values, {row's data set: value}, {'by': column, its value:
        value}, or {'at_least': number}; `victims` are those of all seeds. A column that the rows
        lack is not met.
    """
    met = pd.Series(setting is not None, index=rows.index)
    for column, wanted in (setting or {}).items():
        met &= _meets(rows, column, wanted) if column in rows else False
    return met


def _meets(rows: pd.DataFrame, column: str, wanted: Any) -> "pd.Series[bool]":
    if isinstance(wanted, dict) and "at_least" in wanted:
        count = pd.to_numeric(rows[column], errors="coerce")
        seeds = pd.to_numeric(rows["seeds"]) if column == "victims" else 1
        return count * seeds >= wanted["at_least"]
    if isinstance(wanted, dict):
        keys = rows[wanted.get("by", "dataset")]
        return rows[column] == keys.map(lambda key: str(wanted.get(key)))
    return rows[column].isin(listed(wanted))


def listed(wanted: Any) -> list[str]:
    """Return the values that a column may have, as a record spells them."""
    return [str(w) for w in (wanted if isinstance(wanted, list) else [wanted])]


# ---- the fair trial -------------------------------------------------------------------------


def why_unfair(cell: Mapping[str, Any]) -> str:
    """Return why a trained cell was no fair trial, in a few words; '' for a fair one.

    Parameters
    ----------
    cell : its metrics by name, and its columns `seeds` and `participants`
    """
    if "searched" not in cell:
        return "some learning rates were not searched in their own cells; a search there would tell"
    if int(cell["seeds"]) < SEEDS and int(cell["participants"]) < TAKEN_OVER_FROM:
        return f"some cells have {cell['seeds']} of {SEEDS} seeds"
    # where all are lost, the guess is the result
    lost = 0 < cell.get("diverged", 0) < 1 or (cell.get("diverged", 0) and learns(cell))
    return "some trainings diverged at the chosen rate" if lost else ""


def learns(cell: Mapping[str, Any]) -> bool:
    """Return whether a trained cell ends above what has not learned, where that is recorded."""
    if "guess" not in cell:
        return True
    return not at_guess(
        cell["accuracy"], cell["accuracy_std"], int(cell["seeds"]), cell["guess"],
        int(cell["evaluated"]),
    )  # fmt: skip


def design_effect(means: Any, stds: Any, seeds: Any, victims: Any) -> Any:
    """Return by how much images of one network count less than independent ones, [cells].

    A rate's effective number of images is n/(1 + (m - 1)ρ), where m images share a network and ρ is
    their correlation: of the variance of all images of a table, the share that lies between its
    networks, by the analysis of variance.

    Parameters
    ----------
    means, stds : of each cell's success rate, and over its networks' rates (population form)
    seeds, victims : networks in each cell, and images a network, m

    Returns
    -------
    In [1, m]; m if no cell can tell ρ, as each recovers all or nothing, or has one network.

    Examples
    --------
    >>> float(design_effect(0.5, 0.5, 5, 20)), float(design_effect(0.5, 0.0, 5, 20))
    (20.0, 1.0)
    >>> float(design_effect(0.0, 0.0, 5, 20))
    20.0
    """
    p, std, k, m = (np.asarray(values, dtype=float) for values in (means, stds, seeds, victims))
    between, within = std**2 * k / np.maximum(k - 1, 1), (p - p**2 - std**2) / np.maximum(m - 1, 1)
    weight = (m > 1) * (k - 1)
    total = (weight * (between + (m - 1) * within)).sum()
    return 1 + (m - 1) * np.clip((weight * (between - within)).sum() / total if total else 1, 0, 1)


# ---- the decision ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a compared cell.

    Parameters
    ----------
    held : whether the value agrees, or the claim's test holds; None where that is undecided
    gap : what was measured less what was asked for
    why : why it is undecided
    exceeded : a tuned value that lies beyond the printed one
    cell : the recorded cell, with what was `asked`, what was `found` and its `spread`
    """

    held: bool | None
    gap: float = 0.0
    why: str = ""
    exceeded: bool = False
    cell: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Verdict:
    """A status, how many of the compared cells behind it held, and a sentence that says why.

    Parameters
    ----------
    beside : what else a reader has to know
    outcomes : of the compared cells; of a refuted claim, of its counter-examples
    """

    status: Status
    held: int = 0
    cells: int = 0
    note: str = ""
    beside: tuple[str, ...] = ()
    outcomes: tuple[Outcome, ...] = ()

    @property
    def open(self) -> bool:
        """Whether cells were compared, and none of them decides."""
        return bool(self.outcomes) and all(o.held is None for o in self.outcomes)

    def __str__(self) -> str:
        what = (
            "its counter-example holds" if self.status is Status.REFUTED
            else "is decided" if self.open else "holds"
        )  # fmt: skip
        return self.status + (f": {what} on {self.held} of {self.cells} recorded cells"
                              if self.cells else "")  # fmt: skip


def decide(
    recorded: bool,
    at_setting: bool = False,
    outcomes: Sequence[Outcome] = (),
    counter_examples: Sequence[bool] = (),
    lost: str = "",
) -> Verdict:
    """Return the verdict on a value, a row of values or a claim: the first rule that applies.

    Parameters
    ----------
    recorded : whether anything is recorded of what it is about
    at_setting : whether that ran at the published setting
    outcomes : of each compared cell
    counter_examples : of each cell of a claim's counter-example, whether it holds
    lost : what the paper leaves out that decides the number, or why our trial is not fair
    """
    if not recorded:
        return Verdict(Status.NOT_RUN)
    if not at_setting:
        return Verdict(Status.REDUCED_SETTING)
    if not outcomes:  # some of what is to be compared is not recorded, or cannot be
        return Verdict(Status.UNDECIDED if lost else Status.NOT_RUN, note=lost)
    if any(counter_examples):
        return Verdict(Status.REFUTED, sum(counter_examples), len(counter_examples))
    counts = sum(bool(o.held) for o in outcomes), len(outcomes)
    if all(o.held for o in outcomes):
        return Verdict(Status.REPRODUCED, *counts)
    if lost:
        return Verdict(Status.UNDECIDED, *counts, lost)
    if any(o.held is False and not o.exceeded for o in outcomes):
        return Verdict(Status.NOT_REPRODUCED, *counts)
    if undecided := [o.why for o in outcomes if o.held is None]:
        return Verdict(Status.UNDECIDED, *counts, undecided[0])
    return Verdict(Status.EXCEEDED, *counts)
