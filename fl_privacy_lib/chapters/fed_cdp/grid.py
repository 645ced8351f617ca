"""Fed-CDP's recorded cells: which trainings stand in which table, in which part of the recording (chapter 05).

Nothing is computed here. Every setting below was written down before the first recording.
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


def row_of(point: Training | Utility, values: Callable[[Result], Values], **keys: str) -> Row:
    """Return a point's recorded row: further key columns first, in the same order for a whole table."""
    settings = asdict(point)
    key = keys | settings.pop("arm", {}) | settings
    return Row(key, (point,), lambda results: values(results[0]), getattr(point, "seeds", 1))


def training_values(result: Result) -> Values:
    """Return a training's accuracies over the seeds, how long it ran and whether it diverged."""
    names = ("accuracy", "test_accuracy", "rounds_run", "diverged", "growth")
    return {name: numbers(result[name]) for name in names if np.isfinite(result[name]).all()}


def norm_values(layer: int, axis: int, result: Result) -> Values:
    """Return one tensor's mean gradient norm by tenths of the rounds (axis 0) or local iterations (axis 1)."""
    line = result["norms"][:, :, layer].mean(1 - axis)
    tenths = np.array_split(line, min(10, len(line)))
    means = {f"norm_{i}": numbers(tenth) for i, tenth in enumerate(tenths)}
    return means | {"late_over_early": numbers([tenths[-1].mean() / tenths[0].mean()])}


def training(
    settings: FedCdp, dataset: str, method: str, setting: str = "not_applicable", **changes: Any
) -> Training:
    """Return a cell at the paper's settings for a data set, shortened to the profile's rounds and iterations."""
    setup = setup_of(dataset)
    own: dict[str, Any] = {
        "batch_size": setup.batch_size,
        "rounds": setup.rounds,
        "seed": settings.seed,
    }
    if method in DECAYS:
        own |= {"clip_norm": settings.decay_from, "clip_end": settings.decay_to}
    if setting == "as_coded":
        own |= {"noise_scale": CODE_NOISE, "local_lr": CODE_RATE}
    point = Training(dataset, method, setting, **(own | changes))
    return replace(point, rounds=min(point.rounds, settings.rounds),
                   local_iterations=min(point.local_iterations, settings.local_iterations))  # fmt: skip


Arm = tuple[str, ...]
Rates = dict[Arm, float]


def arm_of(point: Training) -> Arm:
    """Return what a learning rate is chosen for: data, method, reading, σ and L."""
    method = TUNED_AS.get(point.method, point.method)
    return (
        point.dataset,
        method,
        point.setting,
        f"{point.noise_scale:.6g}",
        str(point.local_iterations),
    )


def best_rates(frame: pd.DataFrame) -> Rates:
    """Return the best learning rate of every arm whose whole grid is recorded; the smaller of two equal ones."""
    names = ["dataset", "method", "setting", "noise_scale", "local_iterations"]
    if not len(frame):
        return {}
    own = (
        frame[frame["metric"] == "accuracy"]
        .assign(rate=lambda f: f["local_lr"].astype(float))
        .sort_values("rate")
    )
    groups: Any = own.groupby(names)
    return {tuple(arm): float(group["rate"].iloc[int(group["mean"].argmax())])
            for arm, group in groups if len(group) == len(RATES)}  # fmt: skip


def with_rate(point: Training, rates: Rates, like: Training | None = None) -> Training:
    """Return the point with its arm's learning rate, or that of another point's arm."""
    if point.setting == "as_coded":
        return point
    arm = arm_of(like or point)
    if arm not in rates:
        raise InputError(
            f"the learning rate of {', '.join(arm)} is not chosen yet: record the part learning_rates."
        )
    return replace(point, local_lr=rates[arm])


Make = Callable[[FedCdp, str, Rates], list[Row]]  # settings, data set, rates


def _trained(point: Training, **keys: str) -> Row:
    return row_of(point, training_values, **keys)


