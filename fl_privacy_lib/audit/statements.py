"""Two statements on one training: what the paper counts, and what can be proved.

The first applies the papers' formula to the numbers it is given. The second starts from what is released and asks what
follows. Both carry their reasons; a number without its reading is not returned.
"""

from dataclasses import dataclass, replace

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.accounting.accountants import Accountant, spend
from fl_privacy_lib.accounting.events import Event, Floats, Relation, Sampling, Unit, check_delta
from fl_privacy_lib.accounting.spending import Spending
from fl_privacy_lib.audit.arguments import global_rate
from fl_privacy_lib.audit.participation import mixture_epsilon, participations, quantile
from fl_privacy_lib.defenses.events import ORDER, RELATIONS, UNITS, Holding, Reason, Release, release, unbounded
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.sampling import Plan

INFINITE = float("inf")
_TYPES = {"example": "type 2, inside the client", "update": "type 1, at the client's exit",
          "received": "type 0, at the server"}  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """An ε and everything that must be said beside it.

    Parameters
    ----------
    reading : {'as the paper counts', 'what can be proved'}
    epsilon : float
        ε ≥ 0; ``inf`` if nothing is bounded.
    delta : float
        In (0, 1).
    unit, relation, sampling, accountant : str
        Who is protected, against which change, under which sampling, counted by what.
    adversary : str
        Who it holds against.
    reasons : tuple of (step, argument)
        How the number comes about, step by step.
    """

    reading: str
    epsilon: float
    delta: float
    unit: Unit
    relation: Relation
    sampling: str
    accountant: str
    adversary: str
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return (
            f"{self.reading}: ε = {self.epsilon:.4g} at δ = {self.delta:.3g} for one {self.unit} ({self.relation}); "
            f"sampling: {self.sampling}; accountant: {self.accountant}; against {self.adversary}"
        )


@dataclass(frozen=True)
class Statements:
    """Both statements on one training."""

    paper: Statement
    proved: Statement


def statement(
    defense: Defense, plan: Plan, holding: Holding, *, delta: float, unit: Unit = "example",
    relation: Relation = "add_remove", tap: str = "update", sensitivity: str | None = None,
) -> Statements:
    """Return what a paper would say of a training, and what can be proved.

    Parameters
    ----------
    defense, plan, holding
        What is run, on which data.
    delta : float
        In (0, 1).
    unit : {'example', 'client'}
        Who is to be protected.
    relation : {'add_remove', 'replace_one'}
        See `fl_privacy_lib.defenses.events.release`. The paper's statement is always its own, adding or removing.
    tap : {'example', 'batch', 'update', 'received', 'aggregate'}
        Where the adversary reads, in all rounds, seeing who takes part.
    sensitivity : {'bound', 'l2_max'} or None
        What the noise is scaled with; None: as the defence says.

    Raises
    ------
    InputError
        If a value is out of range.

    Examples
    --------
    >>> from fl_privacy_lib.defenses import fed_cdp
    >>> plan = Plan(1000, 100, 100, 100, 5, local_lr=0.05)
    >>> both = statement(fed_cdp("batch"), plan, Holding(50_000, 500, 3), delta=1e-5)
    >>> print(f"{both.paper.epsilon:.3f} {both.proved.epsilon:.2f}")
    0.823 4.59
    """
    check_delta(delta=delta)
    one_of(UNITS, unit=unit)
    one_of(RELATIONS, relation=relation)
    one_of(ORDER, tap=tap)
    paper = _as_counted(defense, plan, holding, delta, unit)
    return Statements(paper, _proved(defense, plan, holding, delta, unit, relation, tap, sensitivity))


def honest_rate(
    defense: Defense, plan: Plan, holding: Holding, *, delta: float, relation: Relation = "add_remove",
    tap: str = "update", accountant: Accountant = "rdp",
) -> Spending:
    """Return the ε of K_t/K a round, T rounds: an *estimate*, exact only where participation cannot be seen.

    The rate of the papers' clients, put into the papers' accountant. One holder's view; for several holders the rounds
    are multiplied, as if their participations were independent. Not a bound: see `events` and `visible_participation`.
    """
    told = release(defense, plan, holding, "example", relation, tap)
    kind: Sampling = "poisson" if relation == "add_remove" else "fixed"
    rate = plan.client_rate
    event = Event(rate, 1 / told.mu, "example", relation, plan.rounds * holding.holders, "none" if rate == 1 else kind)
    return spend(event, accountant, delta)


def _scale(stage: object) -> float:
    """Return a stage's noise scale; 0 for an empty stage or one without noise."""
    return float(getattr(stage, "noise_scale", 0.0))


