"""FedSel: training under local privacy, one example a client (chapter 08).

A `Training` is one arm: what the clients send, on which data, with which budget; its result is the
accuracy of every fold of every repetition. All arms of one repetition and fold share the split, the
order of the clients and the first weights.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.defenses import Defense, non_private
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.perturbation import (
    Compressed,
    Duchi,
    Flat,
    Hybrid,
    Laplace,
    Perturbation,
    Piecewise,
    random_projection,
)
from fl_privacy_lib.defenses.selection import (
    Exponential,
    PerturbedEncoding,
    PerturbedSampling,
    RandomChoice,
)
from fl_privacy_lib.defenses.two_stage import Perturbed, Select, TwoStage, allocate, local_privacy
from fl_privacy_lib.federated import MarginLoss, simulate_reports
from fl_privacy_lib.federated.rounds import Examples
from fl_privacy_lib.reproduction.loading import load_cached
from fl_privacy_lib.reproduction.verdict import at_guess
from fl_privacy_lib.sampling import Plan

VALUES: dict[str, type[Perturbation]] = {
    "pm": Piecewise,
    "hm": Hybrid,
    "duchi": Duchi,
    "laplace": Laplace,
}
SELECTIONS = ("exp", "pe", "ps")
"""The paper's three private selections."""
WHOLE = ("flat", "flat_unscaled", "compressed")
SENDS = ("full", "random", "top_k", *SELECTIONS, *WHOLE)
"""What a client sends: its gradient, one selected coordinate, or a whole perturbed vector."""
COMPRESSION = 0.1  # of Fig. 2
BUDGETS = ("within", "control", "rule")
MODELS = {"logistic_regression": "logistic", "svm": "hinge"}
PUBLISHED_NAMES = {"adult_123": "adult"}
LARGER_CLASS = {
    "syn_l": 30_216 / 60_000,
    "syn_h": 50_078 / 100_000,
    "bank": 39_922 / 45_211,
    "kdd99": 56_074 / 70_000,
    "adult_123": 37_155 / 48_842,
    "cancer": 357 / 569,
}
"""Share of a data set's larger class, counted over all records; a page needs no data's files."""
CHECKPOINTS = 10  # accuracies along a training
EXTENDED = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
STEPS = EXTENDED[2:-2]
"""Learning rates among which a tuned arm chooses; a best at an edge extends them, twice at most."""
SEARCHED, GOING_ON = 3, 3  # of a search: its folds, and the steps tried on more than the first one


