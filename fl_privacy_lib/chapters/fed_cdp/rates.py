"""Learning rates that one small cell chooses, where the paper prints no table (chapter 05)."""

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.reproduction.experiments.searching import Tried
from fl_privacy_lib.reproduction.experiments.training import DECAYS, Training

RATES = (0.0004, 0.002, 0.01, 0.05, 0.25)
"""Learning rates that every arm chooses from, steps of 5 around the released code's 0.05."""
TUNED_AS = {
    "fed_sdp_server": "fed_sdp",
    "median_clip": "fed_cdp",
    "dssgd": "non_private",
} | dict.fromkeys(DECAYS, "fed_cdp_decay")

Arm = tuple[str, ...]
Rates = dict[Arm, float]


def arm_of(point: Training) -> Arm:
    """Return what a learning rate is chosen for: data, method, reading, σ and L."""
    method = TUNED_AS.get(point.method, point.method)
    return (point.dataset, method, point.setting, f"{point.noise_scale:.6g}",
            str(point.local_iterations))  # fmt: skip


def best_rates(frame: pd.DataFrame) -> Rates:
    """Return the best learning rate of every arm with all rates recorded, the smaller of equals.

    Parameters
    ----------
    frame : the recorded rows of `learning_rates`
    """
    names = ["dataset", "method", "setting", "noise_scale", "local_iterations"]
    if not len(frame):
        return {}
    accuracy = frame[frame["metric"] == "accuracy"]
    accuracy = accuracy.assign(rate=accuracy["local_lr"].astype(float)).sort_values("rate")
    groups: Any = accuracy.groupby(names)
    return {tuple(arm): float(group["rate"].iloc[int(group["mean"].argmax())])
            for arm, group in groups if len(group) == len(RATES)}  # fmt: skip


@dataclass(frozen=True)
class Recorded:
    """What is recorded of learning rates: each arm's in the small cell, and what was searched."""

    rates: Rates
    tried: Tried


def with_rate(point: Training, recorded: Recorded) -> Training:
    """Return the point with its arm's learning rate.

    Raises
    ------
    InputError
        If the arm's learning rate is not recorded yet.
    """
    if point.setting == "as_coded":
        return point
    arm = arm_of(point)
    if arm not in recorded.rates:
        raise InputError(
            f"the learning rate of {', '.join(arm)} is not chosen yet: "
            "record the part learning_rates."
        )
    return replace(point, local_lr=recorded.rates[arm])
