"""Values that change over the steps of a training: noise scales σ_t, clipping bounds C_t, or ε_t.

A schedule is an array, [steps]; its value at step t (from 0) depends on t/T alone, so one formula
serves a count of iterations and a count of rounds.
"""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from fl_privacy_lib._checks import positive, whole_number
from fl_privacy_lib.accounting.composition import STEP_DELTA, step_epsilon
from fl_privacy_lib.accounting.events import (
    MOST_PAIRS,
    Event,
    Floats,
    Ledger,
    Relation,
    Sampling,
    Unit,
)


def _time(steps: int, **levels: float) -> Floats:
    """Return t/T, [steps], of a schedule between levels above 0."""
    positive(**levels)
    whole_number(1, steps=steps)
    return np.arange(int(steps)) / int(steps)


def linear(start: float, end: float, steps: int) -> Floats:
    """Return start + (end - start) t/T, [steps].

    Examples
    --------
    >>> linear(15.0, 5.0, 5)
    array([15., 13., 11.,  9.,  7.])
    """
    return start + (end - start) * _time(steps, start=start, end=end)


def staircase(start: float, end: float, steps: int) -> Floats:
    """Return the linear schedule in ten equal stairs, [steps]; each keeps its first value.

    Examples
    --------
    >>> staircase(15.0, 5.0, 20)[:5]
    array([15., 15., 14., 14., 13.])
    """
    # Whole-number arithmetic: 0.3 · 10 would fall one stair short.
    climbed = np.arange(_time(steps, start=start, end=end).size) * 10 // steps
    return start + (end - start) * climbed / 10


def exponential(start: float, end: float, steps: int) -> Floats:
    """Return start · (end/start)^{t/T}, [steps].

    Examples
    --------
    >>> exponential(16.0, 4.0, 4).round(3)
    array([16.   , 11.314,  8.   ,  5.657])
    """
    time = _time(steps, start=start, end=end)
    return start * (end / start) ** time


def triangular(low: float, high: float, steps: int, cycles: int = 1) -> Floats:
    """Return a triangular wave, [steps]: each cycle rises from ``low`` and falls back to it.

    The cyclic policy of the dynamic-parameters paper, without a decay of the cycles.

    Examples
    --------
    >>> triangular(1.0, 5.0, 8, cycles=2)
    array([1., 3., 5., 3., 1., 3., 5., 3.])
    """
    whole_number(1, cycles=cycles)
    phase = _time(steps, low=low, high=high) * cycles % 1
    return low + (high - low) * (1 - np.abs(2 * phase - 1))


def cosine(start: float, end: float, steps: int, cycles: int = 1) -> Floats:
    """Return cosine annealing from start to end, restarted in each cycle, [steps].

    Notes
    -----
    Fed-alphaCDP, section 5.3, prints the formula with an end of 0, where the noise vanishes and ε
    is infinite: the end here must be above 0.

    Examples
    --------
    >>> cosine(15.0, 5.0, 4).round(2)
    array([15.  , 13.54, 10.  ,  6.46])
    """
    whole_number(1, cycles=cycles)
    length = math.ceil(steps / cycles)
    phase = np.arange(_time(steps, start=start, end=end).size) % length / length
    return end + (start - end) / 2 * (1 + np.cos(np.pi * phase))


def noise_of_epsilon(epsilons: Floats, step_delta: float = STEP_DELTA) -> Floats:
    """Return z_t = sqrt(2 ln(1.25/δ_0)) / ε_t, the noise multipliers of a schedule of ε, [steps].

    Examples
    --------
    >>> noise_of_epsilon(np.array([0.30747, 1.30747])).round(2)
    array([15.76,  3.71])
    """
    positive(epsilons=float(np.min(epsilons)))
    return step_epsilon(epsilons, step_delta)  # the bound is its own inverse: z ε = const


def rounded_down(noise: Iterable[float], step: float = 1.03) -> dict[float, int]:
    """Return how many multipliers lie in each step above the least: less noise, so a bound on ε.

    The step is squared as often as it takes to have no more levels than an accountant takes.

    >>> rounded_down([2.0, 2.05, 3.0, 2.07])
    {2.0: 2, 2.937...: 1, 2.06: 1}
    """
    values = np.fromiter(noise, np.float64)
    if not values.size:
        return {}
    steps = np.floor(np.log(values / values.min()) / math.log(step) + 1e-9)
    levels = dict(Counter((values.min() * step**steps).tolist()))
    return levels if len(levels) <= MOST_PAIRS else rounded_down(values, step**2)


def ledger_of(
    noise: Floats,
    sampling_rate: float,
    unit: Unit,
    relation: Relation,
    sampling: Sampling = "poisson",
) -> Ledger:
    """Return the ledger of one release for each noise multiplier, [steps]."""
    return Ledger(
        tuple(
            Event(sampling_rate, float(z), unit, relation, sampling=sampling)
            for z in np.ravel(noise)
        )
    )
