"""The bench's record: what is compared, which bounds must hold, and how rows are written."""

import datetime
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import fl_privacy_lib
from fl_privacy_lib.chapters.fast_training.engines import ratio
from fl_privacy_lib.reproduction.progress import report_progress
from fl_privacy_lib.reproduction.records import write_table

Times = dict[str, list[float]]
"""Engine → its times, one a repetition."""

COLUMNS = [
    "workload",
    "engine",
    "participants",
    "workers",
    "ms_per_client_iteration",
    "peak_mib",
    "version",
    "date",
]
RATIO_COLUMNS = [
    "workload",
    "ratio",
    "vector_width",
    "median",
    "std",
    "repetitions",
    "goal",
    "version",
    "date",
]
ENGINE_KEYS, RATIO_KEYS = COLUMNS[:4], RATIO_COLUMNS[:3]
RATIOS = (
    ("naive", "compiled_private"),
    ("opacus", "compiled_private"),
    ("ours_private", "compiled_private"),
    ("compiled_private", "plain_non_private"),
    ("compiled_private", "compiled_non_private"),
    ("compiled_private", "floor"),
    ("naive", "opacus"),
    ("naive", "ours_private"),
    ("opacus", "ours_private"),
    ("ours_private", "plain_non_private"),
    ("ours_private", "ours_non_private"),
    ("ours_private", "ours_non_private_and_noise"),
)
"""Pairs of engines whose times are divided, repetition by repetition."""
STAGES = {
    "forward": ("compiled_forward",),
    "backward": ("compiled_non_private", "compiled_forward"),
    "noise": ("compiled_private", "compiled_noiseless"),
}
"""Stage of the compiled engine → an engine with it and one without; the difference is its time."""
GOALS: dict[str, dict[str, str]] = {
    "naive / compiled_private": {"mnist_cnn": "≥ 9", "cifar10_cnn": "≥ 7"},
    "compiled_private / plain_non_private": {
        "mnist_cnn": "≤ 0.25",
        "cifar10_cnn": "≤ 0.28",
        "adult_mlp": "≤ 0.9",
    },
    "opacus / compiled_private": {"mnist_cnn": "≥ 6.5", "cifar10_cnn": "≥ 6.5"},
    "ours_private / compiled_private": {
        "mnist_cnn": "≥ 3",
        "cifar10_cnn": "≥ 2.5",
        "adult_mlp": f"≥ {1 / 0.45:.2f}",
    },
    "compiled_private / compiled_non_private": {"mnist_cnn": "≤ 1.12", "cifar10_cnn": "≤ 1.12"},
    "compiled, 1 / 2 workers": {
        "mnist_cnn": "≥ 1.85",
        "cifar10_cnn": "≥ 1.85",
        "adult_mlp": "≥ 1.85",
    },
    "centralised, stacked / compiled": {"mnist_cnn": "≥ 3.5"},
    "compiled, memory at 1,000 / 20 clients": {
        "mnist_cnn": "≤ 1.3",
        "cifar10_cnn": "≤ 1.3",
        "adult_mlp": "≤ 1.3",
    },
}
"""Ratio → workload → the bound that must hold on a quiet machine."""
COMPARISONS: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le}


def goal_of(workload: str, ratio: str) -> str:
    """Return the bound of a ratio, 'none' where it has none."""
    return GOALS.get(ratio, {}).get(workload, "none")


def holds(goal: str, value: float) -> bool:
    """Return whether a value keeps a bound.

    >>> holds("≥ 9", 9.5), holds("≤ 0.25", 0.3), holds("none", 0.0)
    (True, False, True)
    """
    if goal == "none":
        return True
    sign, bound = goal.split()
    return COMPARISONS[sign](value, float(bound))


def put(path: Path, columns: Sequence[str], keys: Sequence[str], row: dict[str, Any]) -> None:
    """Write one row in place of the row with the same keys, or after the last; all others stay."""
    table = (
        pd.read_csv(path, dtype=str, keep_default_na=False)
        if path.exists()
        else pd.DataFrame(columns=columns)
    )
    new = {column: str(row[column]) for column in columns}
    same = (table[list(keys)] == pd.Series({k: new[k] for k in keys})).all(axis=1).to_numpy()
    table.loc[table.index[same][0] if same.any() else len(table)] = list(new.values())
    write_table(path, table)


class Record:
    """Writes and prints what the bench measures.

    Parameters
    ----------
    path : of the engines' table; the ratios stand beside it
    repetitions : of every measurement
    width : of the compiled engine's vectors, or 'native'
    """

    def __init__(self, path: Path, repetitions: int, width: str = "native") -> None:
        self.path, self.repetitions, self.width = path, repetitions, width
        self.stamp = {
            "version": fl_privacy_lib.__version__,
            "date": datetime.date.today().isoformat(),
        }

    def engine(
        self, workload: str, name: str, participants: int, workers: int, ms: float, peak: str
    ) -> None:
        """Write an engine's time and peak memory."""
        row = {
            "workload": workload,
            "engine": name,
            "participants": participants,
            "workers": workers,
            "ms_per_client_iteration": f"{ms:.4f}",
            "peak_mib": peak,
        } | self.stamp
        put(self.path, COLUMNS, ENGINE_KEYS, row)

    def ratio(self, workload: str, name: str, values: tuple[float, float]) -> None:
        """Write a ratio's median and standard deviation beside the bound that it has to keep."""
        goal = goal_of(workload, name)
        row = {
            "workload": workload,
            "ratio": name,
            "vector_width": self.width,
            "median": f"{values[0]:.4f}",
            "std": f"{values[1]:.4f}",
            "repetitions": self.repetitions,
            "goal": goal,
        } | self.stamp
        put(self.path.with_name("performance_ratios.csv"), RATIO_COLUMNS, RATIO_KEYS, row)
        verdict = (
            "" if goal == "none" else f"; {goal}: {'holds' if holds(goal, values[0]) else 'MISSED'}"
        )
        report_progress(f"  {workload} {name}: {values[0]:.3f} ± {values[1]:.3f}{verdict}")

    def ratios(self, workload: str, times: Times) -> None:
        """Write the ratios of interleaved engines and each stage's share of the compiled one."""
        for top, bottom in RATIOS:
            if {top, bottom} <= times.keys():
                self.ratio(workload, f"{top} / {bottom}", ratio(times, top, bottom))
        for stage, (upper, *lower) in STAGES.items():
            if {upper, *lower, "compiled_private"} <= times.keys():
                less = times[lower[0]] if lower else [0.0] * self.repetitions
                part = [a - b for a, b in zip(times[upper], less, strict=True)]
                both = {"stage": part, "whole": times["compiled_private"]}
                self.ratio(workload, f"share of {stage}", ratio(both, "stage", "whole"))
