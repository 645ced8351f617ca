"""The recorded cells of Dynamic parameters: every training of its tables (chapter 06).

Nothing is computed here. Every setting below was written down before the first recording.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import product
from typing import Any

from fl_privacy_lib.accounting.conventions import DELTA, ITERATIONS
from fl_privacy_lib.accounting.recompute import recompute
from fl_privacy_lib.chapters.dynamic_parameters.distinguishing import Game, game_values
from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.chapters.dynamic_parameters.training import DYNAMIC, POLICIES, Central
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.cells import HIDDEN, ThreatCell
from fl_privacy_lib.reproduction.experiments.scoring import summary
from fl_privacy_lib.reproduction.experiments.searching import (
    Cell,
    Tried,
    judged,
    reached_values,
    row_of,
    searches,
    stopped_values,
)
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.reproduction.records import Values, numbers

BATCHES = {"mnist": 600, "fashion_mnist": 600, "cifar10": 500, "lfw": 22}
SENSITIVITIES = ("dp_baseline", "dp_dyns_cdecay", "dp_dyns_l2max", "dp_dyns")
PAPER, CURVE = "dynamic_parameters", 20  # places of a recorded curve
WHOLE_GRADIENTS = 2000  # iterations of AdaClip, on the generic engine
THRESHOLD = 0.7  # of the mean squared error, below which the paper counts an image as recovered

Arm = tuple[str, dict[str, Any]]
"""A method, and settings of `Central` that differ from the paper's."""


def training(settings: DynamicParameters, dataset: str, method: str, **changes: Any) -> Central:
    """Return a cell at the paper's settings for a data set, cut to the profile's iterations.

    AdaClip needs whole gradients, and has fewer iterations: a reduced setting.
    """
    longest = ITERATIONS.get(dataset, settings.iterations)
    rounds = min(settings.iterations, WHOLE_GRADIENTS if method == "adaclip" else longest)
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


def rows_of(
    kind: Any, some: list[Arm], settings: DynamicParameters, dataset: str, tried: Tried
) -> list[Row]:
    """Return the rows of one kind, `searches` or `judged`, of some arms on a data set."""
    return list(kind([cell(settings, dataset, arm) for arm in some], tried))


FIRST = arms(("non_private", *SENSITIVITIES))
OTHER_CLIPS = arms(SENSITIVITIES, clip_norm=(1.0, 2.0, 8.0, 16.0, 32.0))  # beside the default 4
READINGS: list[Arm] = [
    ("dp_baseline", {"setting": "sqrt_batch"}),
    ("dp_dyns_l2max", {"setting": "code"}),
    ("dp_dyns_l2max", {"setting": "code", "clip_norm": 32.0}),
    ("dp_baseline", {"setting": "none"}),
]
FITTED = (0.25, 0.025)  # C_0 and C_T, the best of `fit`; a test holds the record to it
COUNTED = round((6.0**-2 - (BATCHES["mnist"] / 20) ** -2) ** -0.5, 5)
"""σ beside quantile clipping's noisy counts, of standard deviation B/20: σ⁻² + (B/20)⁻² = 6⁻².

Rounded, as below, to the digits of a record: a search has to find its own tries there.
"""
REPAIRS: list[Arm] = [
    ("dp_flat", {"noise_scale": round(6.0 / 3**0.5, 4)}),
    ("dp_dyns_cdecay", {"clip_norm": FITTED[0], "clip_end": FITTED[1]}),
    ("quantile_clip", {"noise_scale": COUNTED}),
]
"""Methods at the ε that is proved of the baseline: its three tensors have σ/√3 as multiplier."""
COLUMNS = {
    "table_4": ("table_4", ("mnist",), FIRST),
    "table_8": ("noise_scales", ("mnist",), arms(
        ("dp_dynsigma",), noise_scale_policy=tuple(POLICIES))),
    "repairs": ("repairs", ("mnist",), REPAIRS),
    "table_4_clips": ("table_4", ("mnist",), OTHER_CLIPS),
    "readings": ("table_4", ("mnist",), READINGS),
    "rate_decay": ("table_4", ("mnist",), arms(("dp_rate_decay", "dp_short_steps"))),
    "table_8_rest": ("noise_scales", ("mnist",), arms(
        ("dp_dyns_cdecay_sigma", "dp_dyns_l2max_sigma", "dp_dyns_sigma"),
        noise_scale_policy=tuple(POLICIES))),
    "printed": ("noise_scales", ("mnist",), arms(
        ("dp_dynsigma",), noise_scale_policy=tuple(POLICIES), schedule=("printed",))),
    "table_4_lfw": ("table_4", ("lfw",), FIRST),
    "table_4_lfw_clips": ("table_4", ("lfw",), OTHER_CLIPS),
    "table_4_fashion": ("table_4", ("fashion_mnist",), FIRST + OTHER_CLIPS),
    "table_4_cifar10": ("table_4", ("cifar10",), FIRST),
    "table_7": ("variances", ("mnist",), arms(
        ("dp_dyns_cdecay",), clip_norm=(4.0, 8.0), variance=("fixed",))),
    "table_11": ("table_4", ("mnist",), arms(("quantile_clip", "adaclip"))),
}  # fmt: skip
"""Part → its table, data sets and arms, each with a search before it."""


