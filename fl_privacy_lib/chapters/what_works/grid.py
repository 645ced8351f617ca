"""The recorded cells of the chapter on what works: a frontier, and the steps that lead to it.

Nothing is computed here. Every setting below was written down before the first recording.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.chapters.what_works.audited import audits
from fl_privacy_lib.chapters.what_works.parameters import WhatWorks
from fl_privacy_lib.chapters.what_works.training import ClientTraining, SummedTraining
from fl_privacy_lib.reproduction.experiments.searching import Cell, judged, searches

PAPER, CLAIMED = "what_works", 0.82
NOISE = {0.3: 7.784, CLAIMED: 3.212, 1.5: 1.973, 3.0: 1.234, 8.0: 0.768}
"""ε → σ of B = 2,048 and T = 400 on 60,000 examples, by `calibrated`; a test holds them to it."""
TREE = {CLAIMED: 23.658, 3.0: 7.359, 8.0: 3.177}
"""ε → σ of a node of four trees, each over a pass of `PASSES`; a test holds them to it."""
PASSES: dict[str, Any] = {
    "noise_at": "tree",
    "rounds": 4,
    "local_iterations": 100,
    "batch_size": 600,
}
FEATURES = {CLAIMED: 14.737, 3.0: 4.674, 8.0: 2.128}
"""ε → σ of a linear model's batches, of 50,000 examples; a test holds them to it."""
LINEAR: dict[str, Any] = {"batch_size": 8192, "seed": 10}
"""Of the linear model: batches as large as Tramèr and Boneh's on these features."""
CLIENT_NOISE = {
    (1000, "fixed", CLAIMED): 4.673, (1000, "fixed", 3.0): 1.675, (1000, "fixed", 8.0): 0.936,
    (1000, "adaptive", 3.0): 1.778,
    (10_000, "fixed", CLAIMED): 4.673, (10_000, "fixed", 3.0): 1.675, (10_000, "fixed", 8.0): 0.936,
    (10_000, "adaptive", 3.0): 1.676,
}  # fmt: skip
"""K, bound and ε → σ of T = 100 rounds with a tenth of the clients; a test holds them to it."""
EACH: dict[int, dict[str, Any]] = {1000: {"local_iterations": 5, "batch_size": 10},
        10_000: {"local_iterations": 1, "batch_size": 4}}  # fmt: skip
"""K → L and B of a participation: a client holds 60 images or 6."""
SMALL_BATCHES: dict[str, Any] = {
    "batch_size": 600,
    "rounds": 1365,
    "clip_norm": 4.0,
}
STEPS: dict[str, dict[str, Any]] = {
    "noise_in_clients": SMALL_BATCHES
    | {"scope": "layer", "noise_scale": 3.18, "noise_at": "client"},
    "noise_on_sum": SMALL_BATCHES | {"scope": "layer", "noise_scale": 3.18},
    "flat_clip": SMALL_BATCHES | {"noise_scale": 1.836},
    "large_batches": {"clip_norm": 4.0},
    "small_bound": {},
    "momentum": {"momentum": 0.9},
    "bounded": {"activation": "tanh"},
}
"""Step of the waterfall → what differs from the recipe at that ε, on MNIST.

Each departs from the one before; the last two both depart from the small bound. All have the same
proved ε, and as many example gradients: B·T is equal.
"""


