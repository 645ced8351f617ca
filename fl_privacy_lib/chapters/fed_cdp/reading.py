"""Reading Fed-CDP's records: each row as a point, with its ε and effective noise (chapter 05)."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp.rates import TUNED_AS, Rates
from fl_privacy_lib.reproduction.comparison import cells
from fl_privacy_lib.reproduction.experiments.training import CODE_RATE, Training, point_of

GUESSES = {
    "mnist": 1090 / 10_000,
    "cifar10": 1025 / 10_000,
    "lfw": 147 / 756,
    "adult": 9306 / 12_211,
    "cancer": 87 / 143,
    "digits": 52 / 450,
}
"""Data set → accuracy of the best constant guess on its validation data."""


def nearest_rate(point: Training, rates: Rates) -> float:
    """Return the learning rate that was chosen for a point's data, method and reading.

    Of several, that of the nearest σ, then L; as coded, the released code's.

    Raises
    ------
    InputError
        If none was chosen: no rate is taken over from other data.
    """
    if point.setting == "as_coded":
        return CODE_RATE
    method = TUNED_AS.get(point.method, point.method)
    arms = [arm for arm in rates if arm[:3] == (point.dataset, method, point.setting)]
    if not arms:
        raise InputError(
            f"no learning rate is chosen for {method}, {point.setting}, on {point.dataset}: "
            "try some on held-out data first."
        )
    sizes = point.noise_scale, point.local_iterations
    return rates[min(arms, key=lambda arm: [*map(_log_ratio, map(float, arm[3:]), sizes)])]


def _log_ratio(a: float, b: float) -> float:
    return abs(math.log(max(a, 1e-3) / max(b, 1e-3)))


Rate = Literal["searched", "chosen", "coded"]
"""A learning rate: searched in its own cell, chosen in the small one, or the released code's."""


@dataclass(frozen=True)
class NoisePoint:
    """An accuracy over x = z/√K_t, the noise on one round's mean in units of C/B."""

    x: float
    accuracy: float
    std: float
    point: Training
    rate: Rate

    @property
    def tuned(self) -> bool:
        """Whether the learning rate was searched in this cell."""
        return self.rate == "searched"


def noise_points(tables: dict[str, pd.DataFrame]) -> list[NoisePoint]:
    """Return Fed-CDP's recorded trainings on MNIST in the order of x; C = 4, T = L = 100, B = 5.

    Parameters
    ----------
    tables : name → measured table, of 'noise', 'table_2' and 'strongest_case'
    """
    rows = {
        "dataset": "mnist",
        "method": "fed_cdp",
        "clip_norm": "4",
        "rounds": "100",
        "local_iterations": "100",
        "batch_size": "5",
    }
    points: dict[Training, NoisePoint] = {}
    for frame in tables.values():
        for cell in cells(frame, rows):
            point = point_of(cell)
            rate: Rate = "searched" if cell.get("searched") else "chosen"
            if point.setting == "as_coded":
                rate = "coded"
            x = point.multiplier / math.sqrt(point.participants)
            once = replace(point, seeds=1)
            # of two records of one training, the one with more seeds
            if once not in points or points[once].point.seeds < point.seeds:
                points[once] = NoisePoint(x, cell["accuracy"], cell["accuracy_std"], point, rate)
    return sorted(points.values(), key=lambda p: p.x)


Bracket = tuple[float | None, float | None]


def bracket(points: list[NoisePoint], level: float) -> Bracket:
    """Return the largest x up to which all points reach a level, and the smallest from which none.

    Where the two are no neighbours, the points between them disagree.

    Parameters
    ----------
    points : recorded, in the order of x
    level : accuracy, in [0, 1]

    Returns
    -------
    both x; None where no point bounds that side
    """
    missed = [p.x for p in points if p.accuracy < level]
    met = [p.x for p in points if p.accuracy >= level]
    sure = [x for x in met if x < min(missed, default=math.inf)]
    never = [x for x in missed if x > max(met, default=-math.inf)]
    return max(sure, default=None), min(never, default=None)


def clients_needed(multiplier: float, limits: Bracket) -> tuple[float, float]:
    """Return K_t below which a level was missed at x = z/√K_t, and K_t from which it was reached.

    Parameters
    ----------
    multiplier : z
    limits : of x, from `bracket`

    Examples
    --------
    >>> clients_needed(6.0, (0.3, 0.6)), clients_needed(6.0, (0.0, 0.1))
    ((100.0, 400.0), (3600.0, inf))
    >>> clients_needed(6.0, (None, 0.1))
    (3600.0, inf)
    """
    reached, missed = limits
    low = 0.0 if missed is None else (multiplier / missed) ** 2 if missed else math.inf
    return round(low, 6), round((multiplier / reached) ** 2, 6) if reached else math.inf


def break_even(recorded: list[dict[str, Any]]) -> float | None:
    """Return the x at which a round's noise is as long as its signal; None without a record.

    Noise is proportional to x and the signal is not, so a recorded ratio at one x gives the x of
    ratio 1; the median counts.

    Parameters
    ----------
    recorded : cells of `utility`
    """
    equal = [float(c["multiplier"]) / math.sqrt(int(c["participants"])) * c["signal_to_noise"]
             for c in recorded if c["at_round"] == "0"]  # fmt: skip
    return float(np.median(equal)) if equal else None
