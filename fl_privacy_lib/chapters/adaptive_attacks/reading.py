"""Reading the records of chapter 02: curves over one setting, and Fed-αCDP's Table 3."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fl_privacy_lib.metrics import MSE_SUCCESS, SSIM_SUCCESS, wilson_interval
from fl_privacy_lib.reproduction.comparison import cells, effective_images, measured, select
from fl_privacy_lib.reproduction.experiments.scoring import summary
from fl_privacy_lib.reproduction.figures import INK, line_styles, named
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.tables import RESILIENCE, Row, Table, beside, number, rate
from fl_privacy_lib.reproduction.verdict import design_effect

TABLE_3 = "fed_alpha_cdp/table_3"
SOURCES = ("fed_cdp/table_7", TABLE_3, f"{TABLE_3}_rest")
"""The records in which Table 3's cells stand."""
FROM_TABLE_VII = {
    "non_private": "non_private",
    "fed_sdp_client": "fed_sdp_client",
    "fed_sdp_server": "fed_sdp",
}
"""Defence → Table 3's method, where Fed-CDP's Table VII has the same cell."""
Banded = tuple[float, float, float, float]
"""A point of a curve with a band: x, y, and the band from below to above."""
DYNAMIC_MSE = 0.7  # below which the paper on dynamic parameters counts a success


def curves(
    table: str,
    rows: dict[str, Any],
    split: str,
    metric: str = "attack_success_rate",
    x: str = "level",
    folder: Path = MEASURED,
) -> dict[str, list[Banded]]:
    """Return name → curve (x, mean, low, high) of a recorded metric.

    Of equal cells, the one with most victims counts. The band of a success rate is its Wilson
    interval, that of any other metric one standard deviation of the seeds.

    Parameters
    ----------
    table : 'paper/table'
    rows : column → the value or values that select the rows
    split : the column whose values name the curves
    metric : what is drawn
    x : the column of numbers along the axis
    """
    frame = select(measured(table, folder), {"metric": metric} | rows)
    by_name: dict[str, dict[float, Any]] = {}
    for _, r in frame.iterrows():
        points = by_name.setdefault(named(r[split]), {})
        if int(r["n"]) >= points.get(float(r[x]), {"n": 0})["n"]:
            points[float(r[x])] = {**r[["mean", "std", "effective"]], "n": int(r["n"])}
    return {
        name: [(level, p["mean"], *_band(p, metric)) for level, p in sorted(points.items())]
        for name, points in by_name.items()
    }


