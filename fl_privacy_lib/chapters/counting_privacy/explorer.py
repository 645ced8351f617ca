"""ε over σ, q and T behind three sliders (chapter 03)."""

from collections.abc import Sequence

import numpy as np

from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.rdp import TODAY_ORDERS, order_epsilons, step_rdp
from fl_privacy_lib.reproduction.explorer import HTML, explorer


def epsilon_explorer(
    noise: Sequence[float],
    rates: Sequence[float],
    steps: Sequence[int],
    start: tuple[float, float, int],
    delta: float,
) -> HTML:
    """Return ε of Rényi accounting behind sliders for σ, q and T.

    Parameters
    ----------
    noise, rates, steps : the values of the three sliders, rising
    start : the value of each slider at the beginning
    delta : in (0, 1)
    """

    def curve(scale: float, rate: float) -> list[float]:
        step = step_rdp(Event(rate, scale, "example", "add_remove"))  # [1, orders]
        spent = np.array(steps)[:, None] * step  # [steps, orders]
        each = order_epsilons(spent, np.array(TODAY_ORDERS), delta, "improved")
        return list(np.maximum(each.min(axis=1), 0.0))

    sentence = (
        "Noise multiplier z = {}, sampling rate q = {}, T = {} steps: ε = {} at δ = "
        + f"{delta:.0e}".replace("e-0", "e-")
        + " for one example (adding or removing it; Poisson sampling; Rényi accounting with "
        "today's conversion)."
    )
    sliders = {"noise multiplier z": noise, "sampling rate q": rates, "steps T": steps}
    return explorer("privacy-explorer", sliders, start, "ε", sentence, curve)
