"""The book's figures: one style, on a white card, told apart without colour."""

import base64
import io
from collections.abc import Container, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from fl_privacy_lib.defenses.registry import METHODS
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.reproduction.names import NAMES

INK, QUIET, ACCENT, WARN = "#1f2933", "#7b8794", "#0b6e99", "#b54708"
SERIES: tuple[dict[str, Any], ...] = (  # colour, marker and line differ together: readable in grey
    {"color": ACCENT, "marker": "o", "linestyle": "-"},
    {"color": WARN, "marker": "s", "linestyle": "--"},
    {"color": "#5b5f97", "marker": "^", "linestyle": ":"},
    {"color": INK, "marker": "D", "linestyle": "-."},
    {"color": "#1a7f37", "marker": "v", "linestyle": (0, (6, 2))},
    {"color": "#8a5a00", "marker": "P", "linestyle": (0, (1, 1))},
    {"color": QUIET, "marker": "X", "linestyle": (0, (3, 1, 1, 1))},
)
REFERENCE: dict[str, Any] = {"color": QUIET, "lw": 1, "linestyle": (0, (8, 3))}
STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.min_exponent": 3,  # 0.3, not 3 × 10⁻¹, on a logarithmic axis
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def named(code: str) -> str:
    """Return the reader's name of a code name."""
    return METHODS[code].title if code in METHODS else NAMES.get(code, code)


def use_style() -> None:
    """Use the book's style for all figures that follow."""
    plt.rcParams.update(STYLE)


ROUTE = (
    ("example\ngradients", "example", "per_example", "type 2"),
    ("batch\nmean", "batch", "per_batch", ""),
    ("client\nupdate", "update", "per_client", "types 1 and 0"),
    ("received\nupdate", "received", "on_arrival", "type 0"),
    ("aggregate", "aggregate", "on_aggregate", ""),
)


def draw_route(filled: dict[str, str] | None = None) -> Figure:
    """Draw the route of a gradient with its five stages, five taps and three threat types.

    Parameters
    ----------
    filled : stage → what a defence does there; None draws the empty route
    """
    filled = filled or {}
    figure, axes = plt.subplots(figsize=(7.6, 2.9))
    axes.set(xlim=(-0.62, 4.62), ylim=(-1.25, 1.42))
    axes.axis("off")
    bands = ((-0.55, 1.45, "at the client, L local iterations"), (1.55, 2.45, "once a round"),
             (2.55, 4.55, "at the server, once a round"))  # fmt: skip
    for left, right, text in bands:
        axes.add_patch(plt.Rectangle((left, -0.62), right - left, 1.72, color="#f1f4f7", zorder=0))
        axes.text((left + right) / 2, 1.2, text, ha="center", va="bottom", color=INK, fontsize=9)
    for i, (text, tap, stage, threat) in enumerate(ROUTE):
        strong = stage in filled
        box: dict[str, Any] = {
            "boxstyle": "round,pad=0.35",
            "facecolor": "white",
            "edgecolor": WARN if strong else INK,
            "linewidth": 2.2 if strong else 1.1,
        }
        axes.text(i, 0.66, text, ha="center", va="center", bbox=box, fontsize=9.5)
        if i:
            axes.annotate(
                "",
                (i - 0.34, 0.66),
                (i - 0.66, 0.66),
                arrowprops={"arrowstyle": "-|>", "color": INK},
            )
        axes.text(
            i, 0.1, filled.get(stage, stage), ha="center", va="center", fontsize=8.5,
            color=WARN if strong else INK, style="normal" if strong else "italic",
        )  # fmt: skip
        axes.plot([i, i], [-0.08, -0.4], color=ACCENT, lw=1.4)
        axes.plot(i, -0.4, "o", color=ACCENT, ms=8)
        axes.text(i, -0.76, f"tap: {tap}", ha="center", va="top", fontsize=9, color=ACCENT)
        axes.text(i, -0.99, threat, ha="center", va="top", fontsize=9.5, color=INK, weight="bold")
    return figure


