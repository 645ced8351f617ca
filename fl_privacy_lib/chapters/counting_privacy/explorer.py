"""ε over σ, q and T behind three sliders, without a server (chapter 03)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np

from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.rdp import TODAY_ORDERS, order_epsilons, step_rdp
from fl_privacy_lib.reproduction.figures import Curve, curves
from fl_privacy_lib.reproduction.interactive import png

SENTENCE = (
    "Noise multiplier σ = {}, sampling rate q = {}, T = {} steps: ε = {} at δ = $ for one example "
    "(adding or removing it; Poisson sampling; Rényi accounting with today's conversion)."
)
"""What the explorer says; the braces take the three sliders' values and ε, the dollar sign δ."""


@dataclass(frozen=True)
class Explorer:
    """ε over σ, q and T behind three sliders: points of the accountant, computed at build time.

    ``book/_static/explorer.js`` makes the sliders. Without it, as in Jupyter or where scripts are
    off, a figure and a sentence stand in their place.

    Parameters
    ----------
    ident : unique on its page
    noise, rates, steps : the values of the three sliders, rising
    start : the value of each slider at the beginning
    delta : in (0, 1)
    """

    ident: str
    noise: Sequence[float]
    rates: Sequence[float]
    steps: Sequence[int]
    start: tuple[float, float, int]
    delta: float

    @cached_property
    def epsilons(self) -> list[list[list[float]]]:
        """The ε of Rényi accounting with four digits, [noise, rates, steps]."""
        return [[self._curve(noise, rate) for rate in self.rates] for noise in self.noise]

    def _curve(self, noise: float, rate: float) -> list[float]:
        step = step_rdp(Event(rate, noise, "example", "add_remove"))  # [1, orders]
        spent = np.array(self.steps)[:, None] * step  # [steps, orders]
        each = order_epsilons(spent, np.array(TODAY_ORDERS), self.delta, "improved")
        return [float(f"{epsilon:.4g}") for epsilon in np.maximum(each.min(axis=1), 0.0)]

    def _repr_html_(self) -> str:
        values = {"noise multiplier σ": self.noise, "sampling rate q": self.rates,
                  "steps T": self.steps}  # fmt: skip
        places = [list(v).index(s) for v, s in zip(values.values(), self.start, strict=True)]
        delta, rate = f"{self.delta:.0e}".replace("e-0", "e-"), self.start[1]
        sentence = SENTENCE.replace("$", delta)
        data = {"sliders": [[name, list(v)] for name, v in values.items()], "start": places,
                "epsilons": self.epsilons, "sentence": sentence}  # fmt: skip
        drawn: dict[str, Curve] = {
            f"σ = {noise:g}": (self.steps, rows[places[1]])
            for noise, rows in list(zip(self.noise, self.epsilons, strict=True))[::3]
        }
        axes = {"xscale": "log", "yscale": "log", "size": (4.7, 3.2)}  # labels readable at 390 px
        picture = png(curves(drawn, "steps T", "ε", **axes))
        alt = (
            f"Curves of ε over the number of steps at q = {rate:g}, both axes logarithmic, for "
            f"{', '.join(drawn)}. Each curve rises, and the more noise, the lower it lies."
        )
        epsilon = self.epsilons[places[0]][places[1]][places[2]]
        text = sentence.format(f"{self.start[0]:g}", rate, f"{self.start[2]:,}", f"{epsilon:.3g}")
        return (
            f'<div id="{escape(self.ident)}" class="privacy-explorer">'
            f'<img class="dark-light" src="{picture}" alt="{escape(alt)}"><p>{escape(text)}</p>'
            f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script>'
            "</div>"
        )
