"""The published cells of ε, iterations and rounds again, under one convention per column."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import cast

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting import conventions as given
from fl_privacy_lib.accounting import schedules
from fl_privacy_lib.accounting.accountants import first_step_beyond, spend
from fl_privacy_lib.accounting.composition import Theorem, composition_spending
from fl_privacy_lib.accounting.conventions import CONVENTIONS, Convention
from fl_privacy_lib.accounting.events import Event, Floats, Ledger

Row = Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """One published value beside ours.

    Parameters
    ----------
    paper, table : str
        Folder and file of the table.
    keys : mapping
        The row's key columns, as published.
    kind : str
        ``fixed_epsilon``: ε with σ = 6; ``other_epsilon``: ε under a schedule, under the
        sensitivities of one training, or with a σ that is not stated; ``target``: a budget in a
        header; ``iterations``, ``rounds``: when a budget is spent.
    published, ours, tolerance : float
        ε: within 0.1 % or one unit of the last printed digit. Iterations: within 1. Rounds: equal.
    outcome : str
        ``agrees``, within the tolerance; ``differs``; ``coincidence`` for a value within the
        tolerance whose convention is not known, so that it supports nothing.
    cause : str
        Why a cell is not counted; empty for one that agrees.
    """

    paper: str
    table: str
    keys: Row
    kind: str
    published: float
    ours: float
    tolerance: float
    outcome: str
    cause: str


def recompute(paper: str, table: str, rows: Iterable[Row]) -> tuple[Cell, ...]:
    """Return every cell of a published table that accounting can speak to, with our value.

    Parameters
    ----------
    paper, table : str
        Folder and file name, such as ``"fed_cdp"``, ``"table_6"``; one of `CONVENTIONS`.
    rows : iterable of mapping
        The table's rows as text, for example from `csv.DictReader`.

    Returns
    -------
    tuple of Cell
        In the order of the rows; a header's budget once for each column, after them.

    Raises
    ------
    InputError
        If no convention is known for the table.

    Examples
    --------
    >>> row = {"dataset": "lfw", "method": "fed_cdp", "local_iterations": "100",
    ...        "metric": "epsilon", "accounting": "moments_accountant", "value": "0.6356"}
    >>> cell, = recompute("fed_cdp", "table_6", [row])
    >>> print(f"{cell.ours:.4f} {cell.outcome}")
    0.6356 agrees
    """
    if (paper, table) not in CONVENTIONS:
        known = ", ".join("/".join(key) for key in CONVENTIONS)
        raise InputError(
            f"table = '{paper}/{table}' has no accounting convention: choose one of {known}."
        )
    rows = list(rows)
    columns = CONVENTIONS[paper, table]
    cells = []
    for row in rows:
        if row["metric"] == "epsilon":
            cells.append(_epsilon_cell(paper, table, row, rows, columns[row["accounting"]]))
        elif row["metric"] in ("iterations", "rounds") and _budget(row) is not None:
            cells.append(_stopping_cell(paper, table, row, columns))
    return (*cells, *_targets(paper, table, rows))


def _cell(paper: str, table: str, row: Row, kind: str, ours: float, tolerance: float) -> Cell:
    published = float(row["value"])
    cause = given.cause(paper, table, row)
    close = abs(ours - published) <= tolerance * (1 + 1e-9)
    outcome = "differs" if not close else "coincidence" if cause else "agrees"
    keys = {name: value for name, value in row.items() if name not in ("value", "unit")}
    return Cell(paper, table, keys, kind, published, ours, tolerance, outcome, cause)


def epsilon_tolerance(printed: str) -> float:
    """Return the larger of 0.1 % and one unit of the last printed digit.

    Examples
    --------
    >>> epsilon_tolerance("0.8227"), epsilon_tolerance("123.354")
    (0.0008227, 0.123354)
    """
    return max(1e-3 * float(printed), 10.0 ** -len(printed.partition(".")[2]))


def _epsilon_cell(
    paper: str, table: str, row: Row, rows: Sequence[Row], convention: Convention
) -> Cell:
    tolerance = epsilon_tolerance(row["value"])
    policy = row.get("noise_scale_policy", "fixed")
    rate, steps = _training(paper, row, rows)
    if policy == "fixed":
        ours = fixed_epsilon(convention, rate, steps)
        # σ is the stated 6, but where Table VII holds the variance constant
        stated = not (table == "table_7" and "clip" in row) or (
            row["method"] == "dp_baseline" and row["target_accuracy"] != "0.9773"
        )
        kind = "fixed_epsilon" if stated else "other_epsilon"
        return _cell(paper, table, row, kind, ours, tolerance)
    prefix = _schedule(policy, given.ITERATIONS[row["dataset"]]).first(steps)
    return _cell(paper, table, row, "other_epsilon", _spent(convention, prefix), tolerance)


def _training(paper: str, row: Row, rows: Sequence[Row]) -> tuple[float, int]:
    """Return the sampling rate and the steps that a row is charged for, without extra steps."""
    keys = ("dataset", "method", "noise_scale_policy", "target_accuracy")
    printed = [  # the row's own count, where the table prints one
        int(other["value"])
        for other in rows
        if other["metric"] in ("iterations", "rounds")
        and all(other.get(key) == row.get(key) for key in keys)
    ]
    if paper == "dynamic_parameters":
        return given.EXAMPLE_RATE, printed[0] if printed else given.ITERATIONS[row["dataset"]]
    rounds = printed[0] if printed else given.ROUNDS[row["dataset"]]
    if row["method"] == "fed_sdp":
        return given.CLIENT_RATE, rounds
    return given.EXAMPLE_RATE, rounds * int(row.get("local_iterations", given.LOCAL_ITERATIONS))


def fixed_epsilon(convention: Convention, rate: float, steps: int) -> float:
    """Return ε of a run with σ = 6 under a convention.

    Examples
    --------
    >>> print(f"{fixed_epsilon(Convention('advanced', decimals=3), 0.01, 6_000):.3f}")
    5.504
    """
    return _spent(convention, _fixed_run(rate, steps + convention.extra_steps))


def _fixed_run(rate: float, steps: int) -> Ledger:
    return Ledger.of(Event(rate, given.NOISE_MULTIPLIER, "example", "add_remove", uses=steps))


def _spent(convention: Convention, ledger: Ledger) -> float:
    name, decimals = convention.accountant, convention.decimals
    if decimals is not None:
        return composition_spending(ledger, cast(Theorem, name), decimals=decimals).epsilon
    return spend(ledger, name, given.DELTA).epsilon


# The ε-schedules behind the tables, from a number of steps; the cyclic one is a guess.
EPSILON_SCHEDULES: dict[str, Callable[[int], Floats]] = {
    policy: partial(getattr(schedules, shape), *ends, **({"cycles": n} if n > 1 else {}))
    for policy, (shape, ends, n) in given.POLICIES.items()
}


@lru_cache(maxsize=32)
def _schedule(policy: str, steps: int) -> Ledger:
    """Return the releases under a schedule of the noise scale; 'fixed': σ = 6 throughout."""
    if policy == "fixed":
        return _fixed_run(given.EXAMPLE_RATE, steps)
    noise = schedules.noise_of_epsilon(EPSILON_SCHEDULES[policy](steps), given.DELTA)
    return schedules.ledger_of(noise, given.EXAMPLE_RATE, "example", "add_remove")


@lru_cache(maxsize=128)
def _stop(policy: str, steps: int, convention: Convention, budget: float) -> int:
    """Return the step at which a schedule has spent its budget, or all steps if it never does."""
    if convention.budget == "fixed_run":
        budget = fixed_epsilon(convention, given.EXAMPLE_RATE, steps)
    ledger = _schedule(policy, steps)
    return first_step_beyond(ledger, budget, convention.accountant, given.DELTA) or steps


def _budget(row: Row) -> str | None:
    """Return the ε, as printed, that a row's training may spend; None where no budget decides."""
    target = row.get("target_epsilon")
    return None if target in ("all", "not_applicable") else target


