"""Small victims for the tests of attacks: digits of 14 × 14 pixels behind a sigmoid network."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import Partition, load
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.metrics import matched, success
from fl_privacy_lib.models import attacked_lenet, init_uniform
from fl_privacy_lib.sampling import Plan

SHAPE = (1, 14, 14)


@cache
def digits():
    data = load("digits", Path("/nowhere"))
    return torch.nn.functional.avg_pool2d(torch.tensor(data.train_x), 2), torch.tensor(data.train_y)


@cache
def lenet(seed=0):
    return init_uniform(attacked_lenet(SHAPE, 10, 3), torch.Generator().manual_seed(seed))


def observe(defense, stage="example", victims=6, batch=1, rounds=1, first=0, **settings):
    """Return observations [victims][rounds], their images [V, B, …] and labels [V, B]."""
    x, y = digits()
    held = tuple(first + np.arange(i * batch, (i + 1) * batch) for i in range(victims))
    plan = Plan(victims, victims, rounds, 1, batch, **{"local_lr": 0.1} | settings)
    taps = [[Tap(stage, client, r) for r in range(rounds)] for client in range(victims)]
    run = simulate(lenet(), (x, y), Partition("one batch each", held, len(y)), plan, defense,
                   taps=[tap for row in taps for tap in row])  # fmt: skip
    keep = 1 if stage == "example" else batch
    truth = [run.truth[row[0]] for row in taps]
    images, labels = (torch.stack([t[i][:keep] for t in truth]) for i in (0, 1))
    return [[run.observations[tap] for tap in row] for row in taps], images, labels


def successes(found, truth):
    pairs = zip(found.images.numpy(), truth.numpy(), strict=True)
    return np.array([success(matched(guess, images), images).all() for guess, images in pairs])


def by_torch(optimiser, objective, x, iterations, steps=20):
    """Return the iterate after every attack iteration of torch's optimiser on one row."""
    x = x.clone().requires_grad_(True)
    made, iterates = optimiser(x), []

    def closure():
        made.zero_grad()
        value = objective(x)
        value.backward()
        return value

    for _ in range(iterations):
        for _ in range(1 if isinstance(made, torch.optim.LBFGS) else steps):
            made.step(closure)
        iterates.append(x.detach().clone())
    return iterates


def refuse(sentence, call):
    with pytest.raises(InputError, match=sentence) as raised:
        call()
    assert str(raised.value).endswith((".", "?)."))
