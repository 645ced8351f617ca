"""Attacks on leaked gradients, scored: what the chapters on leakage share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib import metrics
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks import Attack, reconstruct
from fl_privacy_lib.data import Dataset, Partition, available
from fl_privacy_lib.federated import Observation, Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.reproduction.devices import device_name
from fl_privacy_lib.reproduction.experiments.scoring import (
    first_successes,
    in_order,
    summary,
    trivial_guesses,
)
from fl_privacy_lib.reproduction.experiments.setups import split_among
from fl_privacy_lib.reproduction.paths import data_root
from fl_privacy_lib.reproduction.points import Result, record_points
from fl_privacy_lib.sampling import Plan


@dataclass(frozen=True)
class Scene:
    """What the adversary of one seed meets: observations, and the images behind them for the scoring."""

    model: nn.Module
    observations: list[Observation]
    truth: np.ndarray  # [V, B, C, H, W]
    labels: np.ndarray  # [V, B]


def scene(point: Any, data: Dataset, seed: int, device: torch.device) -> Scene:
    """Simulate the first round of federated training and keep what stands at the point's tap.

    Every participant is a victim. At the tap ``example`` the victim is the first example of the
    first batch.
    """
    rng = np.random.default_rng([seed, 1])
    partition = split_among(data, point.clients, rng)
    generator = torch.Generator().manual_seed(seed)
    model = build("attacked_lenet", data.example_shape, data.n_classes, generator).to(device)
    plan = Plan(
        point.clients,
        point.victims,
        1,
        point.local_iterations,
        point.batch_size,
        local_lr=point.local_lr,
        seed=seed,
    )
    victims = [int(c) for c in plan.participants_of(0)]
    used = np.unique(
        np.concatenate([partition.indices[v] for v in victims])
    )  # only the victims' data is moved
    other = np.zeros(1, dtype=np.int64)  # stands in for the data of a client that takes no part
    own = [
        np.searchsorted(used, partition.indices[c]) if c in victims else other
        for c in range(point.clients)
    ]
    small = Partition("victims", tuple(own), len(used))
    train = (
        torch.as_tensor(data.train_x[used]).to(device),
        torch.as_tensor(data.train_y[used]).to(device),
    )
    taps = [Tap(point.tap, client) for client in victims]
    run = simulate(model, train, small, plan, point.defense, taps=taps)
    truth = [run.truth[t] for t in taps]
    keep = 1 if point.tap == "example" else point.batch_size * point.local_iterations
    images = np.stack([x[:keep].cpu().numpy() for x, _ in truth])
    labels = np.stack([y[:keep].cpu().numpy() for _, y in truth])
    return Scene(model, [run.observations[t] for t in taps], images, labels)


def measure(
    point: Any,
    data: Dataset,
    device: torch.device,
    snapshots: tuple[int, ...],
    scene: Callable[..., Scene],
    attack_of: Callable[..., Attack],
) -> dict[str, np.ndarray]:
    """Attack all victims of all seeds of a point and score them.

    Parameters
    ----------
    point : a chapter's cell, which `scene` and `attack_of` understand
    data : what it is about
    device : where attacks run
    snapshots : attack iterations whose images are kept
    scene : point, data, seed, device → what the adversary meets
    attack_of : point, seed → the attack's settings

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
        view = scene(point, data, seed, device)
        reached, score = first_successes(view.truth, point.max_iterations)
        result = reconstruct(
            view.model,
            view.observations,
            data.example_shape,
            attack_of(point, seed),
            batch_size=view.truth.shape[1],
            snapshots=snapshots if seed == point.seed else (),
            on_iteration=score,
        )
        matched = in_order(result.images, view.truth)
        scores = {
            "mse": metrics.mse(matched, view.truth),
            "ssim": metrics.ssim(matched, view.truth),
            "success": metrics.success(matched, view.truth),
            "iterations": reached,
            "label_right": result.labels.cpu().numpy() == np.sort(view.labels, axis=1),
            "attack_iterations": result.iterations.cpu().numpy(),
            "status": np.array(result.status),
        } | trivial_guesses(view.truth, view.labels, data)
        for name, values in scores.items():
            parts.setdefault(name, []).append(values)
        if seed == point.seed:
            first = {"images": matched, "truth": view.truth}
            if snapshots:
                first["snapshots"] = np.stack(
                    [in_order(result.snapshots[s], view.truth) for s in snapshots]
                )
    return {name: np.concatenate(values) for name, values in parts.items()} | first


def datasets_to_record(name: str) -> tuple[str, ...]:
    """Return the data sets that are recorded: the one named, or every one of the papers' that is there."""
    wanted = ("mnist", "lfw", "cifar10") if name == "auto" else (name,)
    names = tuple(name for name in wanted if available(name, data_root()))
    if not names:
        raise InputError(
            f"none of {', '.join(wanted)} is in {data_root()}: set FL_PRIVACY_DATA to a folder that holds them."
        )
    return names


def record_attacks(
    grid: dict[str, list[Any]],
    key: Callable[[Any], dict[str, Any]],
    profile: str,
    chapter: str,
    only: str | None,
    folder: Path,
    run: Callable[..., Iterator[tuple[Any, Result]]],
    device: torch.device,
) -> None:
    """Record every table of a grid whose points are attacks, or one; rows that stand already stay."""
    if only is not None and only not in grid:
        raise InputError(
            f"chapter {chapter} records no table {only!r}; it records {', '.join(grid)}."
        )
    for table, points in grid.items():
        if only in (None, table):
            record_points(
                table,
                folder,
                points,
                key,
                partial(run, label=f"{table} "),
                lambda point, result: summary(result, point.seeds),
                lambda point: {
                    "seeds": point.seeds,
                    "profile": profile,
                    "device": device_name(device),
                },
            )
