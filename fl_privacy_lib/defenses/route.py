"""The route of a gradient: five stages for a defence to fill, five taps for an adversary to read.

    example ──▶ batch ──▶ update ──▶ received ──▶ aggregate        taps, each after its stage
    per_example per_batch per_client on_arrival   on_aggregate     stages

The first three stages run at the client, the last two at the server. Every defence of the five
papers is a filling of these stages, and every adversary reads one tap: type 2 is ``example``, type
1 ``update``, type 0 ``received``. A server that is curious before it adds its noise reads
``update`` as well. Taught in notebook 01.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.holding import Holding
from fl_privacy_lib.defenses.noisy_stages import BatchNoise, ClipAndNoiseUpdate, PerExample
from fl_privacy_lib.defenses.releases import events
from fl_privacy_lib.defenses.stage import (
    STAGES,
    TAPS,
    THREAT_TYPES,
    ClientContext,
    Context,
    Declaration,
    Part,
    Stage,
    declaration,
    name_of,
    without_noise,
)
from fl_privacy_lib.sampling import Plan

__all__ = [
    "STAGES",
    "TAPS",
    "THREAT_TYPES",
    "BatchNoise",
    "ClientContext",
    "ClipAndNoiseUpdate",
    "Context",
    "Defense",
    "PerExample",
    "Stage",
    "Then",
]


@dataclass(frozen=True)
class Then(Stage):
    """Two rules at one place, one after the other; a guarantee rests on the first."""

    first: Stage
    then: Stage

    def declare(self) -> Declaration:
        """Refuse: who counts has to look at the parts."""
        raise TypeError("Then has no declaration of its own; ask Defense.parts for its rules'.")

    def noiseless(self) -> "Then":
        """Return both rules without their noise."""
        return Then(without_noise(self.first, "first"), without_noise(self.then, "then"))

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the values after both rules; a second clip measures what the first one left."""
        again = isinstance(_rules(self.then)[0], PerExample)
        return self.then(self.first(values, ctx), replace(ctx, norms=None) if again else ctx)


def _rules(stage: Any) -> list[Any]:
    """Return the rules of what stands at a place, in their order."""
    if isinstance(stage, Then):
        return [*_rules(stage.first), *_rules(stage.then)]
    return [] if stage is None else [stage]


@dataclass(frozen=True)
class Defense:
    """A defence: what happens to a gradient at each of the five stages (None: nothing).

    Parameters
    ----------
    name : str, as in the published tables where the method stands there
    per_example : Stage or None
        `PerExample` is data that an engine may fuse; any other rule takes whole gradients and the
        generic path.
    per_batch, per_client, on_arrival, on_aggregate : Stage or None
        Or any ``stage(values, ctx) -> values``; what is not a `Stage` runs, but has no proof and no
        noiseless form.
    begin_client : ``begin_client(ctx)`` or None, draws what one participation shares
    initial_state : ``initial_state() -> dict`` or None, the memory at round 0
    """

    name: str
    per_example: Any | None = None
    per_batch: Any | None = None
    per_client: Any | None = None
    on_arrival: Any | None = None
    on_aggregate: Any | None = None
    begin_client: Callable[[ClientContext], None] | None = None
    initial_state: Callable[[], dict[str, Any]] | None = None

    def apply(self, place: str, values: Gradient, ctx: Any) -> Gradient:
        """Return the values behind the stage at a place; as they are, where nothing fills it."""
        stage = getattr(self, place)
        return stage(values, ctx) if stage else values

    def local_step(self, gradients: Gradient, ctx: ClientContext) -> tuple[Gradient, Gradient]:
        """Return what stands at the taps ``example`` and ``batch`` in one local iteration.

        Parameters
        ----------
        gradients : tensors [clients, batch, …]
        ctx : its batch_size divides the sum, also where sampling made the batch larger or smaller

        Returns
        -------
        example : tensors [clients, batch, …], after per_example
        batch : tensors [clients, …], after per_batch
        """
        example = self.apply("per_example", gradients, ctx)
        mean = {name: g.sum(1) / ctx.batch_size for name, g in example.items()}
        return example, self.apply("per_batch", mean, ctx)

    def reach(self, tap: str, gradients: Gradient, ctx: ClientContext, step: float) -> Gradient:
        """Return what example gradients become until a tap, in one local iteration.

        Parameters
        ----------
        tap : {'example', 'batch', 'update', 'received'}
        gradients : tensors [clients, batch, …]
        step : float, what a batch mean is multiplied with to become an update

        Returns
        -------
        tensors [clients, batch, …] at ``example``, else [clients, …]
        """
        if tap == "example":
            return self.apply("per_example", gradients, ctx)
        _, values = self.local_step(gradients, ctx)
        if tap == "batch":
            return values
        update = self.apply("per_client", {name: step * v for name, v in values.items()}, ctx)
        return self.apply("on_arrival", update, ctx) if tap == "received" else update

    def parts(self, place: str) -> tuple[Part, ...]:
        """Return the rules at a place, in their order, with what each says of itself."""
        rules = _rules(getattr(self, place))
        return tuple(Part(place, name_of(rule), declaration(rule)) for rule in rules)

    def public(self) -> dict[str, Any]:
        """Return what every attacker is told: the filled stages and their settings.

        Nothing secret can be in it, since all draws come from generators that the simulation keeps.
        """
        return {"name": self.name} | self._filled()

    def noiseless(self) -> "Defense":
        """Return the same defence without its noise: what an adaptive attacker can replay.

        Raises
        ------
        InputError
            If a stage does not say what it is without its noise.
        """
        stages: dict[str, Any] = {
            place: without_noise(stage, place) for place, stage in self._filled().items()
        }
        return replace(self, **stages)

    def _filled(self) -> dict[str, Any]:
        return {place: getattr(self, place) for place in STAGES if getattr(self, place) is not None}

    def events(self, plan: Plan, holding: Holding, **reading: Any) -> tuple[Event, ...]:
        """Return the accounting events of this defence under a plan; see `events.events`."""
        return events(self, plan, holding, **reading)
