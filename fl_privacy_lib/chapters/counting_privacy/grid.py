"""Counting privacy: the papers' cells of ε recomputed, and a reader's own training (chapter 03).

A cell is one published value; `cells` recomputes a table under its conventions.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from fl_privacy_lib.accounting import conventions as given
from fl_privacy_lib.accounting.accountants import Accountant, spend, spending_curve
from fl_privacy_lib.accounting.conventions import CONVENTIONS
from fl_privacy_lib.accounting.events import Event, Ledger
from fl_privacy_lib.accounting.recompute import Cell, recompute
from fl_privacy_lib.chapters.counting_privacy.parameters import CountingPrivacy
from fl_privacy_lib.defenses import Defense, Holding
from fl_privacy_lib.defenses.registry import build
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.sampling import Plan

TABLES = tuple("/".join(key) for key in CONVENTIONS)
"""The published tables that accounting can answer, as 'paper/table'."""


@cache  # no setting changes it
def cells(table: str) -> tuple[Cell, ...]:
    """Return every cell of a published table that accounting can answer, with our value.

    Parameters
    ----------
    table : one of `TABLES`
    """
    paper, _, name = table.partition("/")
    rows = [
        {str(k): str(v) for k, v in row.items()} for row in load_published(table).to_dict("records")
    ]
    return recompute(paper, name, rows)


def cell_row(table: str, cell: Cell) -> dict[str, Any]:
    """Return a cell's key columns: the published ones, then the convention and reading of its ε."""
    printed = load_published(table)
    keys = {
        c: cell.keys.get(c, "not_applicable") for c in printed.columns if c not in ("unit", "value")
    }
    if cell.kind == "target":  # a budget in a header: the printed text stands in its key column
        budgets = [text for text in printed["target_epsilon"].unique() if text[0].isdigit()]
        keys["target_epsilon"] = next(text for text in budgets if float(text) == cell.published)
    column = cell.keys.get("accounting", "moments_accountant")
    convention = CONVENTIONS[cell.paper, cell.table][column]
    if cell.kind == "target":  # what the full run spends, by the convention of the tables of ε
        convention = CONVENTIONS["dynamic_parameters", "table_5"][column]
    client = cell.keys.get("method") == "fed_sdp"
    return keys | {
        "kind": cell.kind,
        "accountant": convention.accountant,
        "extra_steps": convention.extra_steps,
        "step_decimals": convention.decimals or "all",
        "budget": convention.budget,
        "noise_scale": "6"
        if cell.keys.get("noise_scale_policy", "fixed") == "fixed"
        else "schedule",
        "privacy_unit": "client" if client else "example",
        "relation": "add_remove",
        "sampling": "poisson",
        "sampling_rate": given.CLIENT_RATE if client else given.EXAMPLE_RATE,
        "delta": given.DELTA,
    }


def own_system(settings: CountingPrivacy) -> tuple[Defense, Plan, Holding]:
    """Return the defence, plan and data that a reader's parameters describe."""
    defense = build(
        settings.method, clip_norm=settings.clip_norm, noise_scale=settings.noise_scale,
        divide_by=None if settings.divide_by == "as_method" else settings.divide_by,
        scope=settings.clip_scope,
    )  # fmt: skip
    plan = Plan(
        settings.clients,
        settings.participants,
        settings.rounds,
        settings.local_iterations,
        settings.batch_size,
        settings.client_sampling,
        settings.batch_sampling,
        local_lr=0.05,
    )
    holding = Holding(
        settings.examples,
        settings.client_size,
        settings.tensors,
        settings.holders or settings.least_holders,
        settings.repeats,
    )
    return defense, plan, holding


def curve(accountant: Accountant, steps: Sequence[int], noise: float) -> list[float]:
    """Return ε after each of some numbers of steps of the papers' sampled Gaussian, at δ = 1e-5.

    Parameters
    ----------
    accountant : that counts
    steps : numbers of steps, rising
    noise : multiplier σ
    """
    run = Event(given.EXAMPLE_RATE, noise, "example", "add_remove", uses=max(steps))
    if accountant == "pld":
        return [spend(Ledger.of(run).first(count), "pld", given.DELTA).epsilon for count in steps]
    whole = spending_curve(run, accountant, given.DELTA)
    return [float(whole[count - 1]) for count in steps]
