"""Two statements on one training: what the paper counts, and what can be proved.

The first applies the papers' formula to the numbers it is given. The second starts from what is
released and asks what follows. Both carry their reasons; a number without its reading is not
returned.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fl_privacy_lib._checks import one_of, positive
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.events import (
    Event,
    Floats,
    Relation,
    Spending,
    Unit,
    check_delta,
)
from fl_privacy_lib.audit.arguments import (
    global_rate,
    mixture_epsilon,
    participations,
    weighted_participations,
)
from fl_privacy_lib.audit.local import (
    AnyPerturbation,
    claimed_epsilons,
    exact_epsilons,
)
from fl_privacy_lib.defenses import TAPS, Defense, Holding
from fl_privacy_lib.defenses.limits import LOCAL, Reason, noisy, unbounded
from fl_privacy_lib.defenses.releases import (
    DRAWN_ANEW,
    RELATIONS,
    UNITS,
    Release,
    events,
    release,
)
from fl_privacy_lib.defenses.selection import Selection
from fl_privacy_lib.sampling import Plan

_TYPES = {"example": " (type 2, inside the client)", "update": " (type 1, at the client's exit)",
          "received": " (type 0, at the server)"}  # fmt: skip
PAPER, PROOF = "as the paper counts", "what can be proved"


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
            f"{self.reading}: ε = {self.epsilon:.4g} at δ = {self.delta:.3g} for one {self.unit} "
            f"({self.relation}); "
            f"sampling: {self.sampling}; accountant: {self.accountant}; against {self.adversary}"
        )


@dataclass(frozen=True)
class Statements:
    """Both statements on one training."""

    paper: Statement
    proved: Statement


def statement(
    defense: Defense,
    plan: Plan,
    holding: Holding,
    *,
    delta: float,
    unit: Unit = "example",
    relation: Relation = "add_remove",
    tap: str = "update",
    sensitivity: str | None = None,
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
        See `fl_privacy_lib.defenses.releases.release`. The paper's statement is always its own,
        adding or removing.
    tap : {'example', 'batch', 'update', 'received', 'aggregate'}
        Where the adversary reads, in all rounds, seeing who takes part.
    sensitivity : {'bound', 'l2_max'} or None
        What the noise is scaled with; None: as the defence says.

    Raises
    ------
    InputError
        If a value is out of range, or a locally private report stands before the tap.

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
    one_of(TAPS, tap=tap)
    return Statements(
        paper=_as_counted(defense, plan, holding, delta, unit),
        proved=_proved(defense, plan, holding, delta, unit, relation, tap, sensitivity),
    )


def _as_counted(
    defense: Defense, plan: Plan, holding: Holding, delta: float, unit: Unit
) -> Statement:
    """Return the papers' own count: σ as multiplier, Poisson sampling, moments accountant."""
    noises = {place: says.noise for place, says in noisy(defense, "received") if says.noise}
    local = any(place in LOCAL for place in noises)
    adversary = "whoever cannot see who takes part; the paper does not say so"
    if not noises:
        why = (("noise", "nothing adds noise."),)
        return Statement(PAPER, math.inf, delta, unit, "add_remove", "none", "none", adversary, why)
    counted = [noise for place, noise in noises.items() if (place in LOCAL) == local]
    scales = [max(noise.at(t) for noise in counted) for t in range(plan.rounds)]
    if local:
        rate = global_rate(plan.batch_size, plan.participants, holding.examples)
        steps, name = plan.local_iterations * plan.rounds, "B·K_t/N"
    else:
        rate, steps, name = plan.client_rate, plan.rounds, "K_t/K"
    arguments = (
        ("noise", True, f"the noise scale σ = {min(scales):g} is the multiplier, whatever M is."),
        (
            "unit",
            local and unit == "client",
            "the example's ε is carried over to the client by the Billboard lemma.",
        ),
        (
            "unit",
            not local and unit == "example",
            "the count is for clients; the paper states nothing for examples.",
        ),
        ("sampling", rate > 1, f"{name} = {rate:.3g} is above 1 and is counted as 1."),
        (
            "sampling",
            True,
            f"q = {name} = {min(rate, 1):.4g}, drawn anew at each of {steps} steps.",
        ),
    )
    reasons = tuple((step, text) for step, holds, text in arguments if holds)
    claimed: Unit = unit if local else "client"
    events_ = [
        Event(min(rate, 1.0), z, claimed, "add_remove", uses=steps // plan.rounds * count)
        for z, count in Counter(scales).items()
    ]
    spent = spend(events_, "moments_accountant", delta)
    return Statement(
        PAPER, spent.epsilon, delta, claimed, "add_remove", "poisson", spent.accountant, adversary,
        reasons,
    )  # fmt: skip


def _proved(
    defense: Defense,
    plan: Plan,
    holding: Holding,
    delta: float,
    unit: Unit,
    relation: Relation,
    tap: str,
    sensitivity: str | None,
) -> Statement:
    who = f"who reads every '{tap}'{_TYPES.get(tap, '')}"
    whom = f"{who} and sees who takes part, and all who see less"
    why = unbounded(defense, tap, sensitivity)
    if why is not None:
        return Statement(PROOF, math.inf, delta, unit, relation, "none", "none", whom, (why,))
    holders = holding.holders if unit == "example" else 1
    kinds = (unit == "example" and holding.kinds) or ((holding.repeats,) * holders,)
    by_copies = {k: release(defense, plan, replace(holding, repeats=k), unit, relation, tap)
                 for k in {1, holding.repeats, *(k for kind in kinds for k in kind)}}  # fmt: skip
    once = by_copies[1]
    # of a holder with k copies, in units of a single copy's μ², whole ones
    cost = {k: math.ceil((one.mu / once.mu) ** 2 - 1e-9) for k, one in by_copies.items()}
    epsilon = max(_of_kind(plan, [cost[k] for k in kind], once, delta) for kind in kinds)
    copies = ("copies", f"up to {holders} clients hold an example, and each of them uses it.")
    seen = (
        "no amplification by the sampling of clients",
        "who takes part is seen, or can be told from a client's other examples; δ(ε) is averaged "
        f"over all holders' participations, at most {plan.client_rate * plan.rounds * holders:.4g} "
        f"in expectation; each time a single copy is a Gaussian shifted by {once.mu:.3g} standard "
        "deviations.",
    )
    reasons = (*by_copies[holding.repeats].reasons, *([copies] if holders > 1 else []), seen)
    sampling = f"clients {plan.client_sampling}, batches {plan.batch_sampling}; no amplification"
    proof = Statement(
        PROOF, epsilon, delta, unit, relation, sampling, "gdp over participations", whom, reasons
    )
    inner = (_batches_drawn_anew(defense, plan, holding, delta, unit, relation, tap,
                                 participations(plan, holders))
             if plan.batch_sampling in DRAWN_ANEW else None)  # fmt: skip
    if inner is None or inner.epsilon >= proof.epsilon:
        return proof
    anew = (
        f"each batch is drawn anew from the client's {holding.client_size} examples, at rate B/n."
    )
    return replace(
        proof,
        epsilon=inner.epsilon,
        accountant=f"{inner.accountant} over participations",
        sampling=f"clients {plan.client_sampling}; batches {plan.batch_sampling}, amplified at "
        "rate B/n",
        reasons=(*reasons, ("sampling inside a participation", anew)),
    )


def _of_kind(plan: Plan, costs: Sequence[int], once: Release, delta: float) -> float:
    """Return ε of an example whose holders' participations cost so many times `once` in μ²."""
    shared = math.gcd(*costs)  # holders with equally many copies are only counted
    costs, step = [cost // shared for cost in costs], math.sqrt(shared)
    if not once.rounds or plan.client_sampling == "one_pass":
        return mixture_epsilon(participations(plan, len(costs), costs), step * once.mu, delta)
    # each round has a μ of its own
    shifts = [step * math.sqrt(once.uses) / z for z in once.rounds]
    return mixture_epsilon(*weighted_participations(plan, len(costs), shifts, costs), delta)


def _batches_drawn_anew(
    defense: Defense,
    plan: Plan,
    holding: Holding,
    delta: float,
    unit: Unit,
    relation: Relation,
    tap: str,
    distribution: Floats,
) -> Spending | None:
    """Return the bound that counts batches drawn anew at rate B/n, where it is proved; else None.

    The number of participations is cut at a quantile that costs half of δ. Sampling without
    replacement is bounded under ``replace_one`` only, of which an empty place is a special case.
    """
    bound: Relation = "replace_one" if plan.batch_sampling == "with_replacement" else relation
    certain = np.count_nonzero(distribution) == 1  # and then nothing of δ goes to it
    most = int(np.argmax(1 - np.cumsum(distribution) <= delta / 2))
    if most == 0:
        return None
    drawn = events(defense, plan, holding, unit=unit, relation=bound, tap=tap, participations=most)
    if drawn[0].sampling == "none":
        return None
    return spend(drawn, "pld", delta if certain else delta / 2)


def local_statement(
    selection: Selection | None,
    value: AnyPerturbation | None,
    d: int,
    epochs: int = 1,
) -> Statements:
    """Return what FedSel would say of a client's reports, and what can be proved; δ = 0 in both.

    Parameters
    ----------
    selection, value : the mechanisms of a report; None: nothing is selected, or the value is sent
        as it is
    d : int, coordinates
    epochs : int, ≥ 1, reports of each client

    Notes
    -----
    What is proved is exact over all sequences of vectors that a client can come to; those of one
    training may differ less.

    Examples
    --------
    >>> from fl_privacy_lib.defenses.perturbation import Piecewise
    >>> from fl_privacy_lib.defenses.selection import PerturbedEncoding
    >>> both = local_statement(PerturbedEncoding(1.0, k=1, reading="e_eps"), Piecewise(1.0), d=2)
    >>> print(f"{both.paper.epsilon:.4g} {both.proved.epsilon:.4g}")
    2 2.311
    """
    positive(epochs=epochs)
    claims, exact = claimed_epsilons(selection, value), exact_epsilons(selection, value, d)
    reasons = tuple(
        (stage, f"ε = {claim:.4g} is claimed; its exact distribution at d = {d} gives {bound:.4g}.")
        for stage, claim, bound in zip(("selection", "value"), claims, exact, strict=True)
    )
    added = (
        "composition",
        f"the ε of both stages are added, over {epochs} reports of each client.",
    )
    unit: Unit = "local_report" if epochs == 1 else "client"

    def state(reading: str, epsilon: float, *why: Reason) -> Statement:
        return Statement(
            reading,
            epsilon,
            delta=0.0,
            unit=unit,
            relation="replace_one",
            sampling="none",
            accountant="sequential composition",
            adversary="the server, and all who see what it receives",
            reasons=why,
        )

    return Statements(
        state(PAPER, epochs * sum(claims), added),
        state(PROOF, epochs * sum(exact), *reasons, added),
    )
