"""The recorded cells of Dynamic parameters: every training of its tables (chapter 06).

Nothing is computed here. Every setting below was written down before the first recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from fl_privacy_lib.accounting.conventions import DELTA, ITERATIONS
from fl_privacy_lib.accounting.recompute import recompute
from fl_privacy_lib.chapters.dynamic_parameters.distinguishing import Game, game_values
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import DYNAMIC, POLICIES, Central
from fl_privacy_lib.reproduction.experiment import Row
from fl_privacy_lib.reproduction.experiments.looks import reached_values, stopped_values
from fl_privacy_lib.reproduction.experiments.searching import Cell, Tried, judged, row_of
from fl_privacy_lib.reproduction.published import load_published

BATCHES = {"mnist": 600, "fashion_mnist": 600, "cifar10": 500, "lfw": 22}
CLIPS = (1.0, 2.0, 8.0, 16.0, 32.0)  # of Table IV, beside the default 4
SENSITIVITIES = ("dp_baseline", "dp_dyns_cdecay", "dp_dyns_l2max", "dp_dyns")
NOISES = tuple(name for name in DYNAMIC if name not in SENSITIVITIES)
"""The methods with a decaying σ_t, in Table VIII's order."""
PAPER, CURVE = "dynamic_parameters", 20  # places of a recorded curve

Arm = tuple[str, dict[str, Any]]
"""A method, and settings of `Central` that differ from the paper's."""


def training(settings: DynamicParameters, dataset: str, method: str, **changes: Any) -> Central:
    """Return a cell at the paper's settings for a data set, cut to the profile's iterations."""
    rounds = min(settings.iterations, ITERATIONS.get(dataset, settings.iterations))
    published: dict[str, Any] = {"rounds": rounds, "batch_size": BATCHES.get(dataset, 100),
                                 "seeds": settings.seeds}  # fmt: skip
    if method == "non_private":
        published["setting"] = "not_applicable"
    return Central(dataset, method, **published | changes)


def cell(settings: DynamicParameters, dataset: str, arm: Arm) -> Cell:
    """Return the cell of an arm.

    The baseline at C = 4, the non-private training and every departure in the reading have a search
    of their own. Every other cell tries three rates around the baseline's: a clipped step is as
    long as C.
    """
    point, middle = (training(settings, dataset, m, **c)
                     for m, c in (arm, ("dp_baseline", {})))  # fmt: skip
    keys = {"clip": "all" if point.method == "non_private" else f"{point.clip_norm:g}"}
    if point == middle or point.setting != middle.setting:
        return Cell(point, keys)
    return Cell(point, keys, middle, middle.clip_norm / point.clip_norm)


