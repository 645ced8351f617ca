"""What accounting sees, noisy releases, and what it answers: an ε with its reading."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fl_privacy_lib._checks import InputError, in_range, one_of, refuse, whole_number

Unit = Literal["example", "client", "local_report"]
Relation = Literal["add_remove", "replace_one"]
Sampling = Literal["poisson", "fixed", "none"]

Floats = npt.NDArray[np.float64]

# (q, z) beyond which a detour is left out or refused: the peer needs milliseconds for fractional
# orders, 0.2 s under sampling without replacement, and longer for a privacy loss distribution
MOST_PAIRS = 64


@dataclass(frozen=True)
class Event:
    """One kind of Gaussian release, and how often it happens.

    Parameters
    ----------
    sampling_rate : float
        q, in (0, 1]: the probability that one unit takes part in a step.
    noise_multiplier : float
        z > 0: standard deviation of the noise over the ℓ2 sensitivity *under the event's own
        relation*. Clipping at C and noise of standard deviation σC give z = σ under ``add_remove``
        and σ/2 under ``replace_one``.
    unit : {"example", "client", "local_report"}
        Who is protected.
    relation : {"add_remove", "replace_one"}
        What neighbouring data sets differ by.
    uses : int
        How many times the release happens, at least 1.
    sampling : {"poisson", "fixed", "none"}
        ``poisson``: each unit takes part by itself with probability q. ``fixed``: a set of fixed
        size is drawn without replacement, q being its share. ``none``: every unit takes part, or
        the adversary sees who does; q must be 1.

    Raises
    ------
    InputError
        If a value is out of range, or ``sampling`` contradicts the other values.

    Examples
    --------
    >>> Event(0.01, 6.0, "example", "add_remove", uses=10_000).sampling
    'poisson'
    """

    sampling_rate: float
    noise_multiplier: float
    unit: Unit
    relation: Relation
    uses: int = 1
    sampling: Sampling = "poisson"

    def __post_init__(self) -> None:
        one_of(get_args(Unit), unit=self.unit)
        one_of(get_args(Relation), relation=self.relation)
        one_of(get_args(Sampling), sampling=self.sampling)
        refuse(
            {
                f"sampling_rate = {self.sampling_rate} must be greater than 0 and at most 1: it is "
                "the probability that one unit takes part in a step.": (
                    not 0 < self.sampling_rate <= 1
                ),
                "noise_multiplier = 0 adds no noise and makes ε infinite: give a value above 0, or "
                "state ε = ∞ without an accountant.": self.noise_multiplier == 0,
                f"sampling = 'none' with sampling_rate = {self.sampling_rate} is a contradiction: "
                "without sampling every unit takes part, so set sampling_rate = 1.": (
                    self.sampling == "none" and self.sampling_rate != 1
                ),
                "sampling = 'fixed' has no bound under relation = 'add_remove', where the number "
                "of units is not fixed: use 'replace_one', or Poisson sampling.": (
                    self.sampling == "fixed" and self.relation == "add_remove"
                ),
            }
        )
        in_range(1e-4, 1e8, noise_multiplier=self.noise_multiplier)  # beyond, floats give no bound
        whole_number(1, uses=self.uses)


@dataclass(frozen=True)
class Ledger:
    """A sequence of events that may be added up: one unit, one relation.

    Parameters
    ----------
    events : tuple of Event
        In the order in which they happen; at least one.

    Raises
    ------
    InputError
        If there is no event, or if units or relations are mixed.

    Examples
    --------
    >>> step = Event(0.01, 6.0, "example", "add_remove")
    >>> Ledger((step, step)).steps
    2
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        refuse({"The plan has no event, so nothing can be counted: give at least one Event.":
                not self.events})  # fmt: skip
        for name in ("unit", "relation"):
            values = sorted({getattr(event, name) for event in self.events})
            if len(values) > 1:
                raise InputError(
                    f"The plan mixes {name}s ({', '.join(values)}), whose ε mean different things: "
                    f"account for each {name} by itself."
                )

    @classmethod
    def of(cls, events: "Event | Iterable[Event] | Ledger") -> "Ledger":
        """Return a ledger of one event, of several, or the ledger itself."""
        if isinstance(events, Ledger):
            return events
        return cls((events,) if isinstance(events, Event) else tuple(events))

    @property
    def relation(self) -> Relation:
        """What neighbouring data sets differ by."""
        return self.events[0].relation

    @cached_property
    def rates(self) -> Floats:
        """Sampling rates q, [events]."""
        return np.array([event.sampling_rate for event in self.events], dtype=np.float64)

    @cached_property
    def noise(self) -> Floats:
        """Noise multipliers z, [events]."""
        return np.array([event.noise_multiplier for event in self.events], dtype=np.float64)

    @cached_property
    def uses(self) -> npt.NDArray[np.int64]:
        """Number of releases of each event, [events]."""
        return np.array([event.uses for event in self.events], dtype=np.int64)

    @cached_property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Whether an event is subsampled, [events]."""
        return np.array([event.sampling != "none" for event in self.events])

    @property
    def steps(self) -> int:
        """Number of releases in all."""
        return int(self.uses.sum())

    def first(self, steps: int) -> "Ledger":
        """Return the ledger of the first ``steps`` releases; 1 to ``self.steps``."""
        refuse({f"steps = {steps} must lie between 1 and the plan's {self.steps} releases.":
                not 1 <= steps <= self.steps})  # fmt: skip
        ends = np.cumsum(self.uses)
        last = int(np.searchsorted(ends, steps))
        uses = steps - int(ends[last] - self.uses[last])
        return Ledger((*self.events[:last], replace(self.events[last], uses=uses)))


@dataclass(frozen=True)
class Spending:
    """What a sequence of releases costs, and under which reading.

    Parameters
    ----------
    ledger : Ledger
        The releases: who is protected, against which change, under which sampling assumption.
    accountant : str
        Name as in `fl_privacy_lib.accounting.accountants.ACCOUNTANTS`.
    epsilon : float
        ε ≥ 0; ``inf`` if the accountant gives no bound.
    delta : float
        The δ that stands beside ε in the papers: the target, or the δ of one step.
    composition_delta : float
        The δ for which ε really holds. It differs from ``delta`` for base, advanced and optimal
        composition, which add up q·δ of every step and their own slack.
    caveats : tuple of str
        Conditions of the accountant's theorem that the releases do not meet, one sentence each.
    """

    ledger: Ledger
    accountant: str
    epsilon: float
    delta: float
    composition_delta: float
    caveats: tuple[str, ...] = ()


def check_delta(**deltas: float) -> None:
    """Raise `InputError` unless every δ lies strictly between 0 and 1."""
    for name, value in deltas.items():
        if not 0 < value < 1:
            raise InputError(
                f"{name} = {value} must be greater than 0 and less than 1: it is the probability "
                "with which "
                "ε may not hold, well below one over the number of units."
            )
