"""One image a client, attacked under one defence of some strength: the cells that chapters 01 and 02 share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.attacks import PUBLISHED, Attack
from fl_privacy_lib.data import Dataset, Partition
from fl_privacy_lib.defenses import (
    Defense,
    adaclip,
    dssgd,
    fed_alpha_cdp,
    fed_cdp,
    non_private,
    pruned,
    quantile_clipped,
    random_noise,
)
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.leakage import Scene
from fl_privacy_lib.reproduction.experiments.setups import split_among
from fl_privacy_lib.reproduction.points import Result, content_of, finished, load_cached
from fl_privacy_lib.sampling import Plan

METHODS: dict[str, Callable[["Cell"], Defense]] = {
    "non_private": lambda c: non_private(),
    "clipped": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=0.0),
    "gaussian": lambda c: random_noise(c.level, "gaussian", at="per_example"),
    "laplace": lambda c: random_noise(c.level, "laplace", at="per_example"),
    "clipped_gaussian": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=c.level / c.clip_norm),
    "pruned": lambda c: pruned(c.level, at="per_example"),
    "dssgd": lambda c: dssgd(c.level, at="per_example"),
    "fed_cdp": lambda c: fed_cdp(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "fed_alpha_cdp_example": lambda c: fed_alpha_cdp(
        "example", clip_norm=c.clip_norm, noise_scale=c.noise_scale
    ),
    "fed_alpha_cdp_batch": lambda c: fed_alpha_cdp(
        "batch", clip_norm=c.clip_norm, noise_scale=c.noise_scale
    ),
    "quantile_clip": lambda c: quantile_clipped(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
    "adaclip": lambda c: adaclip(clip_norm=c.clip_norm, noise_scale=c.noise_scale),
}
"""Defences whose strength is one number, `level`: a standard deviation per coordinate, or a fraction pruned."""

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "clip_aware": {"clip_aware": True},
    "layer_cosine": {"objective": "layer_cosine"},
    "mask_aware": {"mask": "zeros"},
    "prior": {"tv": 1e-4, "objective": "relative"},
    "several": {},
    "batch_prior": {
        "tv": 3e-4,
        "objective": "relative",
    },  # best of five on six batches of LFW at another seed
    "patient": {"stall": (300, 0.0)},  # never given up
}
"""What the attacker adds to the published attack. The arm `learned` has no such line: it does not search."""


@dataclass(frozen=True)
class Cell:
    """One cell, with every setting that its numbers depend on.

    Parameters
    ----------
    level : what `method` is as strong as; 0 where it has no such number
    attack : one of the published attacks
    network, at_round : which model is attacked, and after how many rounds of training
    observations : R, rounds in which the same example is seen
    """

    dataset: str
    method: str
    level: float = 0.0
    arm: str = "naive"
    attack: str = "cpl"
    network: str = "attacked_lenet"
    at_round: int = 0
    observations: int = 1
    victims: int = 20
    seeds: int = 5
    seed: int = 0
    max_iterations: int = 300
    clip_norm: float = 4.0
    noise_scale: float = 6.0
    clients: int = 1000

    @property
    def defense(self) -> Defense:
        """The defence under which the cell is measured."""
        return METHODS[self.method](self)


def clients_data(cell: Cell, data: Dataset, seed: int) -> list[np.ndarray]:
    """Return the positions of every attacked client's training examples."""
    rng = np.random.default_rng([seed, 1])
    partition = split_among(data, cell.clients, rng)
    chosen = Plan(cell.clients, cell.victims, 1, 1, 1, local_lr=0.05, seed=seed).participants_of(0)
    return [partition.indices[int(c)] for c in chosen]


def scene(cell: Cell, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Train for `at_round` rounds without a defence, then keep what stands at each victim's tap `example`.

    The victim is the first example of the first batch, the same in all R observed rounds.
    """
    own = clients_data(cell, data, seed)
    model = build(
        cell.network, data.example_shape, data.n_classes, torch.Generator().manual_seed(seed)
    ).to(device)
    used = np.unique(np.concatenate(own))
    few = Partition("victims", tuple(np.searchsorted(used, indices) for indices in own), len(used))
    train = (
        torch.as_tensor(data.train_x[used]).to(device),
        torch.as_tensor(data.train_y[used]).to(device),
    )
    if cell.at_round:
        plan = Plan(cell.victims, cell.victims, cell.at_round, 20, 5, local_lr=0.05, seed=seed)
        trained = simulate(model, train, few, plan, non_private(), engine="auto").weights
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(trained[name])
    plan = Plan(cell.victims, cell.victims, cell.observations, 1, 1, local_lr=0.05, seed=seed)
    taps = [
        [Tap("example", client, r) for r in range(cell.observations)]
        for client in range(cell.victims)
    ]
    run = simulate(model, train, few, plan, cell.defense, taps=[tap for row in taps for tap in row])
    truth = [run.truth[row[0]] for row in taps]
    images = np.stack([x[:1].cpu().numpy() for x, _ in truth])
    labels = np.stack([y[:1].cpu().numpy() for _, y in truth])
    seen: list[Any] = [[run.observations[tap] for tap in row] for row in taps]
    return Scene(
        model, [row[0] for row in seen] if cell.observations == 1 else seen, images, labels
    )


def attack_of(cell: Cell, seed: int) -> Attack:
    """Return the attack's settings at this cell."""
    published = PUBLISHED[cell.attack]()
    # the published budget of GradInv is its own; a smaller limit shortens it in proportion
    limit = min(cell.max_iterations, published.max_iterations)
    return replace(published, seed=seed, max_iterations=limit, **ARMS[cell.arm])


def measure(
    cell: Cell, data: Dataset, device: torch.device, snapshots: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a cell and score them; see `leakage.measure`."""
    return leakage.measure(cell, data, device, snapshots, scene, attack_of)


def finished_cells(
    cells: Sequence[Cell],
    device: torch.device,
    snapshots: tuple[int, ...] = (),
    label: str = "",
    workers: int | None = None,
    chapter: str = "02",
    measure: Callable[..., Result] = measure,
) -> Iterator[tuple[Cell, Result]]:
    """Yield every cell with its result, as soon as it is there.

    Parameters
    ----------
    cells : of a chapter's grid
    device, snapshots : see `measure`
    label, workers : as in `points.finished`; on a GPU a single process
    chapter : with whose finished points they are kept
    measure : cell, data, device, snapshots → result, where it is not this module's
    """

    def key(cell: Cell) -> dict[str, object]:
        return (
            asdict(cell)
            | {"device": device.type, "snapshots": snapshots}
            | content_of(cell.dataset)
        )

    def words(cell: Cell, result: Result) -> str:
        what = f"{cell.dataset} {cell.method} {cell.level:g} {cell.attack} {cell.arm}"
        return f"{what}: success {float(np.mean(result['success'])):.2f}"

    count = 1 if device.type == "cuda" else workers
    compute = partial(_measure, measure, device, snapshots)
    return finished(chapter, cells, compute, key=key, words=words, label=label, workers=count)


def _measure(
    measure: Callable[..., Result], device: torch.device, snapshots: tuple[int, ...], cell: Cell
) -> Result:
    return measure(cell, load_cached(cell.dataset), device, snapshots)