def arms(methods: Sequence[str], **changes: Sequence[Any]) -> list[Arm]:
    """Return every method under every combination of the changed settings."""
    return [(m, dict(zip(changes, values, strict=True)))
            for values in product(*changes.values()) for m in methods]  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A part of the recording: a table, its data sets and its arms."""

    table: str
    datasets: tuple[str, ...]
    arms: list[Arm]

    def rows(
        self, kind: Any, settings: DynamicParameters, dataset: str, tried: Tried
    ) -> list[Row]:
        """Return the rows of one kind, `searches` or `judged`, of a data set."""
        return kind([cell(settings, dataset, arm) for arm in self.arms], tried)


FIRST = arms(("non_private", *SENSITIVITIES))
EVERY_CLIP = FIRST + arms(SENSITIVITIES, clip_norm=CLIPS)
READINGS: list[Arm] = [
    ("dp_baseline", {"setting": "sqrt_batch"}),
    ("dp_dyns_l2max", {"setting": "code"}),
    ("dp_dyns_l2max", {"setting": "code", "clip_norm": 32.0}),
    ("dp_baseline", {"setting": "none"}),
]
COLUMNS = {
    "table_4": Column("table_4", ("mnist",), FIRST),
    "table_8": Column("noise_scales", ("mnist",),
                      arms(("dp_dynsigma",), noise_scale_policy=tuple(POLICIES))),
    "table_4_clips": Column("table_4", ("mnist",), EVERY_CLIP[len(FIRST) :]),
    "readings": Column("table_4", ("mnist",), READINGS),
    "table_8_rest": Column("noise_scales", ("mnist",),
                           arms(NOISES[1:], noise_scale_policy=tuple(POLICIES))),
    "printed": Column("noise_scales", ("mnist",), arms(
        ("dp_dynsigma",), noise_scale_policy=tuple(POLICIES), schedule=("printed",))),
    "table_4_lfw": Column("table_4", ("lfw",), EVERY_CLIP),
    "table_4_fashion": Column("table_4", ("fashion_mnist",), EVERY_CLIP),
    "table_4_cifar10": Column("table_4", ("cifar10",), FIRST),
    "table_7": Column("variances", ("mnist",), arms(
        ("dp_dyns_cdecay",), clip_norm=(4.0, 8.0), variance=("fixed",))),
    "table_11": Column("table_4", ("mnist",), arms(("quantile_clip",))),
}  # fmt: skip
"""Part → its table, data sets and arms, in the order in which they are recorded."""


def finished(settings: DynamicParameters, dataset: str, tried: Tried) -> dict[Central, Row]:
    """Return the judged rows of Tables IV and VIII in the reading that judges, by training."""
    parts = [c for c in COLUMNS.values() if c.table != "variances" and dataset in c.datasets]
    rows = [row for c in parts for row in c.rows(judged, settings, dataset, tried)]
    return {r.points[0]: r for r in rows if r.points[0].setting in ("batch", "not_applicable")}


@cache
def stops() -> dict[tuple[str, ...], int]:
    """Return (policy, accounting, budget) → the iteration at which Table VIII stops, ours."""
    printed: Any = load_published(f"{PAPER}/table_8").to_dict("records")
    names = ("noise_scale_policy", "accounting", "target_epsilon")
    return {tuple(c.keys[n] for n in names): int(c.ours)
            for c in recompute(PAPER, "table_8", printed) if c.kind == "iterations"}  # fmt: skip


def stopped(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return Table VIII: each finished training, stopped at the look before a budget is spent.

    A fixed noise scale spends it at the end.
    """
    found = []
    for p, row in finished(settings, dataset, tried).items():
        if p.clip_norm != 4 or p.method not in DYNAMIC or p.schedule == "printed":
            continue
        ends = {k[1:]: i for k, i in stops().items() if k[0] == p.noise_scale_policy}
        for (accounting, budget), end in (ends or {("all", "all"): p.rounds}).items():
            stop = {"accounting": accounting, "target_epsilon": budget, "stopped_at": str(end)}
            values = partial(stopped_values, min(1.0, end / ITERATIONS["mnist"]))
            found.append(Row(stop | row.key, (p,), values, p.seeds))
    return found


def reached(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return Tables VI and IX: when each method reaches the baseline's accuracy at its C."""
    every = finished(settings, dataset, tried)
    bases = {p.clip_norm: p for p in every if p.method == "dp_baseline"}
    return [
        Row(row.key, (bases[p.clip_norm], p), reached_values, p.seeds)
        for p, row in every.items()
        if p.clip_norm in bases and p.method in DYNAMIC
    ]


def curves(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return accuracy over iterations of the trainings with C = 4, at twenty places."""
    names = ("dataset", "method", "noise_scale_policy", "schedule", "clip_norm", "rounds")
    return [
        Row({"iteration": str(i * p.rounds // CURVE)} | {n: getattr(p, n) for n in names},
            (p,), partial(stopped_values, i / CURVE), p.seeds)
        for p in finished(settings, dataset, tried) if p.clip_norm == 4
        for i in range(1, CURVE + 1)
    ]  # fmt: skip


def distinguishing(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return the games at the first iteration and later, for two bounds."""
    points = [Game(dataset, at_round=t, clip_norm=c, batches=settings.batches, games=settings.games)
              for t in (0, 10, 100, 1000) for c in (4.0, 32.0)]  # fmt: skip
    return [row_of(p, partial(game_values, p, DELTA)) for p in points]
