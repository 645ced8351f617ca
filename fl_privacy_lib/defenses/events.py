"""What a defence releases under a plan: the events that accounting counts, each factor with its reason.

Training and accounting read the same `Plan` and the same stages, so they cannot disagree on how
often an example is used, how far it can move a release, or how much noise covers it.
"""

import math
from dataclasses import dataclass

from fl_privacy_lib._checks import InputError, one_of, whole_number
from fl_privacy_lib.accounting.events import Event, Relation, Sampling, Unit
from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.holding import Holding
from fl_privacy_lib.defenses.limits import Reason, counting, local_rule, noisy, unbounded, uncovered
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.stage import Declaration, Noise, Route
from fl_privacy_lib.sampling import Plan

__all__ = ["RELATIONS", "UNITS", "Holding", "Reason", "Release", "events", "release", "unbounded"]

UNITS: tuple[Unit, ...] = ("example", "client")
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")


@dataclass(frozen=True)
class Release:
    """What one participation tells of one unit: ``uses`` Gaussian releases of one noise multiplier.

    Parameters
    ----------
    noise_multiplier : float
        z, for the unit and the relation asked for.
    uses : int
        Releases in one participation that the unit can move.
    reasons : tuple of (step, argument)
        How z and the uses come about.
    """

    noise_multiplier: float
    uses: int
    reasons: tuple[Reason, ...] = ()

    @property
    def mu(self) -> float:
        """√uses / z: one participation is as telling as one Gaussian shifted by this many standard deviations."""
        return math.sqrt(self.uses) / self.noise_multiplier


def release(
    defense: Route,
    plan: Plan,
    holding: Holding,
    unit: Unit = "example",
    relation: Relation = "add_remove",
    tap: str = "update",
) -> Release:
    """Return what one participation of one holder tells of a unit, as seen at a tap.

    Parameters
    ----------
    defense, plan, holding
        What is run.
    unit : {'example', 'client'}
    relation : {'add_remove', 'replace_one'}
        ``add_remove``: the unit's place stays and gives a zero gradient; all divisors stay.
        ``replace_one``: another unit takes the place, which moves a release up to twice as far.
    tap : str
        Where the adversary reads. What follows a noisy release is computed from it and costs
        nothing more.

    Raises
    ------
    InputError
        If no ε holds at this tap, or a name is unknown.

    Examples
    --------
    >>> from fl_privacy_lib.defenses import fed_cdp
    >>> plan = Plan(1000, 100, 100, 100, 5, local_lr=0.05)
    >>> released = release(fed_cdp("batch"), plan, Holding(50_000, 500, 3))
    >>> f"{released.noise_multiplier:.3f}", released.uses
    ('3.464', 1)
    """
    one_of(UNITS, unit=unit)
    one_of(RELATIONS, relation=relation)
    if local_rule(defense, tap) is not None:
        raise InputError(
            f"{defense.name} is locally private: its ε is pure and has no Gaussian events; see audit.statement."
        )
    if (why := unbounded(defense, tap)) is not None:
        raise InputError(
            f"{defense.name} has no events at tap = {tap!r}, because {why[1].rstrip('.')}."
        )
    releases = []
    for place, says in noisy(defense, tap):
        if uncovered(defense, tap, place) is not None:
            continue
        rules = defense.parts("per_example")
        if place in ("per_client", "on_arrival"):
            releases.append(_update_release(says, holding, unit, relation))
        elif place == "per_example" and (tap == "example" or len(rules) > 1):
            # what follows the noise acts on every example by itself, so the batch's other draws do
            # not cover it
            releases.append(_example_release(says, plan, holding, unit, relation))
        else:
            clip = rules[0].says.clip if rules and rules[0].says else None
            releases.append(_batch_release(place, says, clip, plan, holding, unit, relation))
    released = min(
        releases, key=lambda one: one.mu
    )  # each is a bound by itself; the best one counts
    counts = counting(defense, tap)
    return released if counts is None else _counted(released, *counts, plan, holding, unit)


def _counted(
    released: Release, place: str, says: Declaration, plan: Plan, holding: Holding, unit: Unit
) -> Release:
    """Return what gradients and counts tell together: two Gaussian releases of the same unit are one in more space."""
    assert says.count_scale and says.clip is not None
    uses, shift = _uses(plan, holding, unit)[:2] if place == "per_example" else (1, 1.0)
    root, _ = _layers(says.clip, holding)
    mu = math.sqrt(uses) * shift * root / says.count_scale
    reason = (
        "counts",
        (
            f"{uses} report(s) of counts with noise {says.count_scale:g} tell μ = {mu:.3g} "
            "in one participation, beside "
            f"the gradients' {released.mu:.3g}; a unit moves a count by at most 1, removed or replaced."
        ),
    )
    return Release(
        math.sqrt(released.uses) / math.hypot(released.mu, mu),
        released.uses,
        (*released.reasons, reason),
    )