def live(
    cell: Any, result: dict[str, Any], metric: str = "attack_success_rate"
) -> dict[str, float]:
    """Return a metric of a cell that was just run: mean, std, n, effective number of images."""
    p = summary(result, cell.seeds)[metric]
    effect = design_effect(p["mean"], p["std"], cell.seeds, int(p["n"]) // cell.seeds)
    return p | {"effective": float(p["n"] / effect)}


def live_curve(
    results: dict[Any, dict[str, Any]], metric: str = "attack_success_rate", x: str = "level"
) -> list[Banded]:
    """Return the same of cells that were just run, cell → its result, over a field of the cell."""
    points = [(getattr(cell, x), live(cell, r, metric)) for cell, r in results.items()]
    return [(level, p["mean"], *_band(p, metric)) for level, p in points]


def _band(point: dict[str, Any], metric: str) -> tuple[float, float]:
    if metric == "attack_success_rate":
        return wilson_interval(point["mean"] * point["effective"], point["effective"])
    return point["mean"] - point["std"], point["mean"] + point["std"]


def table_3_frame(folder: Path = MEASURED) -> pd.DataFrame:
    """Return the recorded rows of Table 3's cells from all `SOURCES`, under Table 3's keys."""
    seven, *rest = (measured(table, folder) for table in SOURCES)
    if len(seven):
        seven = seven[seven["arm"].isin(list(FROM_TABLE_VII))]
        seven = seven.assign(
            method=seven["arm"].map(FROM_TABLE_VII), defense=seven["arm"], arm=seven["attacker"]
        )
        both = seven["threat_type"] == "type_0_1"
        seven = pd.concat(
            [seven[~both], *(seven[both].assign(threat_type=t) for t in ("type_0", "type_1"))]
        )
    frames = [frame for frame in (seven, *rest) if len(frame)]
    frame = pd.concat(frames, ignore_index=True).fillna("not_applicable") if frames else seven
    return frame.assign(effective=effective_images(frame)) if frames else seven


def table_3(folder: Path = MEASURED) -> Table:
    """Return the whole of Table 3: published values, two measured attackers, two guesses."""
    frame = table_3_frame(folder)
    keys = ("dataset", "threat_type", "method", "defense")
    aware_rates = {"arm": "clip_aware", "metric": "attack_success_rate"}

    def aware(row: Row) -> str:
        cell = select(frame, {key: row[key] for key in keys} | aware_rates)
        return rate(cell["mean"].iloc[0], cell["effective"].iloc[0]) if len(cell) else "—"

    columns = {
        "data, type": lambda row: f"{named(row['dataset'])}, {named(row['threat_type'])}",
        "method": lambda row: named(row["defense" if row.cell else "method"]),
        **RESILIENCE,
        "recovered, clip-aware": aware,
        "grey; class mean": lambda row: (
            f"{row.mean('grey_mse')}; {row.mean('class_mean_mse')}" if row.cell else "—"
        ),
    }
    return beside(TABLE_3, columns, keys, frame=select(frame, {"arm": "naive"}), unrecorded=True)


def guessed(folder: Path = MEASURED) -> dict[str, tuple[int, int]]:
    """Return guess → how many of Table 3's successful attacks it beats, and out of how many.

    Counted are the published successes with a record; a guess beats those whose printed distance is
    larger than its own. The guesses are made for the victims of the same cell: a grey image, and
    the mean of the victim's class.
    """
    keys = ["dataset", "threat_type", "method"]
    printed = load_published(TABLE_3).set_index([*keys, "metric"])["value"].to_dict()
    recorded = {
        tuple(cell[k] for k in keys): cell for cell in reversed(cells(table_3_frame(folder)))
    }
    leaks = [key for key in recorded if printed.get((*key, "resilient")) == "false"]
    return {
        name: (
            sum(float(printed[*key, "rmse"]) > recorded[key][metric] for key in leaks),
            len(leaks),
        )
        for name, metric in (("grey", "grey_mse"), ("class mean", "class_mean_mse"))
    }


def thresholds(grey: float, mean: float) -> Table:
    """Return what counts as a success in the papers and here, and whether two guesses would.

    Parameters
    ----------
    grey, mean : MSE of a grey image and of the class's mean image
    """

    def word(error: float, most: float) -> str:
        return "yes" if error < most else "no"

    rows = [
        ["Fed-αCDP", "the images are visually similar; no number is printed", "—", "—"],
        [
            "Dynamic parameters",
            f"MSE below {DYNAMIC_MSE:.2f}",
            word(grey, DYNAMIC_MSE),
            word(mean, DYNAMIC_MSE),
        ],
        [
            "here",
            f"MSE below {MSE_SUCCESS:g} and SSIM above {SSIM_SUCCESS:g}",
            word(grey, MSE_SUCCESS),
            word(mean, MSE_SUCCESS),
        ],
    ]
    columns = ["who", "an attack succeeds if", f"a grey image would (MSE {number(grey)})",
               f"the class mean would (MSE {number(mean)})"]  # fmt: skip
    return Table(columns, rows)


def banded_curves(
    groups: dict[str, dict[str, Sequence[Banded]]],
    xlabel: str,
    marks: dict[str, float] | None = None,
    **axes_settings: Any,
) -> Figure:
    """Draw curves with their intervals, a panel for each quantity above one axis.

    Every curve stands a little to the right of the one before it, so that no bar hides another.

    Parameters
    ----------
    groups : quantity → name → points in the order of x; a name looks the same in every panel
    marks : name → x of a vertical line
    """
    style = line_styles(groups)
    figure, grid = plt.subplots(
        len(groups), 1, figsize=(5.0, 2.4 * len(groups) + 1.0), sharex=True, squeeze=False
    )
    for axes, (quantity, series) in zip(grid.flat, groups.items(), strict=True):
        axes.set(ylabel=quantity, ylim=(-0.03, 1.03), **axes_settings)
        scale = axes.xaxis.get_transform()
        width = np.ptp(scale.transform([p[0] for points in series.values() for p in points]))
        for i, (name, points) in enumerate(series.items()):
            x, y, low, high = np.transpose(points)
            beside = scale.inverted().transform(scale.transform(x) + 0.01 * i * width)
            axes.errorbar(beside, y, np.abs([y - low, high - y]), label=name, ms=5, elinewidth=1.2,
                          **style[name])  # fmt: skip
        for mark in (marks or {}).values():
            axes.axvline(mark, color=INK, lw=1, ls=":", zorder=0)
        axes.grid(color="#e4e7eb")
    for i, (name, mark) in enumerate((marks or {}).items()):  # names are wide: at two heights
        grid[0, 0].annotate(
            name, (mark, 1.0), (0, 3 + 11 * (i % 2)), grid[0, 0].get_xaxis_transform(),
            "offset points", fontsize=9, color=INK, ha=("right", "left")[i % 2])  # fmt: skip
    grid[-1, 0].set_xlabel(xlabel)
    if len(style) > 1:
        figure.legend(handles=[Line2D([], [], label=name, ms=5, **style[name]) for name in style],
                      loc="outside upper center", ncols=2)  # fmt: skip
    return figure
