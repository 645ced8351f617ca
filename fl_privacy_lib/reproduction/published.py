"""Published numbers beside measured ones: loading, joining by key, and the rule of a value's verdict."""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pandas as pd
import yaml

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.reproduction.paths import PUBLISHED

STATUSES = ("reproduced", "not reproduced", "reduced setting", "refuted", "not run")

MEASURED_AS = {"rmse": "mse"}
"""Published metric → measured metric, where the name and the formula of a paper disagree: they print no root."""


def load_published(table: str, folder: Path = PUBLISHED) -> pd.DataFrame:
    """Return a published table, all columns as printed text.

    Parameters
    ----------
    table : str, ``paper/table``, e.g. 'fed_cdp/table_7'
    """
    path = folder / f"{table}.csv"
    if not path.exists():
        raise InputError(f"there is no published table {table!r}: {path} does not exist.")
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def has_published(table: str, folder: Path = PUBLISHED) -> bool:
    """Return whether a table of this name is published; figures and our own tables are not."""
    return (folder / f"{table}.csv").exists()


def load_index(paper: str, folder: Path = PUBLISHED) -> dict:
    """Return a paper's index: its settings, and the notes on what is garbled or contradictory."""
    return yaml.safe_load((folder / paper / "index.yaml").read_text())


@dataclass(frozen=True)
class Value:
    """A measured value: mean, standard deviation over seeds, and the number of units behind it."""

    mean: float
    std: float
    n: int


def last_digit(printed: str) -> float:
    """Return one unit of the last printed digit.

    >>> last_digit("0.1549"), last_digit("300"), last_digit("1.50E-05")
    (0.0001, 1.0, 1e-07)
    """
    return float(Decimal(1).scaleb(int(Decimal(printed).as_tuple().exponent)))


def reproduces(printed: str, measured: Value, unit: str) -> bool:
    """Return whether a measured value reproduces a printed one (DESIGN section 4).

    Parameters
    ----------
    printed : str, as in the paper; 'true' and 'false' for a boolean
    measured : Value; for a boolean the mean is the success rate, and an attack that recovers fewer than half of
        its images counts as resisted
    unit : str, the published unit

    Examples
    --------
    >>> reproduces("0.1549", Value(0.16, 0.004, 100), "dimensionless")
    True
    >>> reproduces("0.95", Value(0.957, 0.0, 1), "fraction")
    True
    """
    if unit == "boolean":
        return (measured.mean < 0.5) == (printed == "true")
    tolerance = max(2 * measured.std, last_digit(printed), 0.01 if unit == "fraction" else 0.0)
    return abs(measured.mean - float(printed)) <= tolerance
