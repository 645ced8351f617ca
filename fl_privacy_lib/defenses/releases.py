"""What a defence releases under a plan: the events that accounting counts, with reasons.

Training and accounting read the same `Plan` and the same stages, so they cannot disagree on how
often an example is used, how far it can move a release, or how much noise covers it.
"""

import math
from typing import NamedTuple

from fl_privacy_lib._checks import InputError, one_of, refuse, whole_number
from fl_privacy_lib.accounting.events import Event, Relation, Sampling, Unit
from fl_privacy_lib.accounting.schedules import rounded_down
from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.holding import Holding
from fl_privacy_lib.defenses.limits import LOCAL, Reason, counting, noisy, unbounded, uncovered
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.stage import Declaration, Noise, Route
from fl_privacy_lib.sampling import Plan

UNITS: tuple[Unit, ...] = ("example", "client")
RELATIONS: tuple[Relation, ...] = ("add_remove", "replace_one")
DRAWN_ANEW = ("with_replacement", "poisson")  # batches that do not depend on one another


class Release(NamedTuple):
    """What one participation reveals about one unit: ``uses`` equal Gaussian releases.

    Parameters
    ----------
    noise_multiplier : float
        z, for the unit and the relation asked for.
    uses : int
        Releases in one participation that the unit can move.
    rounds : tuple of float, z of every round where schedules change it: `noise_multiplier` is least
    reasons : tuple of (step, argument)
        How z and the uses come about.
    """

    noise_multiplier: float
    uses: int
    reasons: tuple[Reason, ...] = ()
    rounds: tuple[float, ...] = ()

    @property
    def mu(self) -> float:
        """√uses / z: a participation reveals as much as one Gaussian shifted by μ deviations."""
        return math.sqrt(self.uses) / self.noise_multiplier


def release(
    defense: Route,
    plan: Plan,
    holding: Holding,
    unit: Unit = "example",
    relation: Relation = "add_remove",
    tap: str = "update",
) -> Release:
    """Return what one participation of one holder reveals about a unit, as seen at a tap.

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
    >>> release(fed_cdp("batch"), plan, Holding(50_000, 500, 3)).uses
    1
    """
    one_of(UNITS, unit=unit)
    one_of(RELATIONS, relation=relation)
    if (why := unbounded(defense, tap)) is not None:
        raise InputError(
            f"{defense.name} has no events at tap = {tap!r}, because {why[1].rstrip('.')}."
        )
    rules = defense.parts("per_example")
    releases = []
    for place, says in noisy(defense, tap):
        if uncovered(defense, tap, place) is not None:
            continue
        refuse({f"{defense.name} covers {says.steps} local iterations of a round, and the plan has "
                f"{plan.local_iterations}: give its tree as many leaves.":
                plan.local_iterations > (says.steps or plan.local_iterations),
                f"{defense.name} covers one use of a unit in a round's tree, and this {unit} has "
                "more: count an example that is held once, in one pass over the client's data.":
                bool(says.steps) and _uses(plan, holding, unit)[:2] != (1, 1.0)})  # fmt: skip
        local = place in LOCAL
        clipped = rules[0].says if local else says  # what limits what a unit can move
        assert clipped and clipped.clip and says.clip and says.noise  # it would be uncovered
        moved, reasons = _sensitivity(
            clipped.clip, says.noise, holding, relation, not local and unit == "example"
        )
        if not local:
            z = says.noise.least(plan.rounds) / moved
            uses = ("uses", "a client's update is released once in a participation.")
            releases.append(Release(z, 1, (*reasons, uses)))
        elif place == "per_example" and (tap == "example" or len(rules) > 1):
            # what follows the noise acts on every example by itself, so the batch's other draws do
            # not cover it
            releases.append(_example_release(says.noise, moved, reasons, plan, holding, unit))
        else:
            releases.append(_batch_release(place, clipped.clip, says.clip, says.noise, moved,
                                           reasons, plan, holding, unit))  # fmt: skip
    best = min(releases, key=lambda one: one.mu)  # each is a bound by itself
    for place, says in counting(defense, tap):
        best = _with_counts(best, place, says, plan, holding, unit)
    return best


