"""What an attack reports: its best iterate, its status, its stalls and restarts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_scenes import by_torch, refuse
from oracles import gradient_of
from torch import nn

from fl_privacy_lib.attacks import Attack, infer_labels, reconstruct
from fl_privacy_lib.attacks.attack import start
from fl_privacy_lib.attacks.reconstruct import Progress
from fl_privacy_lib.defenses import non_private
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated import Observation, Tap
from fl_privacy_lib.models import parameters_of

CPU = torch.device("cpu")


class Linear(nn.Module):
    """A model so small that an attack on it can be followed step by step."""

    def __init__(self):
        super().__init__()
        rows = [[0.3, -0.2, 0.1, 0.4], [-0.1, 0.2, 0.3, -0.4], [0.2, 0.1, -0.3, 0.0]]
        self.weight = nn.Parameter(torch.tensor(rows))

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


TINY = (1, 2, 2)


def seen_of(model, image, label, change=1.0):
    gradient = gradient_of(model, image, torch.tensor(label))
    values = {name: change * g[None] for name, g in gradient.items()}
    public = non_private().public()
    return Observation(Tap("example"), values, parameters_of(model), 0.1, 1, 1, public)


def tiny_attack(rate, iterations, steps=20):
    """Return a victim of label 1, and torch's Adam on it: the iterates and their objectives."""
    model = Linear()
    observation = seen_of(model, torch.tensor([[[0.45, 0.55], [0.5, 0.4]]]), 1)
    begin = start("patterned", 1, TINY, keyed_generator(CPU, 0, "start", 0))[0]

    def objective(image):
        loss = torch.logsumexp(model(image[None])[0], 0) - model(image[None])[0, 1]
        (gradient,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
        return (gradient - observation.values["weight"][0]).square().sum()

    iterates = by_torch(
        lambda p: torch.optim.Adam([p], lr=rate), objective, begin, iterations, steps
    )
    return model, observation, iterates, [float(objective(i).detach()) for i in iterates]


def test_the_result_is_the_iterate_with_the_least_objective(double):
    """Eight single steps, too long to end where they passed: the third came nearest by far."""
    model, observation, iterates, values = tiny_attack(rate=0.15, iterations=8, steps=1)
    attack = Attack(
        optimiser="adam", learning_rate=0.15, max_iterations=8, steps=1, stall=(99, 0.1)
    )
    found = reconstruct(model, [observation], TINY, attack)
    shown, least = [i.clamp(0, 1) for i in iterates], int(np.argmin(values))
    others = [i for i in range(8) if i != least]
    assert least == 2 and all(values[i] > 5 * values[least] for i in others)
    assert all((shown[i] - shown[least]).abs().max() > 0.1 for i in others)
    assert float(found.loss[0]) == pytest.approx(values[least], rel=1e-6)
    torch.testing.assert_close(found.images[0, 0], shown[least], rtol=0, atol=1e-6)


class Blind(nn.Module):
    """A model that does not look at its input: no attack can get anywhere."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, x):
        return self.bias + 0 * x.flatten(1).sum(1, keepdim=True)


@pytest.mark.parametrize("optimiser", ["lbfgs", "adam"])
@pytest.mark.parametrize("window", [1, 3, 10])
def test_a_victim_without_progress_is_stopped_after_the_window(optimiser, window):
    model = Blind()
    observation = seen_of(model, torch.zeros(TINY), 1, change=2.0)
    attack = Attack(optimiser=optimiser, stall=(window, 0.01))
    found = reconstruct(model, [observation], TINY, attack, labels=torch.tensor([[1]]))
    assert found.status == ["stalled"]
    assert found.iterations.tolist() == [window + 1]  # iteration 1 is the first to compare with


def test_a_stall_is_what_the_window_and_the_fraction_say(double):
    model, observation, _, values = tiny_attack(rate=0.02, iterations=10)
    best, stops = np.minimum.accumulate(values), []
    attack = Attack(optimiser="adam", learning_rate=0.02, max_iterations=10, stop_loss=1e-30)
    for window, fraction in ((1, 0.68), (1, 0.5), (2, 0.95), (2, 0.98), (3, 0.998), (5, 0.5)):
        stalled = [i for i in range(window, 10) if best[i] >= (1 - fraction) * best[i - window]]
        stops.append(stalled[0] + 1 if stalled else 10)
        found = reconstruct(model, [observation], TINY, replace(attack, stall=(window, fraction)))
        assert found.iterations.tolist() == [stops[-1]]
        assert found.status == ["stalled" if stalled else "budget"]
    assert stops == [6, 10, 7, 3, 4, 10]  # not only right after the window, and not always


@pytest.mark.long
@pytest.mark.parametrize("poison", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("optimiser", ["lbfgs", "adam"])
def test_a_gradient_that_says_nothing_is_counted_and_spoils_nobody(optimiser, poison):
    model = Linear()
    good = seen_of(model, torch.tensor([[[0.45, 0.55], [0.5, 0.4]]]), 1)
    bad = replace(good, values={n: torch.full_like(v, poison) for n, v in good.values.items()})
    attack = Attack(optimiser=optimiser, max_iterations=8, start="normal")
    labels = torch.tensor([[1], [1]])
    found = reconstruct(model, [good, bad], TINY, attack, labels=labels)
    assert found.status[1] == "hopeless" and int(found.iterations[1]) == 0
    assert (
        torch.isfinite(found.images).all() and found.images.min() >= 0 and found.images.max() <= 1
    )
    alone = reconstruct(model, [good], TINY, attack, labels=labels[:1])
    assert alone.status[0] == found.status[0] and int(alone.iterations[0]) == int(
        found.iterations[0]
    )
    torch.testing.assert_close(alone.images[0], found.images[0], rtol=0, atol=1e-4)
    inferred = reconstruct(model, [good, bad], TINY, attack)
    assert inferred.labels[1].tolist() == [-1] and inferred.status[1] == "hopeless"


class Cliff(nn.Module):
    """A model with an edge behind which there is no number; to lower its gradient leads there."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, x):
        return self.bias * torch.sqrt(x.flatten(1).sum(1, keepdim=True) + 6)


@pytest.mark.long
@pytest.mark.parametrize("neighbour", [0.0, math.nan])
def test_a_fresh_start_does_not_depend_on_the_restarts_of_others(neighbour):
    model, labels = Cliff(), torch.tensor([[1], [1]])
    goal = seen_of(model, torch.zeros(TINY), 1, change=1e-6)
    other = replace(goal, values={n: v + neighbour for n, v in goal.values.items()})
    attack = Attack(
        optimiser="adam", learning_rate=0.05, max_iterations=12, restarts=3, stall=(99, 0.01)
    )
    for seed in range(2):
        seeded = replace(attack, seed=seed)
        alone = reconstruct(model, [goal], TINY, seeded, labels=labels[:1])
        beside = reconstruct(model, [goal, other], TINY, seeded, labels=labels)
        assert (
            alone.status == ["diverged"] and int(alone.iterations[0]) > 4
        )  # not all at the first iteration
        assert float(beside.loss[0]) == pytest.approx(float(alone.loss[0]), rel=1e-4)
        torch.testing.assert_close(beside.images[0], alone.images[0], rtol=0, atol=1e-4)


def test_a_gradient_without_a_dense_layer_betrays_no_label():
    refuse(
        "no dense layer's weight gradient", lambda: infer_labels({"bias": torch.zeros(2, 10)}, 1)
    )
    observation = seen_of(Blind(), torch.zeros(TINY), 1)
    refuse("no dense layer's", lambda: reconstruct(Blind(), [observation], TINY, Attack()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_objective_that_is_no_number_counts_for_nothing(bad):
    progress = Progress(torch.zeros(2, 3), Attack(restarts=1), pixels=3)
    loss = torch.tensor([bad, 1.0])
    done, again = progress.update(torch.arange(2), loss, torch.full((2, 3), 0.5))
    assert done.tolist() == [False, False] and again.tolist() == [True, False]
    assert progress.least.tolist() == [math.inf, 1.0]
    assert progress.best_x.tolist() == [[0.0] * 3, [0.5] * 3]
