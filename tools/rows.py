"""Tables that a tool measures in parts: what a run does not measure again stays."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd


def other_rows(path: Path, column: str, measured: Iterable[str]) -> list[dict[Any, Any]]:
    """Return a table's rows whose `column` is not in `measured`, as text; none without a table."""
    if not path.exists():
        return []
    table = pd.read_csv(path, dtype=str)
    return table[~table[column].isin(list(measured))].to_dict("records")