def finished(settings: DynamicParameters, dataset: str, tried: Tried) -> dict[Central, Row]:
    """Return the judged rows of Tables IV and VIII in the reading that judges, by training."""
    every = [arm for table, datasets, some in COLUMNS.values() for arm in some
             if dataset in datasets and table in ("table_4", "noise_scales")
             and arm[0] in ("non_private", *DYNAMIC)]  # fmt: skip
    rows = rows_of(judged, every, settings, dataset, tried)
    return {r.points[0]: r for r in rows if r.points[0].setting in ("batch", "not_applicable")}


@cache
def stops() -> dict[tuple[str, ...], int]:
    """Return (policy, accounting, budget) → the iteration at which Table VIII stops, ours."""
    printed: Any = load_published(f"{PAPER}/table_8").to_dict("records")
    return {tuple(c.keys[n] for n in ("noise_scale_policy", "accounting", "target_epsilon")):
            int(c.ours)
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
        Row(row.key, (bases[p.clip_norm], p), partial(reached_values, p.rounds), p.seeds)
        for p, row in every.items()
        if p.clip_norm in bases and p.method in DYNAMIC
    ]


def curves(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return accuracy over iterations of the trainings with C = 4, at twenty places."""
    return [
        Row({"iteration": str(i * p.rounds // CURVE)} | {n: getattr(p, n) for n in (
            "dataset", "method", "noise_scale_policy", "schedule", "clip_norm", "rounds")},
            (p,), partial(stopped_values, i / CURVE), p.seeds)
        for p in finished(settings, dataset, tried) if p.clip_norm == 4
        for i in range(1, CURVE + 1)
    ]  # fmt: skip


def kept_rate(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return the baseline at C = 32, with the learning rate that its search chose at C = 4."""
    return [
        row_of(replace(row.points[0], clip_norm=32.0))
        for row in rows_of(judged, arms(("dp_baseline",)), settings, dataset, tried)
    ]


def distinguishing(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return the games at the first iteration and later, for two bounds."""
    points = [Game(dataset, at_round=t, clip_norm=c, batches=settings.batches, games=settings.games)
              for t in (0, 10, 100, 1000) for c in (4.0, 32.0)]  # fmt: skip
    return [row_of(p, partial(game_values, p, DELTA)) for p in points]


def fit(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return short trainings under several schedules of C, on data that count as public."""
    return [
        row_of(training(
            settings, dataset, "dp_dyns_cdecay", clip_norm=c, clip_end=c / ratio, rounds=1000,
            local_lr=rate / c, held_out=True, seeds=1,
        ))
        for c, ratio, rate in product((0.25, 1.0, 4.0), (1.0, 3.0, 10.0), (0.158114, 0.5, 1.58114))
    ]  # fmt: skip


ATTACKED = {
    "non_private": ("non_private", 0.0), "dp_baseline": ("fed_cdp_batch", 6.0),
    "quantile_clip": ("fed_cdp_batch", 6.0), "adaclip": ("adaclip", 6.0),
    "dp_dyns_sigma": ("fed_alpha_cdp_batch", 15.0),
}  # fmt: skip
"""Table III's method → the defence of its first iteration, and σ.

A quantile that starts at C is C there, so quantile clipping is the baseline.
"""


def table_3(settings: DynamicParameters, dataset: str, tried: Tried) -> list[Row]:
    """Return Table III: first iterations at three places, for a naive and an adaptive attacker.

    The places are a clipped example, the same with the noise that is meant for the mean of B
    examples, and the noisy mean of a few. Eight victims on each of four networks, or wherever a
    defence has added noise those of `HIDDEN`.
    """
    few, large, rows = setup_of(dataset).batch_size, BATCHES.get(dataset, 100), []
    places = {"example": ("example", 1, 1), "noised_example": ("batch", 1, large),
              "batch": ("batch", few, few)}  # fmt: skip
    for place, method, arm in product(places, ATTACKED, ("naive", "clip_aware")):
        (tap, size, divisor), (name, scale) = places[place], ATTACKED[method]
        if name != "fed_alpha_cdp_batch":  # whose noise is not divided by the size of the batch
            scale *= size
        noisy = place != "example" and method != "non_private"
        cell = ThreatCell(dataset, name, arm=arm, tap=tap, batch_size=size,
                          noise_scale=scale / divisor,
                          **(HIDDEN if noisy else {"victims": 8, "seeds": 4}))  # fmt: skip
        if arm == "naive" or method != "non_private":
            key = {"place": place} | asdict(cell) | {"method": method, "defense": name}
            rows.append(Row(key, (cell,), partial(attack_values, cell.seeds), cell.seeds))
    return rows


def attack_values(networks: int, results: Sequence[Result]) -> Values:
    """Return what is recorded of attacks, and the share that the paper's threshold counts."""
    return dict(summary(results[0], networks)) | {
        f"{name}_below_threshold": numbers(results[0][name] < THRESHOLD)
        for name in ("mse", "grey_mse")
    }


PARTS: dict[str, Any] = {
    name: part
    for column, (table, datasets, some) in COLUMNS.items()
    for name, *part in (
        (f"search_{column}", "search", datasets, partial(rows_of, searches, some)),
        (column, table, datasets, partial(rows_of, judged, some)),
    )
} | {
    make.__name__: [make.__name__, datasets, make]
    for make, datasets in (
        (distinguishing, ("mnist",)), (fit, ("fashion_mnist",)), (table_3, tuple(BATCHES)),
        (stopped, ("mnist",)), (reached, ("mnist",)), (curves, ("mnist",)),
        (kept_rate, ("mnist",)),
    )
}  # fmt: skip
"""Part → its table, its data sets, and what makes a data set's rows, in the order of recording."""