@dataclass(frozen=True)
class Training:
    """One arm, with every setting that its numbers depend on.

    Parameters
    ----------
    send : one of `SENDS`
    value : perturbation of what is sent, or 'none'
    epsilon : budget of one participation; a selection whose value is not perturbed gets all of it
    budget : 'within': μ ε for the selection, the rest for the value; 'control': ε for the value, μ
        ε on top of it for the selection (the paper's "-C"); 'rule': as `two_stage.allocate` says
    server_lr : η
    tuned : choose η by `search`
    raw : send the raw gradient, η stands at the server; else η times the gradient (the paper's
        "-O")
    memory : clients keep what they did not send
    batch, rounds : 0 for a share of the clients, and for whole epochs
    """

    dataset: str
    model: str = "logistic_regression"
    send: str = "ps"
    value: str = "pm"
    epsilon: float = 1.0
    ratio: float = 0.1
    budget: str = "within"
    top_share: float = 0.1
    server_lr: float = 0.1
    tuned: bool = False
    raw: bool = True
    memory: bool = False
    discount: float = 0.9
    l2: float = 1e-4
    batch_share: float = 0.01
    batch: int = 0
    epochs: int = 1
    rounds: int = 0
    repetitions: int = 5
    folds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(SENDS, send=self.send)
        one_of([*VALUES, "none"], value=self.value)
        one_of(BUDGETS, budget=self.budget)
        one_of(MODELS, model=self.model)

    @property
    def loss(self) -> MarginLoss:
        """What the clients minimise."""
        return MarginLoss(MODELS[self.model], self.l2)

    @property
    def method(self) -> str:
        """Name of the arm, as the paper abbreviates it where it has a name there."""
        if self.value == "none":
            return {"full": "np", "random": "np_rs", "top_k": "np_k"}.get(self.send, self.send)
        sent = "" if self.send in WHOLE else f"{self.send}_"
        end = {"compressed": "_rp", "flat_unscaled": "_unscaled"}.get(self.send, "")
        budget = {"within": "", "control": "_c", "rule": "_rule"}[self.budget]
        return f"{sent}{self.value}{end}{budget}{'' if self.raw else '_o'}"

    def plan(self, clients: int, seed: int) -> Plan:
        """Return the plan of one training among that many clients."""
        batch = self.batch or max(1, int(self.batch_share * clients))
        rounds = self.rounds or self.epochs * (clients // batch)
        local, server = (1.0, self.server_lr) if self.raw else (self.server_lr, 1.0)
        return Plan(
            clients, batch, rounds, 1, 1, "one_pass", local_lr=local, server_lr=server, seed=seed
        )

    def budgets(self, dimensions: int, batch: int) -> tuple[float, float]:
        """Return (ε₁, ε₂) of the selection and of the value."""
        if self.value == "none":
            return self.epsilon, 0.0
        if self.send not in SELECTIONS:
            return 0.0, self.epsilon
        if self.budget == "rule":
            return allocate(self.epsilon, dimensions, batch, largest_ratio=self.ratio)
        share = self.ratio * self.epsilon
        return share, self.epsilon - (0.0 if self.budget == "control" else share)

    def defense(self, dimensions: int, plan: Plan) -> Defense:
        """Return what the clients do, as a filling of the route."""
        if self.send == "full":
            return non_private()
        if self.send in WHOLE:
            return local_privacy(self.method, Perturbed(self.whole(dimensions, plan.seed)))
        first, second = self.budgets(dimensions, plan.participants)
        uniform = self.send == "random" or (self.send in SELECTIONS and first == 0)
        stage = TwoStage(
            RandomChoice()
            if uniform
            else selection(self.send, first, top(self.top_share, dimensions)),
            None if self.value == "none" else VALUES[self.value](second),
            # the paper enlarges what is drawn uniformly
            scale=dimensions if self.send == "random" else 1.0,
            clients=plan.clients if self.memory else None,
            discount=self.discount,
        )
        return local_privacy(self.method, stage)

    def whole(self, dimensions: int, seed: int = 0) -> Flat | Compressed:
        """Return the flat or the compressed solution's mechanism over whole vectors."""
        compressed = self.send == "compressed"
        d = max(1, round(COMPRESSION * dimensions)) if compressed else dimensions
        # calibrated: as published, Duchi's vectors are not ε-private where d is even
        flat = Flat(VALUES[self.value], self.epsilon, d, self.send != "flat_unscaled")
        generator = keyed_generator(torch.device("cpu"), seed, "projection")
        return Compressed(flat, random_projection(dimensions, d, generator)) if compressed else flat


def top(top_share: float, dimensions: int) -> int:
    """Return k, the number of coordinates that count as top: at least one, and not all.

    Parameters
    ----------
    top_share : k/d, in (0, 1)
    dimensions : d

    Raises
    ------
    InputError
        If all coordinates would count as top.

    Examples
    --------
    >>> top(0.1, 32)
    3
    """
    k = max(1, round(top_share * dimensions))
    if k >= dimensions:
        raise InputError(
            f"top_share = {top_share:g} of {dimensions} coordinates is all of them: choose less."
        )
    return k


def selection(name: str, epsilon: float, top: int) -> Select:
    """Return a selection of one coordinate.

    Parameters
    ----------
    name : 'exp', 'pe', 'ps', or 'top_k', which is not private
    epsilon : its budget
    top : k
    """
    built: dict[str, Select] = {
        "exp": Exponential(epsilon),
        "pe": PerturbedEncoding(epsilon, top, "e_eps"),
        "ps": PerturbedSampling(epsilon, top),
        "top_k": PerturbedSampling(np.inf, top),
    }
    return built[name]


@functools.lru_cache(maxsize=2)
def records(dataset: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all records [N, d] of a data set and their labels [N]; cross-validation splits them.

    Raises
    ------
    InputError
        If the data set has other than two classes.
    """
    data = load_cached(dataset, train_only=False)
    x = np.concatenate([data.train_x, data.validation_x, data.test_x])
    y = np.concatenate([data.train_y, data.validation_y, data.test_y])
    if data.n_classes != 2:
        raise InputError(
            f"dataset = {dataset!r} has {data.n_classes} classes, a margin separates 2: "
            "use another."
        )
    return torch.from_numpy(x), torch.from_numpy(y)


def folds_of(examples: int, folds: int, repetition: int, seed: int) -> list[np.ndarray]:
    """Return the positions of every fold's test part; together they are all examples."""
    return np.array_split(np.random.default_rng([seed, repetition]).permutation(examples), folds)


@functools.lru_cache(maxsize=1)
def split(
    dataset: str, folds: int, repetition: int, fold: int, seed: int
) -> tuple[Examples, Examples]:
    """Return the records and labels of one fold's training part, and those of its test part."""
    x, y = records(dataset)
    cut = folds_of(len(y), folds, repetition, seed)
    train = torch.from_numpy(np.concatenate([part for i, part in enumerate(cut) if i != fold]))
    test = torch.from_numpy(cut[fold])
    return (x[train], y[train]), (x[test], y[test])


def train(point: Training, repetition: int, fold: int) -> np.ndarray:
    """Return the accuracies along one training, [checkpoints]."""
    examples, held_out = split(point.dataset, point.folds, repetition, fold, point.seed)
    plan = point.plan(len(examples[1]), (point.seed * 1000 + repetition) * 1000 + fold)
    run = simulate_reports(
        examples, plan, point.defense(examples[0].shape[1], plan), point.loss,
        evaluation=held_out, evaluate_every=max(1, plan.rounds // CHECKPOINTS),
    )  # fmt: skip
    reached = np.array([r.accuracy for r in run.history if r.accuracy is not None])
    # folds differ by a client, and so perhaps by a round and an accuracy
    return reached[np.linspace(0, len(reached) - 1, CHECKPOINTS).round().astype(int)]


def search(arm: Training) -> dict[float, list[float]]:
    """Return what was tried for an arm: η → the accuracy on each fold, the best η last.

    All of `STEPS` are tried on one fold, the best three of them on two more. A best at the edge of
    what was tried extends it by a step. The cross-validation has a seed that no result has.
    """
    arm = replace(arm, tuned=False, seed=arm.seed + 1)
    folds = range(min(SEARCHED, arm.folds))
    scores: dict[float, list[float]] = {}

    def ranked() -> list[float]:
        return sorted(scores, key=lambda step: (len(scores[step]), np.mean(scores[step])))

    def try_on(folds: range, steps: Sequence[float]) -> None:
        for fold, step in itertools.product(folds, steps):
            curve = train(replace(arm, server_lr=step), 0, fold)
            scores.setdefault(step, []).append(float(curve[-1]))

    try_on(folds[:1], STEPS)
    try_on(folds[1:], ranked()[-GOING_ON:])
    for _ in range(2):
        best, places = EXTENDED.index(ranked()[-1]), [EXTENDED.index(step) for step in scores]
        outward = {min(places): [best - 1], max(places): [best + 1]}.get(best, [])
        try_on(folds, [EXTENDED[place] for place in outward])
    return {step: scores[step] for step in ranked()}


def learns(accuracies: Sequence[float], point: Training) -> bool:
    """Return whether the mean accuracy over folds is surely above the larger class's share.

    By three binomial standard errors; a fold tests its records, and a repetition the same again.
    """
    guess = LARGER_CLASS[point.dataset]
    tested = len(records(point.dataset)[1]) * min(1.0, len(accuracies) / point.folds)
    return not at_guess(float(np.mean(accuracies)), 0.0, 1, guess, tested)


def measure(point: Training) -> dict[str, Any]:
    """Train an arm on every fold of every repetition.

    Returns
    -------
    curve : accuracies, [runs, checkpoints]
    server_lr : η, the chosen one where the arm is tuned
    learns : whether its accuracy is surely above the larger class, in the search too
    steps, scores : what the search tried, [tried] and [tried, folds]; nan where it did not
    """
    tried = search(point) if point.tuned else {}
    chosen = next(reversed(tried), point.server_lr)
    arm = replace(point, tuned=False, server_lr=chosen)
    runs = itertools.product(range(arm.repetitions), range(arm.folds))
    curve = np.array([train(arm, *run) for run in runs])
    last = curve[:, -1].tolist()
    scores = [values + [np.nan] * (SEARCHED - len(values)) for values in tried.values()]
    return {
        "curve": curve,
        "server_lr": np.array(chosen),
        "learns": np.array(learns(last, arm) and learns(tried.get(chosen, last), arm)),
        "steps": np.array(list(tried)),
        "scores": np.array(scores),
    }
