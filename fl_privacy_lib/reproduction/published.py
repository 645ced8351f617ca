"""The papers' printed numbers: loading them, and bringing them into a form that compares."""

import pandas as pd

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.reproduction.paths import PUBLISHED

MEAN_SQUARES = {"rmse": "mse"}
"""Published metric → measured metric, by the formula: both papers that name it take no root."""


def load_published(table: str) -> pd.DataFrame:
    """Return a published table, all columns as printed text.

    Parameters
    ----------
    table : 'paper/table', e.g. 'fed_cdp/table_7'

    Raises
    ------
    InputError
        If there is no such table.
    """
    path = PUBLISHED / f"{table}.csv"
    if not path.exists():
        raise InputError(f"there is no published table {table!r}: {path} does not exist.")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def has_published(table: str) -> bool:
    """Return whether a table of this name is published; figures and our own tables are not."""
    return (PUBLISHED / f"{table}.csv").exists()


def keys_of(printed: pd.DataFrame) -> list[str]:
    """Return the key columns that name a published cell, apart from its metric."""
    return [c for c in printed.columns if c not in ("metric", "unit", "value", "measured_as")]


def comparable(table: str) -> pd.DataFrame:
    """Return a published table in the form that the records can answer.

    The column `measured_as` names the measured metric. Times become ratios to the non-private one,
    since only ratios compare across machines; a budget in a key column becomes a row; a boolean is
    answered by a success rate; GradInv's iterations are steps of Adam. A distance is the root mean
    square that its name says: by the printed formula, without the root, several images that count
    as recovered would be farther off than a grey one.
    """
    printed = load_published(table)
    times = printed["unit"].isin(["ms", "s"])
    base = (
        printed[times & (printed["method"] == "non_private")]
        .set_index("dataset")["value"]
        .astype(float)
    )
    if times.any() and len(base):
        ratios = printed["value"][times].astype(float) / printed["dataset"][times].map(base)
        printed.loc[times, ["metric", "unit"]] = ["ratio_to_non_private", "ratio"]
        printed.loc[times, "value"] = ratios.map(repr)
        printed = printed[~times | (printed["method"] != "non_private")]
    if "target_epsilon" in printed:
        named = [c for c in ("dataset", "accounting", "target_epsilon") if c in printed]
        budgets = printed.loc[printed["target_epsilon"].str.match(r"\d"), named].drop_duplicates()
        columns = {c: "not_applicable" for c in keys_of(printed) if c not in named} | {
            "metric": "target_epsilon",
            "unit": "dimensionless",
            "value": budgets["target_epsilon"],
        }
        printed = pd.concat([printed, budgets.assign(**columns)], ignore_index=True)
    answered = printed["metric"].mask(printed["unit"] == "boolean", "attack_success_rate")
    if "attack" in printed:
        steps = (printed["attack"] == "gradinv") & (answered == "attack_iterations")
        answered = answered.mask(steps, "attack_steps")
    return printed.assign(measured_as=answered)
