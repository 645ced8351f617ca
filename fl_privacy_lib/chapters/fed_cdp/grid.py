"""Fed-CDP's recorded cells: the trainings of each table and of each part of it (chapter 05).

Nothing is computed here. Every setting below was written down before the first recording. A table's
function takes the chapter's settings, a data set, and the learning rates chosen in part (a).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.utility import Utility, utility_values
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.setups import PAPER, setup_of
from fl_privacy_lib.reproduction.experiments.training import CODE_NOISE, CODE_RATE, DECAYS, Training
from fl_privacy_lib.reproduction.records import Values, numbers

RATES = (0.0004, 0.002, 0.01, 0.05, 0.25)
"""Learning rates that every arm chooses from, steps of 5 around the released code's 0.05."""
ARMS = (
    ("non_private", "not_applicable"),
    *(
        (method, setting)
        for method in ("fed_sdp", "fed_cdp", "fed_cdp_decay")
        for setting in ("printed", "code")
    ),
)
COMPARED = tuple(arm for arm in ARMS if arm[0] in ("non_private", "fed_cdp"))
AS_CODED = (("fed_cdp", "as_coded"), ("fed_cdp_decay", "as_coded"))
"""The released code's Fed-SDP adds no noise and clips nothing: its row is the non-private one."""
TUNED_AS = {
    "fed_sdp_server": "fed_sdp",
    "median_clip": "fed_cdp",
    "dssgd": "non_private",
} | dict.fromkeys(DECAYS, "fed_cdp_decay")
CLIPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SCALES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SWEEP = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Noise multipliers between no noise and the code's scaling of σ = 6."""
PRUNED = (0.0, 0.3, 0.6, 0.9)
TENSORS = 3  # of both networks


def row_of(point: Training | Utility, values: Callable[[Result], Values], **keys: str) -> Row:
    """Return a point's recorded row; `keys` are key columns before those of its settings."""
    settings = asdict(point)
    key = keys | settings.pop("arm", {}) | settings
    return Row(key, (point,), lambda results: values(results[0]), getattr(point, "seeds", 1))


def training_values(result: Result) -> Values:
    """Return a training's accuracies over the seeds, how long it ran and whether it diverged."""
    names = ("accuracy", "test_accuracy", "rounds_run", "diverged", "growth")
    return {name: numbers(result[name]) for name in names if np.isfinite(result[name]).all()}


def norm_values(layer: int, axis: int, result: Result) -> Values:
    """Return one tensor's mean gradient norm by tenths of a training.

    Parameters
    ----------
    layer : the tensor's position
    axis : 0, tenths of the rounds; 1, of the local iterations
    result : of a watched training, with norms [T, L, M]
    """
    line = result["norms"][:, :, layer].mean(1 - axis)
    tenths = np.array_split(line, min(10, len(line)))
    means = {f"norm_{i}": numbers(tenth) for i, tenth in enumerate(tenths)}
    return means | {"late_over_early": numbers([tenths[-1].mean() / tenths[0].mean()])}


def training(
    settings: FedCdp, dataset: str, method: str, setting: str = "not_applicable", **changes: Any
) -> Training:
    """Return a cell at the paper's settings for a data set, cut to the profile's T and L.

    Parameters
    ----------
    settings : the chapter's; its rounds and local iterations are upper bounds
    dataset, method, setting : as in `Training`
    changes : settings of `Training` that differ from the paper's
    """
    setup = setup_of(dataset)
    published: dict[str, Any] = {
        "batch_size": setup.batch_size,
        "rounds": setup.rounds,
        "seed": settings.seed,
    }
    if method in DECAYS:
        published |= {"clip_norm": settings.decay_from, "clip_end": settings.decay_to}
    if setting == "as_coded":
        published |= {"noise_scale": CODE_NOISE, "local_lr": CODE_RATE}
    point = Training(dataset, method, setting, **(published | changes))
    return replace(
        point,
        rounds=min(point.rounds, settings.rounds),
        local_iterations=min(point.local_iterations, settings.local_iterations),
    )


Arm = tuple[str, ...]
Rates = dict[Arm, float]


def arm_of(point: Training) -> Arm:
    """Return what a learning rate is chosen for: data, method, reading, σ and L."""
    method = TUNED_AS.get(point.method, point.method)
    return (point.dataset, method, point.setting, f"{point.noise_scale:.6g}",
            str(point.local_iterations))  # fmt: skip


