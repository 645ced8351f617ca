"""Accuracy of a training under clipping and noise (chapters 05 and 06).

A `Training` is one cell of the paper's tables; `measure` trains it for all its seeds.
"""

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import one_of
from fl_privacy_lib._files import write_atomically
from fl_privacy_lib.data import Dataset, Partition
from fl_privacy_lib.defenses import Defense, Then, mean_std, pruned
from fl_privacy_lib.defenses.registry import build as build_defense
from fl_privacy_lib.federated.simulation import RoundReport, evaluate, simulate
from fl_privacy_lib.models import build, parameters_of
from fl_privacy_lib.reproduction.experiments.setups import setup_of
from fl_privacy_lib.reproduction.experiments.watching import (
    NormWatch,
    NotFinite,
    end_if_not_finite,
    has_diverged,
    norm_of,
    read_checkpoint,
)
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.records import point_path
from fl_privacy_lib.sampling import LocalOptimizer, Plan

READINGS = ("printed", "code", "as_coded", "not_applicable")
"""Where noise of which size enters; without noise, none applies.

Fed-CDP: σC on each example and σC/√B on their mean, or σC/B on the batch mean. Fed-SDP: σC on each
update, or σC/√K_t. 'as_coded': the code's scaling, σ and learning rate.
"""
CODE_NOISE, CODE_RATE = 0.5, 0.05
SDP = ("fed_sdp", "fed_sdp_server")
DECAYS = {
    "fed_cdp_decay": "linear",
    "fed_cdp_decay_exponential": "exponential",
    "fed_cdp_decay_cyclic": "cyclic",
}
MOVED: dict[str, LocalOptimizer] = {
    "fed_cdp_momentum": "momentum",
    "fed_cdp_adam": "adam",
    "fed_cdp_models": "sgd",
}
"""Fed-CDP with what stands in its released code besides → what takes the local steps: as comments
two optimisers, and K_t models that are summed and divided by K_t − 1."""
METHODS = ("non_private", *SDP, "fed_cdp", *DECAYS, *MOVED, "median_clip", "dssgd")
DSSGD_SHARE = 0.1  # of the coordinates; the paper prints none
FOLDS = 10  # a tenth is held out for a search; of small data a fifth
SMALL, SMALL_FOLDS = 5000, 5
WATCHED = 1000  # validation examples along the way; the last accuracy is measured on all
CHECKS = 20  # times that a training is looked at
MANY = 1000  # rounds from which on they are short, and the state is kept at every look only
ENGINE = "auto"
"""What trains, live and recorded.

It is in no row's key: engines agree but for their draws of noise, so rows of an earlier one stay
valid (``tools/engine_agreement.py``).
"""