def _full_run(paper: str, dataset: str) -> int:
    """Return the iterations of a whole training, at each client where it is federated."""
    if paper == "dynamic_parameters":
        return given.ITERATIONS[dataset]
    return given.ROUNDS[dataset] * given.LOCAL_ITERATIONS


def _stopping_cell(paper: str, table: str, row: Row, columns: Mapping[str, Convention]) -> Cell:
    """Return the cell of the iteration or the round at which a budget is spent."""
    budget = float(row["target_epsilon"])
    convention = columns[row.get("accounting", "moments_accountant")]
    length = _full_run(paper, row["dataset"])
    if row["metric"] == "iterations":
        stop = _stop(row["noise_scale_policy"], length, convention, budget)
        return _cell(paper, table, row, "iterations", stop, 1.0)
    policy = row["method"].removeprefix("fed_alpha_cdp_sigma_")
    stop = _stop(policy if policy in EPSILON_SCHEDULES else "fixed", length, convention, budget)
    return _cell(paper, table, row, "rounds", math.ceil(stop / given.LOCAL_ITERATIONS), 0.0)


def _targets(paper: str, table: str, rows: Sequence[Row]) -> Iterator[Cell]:
    """Yield a cell for each budget in a header: the cost of the fixed run in earlier tables."""
    spending = CONVENTIONS["dynamic_parameters", "table_5"]
    keys = {  # one for each column of a data set
        (row["dataset"], row.get("accounting", "moments_accountant")): printed
        for row in rows
        if (printed := _budget(row)) is not None
    }
    for (dataset, column), printed in keys.items():
        ours = fixed_epsilon(spending[column], given.EXAMPLE_RATE, _full_run(paper, dataset))
        header = {"dataset": dataset, "accounting": column, "metric": "target_epsilon"}
        row = header | {"value": printed}
        yield _cell(paper, table, row, "target", ours, epsilon_tolerance(printed))
