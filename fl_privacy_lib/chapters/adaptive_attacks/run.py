"""Attacking and recording the cells of chapter 02, the learned attacker's among them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_privacy_lib import metrics
from fl_privacy_lib.attacks import reconstruct
from fl_privacy_lib.attacks.learned import LearnedInverter, train
from fl_privacy_lib.chapters.adaptive_attacks.grid import (
    LearnedCell,
    record_key,
    recorded_grid,
)
from fl_privacy_lib.chapters.adaptive_attacks.parameters import AdaptiveAttacks
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments import leakage
from fl_privacy_lib.reproduction.experiments.cells import (
    Cell,
    attack_of,
    measure,
    scene,
)
from fl_privacy_lib.reproduction.experiments.leakage import (
    LeakageExperiment,
    Scene,
    attacked_clients,
)
from fl_privacy_lib.reproduction.loading import load_cached


@dataclass(frozen=True)
class AdaptiveAttacksExperiment(LeakageExperiment):
    """Chapter 02: cells of attackers that search, and of one that has learned."""

    chapter = "02"

    def grid(self, settings: AdaptiveAttacks, datasets: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the recorded cells; see `recorded_grid`."""
        return recorded_grid(settings, datasets)

    def key(self, point: Cell) -> dict[str, Any]:
        """Return a recorded row's key columns."""
        return record_key(point)

    def run(self, point: Cell, device: torch.device) -> Result:
        """Attack all victims of all seeds of a cell and score them; see `leakage.measure`."""
        data = load_cached(point.dataset)
        if isinstance(point, LearnedCell):
            return leakage.measure(point, data, device, (), scene, reader_of)
        if point.arm == "one_dummy":
            return leakage.measure(point, data, device, (), leakage.scene, blend_of)
        return measure(point, data, device, self.snapshots)


EXPERIMENT = AdaptiveAttacksExperiment()


def public_images(cell: LearnedCell, data: Dataset, seed: int) -> np.ndarray:
    """Return positions of training images that no attacked client holds, in a random order."""
    held = np.concatenate(list(attacked_clients(cell, data, seed).values()))
    rest = np.setdiff1d(np.arange(len(data.train_y)), held)
    return np.random.default_rng([seed, 2]).permutation(rest)[: cell.public_images]


def train_inverter(cell: LearnedCell, view: Scene, data: Dataset, seed: int) -> LearnedInverter:
    """Return the attacker, trained on public images at the weights of the observed scene.

    Parameters
    ----------
    cell : names the defence and the attacker's settings
    view : what the adversary observes
    data, seed : as for the scene
    """
    public, observation = public_images(cell, data, seed), view.observations[0]
    device = next(view.model.parameters()).device
    images, labels = (
        torch.as_tensor(part[public]).to(device) for part in (data.train_x, data.train_y)
    )
    return train(view.model, observation, cell.defense, images, labels, cell.attacker(seed))


def reader_of(cell: LearnedCell, seed: int) -> Callable[[Scene, Dataset], leakage.Found]:
    """Return what reads the images of a scene, once it has learned."""
    return lambda view, data: leakage.read(cell, view, train_inverter(cell, view, data, seed))


def blend_of(cell: Cell, seed: int) -> Callable[[Scene, Dataset], leakage.Found]:
    """Return what fits one dummy image to a batch's gradient, and keeps the iterate nearest to it.

    Nearest to all images of the batch, by their mean squared distance. No attacker knows that.
    Source: the released code of Fed-CDP's attack, which the paper does not describe.
    """

    def find(view: Scene, data: Dataset) -> leakage.Found:
        least, kept = np.full(len(view.truth), np.inf), np.zeros_like(view.truth[:, :1])
        when = np.zeros(len(view.truth), dtype=int)

        def keep(iteration: int, rows: torch.Tensor, images: torch.Tensor) -> None:
            dummies = images.cpu().numpy()
            far = ((dummies - view.truth) ** 2).mean((1, 2, 3, 4))
            closer = far < least
            least[closer], kept[closer], when[closer] = far[closer], dummies[closer], iteration

        result = reconstruct(
            view.model, view.observations, data.example_shape, attack_of(cell, seed),
            on_iteration=keep,
        )  # fmt: skip
        images = kept.repeat(view.truth.shape[1], 1)
        recovered = metrics.success(images, view.truth)
        return images, {
            "iterations": np.where(recovered, when[:, None], cell.max_iterations),
            "label_right": result.labels.cpu().numpy() == view.labels,
            "attack_iterations": when,
            "status": np.array(result.status),
        }, {}  # fmt: skip

    return find
