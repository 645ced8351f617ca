"""One name for each accountant: what a ledger costs, when a budget is spent, noise for an ε."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast, get_args

import numpy as np

from fl_privacy_lib._checks import InputError, in_range, one_of, positive
from fl_privacy_lib.accounting.composition import Theorem, composed, composition_spending, step_sums
from fl_privacy_lib.accounting.events import Event, Floats, Ledger, Spending, check_delta
from fl_privacy_lib.accounting.gdp import gdp_spending
from fl_privacy_lib.accounting.pld import pld_spending
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, rdp_curve, rdp_spending
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

_LARGEST_NOISE = 1e6
_LEAST_NOISE = 1e-3


_SPEND: dict[str, Callable[..., Spending]] = {
    **{name: partial(composition_spending, theorem=name) for name in get_args(Theorem)},
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
    return _SPEND[accountant](Ledger.of(events), delta=delta)


def spending_curve(events: Events, accountant: Accountant, delta: float) -> Floats:
    """Return ε after each release, [steps]; its last value is that of `spend`.

    Raises
    ------
    InputError
        As `spend`; and for ``pld`` and ``gdp``, which have no cheap answer for every prefix.

    Examples
    --------
    >>> run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    >>> print(spending_curve(run, "zcdp", 1e-5)[[0, 99, 9_999]].round(4))
    [0.0113 0.1134 1.1588]
    """
    one_of(ACCOUNTANTS, accountant=accountant)
    check_delta(delta=delta)
    ledger = Ledger.of(events)
    if accountant in ("pld", "gdp"):
        raise InputError(
            f"accountant = {accountant!r} has no curve over the steps: use 'rdp', or spend() on "
            "ledger.first(steps)."
        )
    if accountant in _CURVES:
        return _CURVES[accountant](ledger, delta)
    return composed(step_sums(ledger, delta, prefixes=True), cast(Theorem, accountant), delta)


_CURVES: dict[str, Callable[[Ledger, float], Floats]] = {
    "rdp": rdp_curve,
    "moments_accountant": lambda ledger, delta: rdp_curve(ledger, delta, PAPER_ORDERS, "classic"),
    "zcdp": lambda ledger, delta: epsilon_of_rho(
        np.cumsum(np.repeat(step_rho(ledger), ledger.uses)), delta
    ),
}


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
    within = int(np.sum(spending_curve(ledger, accountant, delta) <= budget))
    return within + 1 if within < ledger.steps else None


def noise_for(
    epsilon: float,
    events: Callable[[float], Events],
    accountant: Accountant,
    delta: float,
    tolerance: float = 1e-6,
) -> float:
    """Return the smallest noise level with which a plan stays within ε.

    Parameters
    ----------
    epsilon : float
        The target, > 0.
    events : callable
        From a noise level (a multiplier, or a factor on a whole schedule) to the plan's events.
        More noise must never cost more.
    accountant, delta
        As for `fl_privacy_lib.accounting.accountants.spend`.
    tolerance : float
        Relative width of the answer, in [1e-12, 1]. The answer is the noisier end, which keeps the
        target.

    Raises
    ------
    InputError
        If even a noise level of 1e6 does not reach the target, as when ε is below what the
        accountant's orders can state at this δ.

    Examples
    --------
    >>> def plan(z):
    ...     return Event(0.01, z, "example", "add_remove", uses=10_000)
    >>> print(f"{noise_for(1.0, plan, 'rdp', 1e-5):.3f}")
    4.126
    """
    positive(epsilon=epsilon)
    in_range(1e-12, 1, tolerance=tolerance)  # a float has no more digits

    def cost(noise: float) -> float:
        return spend(events(noise), accountant, delta).epsilon

    least = cost(_LARGEST_NOISE)
    if least > epsilon:
        raise InputError(
            f"epsilon = {epsilon} is out of reach of accountant = {accountant!r}, which states "
            f"{least:.3g} even at a noise level of {_LARGEST_NOISE:g}: choose a larger epsilon, a "
            "larger delta, or 'pld'."
        )
    high = 1.0
    while cost(high) > epsilon:
        high *= 2
    while high > _LEAST_NOISE and cost(high / 2) <= epsilon:
        high /= 2
    low = high / 2
    while high / low - 1 > tolerance:
        middle = (low * high) ** 0.5  # geometric: the width asked for is relative
        low, high = (low, middle) if cost(middle) <= epsilon else (middle, high)
    return high