def _layers(clip: Clip, holding: Holding) -> tuple[float, Reason]:
    if clip.scope == "all":
        return 1.0, ("clipping", "the whole gradient is clipped to C.")
    text = f"each of the M = {holding.tensors} tensors is clipped to C, so one gradient has a norm of up to C√M."
    return math.sqrt(holding.tensors), ("clipping", text)


def _largest_batch(plan: Plan, holding: Holding) -> int:
    """Return how many examples of a client one batch can hold: all of them if each is drawn by itself."""
    if plan.batch_sampling == "poisson":
        return holding.largest_client or holding.client_size
    return plan.batch_size


def _relation(relation: Relation, noise: Noise) -> tuple[float, Reason]:
    if noise.centred:
        return 2.0, (
            "relation",
            "gradients are centred before clipping: a zero gradient, too, may have the full norm.",
        )
    if relation == "replace_one":
        return 2.0, (
            "relation",
            "a replaced unit moves a release from one end to the other: twice the norm.",
        )
    return 1.0, (
        "relation",
        "the unit's place stays, with a zero gradient, and every divisor stays as it is.",
    )


def _example_release(
    says: Declaration, plan: Plan, holding: Holding, unit: Unit, relation: Relation
) -> Release:
    assert says.clip is not None and says.noise is not None
    root, clipping = _layers(says.clip, holding)
    factor, change = _relation(relation, says.noise)
    mean = mean_std(says.noise.scale, 1.0, plan.batch_size, says.noise.divide_by)
    std = mean * math.sqrt(plan.batch_size)  # in units of C
    z = std / (root * factor)
    drawn = plan.batch_sampling in ("with_replacement", "poisson")
    batch = _largest_batch(plan, holding)
    passes = plan.uses_per_participation(holding.client_size)
    uses = plan.local_iterations * batch if unit == "client" else passes * holding.repeats
    text = f"each use is a noisy gradient of its own: {uses} in one participation" + (
        ", at most." if drawn else "."
    )
    return Release(z, uses, (clipping, change, ("uses", text)))


def _batch_release(
    place: str,
    says: Declaration,
    clip: Clip | None,
    plan: Plan,
    holding: Holding,
    unit: Unit,
    relation: Relation,
) -> Release:
    assert says.clip is not None and says.noise is not None and clip is not None
    root, clipping = _layers(clip, holding)
    factor, change = _relation(relation, says.noise)
    # noise is scaled with the stage's own bound, the gradient obeys the clip's: the worst round
    # counts
    ratio = min(says.clip.bound(t) / clip.bound(t) for t in range(plan.rounds))
    std = (
        mean_std(says.noise.scale, 1.0, plan.batch_size, says.noise.divide_by) * ratio
    )  # in units of C
    z = std * plan.batch_size / (root * factor)
    text = f"noise of {std:.4g} C on a batch mean that one example moves by C/B per tensor."
    reasons = [clipping, change, ("noise", text)]
    varying = plan.batch_sampling == "poisson"
    if place == "per_example" and varying:
        z /= math.sqrt(plan.batch_size)  # a batch of one carries one draw
        reasons.append(
            (
                "noise drawn per example",
                "a Poisson batch may hold one example and then carries one draw.",
            )
        )
    uses, shift, why = _uses(plan, holding, unit)
    if place == "per_example" and varying:
        shift = math.sqrt(shift)  # more examples bring more draws
    return Release(z / shift, uses, (*reasons, *why))


def _uses(plan: Plan, holding: Holding, unit: Unit) -> tuple[int, float, list[Reason]]:
    """Return the releases of a participation that a unit moves, and by how many examples' worth each at most."""
    drawn = plan.batch_sampling in ("with_replacement", "poisson")
    if unit == "client":
        batch = _largest_batch(plan, holding)
        text = f"a client owns its whole batch: each of the L = {plan.local_iterations} means can move {batch}-fold."
        return plan.local_iterations, float(batch), [("unit", text)]
    passes, repeats = plan.uses_per_participation(holding.client_size), holding.repeats
    together = repeats if plan.batch_sampling == "poisson" else min(repeats, plan.batch_size)
    if drawn:
        reasons = [
            ("uses", f"each of the L = {passes} batches is drawn anew and may hold the example.")
        ]
        shift = float(together)
    else:
        passes *= repeats
        reasons = [
            (
                "uses",
                f"passing over the client's data makes {passes} use(s) of the example in a participation.",
            )
        ]
        shift = math.sqrt(together)  # Σk² ≤ uses · max k over the batches
    if repeats > 1:
        reasons.append(
            (
                "repeats",
                f"one client holds it {repeats} times; up to {together} may fall in one batch.",
            )
        )
    return passes, shift, reasons