def learning_rates(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (a): every arm's grid in one small cell, K = 100, K_t = 5, T = 10, on a held-out tenth."""
    made = partial(training, settings, dataset, held_out=True, rounds=10)
    points = [made(*arm) for arm in ARMS]
    if dataset == "mnist":
        points += [made("fed_cdp", "code", noise_scale=z) for z in SWEEP]
        points += [
            made(*arm, local_iterations=1) for arm in ARMS if arm[0] in ("non_private", "fed_cdp")
        ]
    return [_trained(replace(point, local_lr=rate)) for point in points for rate in RATES]


def table_2(
    clients: int, participants: int, repeated: bool, settings: FedCdp, dataset: str, rates: Rates
) -> list[Row]:
    """Return (b), (c), (e): one column of Table II, every arm, and the code's own σ and learning rate."""
    seeds = settings.seeds if repeated else 1
    points = [
        training(settings, dataset, *arm, clients=clients, participants=participants, seeds=seeds)
        for arm in (*ARMS, *AS_CODED)
    ]
    return [
        _trained(with_rate(point, rates), participation=f"{participants / clients:.2f}")
        for point in points
    ]


def population(dataset: str) -> dict[str, Any]:
    """Return the clients of Tables I, IV and V: as in the code for the small data, a tenth of them for images."""
    if dataset in ("adult", "cancer"):
        return {"clients": 1000, "participants": 100}
    return {"clients": 100, "participants": 10} | (
        {"rounds": 20} if dataset in ("cifar10", "lfw") else {}
    )


def table_1(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return the non-private accuracy of Table I."""
    return [
        _trained(
            with_rate(training(settings, dataset, "non_private", **population(dataset)), rates)
        )
    ]


def table_4(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (d): Fed-CDP over the clipping bound, at the learning rate chosen for C = 4."""
    made = partial(training, settings, dataset, "fed_cdp", **population(dataset))
    points = [
        with_rate(made(setting=setting, clip_norm=c), rates)
        for setting in ("printed", "code")
        for c in CLIPS
    ]
    return [_trained(point, clip=f"{point.clip_norm:g}") for point in points]


def table_5(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return (d): Fed-CDP over the noise scale, at the learning rate chosen for σ = 6."""
    made = partial(training, settings, dataset, "fed_cdp", **population(dataset))
    return [
        _trained(with_rate(made(setting=setting, noise_scale=s), rates, like=made(setting=setting)))
        for setting in ("printed", "code")
        for s in SCALES
    ]


def every_rate(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return Table I's cell, and that which Tables IV and V share, at all rates: what choosing them small costs."""
    arms = [arm for arm in ARMS if arm[0] in ("non_private", "fed_cdp")]
    return [_trained(training(settings, dataset, *arm, local_lr=rate, **population(dataset)))
            for arm in arms for rate in RATES]  # fmt: skip


def every_rate_large(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return Fed-CDP of Table II with 1,000 clients, 100 a round, at the two smallest rates."""
    made = partial(training, settings, dataset, "fed_cdp", clients=1000, participants=100)
    return [
        _trained(made(setting=setting, local_lr=rate))
        for setting in ("code", "printed")
        for rate in RATES[:2]
    ]


def noise(
    pairs: tuple[tuple[int, float], ...], settings: FedCdp, dataset: str, rates: Rates
) -> list[Row]:
    """Return accuracy over (K_t, z), each z at a learning rate of its own; z/√K_t is what a round's mean carries."""
    made = partial(training, settings, dataset, "fed_cdp")
    points = [made("code", noise_scale=z, participants=k) for k, z in pairs]
    points += [made("printed", participants=10)] if (10, 6.0) in pairs else []
    return [_trained(with_rate(p, rates), multiplier=f"{p.multiplier:.6g}",
                  round_noise=f"{p.multiplier / p.participants**0.5:.6g}") for p in points]  # fmt: skip


def utility(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return a round's signal and noise at the start and after 20 rounds, and Proposition 2's bound there."""
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
    """Return gradient norms by tensor: over rounds with one iteration of 100 clients, and over local iterations."""
    arms = [arm for arm in ARMS if arm[0] in ("non_private", "fed_cdp")]
    cells = []
    panels: dict[str, dict[str, Any]] = {
        "rounds": {"clients": 1000, "participants": 100, "local_iterations": 1},
        "local_iterations": {"rounds": 10},
    }
    for axis, (panel, sizes) in enumerate(panels.items()):
        for arm in arms:
            point = with_rate(training(settings, dataset, *arm, watched=True, **sizes), rates)
            tensors = 3  # of both networks
            cells += [
                row_of(point, partial(norm_values, m, axis), panel=panel, layer=str(m + 1))
                for m in range(tensors)
            ]
    return cells


def figure_5(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return accuracy where the smallest coordinates of every update are not sent, at a fifth of the rounds."""
    arms = [arm for arm in ARMS if arm[1] != "printed"]
    return [
        _trained(with_rate(training(settings, dataset, *arm, pruned=p, rounds=20), rates))
        for arm in arms
        for p in PRUNED
    ]


def local_iterations(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return the first column of Table II with one local iteration a round, at learning rates of its own."""
    arms = [arm for arm in ARMS if arm[0] in ("non_private", "fed_cdp")]
    points = [
        training(settings, dataset, *arm, local_iterations=1, seeds=settings.seeds) for arm in arms
    ]
    return [_trained(with_rate(point, rates), participation="0.05") for point in points]


def variants(settings: FedCdp, dataset: str, rates: Rates) -> list[Row]:
    """Return other decays, the batch's own median as bound, noise at the server, selective sharing; 20 rounds."""
    methods = ("fed_cdp", *DECAYS, "median_clip", "fed_sdp", "fed_sdp_server")
    arms = [
        *((method, "code") for method in methods),
        ("non_private", "not_applicable"),
        ("dssgd", "not_applicable"),
    ]
    return [
        _trained(with_rate(training(settings, dataset, *arm, rounds=20), rates)) for arm in arms
    ]


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
    made = partial(table_2, clients, participants, clients == 100 and participants <= 10)
    return Column("table_2", ("mnist",), made, (clients, participants) not in SHORT)


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
