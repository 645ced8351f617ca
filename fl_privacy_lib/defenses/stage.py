"""The contract of a stage: what it does to a gradient, and what it says of itself.

Accounting, attacks and audits never look at a stage's fields. They read its `Declaration`, and they
replay its `noiseless` form. What a stage does not say is not guessed: it gets no proof.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from fl_privacy_lib._checks import InputError, in_range, one_of, refuse
from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.schedule import Scheduled, value_at

STAGES = ("per_example", "per_batch", "per_client", "on_arrival", "on_aggregate")
TAPS = ("example", "batch", "update", "received", "aggregate")
THREAT_TYPES = {"type_2": "example", "type_1": "update", "type_0": "received"}


@dataclass
class Context:
    """What a stage may use besides the values.

    At the server it holds no examples: nothing can leak by accident.

    Attributes
    ----------
    round : int
    clients : ids, in the order of the values' leading axis
    weights : [clients], the weight of each client in the aggregate (sums to 1 over the round)
    generators : one for each client, keyed by (seed, round, client); the server has one of its own,
        alone. Clients that are simulated together (`federated.reports`) share a single one. An
        attacker's replay has none.
    state : the defence's memory between rounds
    reports : sums of side values, filled by `report` at the clients, read at the server
    batch_size : what a sum is divided by: B, of the examples of a batch; at on_aggregate K_t, of
        the updates of a round
    """

    round: int
    clients: Sequence[int]
    generators: Sequence[torch.Generator]
    weights: torch.Tensor | None = None
    state: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, torch.Tensor] = field(default_factory=dict)
    batch_size: int = 0

    def report(self, name: str, value: torch.Tensor) -> None:
        """Add a side value, a release to be counted, to the sum that ``on_aggregate`` reads."""
        self.reports[name] = self.reports.get(name, torch.zeros_like(value)) + value


@dataclass
class ClientContext(Context):
    """A context at the client: it also knows the model, the examples and their norms."""

    iteration: int = 0
    model: torch.nn.Module | None = None
    examples: tuple[torch.Tensor, torch.Tensor] | None = None
    norms: Gradient | None = None


@dataclass(frozen=True)
class Noise:
    """The noise that a stage adds, as accounting reads it.

    Parameters
    ----------
    scale : float, > 0, or Schedule
        σ, in units of the level; at the level 'fixed' the standard deviation per coordinate itself.
    level : {'bound', 'l2_max', 'median', 'fixed'}
        What σ is multiplied with: a bound that is known beforehand, a statistic of the private
        batch, or nothing.
    divide_by : {'sqrt_batch', 'batch', 'none'}, of the noise on a batch mean, see `noise.mean_std`
    factor : float, > 0, what σC is multiplied with besides
    centred : bool
        Whether gradients are centred before clipping, so that an absent example moves a release
        like a replaced one.
    share : float, in (0, 1], of the coordinates that get it; the others leave as they are
    """

    scale: Scheduled
    level: str = "bound"
    divide_by: str = "none"
    factor: float = 1.0
    centred: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        in_range(0, float("inf"), scale=self.at(0), factor=self.factor)
        one_of(["bound", "l2_max", "median", "fixed"], level=self.level)

    def at(self, round: int) -> float:
        """Return σ of a round."""
        return value_at(self.scale, round)

    def strength(self, round: int) -> float:
        """Return σ of a round times the factor: what covers a release."""
        return self.at(round) * self.factor

    def least(self, rounds: int) -> float:
        """Return the smallest strength of so many rounds."""
        return min(self.strength(round) for round in range(rounds))


@dataclass(frozen=True)
class Declaration:
    """What a stage says of itself; an empty one: it clips nothing and adds no noise.

    Parameters
    ----------
    clip : Clip or None
        The bound that everything keeps to behind this stage: an example's gradient at per_example,
        an update at per_client and on_arrival. At per_batch: the bound that the noise is scaled
        with.
    noise : Noise or None
    rule : the rule that moves the bound from round to round, or None for a bound that `clip` gives
        for all rounds
    shrinks : bool, whether what was clipped before stays within its bound
    count_scale : float or None
        Standard deviation of the noise on the counts that the stage reports beside the gradient;
        None: no counts.
    noise_on_sum : bool, whether that noise is drawn once, on the sum of a round's counts
    local : bool
        Whether it is a locally private report, whose ε is pure: that of its mechanisms
        (`defenses.selection`, `defenses.perturbation`).
    steps : int or None, the most local iterations of a round that the noise covers; None: any
    """

    clip: Clip | None = None
    noise: Noise | None = None
    rule: Any = None
    shrinks: bool = False
    count_scale: float | None = None
    noise_on_sum: bool = False
    local: bool = False
    steps: int | None = None

    def __post_init__(self) -> None:
        refuse({f"clip = {self.clip}, noise = {self.noise} declare nothing: write a bound as "
                "Declaration(Clip(C)), noise as Declaration(noise=Noise(σ)).":
                not isinstance(self.clip, Clip | None) or not isinstance(self.noise, Noise | None)
                })  # fmt: skip
        if self.noise is not None and not self.noise.strength(0):
            object.__setattr__(self, "noise", None)  # noise of scale 0 is none


class Stage(ABC):
    """A rule at one of the five places of the route: ``stage(values, ctx) -> values``.

    The leading axes of the values are [clients, batch] at per_example, [clients] at per_batch,
    per_client and on_arrival, and a single row, the weighted mean, at on_aggregate. A stage
    computes from the values and what its context holds; behind noise it must not read the examples
    again.

    A class that overrides ``__call__`` has to declare anew, see `declaration`.
    """

    @abstractmethod
    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the values as they leave the stage."""

    @abstractmethod
    def declare(self) -> Declaration:
        """Return what this stage clips, what noise it adds, and what else it releases."""

    @abstractmethod
    def noiseless(self) -> "Stage":
        """Return the same rule without its noise, for an attacker's replay: it draws nothing."""


