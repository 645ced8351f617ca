"""Fed-CDP's recorded cells: the trainings of each table and of each part of it (chapter 05).

Nothing is computed here. Every setting below was written down before the first recording. A table's
function takes the chapter's settings, a data set, and what is recorded of the learning rates: the
tables that the paper prints search theirs in the cell itself, what else is shown takes the one that
was chosen in a small cell.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fl_privacy_lib.chapters.fed_cdp.parameters import FedCdp
from fl_privacy_lib.chapters.fed_cdp.rates import RATES, Recorded, with_rate
from fl_privacy_lib.chapters.fed_cdp.utility import Utility, utility_values
from fl_privacy_lib.reproduction.experiment import Result, Row
from fl_privacy_lib.reproduction.experiments.searching import Cell, judged, row_of, searches
from fl_privacy_lib.reproduction.experiments.setups import PAPER, setup_of
from fl_privacy_lib.reproduction.experiments.spending import TENSORS
from fl_privacy_lib.reproduction.experiments.training import (
    CODE_NOISE,
    CODE_RATE,
    DECAYS,
    MOVED,
    Training,
)
from fl_privacy_lib.reproduction.records import Values, numbers
from fl_privacy_lib.reproduction.verdict import TAKEN_OVER_FROM

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
CLIPS = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SCALES = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
SWEEP = (0.0, 0.1, 0.5, 1.0, 2.0)
"""Noise multipliers between no noise and the code's scaling of σ = 6."""
PRUNED = (0.0, 0.3, 0.6, 0.9)


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


Cells = Callable[[FedCdp, str], list[Cell]]  # settings, data set
Make = Callable[[FedCdp, str, Recorded], list[Row]]


