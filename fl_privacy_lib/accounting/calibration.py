"""The other direction: the noise that an ε needs, and the steps that it allows."""

from collections.abc import Callable
from dataclasses import replace

from fl_privacy_lib._checks import InputError, positive
from fl_privacy_lib.accounting.accountants import Accountant, Events, spend
from fl_privacy_lib.accounting.events import Event

_LARGEST_NOISE = 1e6
_MOST_STEPS = 2**40


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
        Relative width of the answer, > 0. The answer is the noisier end: it keeps the target.

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
    positive(epsilon=epsilon, tolerance=tolerance)

    def within(noise: float) -> bool:
        return spend(events(noise), accountant, delta).epsilon <= epsilon

    if not within(_LARGEST_NOISE):
        least = spend(events(_LARGEST_NOISE), accountant, delta).epsilon
        raise InputError(
            f"epsilon = {epsilon} is out of reach of accountant = {accountant!r}, which states {least:.3g} "
            f"even at a noise level of {_LARGEST_NOISE:g}: choose a larger epsilon, a larger delta, or 'pld'."
        )
    low, high = 1.0, 1.0
    while not within(high):
        low, high = high, high * 2
    while low == high or within(low):
        low, high = low / 2, low
        if low < 1e-6:
            return high
    while high / low - 1 > tolerance:
        middle = (low * high) ** 0.5  # geometric: the width asked for is relative
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


def steps_within(epsilon: float, step: Event, accountant: Accountant, delta: float) -> int:
    """Return how often a release may be repeated within ε; 0 if not even once.

    Parameters
    ----------
    epsilon : float
        The budget, > 0.
    step : Event
        The release; its ``uses`` are ignored.
    accountant, delta
        As for `fl_privacy_lib.accounting.accountants.spend`.

    Raises
    ------
    InputError
        If more than 2**40 releases stay within the budget.

    Examples
    --------
    >>> steps_within(0.5, Event(0.01, 6.0, "example", "add_remove"), "moments_accountant", 1e-5)
    3724
    """
    positive(epsilon=epsilon)

    def within(uses: int) -> bool:
        return spend(replace(step, uses=uses), accountant, delta).epsilon <= epsilon

    inside, beyond = 0, 1
    while within(beyond):
        inside, beyond = beyond, beyond * 2
        if beyond > _MOST_STEPS:
            raise InputError(
                f"epsilon = {epsilon} allows more than 2**40 steps at this noise_multiplier = "
                f"{step.noise_multiplier}: the budget is no limit, so choose the number of steps yourself."
            )
    while beyond - inside > 1:
        middle = (inside + beyond) // 2
        inside, beyond = (middle, beyond) if within(middle) else (inside, middle)
    return inside
