"""The noise that a budget asks for, behind three sliders (chapter 10)."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from fl_privacy_lib._checks import refuse
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.accounting.events import Floats
from fl_privacy_lib.accounting.rdp import TODAY_ORDERS, integer_rdp, order_epsilons
from fl_privacy_lib.reproduction.explorer import HTML, explorer

ORDERS = tuple(order for order in TODAY_ORDERS if order >= 2 and order == int(order))
NOISE = np.geomspace(0.3, 1500, 1000)  # a step is less than a hundredth
SENTENCE = (
    "Budget ε = {} at δ = 1e-5 for one example, sampling rate q = {}, T = {} rounds: the sum of a "
    "round needs noise of standard deviation {} times C (adding or removing the example; Poisson "
    "sampling; Rényi accounting, which asks for a little more than privacy loss distributions). Of "
    "K clients with a margin of m, each adds this over √(K − m)."
)


@cache
def spent_by(rate: float, steps: tuple[int, ...]) -> Floats:
    """Return ε of every scale in `NOISE` after so many steps, [steps, scales], falling in each."""
    one = integer_rdp(np.full(len(NOISE), rate), NOISE, ORDERS)  # [scales, orders]
    return order_epsilons(
        np.array(steps)[:, None, None] * one, np.array(ORDERS), DELTA, "improved"
    ).min(axis=-1)


def noise_needed(budget: float, rate: float, steps: Sequence[int]) -> list[float]:
    """Return the least noise multiplier in `NOISE` that keeps a budget, by Rényi accounting.

    Parameters
    ----------
    budget : ε > 0 at δ = 1e-5, of one example, added or removed
    rate : q in (0, 1], with which each example is drawn by itself
    steps : T, of each value that is returned

    Raises
    ------
    InputError
        If none of the scales keeps the budget.
    """
    kept = spent_by(rate, tuple(steps)) <= budget
    refuse(
        {
            f"no noise up to σ = {NOISE[-1]:g} keeps ε = {budget:g}: raise it.": not kept.any(
                axis=1
            ).all()
        }
    )
    return [float(NOISE[row.argmax()]) for row in kept]


def noise_explorer(
    budgets: Sequence[float],
    rates: Sequence[float],
    steps: Sequence[int],
    start: tuple[float, float, int],
) -> HTML:
    """Return the noise that a budget asks for, behind sliders for ε, q and T."""
    sliders = {"budget ε": budgets, "sampling rate q": rates, "rounds T": steps}
    return explorer("noise-explorer", sliders, start, "σ", SENTENCE,
                    lambda budget, rate: noise_needed(budget, rate, steps))  # fmt: skip