def training(settings: WhatWorks, dataset: str, epsilon: float, **changes: Any) -> SummedTraining:
    """Return a cell of the frontier, with changes, cut to the profile's iterations and seeds."""
    own = {"noise_scale": NOISE[epsilon], "seeds": settings.seeds, "epsilon": epsilon}
    point = SummedTraining(dataset, **own | changes)
    cut = min(settings.iterations * point.rounds // 400, point.rounds)
    return SummedTraining(**asdict(point) | {"rounds": max(1, cut)})


def keys_of(point: SummedTraining | ClientTraining, **step: str) -> dict[str, Any]:
    """Return the first key columns of a row: what is proved, of whom, against whom."""
    return {**step, "dataset": point.dataset, **point.proof, "epsilon": point.epsilon,
            "delta": DELTA}  # fmt: skip


def middle_of(settings: WhatWorks, **recipe: Any) -> SummedTraining:
    """Return the cell that has a whole search: MNIST at the claimed ε."""
    return training(settings, "mnist", CLAIMED, **recipe)


def frontier_cells(
    recipe: dict[str, Any], budgets: tuple[float, ...], settings: WhatWorks, dataset: str,
    searched: tuple[float, ...] = tuple(NOISE), **changes: Any,
) -> list[Cell]:  # fmt: skip
    """Return cells of the frontier of a recipe.

    MNIST at the claimed ε has a whole search. Other cells try three rates around its choice where
    they are searched, and take it over elsewhere.
    """
    middle = middle_of(settings, **recipe)
    points = {e: training(settings, dataset, e, **recipe | changes) for e in budgets}
    return [
        Cell(point, keys_of(point), None if point == middle else middle, float(e in searched))
        for e, point in points.items()
    ]


MOMENTUM: dict[str, Any] = {"momentum": 0.9}
PLAIN = {"seed": 10}
"""Of the recipe without momentum: the first of seeds that no step of the waterfall has seen."""


def cells_of(
    noise: dict[float, float], recipe: dict[str, Any], settings: WhatWorks, dataset: str
) -> list[Cell]:
    """Return cells with a noise of their own, ε → σ.

    On MNIST they are searched around the rate of the recipe without momentum, elsewhere around
    that of their own cell at ε = 3.
    """
    points = {e: training(settings, dataset, e, noise_scale=z, **recipe) for e, z in noise.items()}
    middle = middle_of(settings, **PLAIN) if dataset == "mnist" else points[3.0]
    return [
        Cell(point, keys_of(point), None if point == middle else middle, 1.0)
        for point in points.values()
    ]


def client_cells(settings: WhatWorks, dataset: str) -> list[Cell]:
    """Return trainings that protect a client, each number of clients with a search at ε = 3."""
    cells, rounds = [], max(1, min(100, settings.iterations // 4))
    for (clients, setting, epsilon), scale in CLIENT_NOISE.items():
        one = ClientTraining(
            dataset, setting=setting, clients=clients, participants=clients // 10, rounds=rounds,
            noise_scale=scale, epsilon=epsilon, seed=20, seeds=settings.seeds, **EACH[clients],
        )  # fmt: skip
        middle = replace(
            one, setting="fixed", epsilon=3.0, noise_scale=CLIENT_NOISE[clients, "fixed", 3.0]
        )
        cells.append(Cell(one, keys_of(one), None if one == middle else middle, 1.0))
    return cells


def waterfall_cells(settings: WhatWorks, dataset: str) -> list[Cell]:
    """Return the steps of the waterfall, each with a search around the rate of its end.

    A clipped step is as long as C, and momentum makes it 1/(1 - γ) times as long.
    """
    middle, cells = middle_of(settings, **MOMENTUM), []
    for step, changes in reversed(STEPS.items()):  # those that learn nothing come last
        point = training(settings, dataset, CLAIMED, **changes)
        longer = (1 - point.momentum) / (1 - middle.momentum)
        factor = longer * middle.clip_norm / point.clip_norm
        around = None if point == middle else middle
        cells.append(Cell(point, keys_of(point, step=step), around, factor))
    return cells


MNIST, FASHION = ("mnist",), ("fashion_mnist",)
PARTS: dict[str, Any] = {}
for _name, _table, _datasets, _make in (
    ("frontier", "frontier", MNIST, partial(frontier_cells, MOMENTUM, (CLAIMED, 3.0))),
    ("waterfall", "waterfall", MNIST, waterfall_cells),
    (
        "frontier_rest",
        "frontier",
        MNIST,
        partial(frontier_cells, MOMENTUM, (0.3, 8.0, 1.5), searched=()),
    ),
    ("plain", "frontier", MNIST, partial(frontier_cells, PLAIN, tuple(NOISE))),
    ("plain_fashion", "frontier", FASHION, partial(frontier_cells, PLAIN, tuple(NOISE))),
    ("bounded", "frontier", MNIST, partial(frontier_cells, PLAIN, (3.0,), activation="tanh")),
    (  # as many example gradients as in chapter 06's trainings; a test holds it to that
        "longer",
        "longer",
        MNIST,
        partial(frontier_cells, PLAIN, (3.0,), batch_size=4096, rounds=1465, noise_scale=3.739),
    ),
    ("features", "frontier", ("cifar10_scattering",), partial(cells_of, FEATURES, LINEAR)),
    ("tree", "unsampled", MNIST, partial(cells_of, TREE, PASSES)),
    ("clients", "clients", MNIST, client_cells),
):
    if _name != "frontier_rest":
        _searched = "search_clients" if _name == "clients" else "search"
        PARTS[f"search_{_name}"] = (_searched, _datasets, _make, searches)
    PARTS[_name] = (_table, _datasets, _make, judged)
PARTS["audit"] = ("audit", MNIST, audits, lambda rows, tried: rows)
"""Part → its table, its data sets, the cells of one, and what makes rows of them and of what was
tried, in the order of recording."""
