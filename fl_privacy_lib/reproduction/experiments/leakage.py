"""Attacks on leaked gradients, scored: what the chapters on leakage share."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fl_privacy_lib import metrics
from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.attacks.evidence import infer_labels, stacked
from fl_privacy_lib.attacks.learned import LearnedInverter
from fl_privacy_lib.data import Dataset, Partition
from fl_privacy_lib.federated import Observation, Run, Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.experiment import Experiment, Part, Result, Row
from fl_privacy_lib.reproduction.experiments.scoring import (
    first_successes,
    in_order,
    summary,
    trivial_guesses,
)
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.records import Values
from fl_privacy_lib.sampling import Plan


class Scene(NamedTuple):
    """What one seed's adversary observes, and the images behind it, which only scoring reads."""

    model: nn.Module
    observations: list[Observation]
    truth: np.ndarray  # [V, B, C, H, W]
    labels: np.ndarray  # [V, B]


def attacked_clients(point: Any, data: Dataset, seed: int) -> dict[int, np.ndarray]:
    """Return every attacked client with the positions of its training examples."""
    rng = np.random.default_rng([seed, 1])
    partition = setup_of(data.name).split(data, point.clients, rng)
    plan = Plan(point.clients, point.victims, 1, 1, 1, local_lr=0.05, seed=seed)
    return {int(c): partition.indices[int(c)] for c in plan.participants_of(0)}


def moved(
    data: Dataset, held: Sequence[np.ndarray], device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], Partition]:
    """Return the examples that some clients hold, on the device, and who holds which of them."""
    used = np.unique(np.concatenate(held))
    x, y = (torch.as_tensor(part[used]).to(device) for part in (data.train_x, data.train_y))
    return (x, y), Partition("victims", tuple(np.searchsorted(used, i) for i in held), len(used))


def seen(model: nn.Module, run: Run, taps: list[list[Tap]], keep: int = 1) -> Scene:
    """Return what was observed at each victim's taps, and the first `keep` examples behind it."""
    truth = [run.truth[row[0]] for row in taps]
    images = np.stack([x[:keep].cpu().numpy() for x, _ in truth])
    labels = np.stack([y[:keep].cpu().numpy() for _, y in truth])
    rows: list[Any] = [[run.observations[tap] for tap in row] for row in taps]
    return Scene(model, [row[0] for row in rows] if len(taps[0]) == 1 else rows, images, labels)