def best_rates(frame: pd.DataFrame) -> Rates:
    """Return the best learning rate of every arm with all rates recorded, the smaller of equals.

    Parameters
    ----------
    frame : the recorded rows of `learning_rates`
    """
    names = ["dataset", "method", "setting", "noise_scale", "local_iterations"]
    if not len(frame):
        return {}
    accuracy = frame[frame["metric"] == "accuracy"]
    accuracy = accuracy.assign(rate=accuracy["local_lr"].astype(float)).sort_values("rate")
    groups: Any = accuracy.groupby(names)
    return {tuple(arm): float(group["rate"].iloc[int(group["mean"].argmax())])
            for arm, group in groups if len(group) == len(RATES)}  # fmt: skip


def with_rate(point: Training, rates: Rates, like: Training | None = None) -> Training:
    """Return the point with its arm's learning rate, or that of another point's arm.

    Raises
    ------
    InputError
        If the arm's learning rate is not recorded yet.
    """
    if point.setting == "as_coded":
        return point
    arm = arm_of(like or point)
    if arm not in rates:
        raise InputError(
            f"the learning rate of {', '.join(arm)} is not chosen yet: "
            "record the part learning_rates."
        )
    return replace(point, local_lr=rates[arm])


Make = Callable[[FedCdp, str, Rates], list[Row]]  # settings, data set, rates


def _row(point: Training, **keys: str) -> Row:
    return row_of(point, training_values, **keys)