def learning_rates(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
    """Return (a): all rates of every arm in one small cell, on a held-out tenth of the data.

    The cell has K = 100, K_t = 5, T = 10.
    """
    cell = partial(training, settings, dataset, held_out=True, rounds=10)
    points = [cell(*arm) for arm in ARMS]
    if dataset == "mnist":
        points += [cell(*arm, local_iterations=1) for arm in COMPARED]
    return [row_of(replace(point, local_lr=rate)) for point in points for rate in RATES]


def table_2(clients: int, participants: int, settings: FedCdp, dataset: str) -> list[Cell]:
    """Return a column (K, K_t) of Table II, and the first one with L = 1 besides.

    From 200 clients a round on, every arm takes the rate of the largest searched cell.
    """
    cell = partial(training, settings, dataset, clients=clients, participants=participants)
    share, size = {"participation": f"{participants / clients:.2f}"}, (clients, participants)
    few, thrice = participants < TAKEN_OVER_FROM, size in (*SHORT[:2], (1000, 100))
    cells = [
        Cell(
            cell(*arm, seeds=settings.seeds if few else 1),
            share,
            None if few else training(settings, dataset, *arm, clients=1000, participants=100),
        )
        for arm in ARMS
    ]
    cells += [
        Cell(cell(*arm, seeds=settings.seeds if thrice else 1), share, fixed=True)
        for arm in AS_CODED
    ]
    if size == POPULATIONS[0]:
        cells += [
            Cell(cell(*arm, local_iterations=1, seeds=settings.seeds), share) for arm in COMPARED
        ]
    return cells


def population(dataset: str) -> dict[str, Any]:
    """Return K and K_t of Tables I, IV and V: the code's, and a tenth of each for colour images."""
    images = dataset in ("cifar10", "lfw")
    return (
        {"clients": 100, "participants": 10} if images else {"clients": 1000, "participants": 100}
    )


def table_1(settings: FedCdp, dataset: str) -> list[Cell]:
    """Return the non-private training of Table I."""
    sizes = population(dataset)
    return [Cell(training(settings, dataset, "non_private", seeds=settings.seeds, **sizes), {})]


def tables_4_and_5(over: str, settings: FedCdp, dataset: str) -> list[Cell]:
    """Return Fed-CDP over the clipping bound at σ = 6, or over the noise scale at C = 4.

    The middle cell, C = 4 and σ = 6, has a search of its own. From there the learning rate is
    expected to fall as 1/C, since a clipped step is as long as C, and as 1/√σ. Tabular data are
    z-scored; scaled by their range they have the middle cell alone.
    """
    cells = []
    for setting in ("printed", "code"):
        cell = partial(
            training, settings, dataset, "fed_cdp", setting, seeds=settings.seeds,
            **population(dataset),
        )  # fmt: skip
        middle = cell()
        levels = CLIPS if over == "clip_norm" else SCALES
        for value in [getattr(middle, over)] if dataset in ("adult", "cancer") else levels:
            point = cell(**{over: value})
            keys = {"clip": f"{value:g}"} if over == "clip_norm" else {}
            ratio = getattr(middle, over) / value
            factor = ratio if over == "clip_norm" else ratio**0.5
            cells.append(Cell(point, keys, *([] if point == middle else [middle, factor])))
    return cells


def table_4_large(settings: FedCdp, dataset: str) -> list[Cell]:
    """Return the middle cell of Table IV, C = 4, with 1,000 clients, 100 a round."""
    sizes = {"clients": 1000, "participants": 100, "seeds": settings.seeds}
    return [
        Cell(training(settings, dataset, "fed_cdp", setting, **sizes), {"clip": "4"})
        for setting in ("printed", "code")
    ]


def strongest_case(settings: FedCdp, dataset: str) -> list[Cell]:
    """Return Fed-CDP with the released code's σ at a searched rate: 1,000 clients, 100 a round.

    With the code's scaling also what else stands in its scripts.
    """
    cell = partial(training, settings, dataset, clients=1000, participants=100)
    arms = [("fed_cdp", "code"), ("fed_cdp", "printed"), *((method, "code") for method in MOVED)]
    return [Cell(cell(*arm, noise_scale=CODE_NOISE, seeds=settings.seeds), {}) for arm in arms]


def noise(pairs: tuple[tuple[int, float], ...], settings: FedCdp, dataset: str) -> list[Cell]:
    """Return accuracy over (K_t, z), of one seed; the noise on a round's mean is z/√K_t."""
    points = [
        training(settings, dataset, "fed_cdp", "code", noise_scale=z, participants=k)
        for k, z in pairs
    ]
    return [
        Cell(p, {"multiplier": f"{p.multiplier:.6g}",
                 "round_noise": f"{p.multiplier / p.participants**0.5:.6g}"})
        for p in points
    ]  # fmt: skip


def utility(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
    """Return a round's signal, noise and Proposition 2's bound, at first and after 20 rounds."""
    arms = [training(settings, dataset, "fed_cdp", setting, participants=10)
            for setting in ("printed", "code", "as_coded")]  # fmt: skip
    late = min(20, settings.rounds)
    points = [
        Utility(with_rate(arm, recorded), at, settings.examples) for at in (0, late) for arm in arms
    ]
    large = training(settings, dataset, "fed_cdp", "code", clients=1000, participants=100)
    points.append(Utility(with_rate(large, recorded), 0, settings.examples))
    return [row_of(p, utility_values, multiplier=f"{p.arm.multiplier:.6g}") for p in points]


def figure_3(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
    """Return gradient norms by tensor, over rounds (K_t = 100, L = 1) and over local iterations.

    Beside the arms a control: no defence at the small learning rate of the first private arm.
    """
    cells = []
    panels: dict[str, dict[str, Any]] = {
        "rounds": {"clients": 1000, "participants": 100, "local_iterations": 1},
        "local_iterations": {"rounds": 10},
    }
    for axis, (panel, sizes) in enumerate(panels.items()):
        points = [
            with_rate(training(settings, dataset, *arm, watched=True, **sizes), recorded)
            for arm in COMPARED
        ]
        cells += [
            row_of(point, partial(norm_values, m, axis), panel=panel, layer=str(m + 1))
            for point in dict.fromkeys([*points, replace(points[0], local_lr=points[1].local_lr)])
            for m in range(TENSORS)
        ]
    return cells


def figure_5(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
    """Return accuracy where updates lack their smallest coordinates, at a fifth of the rounds."""
    arms = [arm for arm in ARMS if arm[1] != "printed"]
    return [
        row_of(with_rate(training(settings, dataset, *arm, pruned=p, rounds=20), recorded))
        for arm in arms
        for p in PRUNED
    ]


def variants(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
    """Return other decays, median clipping, noise at the server, selective sharing; 20 rounds."""
    methods = ("fed_cdp", *DECAYS, "median_clip", "fed_sdp", "fed_sdp_server")
    arms = [
        *((method, "code") for method in methods),
        ("non_private", "not_applicable"),
        ("dssgd", "not_applicable"),
    ]
    return [
        row_of(with_rate(training(settings, dataset, *arm, rounds=20), recorded)) for arm in arms
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
SHORT = ((100, 5), (100, 10), (100, 20))


def _printed(
    table: str, datasets: tuple[str, ...], cells_of: Cells, name: str = "", long: bool = False
) -> dict[str, Column]:
    """Return the two parts of a printed table's cells: their searches, then their rows."""

    def asked(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
        return searches(cells_of(settings, dataset), recorded.tried)

    def rows(settings: FedCdp, dataset: str, recorded: Recorded) -> list[Row]:
        return judged(cells_of(settings, dataset), recorded.tried)

    name = name or table
    return {
        f"search_{name}": Column("search", datasets, asked, long),
        name: Column(table, datasets, rows, long),
    }


def _table_2(*populations: tuple[int, int]) -> dict[str, Column]:
    parts: dict[str, Column] = {}
    for clients, participants in populations:
        cells_of, name = (
            partial(table_2, clients, participants),
            f"table_2_{clients}_{participants}",
        )
        long = (clients, participants) not in SHORT
        parts |= _printed("table_2", ("mnist",), cells_of, name, long)
        if participants >= TAKEN_OVER_FROM:
            del parts[f"search_{name}"]
    return parts


def _over_data(end: str, *datasets: str) -> dict[str, Column]:
    return {
        **_printed("table_1", datasets, table_1, f"table_1{end}", bool(end)),
        **_printed(
            "table_4", datasets, partial(tables_4_and_5, "clip_norm"), f"table_4{end}", bool(end)
        ),
        **_printed(
            "table_5", datasets, partial(tables_4_and_5, "noise_scale"), f"table_5{end}", bool(end)
        ),
    }


PARTS = {
    "learning_rates": Column("learning_rates", (*PAPER, "digits"), learning_rates),
    **_table_2(*POPULATIONS[:3]),
    **_over_data("", "cancer", "cancer_z", "adult", "adult_z"),
    **_printed("noise", ("mnist",), partial(noise, tuple((10, z) for z in SWEEP))),
    "utility": Column("utility", ("mnist",), utility),
    "figure_3": Column("figure_3", ("mnist",), figure_3),
    "variants": Column("variants", ("mnist",), variants),
    "figure_5": Column("figure_5_accuracy", ("mnist",), figure_5),
    **_printed(
        "noise",
        ("mnist",),
        partial(noise, ((5, 1.0), (20, 2.0), (5, 0.5), (20, 1.0))),
        "noise_over_clients",
        long=True,
    ),
    **_table_2(*POPULATIONS[3:6]),
    **_printed("strongest_case", ("mnist",), strongest_case, long=True),
    **_over_data("_mnist", "mnist"),
    **_over_data("_images", "cifar10", "lfw"),
    **_printed("table_4", ("cifar10", "lfw"), table_4_large, "table_4_large", True),
    **_table_2(*POPULATIONS[6:]),
}
"""The recording's parts in their order."""