@dataclass(frozen=True)
class Training:
    """One cell, with every setting that its accuracy depends on.

    Parameters
    ----------
    setting : one of `READINGS`
    clip_norm, clip_end : C, and where it decays to over the rounds; 0 where it stays
    pruned : fraction of an update's coordinates that is not sent, after everything else
    held_out : train on a part of the training data and measure on the rest, a tenth or, of fewer
        than 5,000 examples, a fifth: another one for every seed; else on the validation data
    watched : keep the gradients' norms
    """

    dataset: str
    method: str
    setting: str = "not_applicable"
    clients: int = 100
    participants: int = 5
    rounds: int = 100
    local_iterations: int = 100
    batch_size: int = 5
    clip_norm: float = 4.0
    clip_end: float = 0.0
    noise_scale: float = 6.0
    local_lr: float = 0.05
    pruned: float = 0.0
    held_out: bool = False
    watched: bool = False
    seed: int = 0
    seeds: int = 1

    methods: ClassVar[tuple[str, ...]] = METHODS
    readings: ClassVar[tuple[str, ...]] = READINGS

    def __post_init__(self) -> None:
        one_of(self.methods, method=self.method)
        one_of(self.readings, setting=self.setting)

    def data(self) -> Dataset:
        """Return the examples: what trains, and as validation data what is measured on."""
        return load_cached(self.dataset, train_only=False)

    def split(self, data: Dataset, rng: np.random.Generator) -> Partition:
        """Split the training examples among the clients."""
        return setup_of(self.dataset).split(data, self.clients, rng)

    def network(self, shape: tuple[int, ...]) -> str:
        """Return the name of the network that the papers train on examples of a shape."""
        return "training_cnn" if len(shape) == 3 else "mlp"

    def looks(self) -> tuple[int, int | None]:
        """Return how often a training is looked at, and on how many examples; None: all.

        Its last accuracy is measured on all.
        """
        return CHECKS, WATCHED

    @property
    def defense(self) -> Defense:
        """What clients and server do, as a filling of the route."""
        printed = self.setting == "printed"
        name = "fed_sdp_client" if self.method == "fed_sdp" else self.method
        if self.method in ("fed_cdp", "median_clip", *DECAYS, *MOVED):
            kind = "fed_cdp_decay" if self.method in DECAYS else self.method
            kind = "fed_cdp" if self.method in MOVED else kind
            name = f"{kind}_example" if printed else f"{kind}_batch"
        filled = build_defense(
            name, clip_norm=self.clip_norm, noise_scale=self.noise_scale,
            level=DSSGD_SHARE if self.method == "dssgd" else self.noise_scale,
            participants=None if printed else self.participants, end=self.clip_end,
            rounds=self.rounds, shape=DECAYS.get(self.method),
        )  # fmt: skip
        return pruned(self.pruned, defense=filled) if self.pruned else filled

    @property
    def multiplier(self) -> float:
        """Noise multiplier of a batch mean, in units of C/B; for Fed-SDP of an update, of C."""
        if self.method in SDP:
            clients = 1 if self.setting == "printed" else self.participants
            return self.noise_scale / math.sqrt(clients)
        divisor = "sqrt_batch" if self.setting == "printed" else "batch"
        noisy = self.method not in ("non_private", "dssgd")
        return effective_multiplier(self.noise_scale, self.batch_size, divisor) if noisy else 0.0

    def plan(self, seed: int, rounds: int | None = None) -> Plan:
        """Return the plan of one seed's training."""
        k = self.participants
        return Plan(
            self.clients, k, rounds or self.rounds, self.local_iterations, self.batch_size,
            local_lr=self.local_lr, seed=seed, local_optimizer=MOVED.get(self.method, "sgd"),
            weight_factor=k / max(k - 1, 1) if self.method == "fed_cdp_models" else 1.0,
        )  # fmt: skip


def point_of(row: Any, kind: type[Training] = Training) -> Any:
    """Return the training, of a kind, that a recorded row is of."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    return kind(**{n: row[n] == "True" if k is bool else k(row[n]) for n, k in kinds.items()})


def effective_multiplier(noise_scale: float, batch_size: int, divide_by: str) -> float:
    """Return the noise on the batch mean in units of C/B, the most that one example moves it.

    Examples
    --------
    >>> [round(effective_multiplier(6, 5, how), 1) for how in ("sqrt_batch", "batch", "none")]
    [13.4, 6.0, 30.0]
    """
    return mean_std(noise_scale, 1.0, batch_size, divide_by) * batch_size


class Scene(NamedTuple):
    """What one seed's training starts from; examples are (inputs, labels) on the device."""

    model: nn.Module
    train: tuple[torch.Tensor, torch.Tensor]
    partition: Partition
    evaluation: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


def best_constant(labels: torch.Tensor) -> float:
    """Return the accuracy of the best constant guess of some labels, [n]."""
    return float(torch.bincount(labels).max()) / len(labels)