def scene(point: Any, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Simulate the first round of federated training and observe it at the point's tap.

    Every participant is a victim. At the tap ``example`` the victim is the first example of the
    first batch.

    Parameters
    ----------
    point : the cell under attack
    data : of which the clients hold parts
    seed : of weights, clients and noise
    device : where the model lies
    """
    victims = attacked_clients(point, data, seed)
    # only the victims' data is moved; a client that takes no part holds one example of a victim
    absent = next(iter(victims.values()))[:1]
    train, partition = moved(data, [victims.get(c, absent) for c in range(point.clients)], device)
    generator = torch.Generator().manual_seed(seed)
    model = build("attacked_lenet", data.example_shape, data.n_classes, generator).to(device)
    plan = Plan(
        point.clients, point.victims, 1, point.local_iterations, point.batch_size,
        local_lr=point.local_lr, seed=seed,
    )  # fmt: skip
    taps = [Tap(point.tap, client) for client in victims]
    run = simulate(model, train, partition, plan, point.defense, taps=taps)
    return seen(
        model, run, [[tap] for tap in taps],
        keep=1 if point.tap == "example" else point.batch_size * point.local_iterations,
    )  # fmt: skip


Found = tuple[Any, dict[str, Any], dict[str, Any]]
"""Images [V, B, C, H, W]; columns by image or victim; pictures of the first seed."""


def search(
    point: Any, data: Dataset, view: Scene, attack: Attack, snapshots: tuple[int, ...]
) -> Found:
    """Return what an attack finds, and how it went."""
    reached, score = first_successes(view.truth, point.max_iterations)
    result = reconstruct(
        view.model,
        view.observations,
        data.example_shape,
        attack,
        batch_size=view.truth.shape[1],
        labels=torch.as_tensor(view.labels).to(next(view.model.parameters()).device)
        if attack.label_rule == "given"
        else None,
        snapshots=snapshots,
        on_iteration=score,
    )
    shots = [in_order(result.snapshots[s], view.truth) for s in snapshots]
    return in_order(result.images, view.truth), {
        "iterations": reached,
        "label_right": np.sort(result.labels.cpu().numpy(), 1) == np.sort(view.labels, 1),
        "attack_iterations": result.iterations.cpu().numpy(),
        "status": np.array(result.status),
    }, {"snapshots": np.stack(shots)} if shots else {}  # fmt: skip


def read(point: Any, view: Scene, inverter: LearnedInverter) -> Found:
    """Return what an attacker reads who has learned.

    It takes no iterations and needs no label; the label is the one that others infer. An image that
    is not recovered counts as `max_iterations`, as in a search.
    """
    images = inverter(view.observations).cpu().numpy()
    return images, {
        "iterations": np.where(metrics.success(images, view.truth), 0, point.max_iterations),
        "label_right": infer_labels(stacked(view.observations), 1).cpu().numpy() == view.labels,
        "attack_iterations": np.zeros(len(images), dtype=int),
        "status": np.full(len(images), "read"),
    }, {}  # fmt: skip


def measure(
    point: Any,
    data: Dataset,
    device: torch.device,
    snapshots: tuple[int, ...],
    scene: Callable[..., Scene],
    attack_of: Callable[..., Any],
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a point and score them.

    Parameters
    ----------
    point : a chapter's cell, which `scene` and `attack_of` understand
    data : what it is about
    device : where attacks run
    snapshots : attack iterations whose images are kept
    scene : point, data, seed, device → what the adversary meets
    attack_of : point, seed → the settings of a search, or view, data → what is found without one

    Returns
    -------
    per image, [seeds·V, B]: mse, ssim, success, iterations (to success), label_right; per victim,
    [seeds·V]: attack_iterations (until the attack stopped), status; images, truth [V, B, C, H, W]
    of the first seed, and snapshots [S, V, B, C, H, W] where asked for; grey_mse, mean_mse,
    grey_success, mean_success: the two trivial guesses on the same victims
    """
    parts: dict[str, list[np.ndarray]] = {}
    first: dict[str, np.ndarray] = {}
    for seed in range(point.seed, point.seed + point.seeds):
        view, attack = scene(point, data, seed, device), attack_of(point, seed)
        images, went, pictures = (
            search(point, data, view, attack, () if first else snapshots)
            if isinstance(attack, Attack)
            else attack(view, data)
        )
        scores = {
            n: getattr(metrics, n)(images, view.truth) for n in ("mse", "ssim", "success")
        } | (went | trivial_guesses(view.truth, view.labels, data))
        for name, values in scores.items():
            parts.setdefault(name, []).append(values)
        first = first or {"images": images, "truth": view.truth} | pictures
    return {name: np.concatenate(values) for name, values in parts.items()} | first


@dataclass(frozen=True)
class LeakageExperiment(Experiment):
    """Attacks on images: what chapters 01 and 02 share.

    Parameters
    ----------
    snapshots : attack iterations whose images are kept with each result
    """

    snapshots: tuple[int, ...] = ()

    @abstractmethod
    def grid(self, settings: Any, datasets: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the recorded points by table, those that a verdict needs first."""

    @abstractmethod
    def key(self, point: Any) -> dict[str, Any]:
        """Return a recorded row's key columns."""

    def parts(self, settings: Any, folder: Path) -> list[Part]:
        """Return a part for each table of the grid; see `Experiment.parts`."""

        def rows(table: str, datasets: tuple[str, ...]) -> list[Row]:
            return [
                Row(self.key(point), (point,), partial(_metrics, point.seeds), point.seeds)
                for point in self.grid(settings, datasets)[table]
            ]

        return [Part(t, partial(rows, t), IMAGES) for t in self.grid(settings, IMAGES)]

    def words(self, point: Any, result: Result) -> str:
        """Return what was attacked how, and the share that was recovered."""
        signs = {"batch_size": "B=", "local_iterations": "L="}
        settings = " ".join(
            f"{signs.get(n, '')}{getattr(point, n)}"
            for n in ("dataset", "threat_type", "method", "level", "attack", "arm", "attacker",
                      *signs)
            if n in vars(point)
        )  # fmt: skip
        return f"{settings}: success {float(np.mean(result['success'])):.2f}"


IMAGES = ("mnist", "lfw", "cifar10")
"""The papers' image data sets."""


def _metrics(seeds: int, results: list[Result]) -> Values:
    return summary(results[0], seeds)
