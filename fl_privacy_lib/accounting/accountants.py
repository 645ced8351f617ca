"""One name for each accountant: what a ledger costs, how it grows, and when a budget is spent."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from fl_privacy_lib._checks import InputError, one_of, positive
from fl_privacy_lib.accounting.composition import StepSums, Theorem, composed, composition_spending
from fl_privacy_lib.accounting.events import Event, Floats, Ledger, check_delta
from fl_privacy_lib.accounting.gdp import gdp_epsilon, gdp_mu, gdp_spending
from fl_privacy_lib.accounting.pld import pld_spending
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, rdp_curve, rdp_spending
from fl_privacy_lib.accounting.spending import Spending
from fl_privacy_lib.accounting.zcdp import epsilon_of_rho, step_rho, zcdp_spending

Accountant = Literal[
    "base",
    "advanced",
    "advanced_tanh",
    "optimal",
    "optimal_third_term",
    "zcdp",
    "moments_accountant",
    "rdp",
    "pld",
    "gdp",
]
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)

Events = Event | Ledger | Sequence[Event]


def _theorem(name: Theorem) -> Callable[[Ledger, float], Spending]:
    return lambda ledger, delta: composition_spending(ledger, name, step_delta=delta, slack=delta)


_SPEND: dict[str, Callable[[Ledger, float], Spending]] = {
    "base": _theorem("base"),
    "advanced": _theorem("advanced"),
    "advanced_tanh": _theorem("advanced_tanh"),
    "optimal": _theorem("optimal"),
    "optimal_third_term": _theorem("optimal_third_term"),
    "zcdp": zcdp_spending,
    "moments_accountant": lambda ledger, delta: rdp_spending(
        ledger, delta, PAPER_ORDERS, "classic", "moments_accountant"
    ),
    "rdp": rdp_spending,
    "pld": pld_spending,
    "gdp": gdp_spending,
}


def spend(events: Events, accountant: Accountant, delta: float) -> Spending:
    """Return what a sequence of releases costs.

    Parameters
    ----------
    events : Event, Ledger, or sequence of Event
        The releases; one unit, one relation.
    accountant : str
        ``base``, ``advanced``, ``advanced_tanh``, ``optimal``, ``optimal_third_term``: compositions
        of (ε, δ) steps, see `fl_privacy_lib.accounting.composition`; ``zcdp``;
        ``moments_accountant``: Rényi accounting as the papers did it (their orders, classic
        conversion); ``rdp``: the same with today's orders and conversion; ``pld``: privacy loss
        distributions; ``gdp``: exact, for releases without sampling.
    delta : float
        In (0, 1). The target; for the compositions δ_0 of one step and the slack δ~ (the result's
        ``composition_delta`` says what that adds up to).

    Raises
    ------
    InputError
        If a value is out of range, or the accountant has no answer for such a plan.

    Examples
    --------
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> for name in ("base", "advanced", "optimal", "zcdp", "moments_accountant", "rdp", "pld"):
    ...     print(f"{name} {spend(run, name, 1e-5).epsilon:.3f}")
    base 123.457
    advanced 7.458
    optimal 6.686
    zcdp 1.159
    moments_accountant 0.823
    rdp 0.659
    pld 0.601
    """
    one_of(ACCOUNTANTS, accountant=accountant)
    check_delta(delta=delta)
    return _SPEND[accountant](Ledger.of(events), delta)


def spending_curve(events: Events, accountant: Accountant, delta: float) -> Floats:
    """Return ε after each release, [steps]; its last value is that of `spend`.

    Raises
    ------
    InputError
        As `spend`; and for ``pld``, which has no cheap answer for every prefix.

    Examples
    --------
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> print(spending_curve(run, "zcdp", 1e-5)[[0, 99, 9_999]].round(4))
    [0.0113 0.1134 1.1588]
    """
    one_of(ACCOUNTANTS, accountant=accountant)
    check_delta(delta=delta)
    ledger = Ledger.of(events)
    if accountant == "pld":
        raise InputError(
            "accountant = 'pld' has no curve over the steps: use 'rdp', or spend() on ledger.first(steps)."
        )
    if accountant == "rdp":
        return rdp_curve(ledger, delta)
    if accountant == "moments_accountant":
        return rdp_curve(ledger, delta, PAPER_ORDERS, "classic")
    if accountant == "zcdp":
        return epsilon_of_rho(np.cumsum(np.repeat(step_rho(ledger), ledger.uses)), delta)
    if accountant == "gdp":
        gdp_mu(ledger)  # refuses sampled plans
        total = np.cumsum(np.repeat(1 / np.square(ledger.noise), ledger.uses))
        return np.array([gdp_epsilon(float(mu), delta) for mu in np.sqrt(total)])
    return composed(StepSums.over(ledger, delta, prefixes=True), accountant, delta)


def first_step_beyond(
    events: Events, budget: float, accountant: Accountant, delta: float
) -> int | None:
    """Return the number of the first release (from 1) after which ε exceeds a budget, or None.

    Parameters
    ----------
    events, accountant, delta
        As for `spend`.
    budget : float
        ε > 0. The budget allows one release less than the answer.

    Examples
    --------
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> first_step_beyond(run, 0.5, "moments_accountant", 1e-5)
    3725
    """
    positive(budget=budget)
    ledger = Ledger.of(events)
    if accountant == "pld":
        return _bisect(ledger, budget, accountant, delta)
    beyond = spending_curve(ledger, accountant, delta) > budget
    return int(np.argmax(beyond)) + 1 if beyond.any() else None


def _bisect(ledger: Ledger, budget: float, accountant: Accountant, delta: float) -> int | None:
    if spend(ledger, accountant, delta).epsilon <= budget:
        return None
    inside, beyond = 0, ledger.steps
    while beyond - inside > 1:
        middle = (inside + beyond) // 2
        if spend(ledger.first(middle), accountant, delta).epsilon > budget:
            beyond = middle
        else:
            inside = middle
    return beyond