def scene(point: Training, seed: int, device: torch.device) -> Scene:
    """Return the first weights, the clients' data and the evaluation data of one seed.

    What is held out is the same for every point of a data set: no arm is chosen on luckier data.
    """
    data = point.data()
    if point.held_out:
        order = np.random.default_rng(0).permutation(len(data.train_y))
        folds = fold_count(len(order))
        size = len(order) // folds
        first = size * (seed % folds)
        out, rest = np.split(np.roll(order, -first), [size])
        x, y, none = data.train_x, data.train_y, slice(0)
        data = replace(
            data, train_x=x[rest], train_y=y[rest], validation_x=x[out], validation_y=y[out],
            test_x=data.test_x[none], test_y=data.test_y[none],
        )  # fmt: skip
    generator, shape = torch.Generator().manual_seed(seed), data.example_shape
    model = build(point.network(shape), shape, data.n_classes, generator).to(device)
    partition = point.split(data, np.random.default_rng([seed, 1]))

    def part(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.as_tensor(x).to(device), torch.as_tensor(y).to(device)

    return Scene(
        model,
        part(data.train_x, data.train_y),
        partition,
        part(data.validation_x, data.validation_y),
        part(data.test_x, data.test_y),
    )


def fold_count(examples: int) -> int:
    """Return into how many parts training data are cut, one of which is held out for a search."""
    return FOLDS if examples >= SMALL else SMALL_FOLDS


def best_rate(results: dict[Any, dict[str, np.ndarray]]) -> float:
    """Return the learning rate that is most accurate over its seeds, the smaller of equals.

    Parameters
    ----------
    results : point → its result, on data held out for the choice
    """
    return float(min(results, key=lambda p: (-results[p]["accuracy"].mean(), p.local_lr)).local_lr)


def measure(point: Training, device: torch.device, folder: Path) -> dict[str, np.ndarray]:
    """Train a point with all its seeds; an interrupted training goes on at its last finished round.

    Parameters
    ----------
    folder : where trainings under way keep their state

    Returns
    -------
    accuracy, test_accuracy (NaN without test data), rounds_run, diverged, growth (of the weights'
    norm): [seeds]
    guess, evaluated : [seeds], accuracy of what has not learned, the better of the best constant
        guess and the first weights, and the examples behind it
    engine : [seeds], the one that was taken; '' where the weights did not stay finite
    curve : [seeds, looks], NaN where a training had stopped
    weights : [P] of the first seed
    norms : [T, L, M] of the first seed where the point is watched
    """
    state = point_path(folder, asdict(point) | {"device": device.type}).with_suffix("")
    paths = [Path(f"{state}_{seed}.pt") for seed in range(point.seed, point.seed + point.seeds)]
    runs = [train(point, point.seed + i, device, path) for i, path in enumerate(paths)]
    for path in paths:
        path.unlink()
        _clock(path).unlink()
    first = {name: runs[0].pop(name) for name in ("weights", "norms") if name in runs[0]}
    result = {name: np.array([run[name] for run in runs]) for name in runs[0]}
    return result | first | {"seconds": result["seconds"].sum()}


def _clock(checkpoint: Path) -> Path:
    """Return the file that holds how many seconds a training has run, interrupted runs included."""
    return checkpoint.with_suffix(".seconds")


def _after_round(checkpoint: Path, started: float, report: RoundReport) -> None:
    """Write the time after a round that was looked at, and end a training that has broken."""
    if report.accuracy is not None:
        write_atomically(_clock(checkpoint), str(time.perf_counter() - started).encode())
        end_if_not_finite(checkpoint)


def train(
    point: Training,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    engine: str = ENGINE,
) -> dict[str, Any]:
    """Train one seed and return what `measure` collects."""
    taken, earlier = "", _clock(checkpoint)
    started = time.perf_counter() - (float(earlier.read_text()) if earlier.exists() else 0.0)
    start, plan, defense = scene(point, seed, device), point.plan(seed), point.defense
    norms = NormWatch()
    if point.watched:
        late = defense.per_batch
        defense = replace(defense, per_batch=norms if late is None else Then(late, norms))
    looks, examples = point.looks()
    looked = (start.evaluation[0][:examples], start.evaluation[1][:examples])
    constant = best_constant(looked[1])
    untrained = parameters_of(start.model)
    score = partial(evaluate, start.model, compiled=engine in ("auto", "compiled"))
    first_norm, first = norm_of(untrained), score(untrained, start.evaluation)
    every = max(1, plan.rounds // looks)
    with suppress(NotFinite):
        if checkpoint.exists() and not point.watched:
            end_if_not_finite(checkpoint)  # it had ended there, and another seed was interrupted
        taken = simulate(
            start.model, start.train, start.partition, plan, defense, engine=engine,
            evaluation=looked, evaluate_every=every,
            on_round=partial(_after_round, checkpoint, started),
            checkpoint=checkpoint, save_every=every if plan.rounds >= MANY else 1,
            resume=not point.watched,
        ).engine  # fmt: skip
    last, history = read_checkpoint(checkpoint)
    weights = {name: w.to(device) for name, w in last.items()}
    curve = {t: value for t, value in history.items() if value is not None}
    growth = norm_of(weights) / first_norm
    seen = [t for t in range(plan.rounds) if (t + 1) % every == 0 or t + 1 == plan.rounds]
    tested = len(start.test[1]) > 0
    result = {
        "accuracy": score(weights, start.evaluation),
        "test_accuracy": score(weights, start.test) if tested else math.nan,
        "guess": max(best_constant(start.evaluation[1]), first),
        "evaluated": len(start.evaluation[1]),
        "rounds_run": max(curve) + 1,
        "diverged": float(has_diverged(curve, constant, growth)),
        "growth": growth,
        "engine": taken,
        "curve": [curve.get(t, math.nan) for t in seen],
        "weights": torch.cat([w.flatten() for w in weights.values()]).cpu().numpy(),
    }
    if point.watched:
        result["norms"] = norms.table(plan.rounds, plan.local_iterations)
    result["seconds"] = time.perf_counter() - started
    return result
