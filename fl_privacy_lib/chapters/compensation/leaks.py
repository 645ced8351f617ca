"""One image a client, its update attacked under one defence: a cell of the tables (chapter 09)."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.attacks import PUBLISHED, Attack
from fl_privacy_lib.attacks.convnet import attacked_convnet
from fl_privacy_lib.attacks.slice_aware import Pair, SliceReader
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.defenses import Defense, non_private, pruned, random_noise
from fl_privacy_lib.defenses.compensation import risk_compensated
from fl_privacy_lib.defenses.representation import soteria
from fl_privacy_lib.defenses.risk import root_set, sensitivity_slices
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.leakage import Scene
from fl_privacy_lib.reproduction.experiments.scoring import summary
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.records import Values, numbers

LEVELS = {"dga": {"risk_compensation": 0.2, "gc": 0.8, "pld": 0.6},
          "gia": {"risk_compensation": 0.3, "gc": 0.9, "pld": 0.8}}  # fmt: skip
"""Attack → method → γ, or the share that is pruned: the paper's section VI-B."""
SLICINGS = {"gradient_sensitivity": "hutchinson", "layer_size": "size", "all_ones": "all_ones"}
"""What is balanced over the slices → its estimator."""
CLIP = 1.0  # B of the local clipping; the paper prints none


@dataclass(frozen=True)
class Leak:
    """One cell, with every setting that its numbers depend on.

    Parameters
    ----------
    attack : 'dga' on LeNet, 'gia' on ConvNet of `width`
    method : {'non_private', 'risk_compensation', 'gc', 'dp_gaussian', 'dp_laplace', 'pld'}
    arm : what the attacker adds, one of `slice_aware.ARMS`
    level : γ, or the share that is pruned; 0: the paper's
    noise : σ, on a gradient
    slicing : what is balanced over the slices, one of `SLICINGS`
    root_dataset_bias : probability of class 0 in the root set; a tenth is no bias for ten classes
    observations : R, noisy updates of the same image at the same weights
    """

    dataset: str
    attack: str
    method: str
    arm: str = "naive"
    level: float = 0.0
    noise: float = 0.1
    slices: int = 10
    slicing: str = "gradient_sensitivity"
    root_dataset_size: int = 100
    root_dataset_bias: float = 0.1
    local_clipping: bool = False
    compensation_q: float = 6.0
    observations: int = 1
    width: int = 16
    victims: int = 4
    seeds: int = 4
    seed: int = 0
    max_iterations: int = 500

    def __post_init__(self) -> None:
        one_of(SLICINGS, slicing=self.slicing)
        one_of(LEVELS, attack=self.attack)

    @property
    def strength(self) -> float:
        """The level, or the paper's."""
        return self.level or LEVELS[self.attack].get(self.method, 0.0)

    def network(self, data: Dataset, seed: int) -> nn.Module:
        """Return the attacked network with one seed's weights."""
        generator = torch.Generator().manual_seed(seed)
        if self.attack == "dga":
            return build("attacked_lenet", data.example_shape, data.n_classes, generator)
        return attacked_convnet(data.example_shape, data.n_classes, generator, self.width)

    def defense(self, model: nn.Module, root: tuple[torch.Tensor, torch.Tensor]) -> Defense:
        """Return what the client does to its update."""
        if self.method == "risk_compensation":
            cut = sensitivity_slices(model, root, self.slices, SLICINGS[self.slicing])
            bound = CLIP if self.local_clipping else None
            return risk_compensated(cut, share=self.strength, std=self.noise, clip_norm=bound,
                                    ratio=self.compensation_q)  # fmt: skip
        return {
            "non_private": non_private(),
            "gc": pruned(self.strength, scope="layer"),
            "dp_gaussian": random_noise(self.noise),
            "dp_laplace": random_noise(self.noise, "laplace"),
            "pld": soteria(self.strength),
        }[self.method]


def observed(
    cell: Leak, data: Dataset, seed: int, device: torch.device
) -> tuple[SliceReader, list[list[Pair]], np.ndarray]:
    """Return one seed's reader, updates [V][R], and the victims' positions [V].

    Victims are drawn from the training images, the root set from the rest.
    """
    rng = np.random.default_rng([seed, 1])
    victims, pool = np.split(rng.permutation(len(data.train_y)), [cell.victims])
    root = root_set(data.train_y, pool, cell.root_dataset_size, cell.root_dataset_bias, rng)
    model = cell.network(data, seed).to(device)
    public, train = (
        (torch.as_tensor(data.train_x[i]).to(device), torch.as_tensor(data.train_y[i]).to(device))
        for i in (root, victims)
    )
    reader = SliceReader(model, cell.defense(model, public))
    return reader, reader.updates(train, cell.observations, seed), victims


def scene(cell: Leak, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Return what the adversary matches of every victim."""
    reader, pairs, victims = observed(cell, data, seed, device)
    rows: Any = [[reader.read(cell.arm, *pair) for pair in row] for row in pairs]
    images, labels = data.train_x[victims][:, None], data.train_y[victims][:, None]
    return Scene(reader.model, rows, images, labels)


def attack_of(cell: Leak, seed: int) -> Attack:
    """Return the attack's settings at this cell."""
    published = PUBLISHED[cell.attack]
    mask = "none" if cell.arm in ("naive", "compensating") else "zeros"
    return replace(published, seed=seed, mask=mask,
                   max_iterations=min(cell.max_iterations, published.max_iterations))  # fmt: skip


def measure(cell: Leak, device: torch.device) -> Result:
    """Attack all victims of all seeds of a cell and score them; see `leakage.measure`.

    A slice-aware attacker's result has `slices_found` besides, [seeds·V].
    """
    data = load_cached(cell.dataset)
    result = leakage.measure(cell, data, device, (), scene, attack_of)
    if cell.arm != "slice_aware":
        return result
    views = [observed(cell, data, cell.seed + i, device) for i in range(cell.seeds)]
    shares = [reader.found(*row[0]) for reader, rows, _ in views for row in rows]
    return result | {"slices_found": np.array(shares)}


def leak_values(seeds: int, results: list[Result]) -> Values:
    """Return what is recorded of a cell: the scores of all attacks, and what a search found."""
    extra = {n: numbers(results[0][n]) for n in ("slices_found",) if n in results[0]}
    return summary(results[0], seeds) | extra