def _as_counted(defense: Defense, plan: Plan, holding: Holding, delta: float, unit: Unit) -> Statement:
    """Return the papers' own count: σ as multiplier, Poisson sampling, moments accountant."""
    local = max(_scale(defense.per_batch), _scale(defense.per_example))
    remote = max(_scale(defense.per_client), _scale(defense.on_arrival))
    say = "whoever cannot see who takes part; the paper does not say so"
    noise = local or remote
    if not noise:
        return Statement("as the paper counts", INFINITE, delta, unit, "add_remove", "none", "none", say,
                         (("noise", "nothing adds noise."),))  # fmt: skip
    reasons: list[Reason] = [("noise", f"the noise scale σ = {noise:g} is the multiplier, whatever M is.")]
    if local:
        rate = global_rate(plan.batch_size, plan.participants, holding.examples)
        steps, name = plan.local_iterations * plan.rounds, "B·K_t/N"
        if unit == "client":
            reasons.append(("unit", "the example's ε is carried over to the client by the Billboard lemma."))
    else:
        rate, steps, name = plan.client_rate, plan.rounds, "K_t/K"
        if unit == "example":
            reasons.append(("unit", "the count is for clients; the paper states nothing for examples."))
    if rate > 1:
        reasons.append(("sampling", f"{name} = {rate:.3g} is above 1 and is counted as 1."))
    reasons.append(("sampling", f"q = {name} = {min(rate, 1):.4g}, drawn anew at each of {steps} steps."))
    claimed: Unit = unit if local else "client"
    spent = spend(Event(min(rate, 1.0), noise, claimed, "add_remove", uses=steps), "moments_accountant", delta)
    return Statement("as the paper counts", spent.epsilon, delta, claimed, "add_remove", "poisson", spent.accountant,
                     say, tuple(reasons))  # fmt: skip


def _proved(
    defense: Defense, plan: Plan, holding: Holding, delta: float, unit: Unit, relation: Relation, tap: str,
    sensitivity: str | None,
) -> Statement:
    place = f"who reads every '{tap}' ({_TYPES[tap]})" if tap in _TYPES else f"who reads every '{tap}'"
    whom = f"{place} and sees who takes part, and all who see less"
    reading = "what can be proved"
    why = unbounded(defense, tap, sensitivity)
    if why is not None:
        return Statement(reading, INFINITE, delta, unit, relation, "none", "none", whom, (why,))
    told = release(defense, plan, holding, unit, relation, tap)
    holders = holding.holders if unit == "example" else 1
    law = participations(plan, holders)
    epsilon = mixture_epsilon(law, told.mu, delta)
    mean = plan.client_rate * plan.rounds * holders
    reasons = (*told.reasons, *_participation_reasons(holders, mean, told))
    sampling = f"clients {plan.client_sampling}, batches {plan.batch_sampling}; no amplification"
    found = Statement(reading, epsilon, delta, unit, relation, sampling, "gdp over participations", whom, reasons)
    inner = _batches_drawn_anew(defense, plan, holding, delta, unit, relation, tap, law)
    if inner is not None and inner.epsilon < found.epsilon:
        argument = f"each batch is drawn anew from the client's {holding.client_size} examples, at rate B/n."
        found = replace(
            found, epsilon=inner.epsilon, accountant=f"{inner.accountant} over participations",
            sampling=f"clients {plan.client_sampling}; batches {plan.batch_sampling}, amplified at rate B/n",
            reasons=(*reasons, ("sampling inside a participation", argument)),
        )  # fmt: skip
    return found


def _participation_reasons(holders: int, mean: float, told: Release) -> tuple[Reason, ...]:
    reasons = []
    if holders > 1:
        reasons.append(("copies", f"{holders} clients hold the example, and each of them uses it."))
    reasons.append((
        "no amplification by the sampling of clients",
        f"who takes part is seen, or can be told from a client's other examples; ε is the mean over the {mean:.4g} "
        f"expected participations and their spread, each a Gaussian shifted by {told.mu:.3g} standard deviations.",
    ))  # fmt: skip
    return tuple(reasons)


def _batches_drawn_anew(
    defense: Defense, plan: Plan, holding: Holding, delta: float, unit: Unit, relation: Relation, tap: str,
    law: Floats,
) -> Spending | None:
    """Return the bound that counts batches drawn anew at rate B/n, where it is proved; else None.

    The number of participations is cut at a quantile that costs half of δ. Sampling without replacement is bounded
    under ``replace_one`` only, of which an empty place is a special case.
    """
    drawn = plan.batch_sampling in ("with_replacement", "poisson")
    plain = unit == "example" and holding.repeats == 1 and tap != "example"
    others = (defense.per_example, defense.per_client, defense.on_arrival)
    noise_per_batch = _scale(defense.per_batch) > 0 and not any(_scale(stage) for stage in others)
    rate = plan.batch_size / holding.client_size
    if not (drawn and plain and noise_per_batch) or rate == 1:
        return None
    bound: Relation = "replace_one" if plan.batch_sampling == "with_replacement" else relation
    told = release(defense, plan, holding, unit, bound, tap)
    most = quantile(law, delta / 2)
    if most == 0:
        return None
    kind: Sampling = "fixed" if bound == "replace_one" else "poisson"
    event = Event(rate, told.noise_multiplier, unit, bound, most * plan.local_iterations, kind)
    try:
        return spend(event, "pld", delta / 2)
    except InputError:
        return None
