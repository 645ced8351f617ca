"""Attacking and recording the cells of chapter 02, the learned attacker's among them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_privacy_lib import metrics
from fl_privacy_lib.attacks.evidence import infer_labels, stacked
from fl_privacy_lib.attacks.learned import LearnedInverter, train
from fl_privacy_lib.chapters.adaptive_attacks.grid import (
    LearnedCell,
    record_key,
    recorded_grid,
)
from fl_privacy_lib.chapters.adaptive_attacks.parameters import AdaptiveAttacks
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments.cells import (
    Cell,
    measure,
    scene,
)
from fl_privacy_lib.reproduction.experiments.leakage import (
    LeakageExperiment,
    Scene,
    attacked_clients,
)
from fl_privacy_lib.reproduction.experiments.scoring import trivial_guesses
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
            return _measure_learned(point, data, device)
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
    return train(view.model, observation.weights, cell.defense, images, labels, cell.attacker(seed))


def _measure_learned(
    cell: LearnedCell, data: Dataset, device: torch.device
) -> dict[str, np.ndarray]:
    """Train the attacker for every seed's weights and score what it reconstructs.

    The columns are those of `leakage.measure`. This attacker takes no iterations and needs no
    label; the label is the one that the others infer. As there, an image that is not recovered
    counts as `max_iterations`.
    """
    parts: dict[str, list[np.ndarray]] = {}
    first: dict[str, np.ndarray] = {}
    for seed in range(cell.seed, cell.seed + cell.seeds):
        view = scene(cell, data, seed, device)
        # [V, 1, C, H, W]
        images = train_inverter(cell, view, data, seed)(view.observations).cpu().numpy()
        success = metrics.success(images, view.truth)
        scores = {
            "mse": metrics.mse(images, view.truth),
            "ssim": metrics.ssim(images, view.truth),
            "success": success,
            "iterations": np.where(success, 0, cell.max_iterations),
            "label_right": infer_labels(stacked(view.observations), 1).cpu().numpy() == view.labels,
            "attack_iterations": np.zeros(cell.victims, dtype=int),
            "status": np.full(cell.victims, "read"),
        } | trivial_guesses(view.truth, view.labels, data)
        for name, values in scores.items():
            parts.setdefault(name, []).append(values)
        first = first or {"images": images, "truth": view.truth}
    return {name: np.concatenate(values) for name, values in parts.items()} | first