def show_image(axes: Axes, image: np.ndarray) -> None:
    """Draw one image [C, H, W] in [0, 1], grey or RGB, without axes."""
    axes.imshow(
        np.moveaxis(image, 0, -1).squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest"
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#cbd2d9")


def image_grid(
    rows: Sequence[Sequence[np.ndarray]],
    row_names: Sequence[str],
    column_names: Sequence[str],
    size: float = 0.95,
) -> Figure:
    """Draw images [C, H, W] in rows and columns with a name for each.

    Parameters
    ----------
    rows : rows of equally many images; None leaves a place empty
    size : inches an image takes
    """
    count, width = len(rows), len(column_names)
    figure, grid = plt.subplots(count, width, squeeze=False,
                                figsize=(size * width + 2.1, size * count + 0.35))  # fmt: skip
    for r, images in enumerate(rows):
        for c in range(width):
            image = images[c] if c < len(images) else None
            if image is None:
                grid[r, c].axis("off")
            else:
                show_image(grid[r, c], image)
            grid[r, c].set_title("" if r else column_names[c], fontsize=9)
        grid[r, 0].set_ylabel(row_names[r], rotation=0, ha="right", va="center", fontsize=9,
                              labelpad=8)  # fmt: skip
    return figure


ATTACKERS = {"naive": "naive attacker", "clip_aware": "clip-aware attacker"}


def success_chart(
    cells: Sequence[dict[str, Any]], attackers: Mapping[str, str] = ATTACKERS
) -> Figure:
    """Draw success rates with Wilson intervals: a row for each cell, a marker for each attacker.

    Parameters
    ----------
    cells : dicts with name, and attacker → (successes, trials) for the attackers that it has
    attackers : attacker → what the legend calls it
    """
    rows = []
    for cell, attacker in ((c, a) for c in cells for a in attackers if a in c):
        successes, trials = cell[attacker]
        rate, (low, high) = successes / trials, wilson_interval(successes, trials)
        about = [[max(0.0, rate - low)], [max(0.0, high - rate)]]
        rows.append((cell["name"], rate, attackers[attacker], about))
    figure = value_chart(
        rows, "fraction of private images recovered", scale="linear", first=[*attackers.values()]
    )
    figure.set_size_inches(5.0, 0.42 * len(cells) + 0.9)
    figure.axes[0].set_xlim(-0.02, 1.02)
    return figure


Curve = tuple[Sequence[float], ...]  # x, y and, where there is one, the spread of y
Reference = tuple[str, float | Mapping[str, float | None]]


def curves(series: dict[str, Curve], xlabel: str, ylabel: str, **axes_settings: Any) -> Figure:
    """Draw named curves (x, y, spread), told apart by marker and line as well as by colour."""
    return panels({"": series}, xlabel, ylabel, **axes_settings)


def line_styles(
    groups: dict[str, dict[str, Any]], first: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return name → colour, marker and line, the same in every group.

    Parameters
    ----------
    first : names that take the first styles, drawn here or not: the same in every figure then
    """
    names = dict.fromkeys([*first, *(name for series in groups.values() for name in series)])
    if len(names) > len(SERIES):
        raise ValueError(
            f"{len(names)} curves, but only {len(SERIES)} can be told apart: leave some out."
        )
    styles = zip(names, SERIES, strict=False)
    return {n: style for n, style in styles if any(n in series for series in groups.values())}


def panels(
    groups: dict[str, dict[str, Curve]],
    xlabel: str,
    ylabel: str,
    columns: int = 2,
    size: tuple[float, float] | None = None,
    reference: Reference | None = None,
    first: Sequence[str] = (),
    points: Container[str] = (),
    legend_columns: int | None = None,
    **axes_settings: Any,
) -> Figure:
    """Draw groups of named curves, a panel each, with one legend and one style for each name.

    Parameters
    ----------
    groups : title → name → (x, y), or (x, y, spread) with error bars; a figure without a curve says
        that nothing is recorded
    size : inches; None: by the number of panels
    reference : name and height of a horizontal line in every panel, or title → height, None for a
        panel without one
    first : names that take the first styles, see line_styles
    points : names whose values are drawn as marks, every one of them, without a line
    legend_columns : of a legend above the panels; None: up to four, and one panel with up to four
        names has its legend inside
    """
    style = {
        name: look | ({"linestyle": "none"} if name in points else {})
        for name, look in line_styles(groups, first).items()
    }
    name_of_line, height = reference or ("", {})
    heights = {t: h for t in groups if (
        h := height.get(t) if isinstance(height, Mapping) else height) is not None}  # fmt: skip
    columns = max(1, min(columns, len(groups)))
    rows = max(1, -(-len(groups) // columns))
    size = size or ((6.4, 3.2) if rows == columns == 1 else (3.5 * columns, 2.4 * rows + 0.6))
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False)
    for axes, (title, series) in zip(grid.flat, groups.items(), strict=False):
        for name, (x, y, *spread) in series.items():
            axes.plot(x, y, label=name, ms=5, **style[name],
                      markevery=1 if name in points else max(1, len(x) // 12))  # fmt: skip
            if spread:
                axes.errorbar(x, y, spread[0], fmt="none", ecolor=style[name]["color"],
                              elinewidth=0.9, capsize=2)  # fmt: skip
        if title in heights:
            axes.axhline(heights[title], label=name_of_line, **REFERENCE)
        axes.set(title=title, **axes_settings)
        if axes.get_xscale() == "log":
            _plain_ticks(axes, sorted({float(v) for x, *_ in series.values() for v in x}))
        axes.grid(color="#e4e7eb")
    for axes in grid.flat[len(groups) :]:
        axes.set_axis_off()
    if not style:
        grid[0, 0].text(0.5, 0.5, "not recorded yet", ha="center", transform=grid[0, 0].transAxes)
    figure.supxlabel(xlabel, fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    if 1 < len(style) <= 4 and len(groups) == 1 and legend_columns is None:
        grid[0, 0].legend()
    elif len(style) > 1:
        handles = [Line2D([], [], label=name, ms=5, **style[name]) for name in style]
        handles += [Line2D([], [], label=name_of_line, **REFERENCE)] if heights else []
        figure.legend(handles=handles, loc="outside upper center",
                      ncols=legend_columns or min(4, len(style)))  # fmt: skip
    return figure


def _plain_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Label a logarithmic axis with the few values that were measured, in plain numbers.

    One that lies too close above another for two labels has a tick alone.
    """
    labels = [f"{float(f'{value:.3g}'):g}" for value in values]
    if 1 < len(values) <= 8 and len("".join(labels)) <= 28:  # longer ones would overlap
        apart = np.diff(np.log(values), prepend=-np.inf) > 0.1 * np.log(values[-1] / values[0])
        axes.set_xticks(values, np.where(apart, labels, "").tolist())
        axes.xaxis.set_minor_locator(NullLocator())


def value_chart(
    rows: Sequence[tuple[str, float, str] | tuple[str, float, str, Any]],
    xlabel: str,
    reference: float | None = None,
    scale: str = "log",
    first: Sequence[str] = (),
) -> Figure:
    """Draw one number a row on an axis, written above its mark, or several a row.

    Parameters
    ----------
    rows : (name, value, standing, spread): the standing chooses the mark, and the legend names it;
        a spread may be left out, and is what matplotlib's errorbar takes; equal names share a row
    reference : a value marked by a vertical line
    scale : 'log' or 'linear'
    first : standings that take the first styles, see line_styles
    """
    if not rows:
        return panels({"": {}}, xlabel, "")
    names = list(dict.fromkeys(name for name, *_ in rows))
    styles = line_styles({"": dict.fromkeys(row[2] for row in rows)}, first)
    several = len(names) < len(rows)  # narrow then: the numbers beside the marks are left out
    width, pitch = (5.4, 0.12 * len(styles) + 0.12) if several else (7.2, 0.36)
    figure, axes = plt.subplots(figsize=(width, pitch * len(names) + 1.2))
    for name, value, standing, *spread in rows:
        style, shift = styles[standing], list(styles).index(standing) - (len(styles) - 1) / 2
        row = names.index(name) + several * 0.19 * shift
        if not several:
            digits = f"{value:#.3g}" if scale == "linear" else f"{value:.3g}"
            axes.annotate(digits.rstrip("."), (value, row), (0, 4), textcoords="offset points",
                          ha="center", va="bottom", fontsize=8.5,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        axes.errorbar(value, row, xerr=spread[0] if spread else None, fmt=style["marker"],
                      color=style["color"], ms=6 if several else 8, capsize=2.5)  # fmt: skip
    if reference is not None:
        axes.axvline(reference, color=QUIET, lw=1, zorder=0)
    axes.set(xscale=scale, ylim=(len(names) - 0.5, -0.7), xlabel=xlabel)
    if scale == "log":
        values = [value for _, value, *_ in rows]
        subs = (1, 2, 5) if max(values) < 300 * min(values) else (1,)
        axes.xaxis.set(major_locator=LogLocator(subs=subs), minor_locator=NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlim(min(values) / 1.5, max(values) * 2)
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="x", color="#e4e7eb")
    handles = [Line2D([], [], color=s["color"], marker=s["marker"], lw=0) for s in styles.values()]
    figure.legend(handles, list(styles), loc="outside upper center", ncols=2)
    return figure


def png(figure: Figure) -> str:
    """Return a figure as a data address and close it."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
        plt.close(figure)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
