"""What is read off a training that was looked at along the way: nothing is trained for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.records import Values, numbers


def judged_values(result: Result, **values: Any) -> Values:
    """Return some of a training's values with what says whether it was a fair trial."""
    beside = {n: result[n] for n in ("guess", "evaluated") if "accuracy" in values}
    return {n: numbers(value) for n, value in (values | beside | {"searched": [1]}).items()}


def stopped_values(share: float, results: Sequence[Result]) -> Values:
    """Return the accuracy at the last look before a training has run a share of its rounds."""
    curve = results[0]["curve"]  # [seeds, looks]
    at = max(1, int(share * curve.shape[1] + 1e-9)) - 1
    return judged_values(results[0], accuracy=curve[:, at])


def reached_values(
    results: Sequence[Result], unit: str = "iterations", target: float | None = None
) -> Values:
    """Return when the last training first reaches a target.

    Parameters
    ----------
    results : of the training that sets the target, then of the one that has to reach it
    unit : what its rounds are called; `…_left` of them are not run, 0 where it never reaches it
    target : an accuracy; None: that which the first training ends with
    """
    target = float(results[0]["accuracy"].mean()) if target is None else target
    total = results[-1]["rounds_run"]
    met = results[-1]["curve"] >= target  # [seeds, looks]
    run = np.where(met.any(1), (met.argmax(1) + 1) * total / met.shape[1], total)
    values = {unit: run, f"{unit}_left": total - run, "reached": met.any(1)}
    return judged_values(results[-1], **values, target_accuracy=[target])