def learning_rates(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (a): all rates of every arm in one small cell, on a held-out tenth of the data.

    The cell has K = 100, K_t = 5, T = 10.
    """
    cell = partial(training, settings, dataset, held_out=True, rounds=10)
    points = [cell(*arm) for arm in ARMS]
    if dataset == "mnist":
        points += [cell("fed_cdp", "code", noise_scale=z) for z in SWEEP]
        points += [cell(*arm, local_iterations=1) for arm in COMPARED]
    return [_row(replace(point, local_lr=rate)) for point in points for rate in RATES]


def table_2(
    clients: int, participants: int, repeated: bool, settings: FedCdp, dataset: str, rates: Rates
) -> list[Row]:
    """Return (b), (c), (e): a column (K, K_t) of Table II, all arms and those `AS_CODED`."""
    seeds = settings.seeds if repeated else 1
    points = [
        training(settings, dataset, *arm, clients=clients, participants=participants, seeds=seeds)
        for arm in (*ARMS, *AS_CODED)
    ]
    share = f"{participants / clients:.2f}"
    return [_row(with_rate(point, rates), participation=share) for point in points]


def population(dataset: str) -> dict[str, Any]:
    """Return K and K_t of Tables I, IV and V: the code's for small data, a tenth for images."""
    if dataset in ("adult", "cancer"):
        return {"clients": 1000, "participants": 100}
    short = {"rounds": 20} if dataset in ("cifar10", "lfw") else {}
    return {"clients": 100, "participants": 10} | short


def table_1(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return the non-private accuracy of Table I."""
    point = training(settings, dataset, "non_private", **population(dataset))
    return [_row(with_rate(point, rates))]


def table_4(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (d): Fed-CDP over the clipping bound, at the learning rate chosen for C = 4."""
    cell = partial(training, settings, dataset, "fed_cdp", **population(dataset))
    points = [
        with_rate(cell(setting=setting, clip_norm=c), rates)
        for setting in ("printed", "code")
        for c in CLIPS
    ]
    return [_row(point, clip=f"{point.clip_norm:g}") for point in points]


def table_5(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (d): Fed-CDP over the noise scale, at the learning rate chosen for σ = 6."""
    cell = partial(training, settings, dataset, "fed_cdp", **population(dataset))
    return [
        _row(with_rate(cell(setting=setting, noise_scale=s), rates, like=cell(setting=setting)))
        for setting in ("printed", "code")
        for s in SCALES
    ]


def every_rate(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return Table I's cell and that of Tables IV and V at all rates: the cost of tuning on (a)."""
    return [_row(training(settings, dataset, *arm, local_lr=rate, **population(dataset)))
            for arm in COMPARED for rate in RATES]  # fmt: skip


def every_rate_large(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return Fed-CDP of Table II with 1,000 clients, 100 a round, at the two smallest rates."""
    cell = partial(training, settings, dataset, "fed_cdp", clients=1000, participants=100)
    return [
        _row(cell(setting=setting, local_lr=rate))
        for setting in ("code", "printed")
        for rate in RATES[:2]
    ]


def noise(
    pairs: tuple[tuple[int, float], ...], settings: FedCdp, dataset: str, rates: Rates
) -> list[Row]:
    """Return accuracy over (K_t, z), each z at its own learning rate; a round's noise is z/√K_t."""
    cell = partial(training, settings, dataset, "fed_cdp")
    points = [cell("code", noise_scale=z, participants=k) for k, z in pairs]
    points += [cell("printed", participants=10)] if (10, 6.0) in pairs else []
    return [_row(with_rate(p, rates), multiplier=f"{p.multiplier:.6g}",
                 round_noise=f"{p.multiplier / p.participants**0.5:.6g}")
            for p in points]  # fmt: skip


def utility(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return a round's signal, noise and Proposition 2's bound, at first and after 20 rounds."""
    arms = [training(settings, dataset, "fed_cdp", setting, participants=10)
            for setting in ("printed", "code", "as_coded")]  # fmt: skip
    late = min(20, settings.rounds)
    points = [
        Utility(with_rate(arm, rates), at, settings.examples) for at in (0, late) for arm in arms
    ]
    large = training(settings, dataset, "fed_cdp", "code", clients=1000, participants=100)
    points.append(Utility(with_rate(large, rates), 0, settings.examples))
    return [row_of(p, utility_values, multiplier=f"{p.arm.multiplier:.6g}") for p in points]


def figure_3(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return gradient norms by tensor, over rounds (K_t = 100, L = 1) and over local iterations."""
    cells = []
    panels: dict[str, dict[str, Any]] = {
        "rounds": {"clients": 1000, "participants": 100, "local_iterations": 1},
        "local_iterations": {"rounds": 10},
    }
    for axis, (panel, sizes) in enumerate(panels.items()):
        for arm in COMPARED:
            point = with_rate(training(settings, dataset, *arm, watched=True, **sizes), rates)
            cells += [
                row_of(point, partial(norm_values, m, axis), panel=panel, layer=str(m + 1))
                for m in range(TENSORS)
            ]
    return cells


def figure_5(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return accuracy where updates lack their smallest coordinates, at a fifth of the rounds."""
    arms = [arm for arm in ARMS if arm[1] != "printed"]
    return [
        _row(with_rate(training(settings, dataset, *arm, pruned=p, rounds=20), rates))
        for arm in arms
        for p in PRUNED
    ]


def local_iterations(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return the first column of Table II with L = 1, at learning rates of its own."""
    cell = partial(training, settings, dataset, local_iterations=1, seeds=settings.seeds)
    return [_row(with_rate(cell(*arm), rates), participation="0.05") for arm in COMPARED]


def variants(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return other decays, median clipping, noise at the server, selective sharing; 20 rounds."""
    methods = ("fed_cdp", *DECAYS, "median_clip", "fed_sdp", "fed_sdp_server")
    arms = [
        *((method, "code") for method in methods),
        ("non_private", "not_applicable"),
        ("dssgd", "not_applicable"),
    ]
    return [_row(with_rate(training(settings, dataset, *arm, rounds=20), rates)) for arm in arms]


@dataclass(frozen=True)
class Column:
    """A part of the recording: a table, its data sets, and what makes a data set's rows."""

    table: str
    datasets: tuple[str, ...]
    make: Make
    long: bool = False  # hours on a CPU: only where it is named, or on a CUDA device


POPULATIONS = tuple(
    (k, round(k * share)) for k in (100, 1000, 10_000) for share in (0.05, 0.1, 0.2, 0.5)
)
SHORT = ((100, 5), (100, 10), (100, 20), (100, 50), (1000, 50), (1000, 100))


def _column(clients: int, participants: int) -> Column:
    make = partial(table_2, clients, participants, clients == 100 and participants <= 10)
    return Column("table_2", ("mnist",), make, (clients, participants) not in SHORT)


BY_DATA: dict[str, Make] = {
    "table_1": table_1,
    "table_4": table_4,
    "table_5": table_5,
    "every_rate": every_rate,
}
PARTS = {
    "learning_rates": Column("learning_rates", PAPER, learning_rates),
    "table_2_100_5": _column(100, 5),
    "noise": Column("noise", ("mnist",), partial(noise, tuple((10, z) for z in (*SWEEP, 6.0)))),
    "utility": Column("utility", ("mnist",), utility),
    "figure_3": Column("figure_3", ("mnist",), figure_3),
    "local_iterations": Column("table_2", ("mnist",), local_iterations),
    "variants": Column("variants", ("mnist",), variants),
    "figure_5": Column("figure_5_accuracy", ("mnist",), figure_5),
    **{name: Column(name, ("cancer", "adult", "mnist"), make) for name, make in BY_DATA.items()},
    "noise_over_clients": Column(
        "noise", ("mnist",), partial(noise, ((5, 1.0), (20, 2.0), (5, 0.5), (20, 1.0)))
    ),
    **{f"table_2_{k}_{n}": _column(k, n) for k, n in POPULATIONS if (k, n) != (100, 5)},
    "every_rate_large": Column("every_rate", ("mnist",), every_rate_large),
    **{f"{name}_images": Column(name, ("cifar10", "lfw"), make) for name, make in BY_DATA.items()},
}
"""The recording's parts in their order."""
