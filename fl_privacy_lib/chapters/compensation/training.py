"""Federated training under the compared defences: accuracy, and the time of a round (chapter 09).

The federation of LeNet's panels is the paper's own, and small: 100 clients with ten images each.
ConvNet's here is the same, where the paper has 1,000 clients and 64 channels.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.attacks.convnet import attacked_network
from fl_privacy_lib.data import some_classes
from fl_privacy_lib.defenses.compensation import Compared
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments.training import best_constant
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.sampling import Plan

REPAIRS: dict[str, dict[str, Any]] = {
    "right_variance": {},
    "as_released": {"centred": True, "variance": "sum", "fold": "divisor"},
    "no_repair": {"compensated": False},
}
"""What the server does to noise on slices → options of `risk_compensated`."""
CLASSES, LOOKS = 2, 10  # of a client; accuracies along the way


@dataclass(frozen=True)
class Federated(Compared):
    """A training under a defence, of LeNet or of a narrow ConvNet.

    Parameters
    ----------
    network : 'attacked_lenet', or 'convnet_16', which has sixteen channels in its first layer
    repair : one of `REPAIRS`, or 'not_applicable'
    noise_on : {'gradient', 'update', 'not_applicable'}
        What σ is measured on: the update itself, or the gradient that it stands for, the update
        over the learning rate.
    plan : a local iteration takes all ten images of a client, so that it is an epoch
    """

    seeds: int = 3
    repair: str = "not_applicable"
    noise_on: str = "not_applicable"
    network: str = "attacked_lenet"
    plan: Plan = field(default=Plan(100, 10, 2000, 2, 10, local_lr=0.01))

    def scene(self, seed: int, device: torch.device) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments of `simulate` for one seed, and the test examples.

        The root set is drawn from images that no client holds.
        """
        data = load_cached(self.dataset, train_only=False)
        rng, dice = np.random.default_rng([seed, 1]), torch.Generator().manual_seed(seed)
        plan = replace(self.plan, seed=seed)
        split = some_classes(data.train_y, plan.clients, plan.batch_size, CLASSES, rng)
        model = attacked_network(
            "gia" if self.network == "convnet_16" else "dga",  # each has a network of its own
            data.example_shape, data.n_classes, dice, 16,
        ).to(device)  # fmt: skip
        cut = self.cut(model, data, np.setdiff1d(np.arange(split.examples),
                                                 np.concatenate(split.indices)), rng,
                       unit=plan.local_lr if self.noise_on == "gradient" else 1.0,
                       **REPAIRS.get(self.repair, {}))  # fmt: skip
        train, test = (
            tuple(torch.as_tensor(getattr(data, f"{part}_{n}")).to(device) for n in "xy")
            for part in ("train", "test" if len(data.test_y) else "validation")
        )
        # slices that are drawn at their stage: the stacked engine takes every arm
        return (model, train, split, plan, replace(cut, begin_client=None)), test


@dataclass(frozen=True)
class Rounds:
    """Rounds of several trainings, timed in turn: times on a shared machine drift.

    Parameters
    ----------
    arms : the first is what the others are compared with
    repetitions : of all of them, after a first one that warms up
    """

    arms: tuple[Federated, ...]
    repetitions: int


def train(point: Federated, device: torch.device) -> Result:
    """Train with all seeds.

    Returns
    -------
    accuracy, guess, evaluated : of the last round, of the best constant, and test examples, [seeds]
    accuracy_after_… : along the way
    """
    runs = []
    for seed in range(point.seed, point.seed + point.seeds):
        args, test = point.scene(seed, device)
        run = simulate(*args, engine="auto", evaluation=test,
                       evaluate_every=max(1, point.plan.rounds // LOOKS))  # fmt: skip
        looks = {r.round + 1: r.accuracy for r in run.history if r.accuracy is not None}
        runs.append({
            "accuracy": looks[point.plan.rounds], "guess": best_constant(test[1]),
            "evaluated": len(test[1]),
        } | {f"accuracy_after_{rounds}": value for rounds, value in looks.items()})  # fmt: skip
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}


def time_rounds(point: Rounds, device: torch.device) -> Result:
    """Return each arm's time over the first one's minus 1, by its place, [repetitions].

    All train by automatic differentiation, as the paper's code would.
    """
    scenes = [arm.scene(arm.seed, device)[0] for arm in point.arms]
    times = np.empty((point.repetitions + 1, len(scenes)))
    for row in times:
        for i, args in enumerate(scenes):
            started = time.process_time()
            simulate(*args, engine="generic")
            row[i] = time.process_time() - started
    return {str(i): times[1:, i] / times[1:, 0] - 1 for i in range(len(scenes))}
