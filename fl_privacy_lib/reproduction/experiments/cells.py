"""Images attacked under one defence: the cells that the chapters on attacks share (01, 02, 06)."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.attacks import PUBLISHED, Attack
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.defenses import Defense, non_private
from fl_privacy_lib.defenses.registry import build as build_defense
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.leakage import Scene, attacked_clients, moved, seen
from fl_privacy_lib.sampling import Plan

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "clip_aware": {"clip_aware": True},
    "layer_cosine": {"objective": "layer_cosine"},
    "mask_aware": {"mask": "zeros"},
    "prior": {"tv": 1e-4, "objective": "relative"},
    # relative: on squared distances of small gradients the search stalls
    "clip_prior": {"clip_aware": True, "tv": 1e-4, "objective": "relative"},
    "several": {},
    # best of five on six batches of LFW at another seed
    "batch_prior": {"tv": 3e-4, "objective": "relative"},
    "patient": {"stall": (300, 0.0)},  # never given up
    "one_dummy": {"stall": (300, 0.0)},  # one image for a whole batch
    # GradInv's step and weight of total variation, a factor √10 apart
    **{
        f"step {step:g}, TV {tv:g}": {"learning_rate": step, "tv": tv}
        for step in (0.0316, 0.1, 0.316)
        for tv in (3.16e-4, 1e-3, 3.16e-3)
    },
    "step 0.1, TV 0.01": {"learning_rate": 0.1, "tv": 1e-2},  # beyond the edge that was best
}
"""What an attacker adds to the published attack; not `learned`, which does not search."""
HIDDEN: dict[str, Any] = {"victims": 3, "seeds": 35}
"""Images on each of so many networks where a paper says that a defence hides them, or where five
networks do not tell.

Images of a network may succeed or fail together. Even then, Wilson's interval ends below one tenth
if none of 35 networks gives an image away.
"""


@dataclass(frozen=True)
class Cell:
    """One cell, with every setting that its numbers depend on.

    Parameters
    ----------
    level : strength of `method`; 0 where it has no such number
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
        settings = {"clip_norm": self.clip_norm, "noise_scale": self.noise_scale}
        return build_defense(self.method, level=self.level, at="per_example", **settings)


@dataclass(frozen=True)
class ThreatCell(Cell):
    """A cell that may read updates and batches, attacked as the cells of chapter 01.

    Parameters
    ----------
    tap, batch_size : where the adversary reads, and B
    threat_type : the papers' name for it. The defences here do nothing behind the update, so types
        0 and 1 read the same values; such cells are equal, and attacked once.
    """

    tap: str = "example"
    batch_size: int = 1
    local_iterations: int = 1
    local_lr: float = 0.05
    threat_type: str = field(default="type_2", compare=False)


def scene(cell: Cell, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Train for `at_round` rounds without a defence, then observe each victim's tap `example`.

    The victim is the first example of the first batch, the same in all R observed rounds.

    Parameters
    ----------
    cell : the cell under attack
    data : of which the clients hold parts
    seed : of weights, clients and noise
    device : where the model lies
    """
    train, few = moved(data, list(attacked_clients(cell, data, seed).values()), device)
    generator = torch.Generator().manual_seed(seed)
    model = build(cell.network, data.example_shape, data.n_classes, generator).to(device)
    if cell.at_round:
        plan = Plan(cell.victims, cell.victims, cell.at_round, 20, 5, local_lr=0.05, seed=seed)
        trained = simulate(model, train, few, plan, non_private(), engine="auto").weights
        model.load_state_dict(trained)
    plan = Plan(cell.victims, cell.victims, cell.observations, 1, 1, local_lr=0.05, seed=seed)
    taps = [
        [Tap("example", client, r) for r in range(cell.observations)]
        for client in range(cell.victims)
    ]
    run = simulate(model, train, few, plan, cell.defense, taps=[tap for row in taps for tap in row])
    return seen(model, run, taps)


def attack_of(cell: Cell, seed: int) -> Attack:
    """Return the attack's settings at this cell."""
    published = PUBLISHED[cell.attack]
    # the published budget of GradInv is its own; a smaller limit shortens it in proportion
    return replace(
        published,
        seed=seed,
        max_iterations=min(cell.max_iterations, published.max_iterations),
        **ARMS[cell.arm],
    )


def measure(
    cell: Cell, data: Dataset, device: torch.device, snapshots: tuple[int, ...] = ()
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a cell and score them; see `leakage.measure`."""
    return leakage.measure(
        cell, data, device, snapshots, leakage.scene if isinstance(cell, ThreatCell) else scene,
        attack_of,
    )  # fmt: skip
