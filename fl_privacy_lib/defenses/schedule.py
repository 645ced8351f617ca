"""A number that changes over the rounds of a training, by a rule that no data enter."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.accounting import schedules

SHAPES: dict[str, Callable[[float, float, int, int], np.ndarray]] = {
    "linear": lambda start, end, rounds, cycles: schedules.linear(start, end, rounds),
    "staircase": lambda start, end, rounds, cycles: schedules.staircase(start, end, rounds),
    "exponential": lambda start, end, rounds, cycles: schedules.exponential(start, end, rounds),
    "cyclic": schedules.cosine,
    "triangular": schedules.triangular,
}
"""Linear; the same in ten stairs; start (end/start)^{t/T}; cosine annealing, restarted each cycle;
triangles from the start to the end and back."""


@dataclass(frozen=True)
class Schedule:
    """A clipping bound C_t or noise scale σ_t over the rounds t.

    Since it looks at no data, every round's value is known beforehand, and its ε can be counted.

    Parameters
    ----------
    start, end : float, > 0; the value of round 0, and of every round from `rounds` on
    rounds : int, T; round T − 1 is still one step above the end
    shape : {'linear', 'staircase', 'exponential', 'cyclic', 'triangular'}, see `SHAPES`
    cycles : int, ≥ 1, of the last two
    of_epsilon : bool
        Whether start and end are a step's ε_0, and the value is the noise scale √(2 ln(1.25/δ_0)) /
        ε_0 that the papers take for it.

    Notes
    -----
    Source: Dynamic parameters, section IV; Fed-CDP, section VII, linear from 6 to 2 in 100 rounds;
    Fed-αCDP, section 5.3.

    Examples
    --------
    >>> fall = Schedule(6.0, 2.0, rounds=100)
    >>> fall.at(0), fall.at(50), fall.at(100)
    (6.0, 4.0, 2.0)
    """

    start: float
    end: float
    rounds: int = 100
    shape: str = "linear"
    cycles: int = 1
    of_epsilon: bool = False

    def __post_init__(self) -> None:
        one_of(SHAPES, shape=self.shape)
        _values(self)  # checks the rest

    def at(self, round: int) -> float:
        """Return the value of a round."""
        return _values(self)[min(round, self.rounds)]


@lru_cache(maxsize=64)
def _values(schedule: Schedule) -> tuple[float, ...]:
    s = schedule
    values = np.append(SHAPES[s.shape](s.start, s.end, s.rounds, s.cycles), s.end)
    return tuple((schedules.noise_of_epsilon(values) if s.of_epsilon else values).tolist())


Scheduled = float | Schedule


def value_at(value: Scheduled, round: int) -> float:
    """Return a round's value: of a schedule, or a number that stays."""
    return value.at(round) if isinstance(value, Schedule) else value
