"""A curve behind three sliders, without a server (chapters 03 and 10)."""

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape

from IPython.display import HTML

from fl_privacy_lib.reproduction.figures import Curve, curves, png


def explorer(
    ident: str,
    sliders: Mapping[str, Sequence[float]],
    start: tuple[float, float, int],
    symbol: str,
    sentence: str,
    curve: Callable[[float, float], Sequence[float]],
) -> HTML:
    """Return a positive value over three quantities, each with a slider.

    Its points are computed at build time. ``book/_static/explorer.js`` makes the sliders. Without
    it, as in Jupyter or where scripts are off, a figure and a sentence stand in their place.

    Parameters
    ----------
    ident : unique on its page
    sliders : name, whose last word is its symbol → rising values; the last one is the axis
    start : the value of each slider at the beginning
    symbol : of the value
    sentence : its braces take the three sliders' values and the value
    curve : values of the first two sliders → the value over the third
    """
    names, (first, second, steps) = list(sliders), sliders.values()
    # four digits at every position of the sliders
    values = [[[float(f"{value:.4g}") for value in curve(a, b)] for b in second] for a in first]
    places = [list(v).index(s) for v, s in zip(sliders.values(), start, strict=True)]
    data = {"sliders": [[name, list(v)] for name, v in sliders.items()],
            "start": places, "symbol": symbol, "values": values,
            "sentence": sentence}  # fmt: skip
    drawn: dict[str, Curve] = {
        f"{names[0].split()[-1]} = {value:g}": (steps, rows[places[1]])
        for value, rows in list(zip(first, values, strict=True))[::3]
    }
    axes = {"xscale": "log", "yscale": "log", "size": (4.7, 3.2)}  # labels readable at 390 px
    picture = png(curves(drawn, names[2], symbol, **axes))
    alt = (
        f"Curves of {symbol} over {names[2]} at {names[1]} = {start[1]:g}, both axes "
        f"logarithmic, for {', '.join(drawn)}. Each curve rises."
    )
    value = values[places[0]][places[1]][places[2]]
    text = sentence.format(f"{start[0]:g}", start[1], f"{start[2]:,}", f"{value:.3g}")
    return HTML(
        f'<div id="{escape(ident)}" class="privacy-explorer">'
        f'<img class="dark-light" src="{picture}" alt="{escape(alt)}"><p>{escape(text)}</p>'
        f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script>'
        "</div>"
    )
