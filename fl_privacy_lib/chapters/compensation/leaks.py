"""One image a client, its update attacked under one defence: a cell of the tables (chapter 09)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.attacks import PUBLISHED
from fl_privacy_lib.attacks.convnet import attacked_network
from fl_privacy_lib.attacks.learned import LearnedAttack, train
from fl_privacy_lib.attacks.slice_aware import Pair, SliceReader
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.defenses.compensation import Compared
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.scoring import summary
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.records import Values, numbers


@dataclass(frozen=True)
class Leak(Compared):
    """One cell, with every setting that its numbers depend on; the defence's are `Compared`'s.

    Parameters
    ----------
    attack : 'dga' on LeNet, 'gia' on ConvNet of `width`
    arm : what the attacker adds, one of `slice_aware.ARMS`
    observations : R, noisy updates of the same image at the same weights
    """

    arm: str = "naive"
    observations: int = 1
    width: int = 16
    victims: int = 4
    max_iterations: int = 500

    def network(self, data: Dataset, seed: int) -> nn.Module:
        """Return the attacked network with one seed's weights."""
        dice = torch.Generator().manual_seed(seed)
        return attacked_network(self.attack, data.example_shape, data.n_classes, dice, self.width)


def observed(
    cell: Leak, data: Dataset, seed: int, device: torch.device
) -> tuple[SliceReader, list[list[Pair]], np.ndarray]:
    """Return one seed's reader, updates [V][R], and the victims' positions [V].

    Victims are drawn from the training images, the root set from the rest.
    """
    rng = np.random.default_rng([seed, 1])
    victims, pool = np.split(rng.permutation(len(data.train_y)), [cell.victims])
    model = cell.network(data, seed).to(device)
    reader = SliceReader(model, cell.cut(model, data, pool, rng))
    x, y = (torch.as_tensor(p[victims]).to(device) for p in (data.train_x, data.train_y))
    return reader, reader.updates((x, y), cell.observations, seed), victims


def scene(cell: Leak, data: Dataset, seed: int, device: torch.device) -> leakage.Scene:
    """Return what the adversary matches of every victim."""
    reader, pairs, victims = observed(cell, data, seed, device)
    rows: Any = [[reader.read(cell.arm, *pair) for pair in row] for row in pairs]
    return leakage.Scene(
        reader.model,
        rows if cell.observations > 1 else [row[0] for row in rows],
        data.train_x[victims][:, None],
        data.train_y[victims][:, None],
    )


def learned(cell: Leak, seed: int, view: leakage.Scene, data: Dataset) -> leakage.Found:
    """Return what an attacker reads who has learned from the images that are no victims."""
    device = next(view.model.parameters()).device
    reader, _, victims = observed(cell, data, seed, device)
    public = np.random.default_rng([seed, 2]).permutation(
        np.setdiff1d(np.arange(len(data.train_y)), victims)
    )
    x, y = (torch.as_tensor(part[public]).to(device) for part in (data.train_x, data.train_y))
    inverter = train(
        view.model, view.observations[0], reader.defense, x, y, LearnedAttack(seed=seed)
    )
    return leakage.read(cell, view, inverter)


def attack_of(cell: Leak, seed: int) -> Any:
    """Return the attack's settings at this cell, or what reads without a search."""
    published = PUBLISHED[cell.attack]
    return partial(learned, cell, seed) if cell.arm == "learned" else replace(
        published, seed=seed, mask="none" if cell.arm in ("naive", "compensating") else "zeros",
        max_iterations=min(cell.max_iterations, published.max_iterations))  # fmt: skip


def measure(cell: Leak, device: torch.device) -> Result:
    """Attack all victims of all seeds of a cell and score them; see `leakage.measure`.

    A slice-aware attacker's result has `slices_found` besides, [seeds·V].
    """
    data = load_cached(cell.dataset)
    result = leakage.measure(cell, data, device, (), scene, attack_of)
    looks = cell.seeds if cell.arm == "slice_aware" else 0
    views = [observed(cell, data, cell.seed + i, device) for i in range(looks)]
    shares = [reader.found(*row[0]) for reader, rows, _ in views for row in rows]
    return result | ({"slices_found": np.array(shares)} if shares else {})


def leak_values(seeds: int, results: list[Result]) -> Values:
    """Return what is recorded of a cell: the scores of all attacks, and what a search found."""
    return summary(results[0], seeds) | {
        n: numbers(v) for n, v in results[0].items() if n == "slices_found"
    }
