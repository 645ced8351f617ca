"""Reading the bench's record: engines from naive to compiled, and their ratios (chapter 04)."""

from pathlib import Path

import pandas as pd

from fl_privacy_lib.reproduction.paths import MEASURED

STEPS = {
    "opacus": "one backward pass\n(Opacus)",
    "ours_private": "clients stacked,\nno autograd",
    "compiled_private": "one compiled\nkernel",
}
"""Engines after the naive one, with what each does."""
COLUMNS = ["workload", "ratio", "vector_width", "median", "std"]
NETWORKS = {"mnist_cnn": "MNIST", "cifar10_cnn": "CIFAR-10", "adult_mlp": "Adult"}
"""Workload of the bench → the data set whose shape, network and batch size it has."""


def recorded_ratios(workload: str, folder: Path = MEASURED) -> dict[str, tuple[float, float]]:
    """Return a workload's recorded ratios, ratio → (median, standard deviation); it may be empty.

    Rows of a kernel that was compiled for narrower registers than the machine's are left out.
    """
    path = folder / "performance_ratios.csv"
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=COLUMNS)
    rows = table[table["workload"] == workload].query("vector_width == 'native'")
    return dict(zip(rows["ratio"], zip(rows["median"], rows["std"], strict=True), strict=True))


def gains(folder: Path = MEASURED) -> list[tuple[str, float, str, float]]:
    """Return (step, times as fast as the naive loop, network, standard deviation), step by step.

    An engine without a recorded row is left out.
    """
    ratios = {data: recorded_ratios(workload, folder) for workload, data in NETWORKS.items()}
    return [
        (step, recorded[ratio][0], data, recorded[ratio][1])
        for engine, step in STEPS.items()
        for data, recorded in ratios.items()
        if (ratio := f"naive / {engine}") in recorded
    ]
