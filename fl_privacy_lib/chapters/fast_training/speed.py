"""Reading the bench's record: engines from naive to compiled, and their ratios (chapter 04)."""

from pathlib import Path

import pandas as pd

from fl_privacy_lib.reproduction.paths import MEASURED

STEPS = {
    "naive": "a loop over the examples",
    "opacus": "one backward pass for all (Opacus)",
    "ours_private": "clients stacked, no autograd",
    "compiled_private": "one compiled kernel",
}
"""Engines from naive to compiled, with what each does."""


def recorded_ms(workload: str, folder: Path = MEASURED) -> dict[str, float]:
    """Return the recorded ms of a client's local iteration by engine: 20 clients, one thread."""
    table = pd.read_csv(folder / "performance.csv")
    rows = table[
        (table["workload"] == workload) & (table["participants"] == 20) & (table["workers"] == 1)
    ]
    return dict(zip(rows["engine"], rows["ms_per_client_iteration"], strict=True))


def recorded_ratios(workload: str, folder: Path = MEASURED) -> pd.DataFrame:
    """Return the recorded ratios of a workload, none where the bench has not recorded any."""
    path = folder / "performance_ratios.csv"
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({"workload": []})
    return table[table["workload"] == workload]


def steps(workload: str, folder: Path = MEASURED) -> list[tuple[str, float, float]]:
    """Return what each engine of `STEPS` does, its recorded ms, and its gain over the one before.

    An engine without a recorded row is left out; the first one's gain is 1.
    """
    ms = recorded_ms(workload, folder)
    names = [name for name in STEPS if name in ms]
    before = [names[0], *names] if names else []
    return [
        (STEPS[name], ms[name], ms[last] / ms[name])
        for last, name in zip(before, names, strict=False)
    ]