def _with_counts(
    released: Release, place: str, says: Declaration, plan: Plan, holding: Holding, unit: Unit
) -> Release:
    """Return what gradients and counts reveal together.

    Two Gaussian releases of one unit are a single one in more dimensions.
    """
    assert says.count_scale and says.clip is not None
    uses, shift = _uses(plan, holding, unit)[:2] if place == "per_example" else (1, 1.0)
    draws = 1 if says.noise_on_sum else uses  # reports that share a draw of noise add up in a line
    mu = uses / math.sqrt(draws) * shift * _tensors_factor(says.clip, holding) / says.count_scale
    text = (
        f"{uses} report(s) of counts with noise {says.count_scale:g} tell μ = {mu:.3g} in one "
        f"participation, beside the gradients' {released.mu:.3g}; a unit moves a count by at most "
        "1, removed or replaced."
    )
    z = math.sqrt(released.uses) / math.hypot(released.mu, mu)
    return Release(z, released.uses, (*released.reasons, ("counts", text)))


def _tensors_factor(clip: Clip, holding: Holding) -> float:
    """Return √M where each tensor is clipped by itself: what the norm of them all is, over C."""
    return 1.0 if clip.scope == "all" else math.sqrt(holding.tensors)


def _sensitivity(
    clip: Clip, noise: Noise, holding: Holding, relation: Relation, one_of_many: bool = False
) -> tuple[float, list[Reason]]:
    """Return how far a unit moves a release at most, over C, with the reasons.

    `one_of_many`: the unit is an example, and what is clipped a client's whole update.
    """
    clippings = {
        "all": "the whole gradient is clipped to C.",
        "layer": f"each of the M = {holding.tensors} tensors is clipped to C, so one gradient has "
        "a norm of up to C√M.",
    }
    twice = {
        "gradients are centred before clipping: a zero gradient, too, may have the full norm.": (
            noise.centred
        ),
        "a replaced unit moves a release from one end to the other: twice the norm.": (
            relation == "replace_one"
        ),
        "one example may turn a client's clipped update from one end to the other.": one_of_many,
    }
    change = next((sentence for sentence, holds in twice.items() if holds), None)
    once = "the unit's place stays, with a zero gradient, and every divisor stays as it is."
    reasons = [("clipping", clippings[clip.scope]), ("relation", change or once)]
    return (2.0 if change else 1.0) * _tensors_factor(clip, holding), reasons


def _largest_batch(plan: Plan, holding: Holding) -> int:
    """Return how many examples of a client one batch can hold: all if each is drawn by itself."""
    if plan.batch_sampling == "poisson":
        return holding.largest_client or holding.client_size
    return plan.batch_size


def _example_release(
    noise: Noise, moved: float, reasons: list[Reason], plan: Plan, holding: Holding, unit: Unit
) -> Release:
    """Return the release of every example's gradient, which a unit moves by `moved` · C."""
    mean = mean_std(noise.least(plan.rounds), 1.0, plan.batch_size, noise.divide_by)
    z = mean * math.sqrt(plan.batch_size) / moved
    of_client = plan.local_iterations * _largest_batch(plan, holding)
    of_example = plan.uses_per_participation(holding.client_size) * holding.repeats
    uses = of_client if unit == "client" else of_example
    at_most = ", at most" if plan.batch_sampling in DRAWN_ANEW else ""
    text = f"each use is a noisy gradient of its own: {uses} in one participation{at_most}."
    return Release(z, uses, (*reasons, ("uses", text)))


