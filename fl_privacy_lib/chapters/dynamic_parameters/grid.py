"""The recorded cells of Dynamic parameters: every training of its tables (chapter 06).

Nothing is computed here. Every setting below was written down before the first recording.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fl_privacy_lib.accounting.conventions import ITERATIONS
from fl_privacy_lib.accounting.recompute import recompute
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import DYNAMIC, LOOKS, POLICIES, Central
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.searching import Cell, Tried, judged, searches
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.records import Values, numbers

BATCHES = {"mnist": 600, "fashion_mnist": 600, "cifar10": 500, "lfw": 22}
CLIPS = (1.0, 2.0, 8.0, 16.0, 32.0)  # of Table IV, beside the default 4
SENSITIVITIES = ("dp_baseline", "dp_dyns_cdecay", "dp_dyns_l2max", "dp_dyns")
NOISES = tuple(name for name in DYNAMIC if name not in SENSITIVITIES)
"""The methods with a decaying σ_t, in Table VIII's order."""
PAPER = "dynamic_parameters"


def training(settings: DynamicParameters, dataset: str, method: str, **changes: Any) -> Central:
    """Return a cell at the paper's settings for a data set, cut to the profile's iterations."""
    published: dict[str, Any] = {
        "rounds": min(settings.iterations, ITERATIONS.get(dataset, settings.iterations)),
        "batch_size": BATCHES.get(dataset, 100),
        "setting": "not_applicable" if method == "non_private" else "batch",
        "seeds": settings.seeds,
    }
    return Central(dataset, method, **published | changes)


def cell(settings: DynamicParameters, dataset: str, method: str, **changes: Any) -> Cell:
    """Return a cell of Table IV, VIII or XI.

    The baseline at C = 4 and the non-private training have a search of their own. Every other cell
    tries three rates around the baseline's: a clipped step is as long as C.
    """
    point = training(settings, dataset, method, **changes)
    middle = training(settings, dataset, "dp_baseline")
    keys = {"clip": "all" if method == "non_private" else f"{point.clip_norm:g}"}
    if point in (middle, training(settings, dataset, "non_private")):
        return Cell(point, keys)
    return Cell(point, keys, middle, middle.clip_norm / point.clip_norm)


Cells = Callable[[DynamicParameters, str], list[Cell]]


def table_4(
    clips: tuple[float, ...], methods: tuple[str, ...], settings: DynamicParameters, dataset: str
) -> list[Cell]:
    """Return Table IV's columns for some clipping bounds."""
    return [cell(settings, dataset, m, clip_norm=c) for c in clips for m in methods]


def noises(methods: tuple[str, ...], settings: DynamicParameters, dataset: str) -> list[Cell]:
    """Return Table VIII's trainings with a decaying noise scale."""
    policies = [cell(settings, dataset, m, noise_scale_policy=p) for p in POLICIES for m in methods]
    if methods == NOISES:
        policies += [cell(settings, dataset, "dp_dynsigma", noise_scale_policy=p, schedule="printed")
                     for p in POLICIES]  # fmt: skip
    return policies


def divisors(settings: DynamicParameters, dataset: str) -> list[Cell]:
    """Return the baseline with what else may divide the noise, each with a search of its own."""
    return [Cell(training(settings, dataset, "dp_baseline", setting=s, seeds=1), {"clip": "4"})
            for s in ("sqrt_batch", "none")]  # fmt: skip


def variances(settings: DynamicParameters, dataset: str) -> list[Cell]:
    """Return Table VII's trainings: the noise stays at (σC)² where the bound decays."""
    return [cell(settings, dataset, "dp_dyns_cdecay", clip_norm=c, variance="fixed", seeds=1)
            for c in (4.0, 8.0)]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A part of the recording: a table, its data sets and its cells."""

    table: str
    datasets: tuple[str, ...]
    cells: Cells
    long: bool = True  # hours on a CPU: only where it is named, or on a CUDA device


FIRST = ("non_private", *SENSITIVITIES)
COLUMNS = {
    "table_4": Column("table_4", ("mnist",), partial(table_4, (4.0,), FIRST)),
    "table_8": Column("noise_scales", ("mnist",), partial(noises, ("dp_dynsigma", "dp_dyns_sigma"))),
    "table_4_clips": Column("table_4", ("mnist",), partial(table_4, CLIPS, SENSITIVITIES)),
    "table_8_rest": Column("noise_scales", ("mnist",), partial(noises, NOISES)),
    "divisors": Column("table_4", ("mnist",), divisors),
    "table_4_lfw": Column("table_4", ("lfw",), partial(table_4, (4.0, *CLIPS), FIRST)),
    "table_4_fashion": Column("table_4", ("fashion_mnist",), partial(table_4, (4.0, *CLIPS), FIRST)),
    "table_4_cifar10": Column("table_4", ("cifar10",), partial(table_4, (4.0,), FIRST)),
    "table_7": Column("variances", ("mnist",), variances),
    "table_11": Column("table_4", ("mnist",), partial(table_4, (4.0,), ("quantile_clip",))),
}
"""Part → its cells, in the order in which they are recorded."""


def asked(column: Column, settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return the rows of a part's searches."""
    return searches(column.cells(settings, dataset), tried)