def _update_release(says: Declaration, holding: Holding, unit: Unit, relation: Relation) -> Release:
    assert says.clip is not None and says.noise is not None
    root, clipping = _layers(says.clip, holding)
    factor, change = _relation(relation, says.noise)
    reasons = [clipping, change]
    if unit == "example" and factor == 1:
        factor = 2.0
        reasons[-1] = (
            "relation",
            "one example may turn a client's clipped update from one end to the other.",
        )
    z = says.noise.scale * says.noise.factor / (root * factor)
    return Release(
        z, 1, (*reasons, ("uses", "a client's update is released once in a participation."))
    )


def events(
    defense: Route,
    plan: Plan,
    holding: Holding,
    *,
    unit: Unit = "example",
    relation: Relation = "add_remove",
    tap: str = "update",
    participations: int | None = None,
) -> tuple[Event, ...]:
    """Return the accounting events of a training.

    Parameters
    ----------
    defense, plan, holding, unit, relation, tap
        As `release`.
    participations : int or None
        A number: the adversary sees who takes part, and a holder of the unit did so this many
        times; the sampling of clients hides nothing. None: it does not see it; one event of rate
        K_t/K a round, for one holder. Where every client always takes part (K_t = K), there is
        nothing to see.

    Notes
    -----
    Inside a participation, batches drawn anew count at rate B/n where that is proved: L events a
    participation, each of rate B/n, if they are ``poisson`` (or ``with_replacement``, under
    ``replace_one``), the example stands once at its client, and only the batch carries noise. With
    K_t = K this is plain DP-SGD.

    With ``None`` and ``unit="example"`` an accountant's ε is *exact where the rest of the client's
    gradients is zero, and no bound otherwise*: the client's other examples can show that it takes
    part, and then only δ shrinks by K_t/K, not ε (`fl_privacy_lib.audit.visible_participation`).

    Raises
    ------
    InputError
        If no ε holds at this tap, or the accountant has no events for this sampling and relation (a
        fixed number of clients under ``add_remove``).

    Examples
    --------
    >>> from fl_privacy_lib.defenses import fed_cdp
    >>> plan = Plan(1000, 100, 100, 100, 5, "poisson", local_lr=0.05)
    >>> (event,) = fed_cdp("batch").events(plan, Holding(50_000, 500, 1))
    >>> event.sampling_rate, event.noise_multiplier, event.uses
    (0.1, 6.0, 100)

    Plain DP-SGD is one client that never leaves:

    >>> central = Plan(1, 1, 1, 100, 10, batch_sampling="poisson", local_lr=0.05)
    >>> (event,) = fed_cdp("batch", noise_scale=1.0, scope="all").events(central, Holding(1000, 1000, 3))
    >>> event.sampling_rate, event.noise_multiplier, event.uses
    (0.01, 1.0, 100)
    """
    released = release(defense, plan, holding, unit, relation, tap)
    if participations is None:
        participations = _certain_participations(plan)
    if participations is None:
        z = 1 / released.mu  # the uses of one participation together
        clients: Sampling = "fixed" if plan.client_sampling == "fixed" else "poisson"
        return (Event(plan.client_rate, z, unit, relation, uses=plan.rounds, sampling=clients),)
    whole_number(1, participations=participations)
    uses = int(participations) * released.uses
    batches = _sampled_batches(defense, plan, holding, unit, relation, tap)
    if batches is None:
        return (Event(1.0, released.noise_multiplier, unit, relation, uses=uses, sampling="none"),)
    rate = plan.batch_size / holding.client_size
    return (Event(rate, released.noise_multiplier, unit, relation, uses=uses, sampling=batches),)


def _certain_participations(plan: Plan) -> int | None:
    """Return how often a client takes part where that is no secret: always, or once an epoch; else None."""
    if plan.client_rate == 1:
        return plan.rounds
    if plan.client_sampling == "one_pass":
        return -(-plan.rounds // (plan.clients // plan.participants))
    return None


def _sampled_batches(
    defense: Route, plan: Plan, holding: Holding, unit: Unit, relation: Relation, tap: str
) -> Sampling | None:
    """Return the sampling that amplifies each batch inside a participation, or None where none is proved.

    Batches drawn anew hide whether an example is in them, at rate B/n, if the batch's noise is the
    only one and the example stands once at the client. Sampling without replacement is bounded
    under ``replace_one`` only.
    """
    once = unit == "example" and holding.repeats == 1 and plan.batch_size < holding.client_size
    noise_per_batch = [place for place, _ in noisy(defense, tap)] == ["per_batch"]
    if not (once and noise_per_batch):
        return None
    if plan.batch_sampling == "poisson":
        return "poisson"
    return (
        "fixed" if plan.batch_sampling == "with_replacement" and relation == "replace_one" else None
    )