def _batch_release(
    place: str, clip: Clip, level: Clip, noise: Noise, moved: float, reasons: list[Reason],
    plan: Plan, holding: Holding, unit: Unit,
) -> Release:  # fmt: skip
    """Return the release of a batch mean whose examples obey `clip`, with noise of `level`.

    `place`: where the noise is added, to the mean or to each example.
    """
    # in units of C, [T]
    scales = [noise.strength(t) * (level.bound(t) / clip.bound(t)) for t in range(plan.rounds)]
    least, changes = min(scales), len(set(scales)) > 1
    std = mean_std(least, 1.0, plan.batch_size, noise.divide_by)
    z = std * plan.batch_size / moved
    reasons = [*reasons, ("noise", f"noise of {std:.4g} C on a batch mean that one example moves "
                          "by C/B per tensor.")]  # fmt: skip
    uses, shift, use_reasons = _uses(plan, holding, unit)
    if place == "per_example" and plan.batch_sampling == "poisson":
        z /= math.sqrt(plan.batch_size)
        shift = math.sqrt(shift)  # more examples bring more draws
        reasons.append(("noise drawn per example", "a Poisson batch may hold one example and then "
                        "carries one draw."))  # fmt: skip
    rounds = tuple(z / shift * scale / least for scale in scales) if changes else ()
    return Release(z / shift, uses, (*reasons, *use_reasons), rounds)


def _uses(plan: Plan, holding: Holding, unit: Unit) -> tuple[int, float, list[Reason]]:
    """Return how many releases of a participation a unit moves, and how many-fold."""
    if unit == "client":
        batch = _largest_batch(plan, holding)
        return plan.local_iterations, float(batch), [(
            "unit", f"a client owns its whole batch: each of the L = {plan.local_iterations} means "
            f"can move {batch}-fold.")]  # fmt: skip
    uses, repeats = plan.uses_per_participation(holding.client_size), holding.repeats
    together = repeats if plan.batch_sampling == "poisson" else min(repeats, plan.batch_size)
    if plan.batch_sampling in DRAWN_ANEW:
        shift = float(together)
        text = f"each of the L = {uses} batches is drawn anew and may hold the example."
    else:
        uses *= repeats
        shift = math.sqrt(together)  # Σk² ≤ uses · max k over the batches
        text = (
            f"passing over the client's data makes {uses} use(s) of the example in a participation."
        )
    reasons = [("uses", text)]
    if repeats > 1:
        reasons.append(("repeats", f"one client holds it {repeats} times; up to {together} may "
                        "fall in one batch."))  # fmt: skip
    return uses, shift, reasons


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
    >>> dp_sgd = fed_cdp("batch", noise_scale=1.0, scope="all")
    >>> (event,) = dp_sgd.events(central, Holding(1000, 1000, 3))
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
    batches = _sampled_batches(defense, plan, holding, unit, relation, tap)
    rate = 1.0 if batches == "none" else plan.batch_size / holding.client_size
    # which rounds it takes part in is open, and holders of one example may share the worst
    often = max(holding.holders if unit == "example" else 1, -(-participations // plan.rounds))
    worst = sorted(released.rounds * often)[:participations]
    levels = rounded_down(worst) or {released.noise_multiplier: int(participations)}
    return tuple(
        Event(rate, z, unit, relation, uses=count * released.uses, sampling=batches)
        for z, count in levels.items()
    )


def _certain_participations(plan: Plan) -> int | None:
    """Return how often a client takes part where that is no secret; else None."""
    if plan.client_rate == 1:
        return plan.rounds
    if plan.client_sampling == "one_pass":
        return -(-plan.rounds // (plan.clients // plan.participants))  # once an epoch
    return None


def _sampled_batches(
    defense: Route, plan: Plan, holding: Holding, unit: Unit, relation: Relation, tap: str
) -> Sampling:
    """Return the sampling that amplifies each batch of a participation; 'none' if none is proved.

    Batches drawn anew hide whether an example is in them, at rate B/n, if the batch's noise is the
    only one and the example stands once at the client. Sampling without replacement is bounded
    under ``replace_one`` only.
    """
    once = unit == "example" and holding.repeats == 1 and plan.batch_size < holding.client_size
    noise_per_batch = [place for place, _ in noisy(defense, tap)] == ["per_batch"]
    if once and noise_per_batch and plan.batch_sampling == "poisson":
        return "poisson"
    fixed = plan.batch_sampling == "with_replacement" and relation == "replace_one"
    return "fixed" if once and noise_per_batch and fixed else "none"