def rows(column: Column, settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return a part's judged rows."""
    return judged(column.cells(settings, dataset), tried)


def look_after(iterations: float, point: Central) -> int:
    """Return the look at or next before an iteration."""
    return max(0, int(iterations * LOOKS / point.rounds) - 1)


def stops(dataset: str) -> dict[tuple[str, str, str], int]:
    """Return (policy, accounting, budget) → the iteration at which Table VIII stops, ours."""
    table = f"{PAPER}/table_8"
    found = recompute(PAPER, "table_8", load_published(table).to_dict("records"))  # type: ignore[arg-type]
    return {
        (c.keys["noise_scale_policy"], c.keys["accounting"], c.keys["target_epsilon"]): int(c.ours)
        for c in found
        if c.kind == "iterations"
    }


def stopped_values(iterations: int, point: Central, results: Sequence[Result]) -> Values:
    """Return the accuracy of a training that stops early, at the look before."""
    accuracies = results[0]["curve"][:, look_after(iterations, point)]
    return {
        "accuracy": numbers(accuracies),
        "guess": numbers(results[0]["guess"]),
        "evaluated": numbers(results[0]["evaluated"]),
        "searched": numbers([1]),
    }


def stopped(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return Table VIII: each finished training, stopped where a budget is spent.

    A fixed noise scale spends it at the end.
    """
    found = []
    for name in ("table_4", "table_8", "table_8_rest"):
        for row in rows(COLUMNS[name], settings, dataset, tried):
            point = row.points[0]
            if point.method == "non_private" or point.schedule == "printed":
                continue
            policy = point.noise_scale_policy
            ends = {k: i for k, i in stops(dataset).items() if k[0] == policy}
            ends = ends or {(policy, "all", "all"): point.rounds}
            for (_, accounting, budget), end in ends.items():
                stop = {"accounting": accounting, "target_epsilon": budget, "stopped_at": str(end)}
                values = partial(stopped_values, min(end, point.rounds), point)
                found.append(Row(stop | row.key, (point,), values, point.seeds))
    return list({str(row.key): row for row in found}.values())


def reached_values(results: Sequence[Result]) -> Values:
    """Return when a training first reaches the baseline's last accuracy, of equal seeds.

    `iterations_left` of T are not run; 0 for one that never reaches it.
    """
    target = results[0]["accuracy"].mean()
    looks = results[1]["curve"] >= target  # [seeds, looks]
    first = np.where(looks.any(1), looks.argmax(1), looks.shape[1] - 1) + 1
    total = results[1]["rounds_run"]
    return {
        "iterations": numbers(first * total / looks.shape[1]),
        "iterations_left": numbers(total - first * total / looks.shape[1]),
        "reached": numbers(looks.any(1)),
        "target_accuracy": numbers([target]),
        "guess": numbers(results[1]["guess"]),
        "evaluated": numbers(results[1]["evaluated"]),
        "searched": numbers([1]),
    }


def reached(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return Tables VI and IX: when each method reaches the baseline's accuracy at its C."""
    parts = [n for n in COLUMNS if n.startswith("table_4") or n.startswith("table_8")]
    every = [r for n in parts if dataset in COLUMNS[n].datasets
             for r in rows(COLUMNS[n], settings, dataset, tried)]  # fmt: skip
    bases = {r.points[0].clip_norm: r.points[0] for r in every if r.points[0].method == "dp_baseline"}
    pairs = {r.points[0]: (r, bases.get(r.points[0].clip_norm)) for r in every}
    return [
        Row(row.key, (base, point), reached_values, point.seeds)
        for point, (row, base) in pairs.items()
        if base is not None and point.method != "non_private"
    ]


def curve_values(look: int, results: Sequence[Result]) -> Values:
    """Return the accuracy at a look."""
    return {"accuracy": numbers(results[0]["curve"][:, look])}


def curves(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return accuracy over iterations of the trainings with C = 4, at every fifth look."""
    points = [r.points[0] for n in ("table_4", "table_8")
              for r in rows(COLUMNS[n], settings, dataset, tried)]  # fmt: skip
    return [
        Row(
            {"iteration": str((look + 1) * p.rounds // LOOKS), "dataset": dataset, "method": p.method,
             "noise_scale_policy": p.noise_scale_policy, "clip": f"{p.clip_norm:g}"},
            (p,), partial(curve_values, look), p.seeds,
        )
        for p in points
        for look in range(4, LOOKS, 5)
    ]  # fmt: skip
