"""The search for an unprinted learning rate: successive halving in the cell itself.

A fair trial (`verdict`) needs it. Nothing is trained here: what was tried goes in, and what is to
be tried next, or the chosen rate, comes out. So a search that was interrupted goes on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tries = Mapping[tuple[int, float], "Try"]
"""(rounds, learning rate) → what came of it."""
STEPS = tuple(range(-4, 3))
"""The seven rates that a search begins with, in steps of √10 around 0.05, the released code's."""
EXTENSIONS = 2
SHORT = 10  # rounds up to which every rate is tried in full


def rate_at(step: int) -> float:
    """Return a learning rate, three digits of 0.05 · √10 to the step.

    >>> [rate_at(step) for step in STEPS]
    [0.0005, 0.00158, 0.005, 0.0158, 0.05, 0.158, 0.5]
    """
    return float(f"{0.05 * 10 ** (step / 2):.3g}")


def step_near(rate: float) -> int:
    """Return the step whose rate is nearest, by ratio.

    >>> step_near(0.0158), step_near(0.02)
    (-1, -1)
    """
    return round(2 * math.log10(rate / 0.05))


@dataclass(frozen=True)
class Try:
    """A training at one rate, on data held out for the search.

    Parameters
    ----------
    accuracy : in [0, 1]
    error : its standard error
    learns : whether it ended above the constant guess; a diverged one did not
    """

    accuracy: float
    error: float
    learns: bool


@dataclass(frozen=True)
class Search:
    """Where a search stands.

    Parameters
    ----------
    asked : (rounds, rate) of every training that it has asked for so far
    rate : the chosen rate; None while a training is missing
    learns : whether the chosen rate leaves the constant guess. If none does after the extensions,
        the guess is the result, and the trial counts as fair.
    """

    asked: tuple[tuple[int, float], ...]
    rate: float | None = None
    learns: bool = False


def stages_of(rounds: int) -> tuple[tuple[int, int], ...]:
    """Return (rounds, how many rates go on) of every stage; short trainings are all run in full.

    >>> stages_of(100), stages_of(10)
    (((10, 3), (34, 2), (100, 1)), ((10, 1),))
    """
    if rounds <= SHORT:
        return ((rounds, 1),)
    return (math.ceil(rounds / 10), 3), (math.ceil(rounds / 3), 2), (rounds, 1)


def search(tries: Tries, stages: Sequence[tuple[int, int]], steps: Sequence[int] = STEPS) -> Search:
    """Return what a search has asked for, and its choice where all of that was tried.

    Parameters
    ----------
    tries : what was tried in this cell
    stages : (rounds, how many rates go on), from `stages_of`
    steps : of the rates that it begins with; the others are extensions of an edge

    Notes
    -----
    The best of a stage that lies at the edge of the rates that the stage ran extends it there,
    twice at most, unless it gains less than its standard error over its neighbour. Noise adds up
    over the rounds, so short stages favour large steps: each longer one also runs the step below
    the smallest that goes on. A rate that does not learn
    comes after all that do, and is chosen only where none does. A stage in which none learns drops
    no rate: it has no evidence.
    """
    asked: list[tuple[int, float]] = []
    entered = list(steps)
    for rounds, going_on in stages:
        allowed = len(entered) + EXTENSIONS
        while True:
            asked += [p for s in entered if (p := (rounds, rate_at(s))) not in asked]
            if any(point not in tries for point in asked):
                return Search(tuple(asked))
            results = {s: tries[rounds, rate_at(s)] for s in entered}
            further = _edge(results)
            if rounds == stages[-1][0] and not any(t.learns for t in results.values()):
                # noise is the likelier reason, too small a step the next
                first = len(entered) == allowed - EXTENSIONS
                further = min(results) - 1 if first else max(results) + 1
            if further is None or len(entered) == allowed:
                break
            entered.append(further)
        entered = sorted(results, key=lambda s: _merit(results[s]), reverse=True)
        if results[entered[0]].learns:
            entered = entered[:going_on]
            if rounds != stages[-1][0]:
                entered.append(min(entered) - 1)
    return Search(tuple(asked), rate_at(entered[0]), results[entered[0]].learns)


def _merit(result: Try) -> tuple[bool, float]:
    return result.learns, result.accuracy


def _edge(results: Mapping[int, Try]) -> int | None:
    """Return the step beyond the edge at which a stage's best rate lies, or None."""
    best = max(results, key=lambda s: _merit(results[s]))
    for edge, outward in ((min(results), -1), (max(results), 1)):
        inside = results.get(edge - outward)
        gain = math.inf if inside is None else results[best].accuracy - inside.accuracy
        if best == edge and results[best].learns and gain >= results[best].error:
            return edge + outward
    return None