class Transformation(Stage):
    """A stage that bounds nothing and draws nothing: a function of the values alone."""

    def declare(self) -> Declaration:
        """Return an empty declaration."""
        return Declaration()

    def noiseless(self) -> Stage:
        """Return the stage itself."""
        return self


def declaration(stage: Any) -> Declaration | None:
    """Return what a stage says of itself, or None for one that does not say.

    A function does not say, nor does a class that changes ``__call__`` and inherits what its base
    says of the old one.
    """
    return stage.declare() if _speaks(stage, "declare") else None


def without_noise(stage: Any, place: str) -> Stage:
    """Return a stage's noiseless form.

    Raises
    ------
    InputError
        If the stage does not say what it is without its noise.
    """
    if not _speaks(stage, "noiseless"):
        raise InputError(
            f"{place} = {name_of(stage)} does not say what it is without its noise: derive it from "
            "fl_privacy_lib.defenses.Stage (or Transformation, if it draws nothing) and define "
            "noiseless()."
        )
    return stage.noiseless()


def _speaks(stage: Any, method: str) -> bool:
    """Return whether a stage's method describes its ``__call__``, not that of a base class."""
    if not isinstance(stage, Stage):
        return False
    line = [c for c in type(stage).__mro__ if c is not Stage]
    acts = [i for i, c in enumerate(line) if "__call__" in vars(c)]
    says = [i for i, c in enumerate(line) if method in vars(c)]
    # what a base says of the one __call__ there is, it says of this one
    return len(acts) == 1 or (bool(says) and says[0] <= acts[0])


def name_of(stage: Any) -> str:
    """Return the name of a function, or of a stage's class."""
    return getattr(stage, "__name__", type(stage).__name__)


class Part(NamedTuple):
    """One rule of a defence: its place, its class, its declaration (None: it has none)."""

    place: str
    name: str
    says: Declaration | None


class Route(Protocol):
    """What accounting asks of a defence."""

    @property
    def name(self) -> str:
        """The defence's name."""

    def parts(self, place: str) -> tuple[Part, ...]:
        """Return the rules at a place of the route, in their order."""
