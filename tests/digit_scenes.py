"""Victims for the tests of attacks: digits of 28 × 28 pixels behind the attacked LeNet."""

from functools import cache
from pathlib import Path

import numpy as np
import torch

from fl_privacy_lib.data import Partition, load
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

SHAPE = (1, 28, 28)


@cache
def digits():
    data = load("digits", Path("/nowhere"))
    return torch.tensor(data.train_x), torch.tensor(data.train_y)


@cache
def lenet(dtype=torch.float32, seed=0):
    return build("attacked_lenet", SHAPE, 10, torch.Generator().manual_seed(seed)).to(dtype)


def observe(defense, stage="example", victims=8, batch=1, dtype=torch.float32, **settings):
    """Return the observations of so many clients, and their images [V, …] and labels [V, …]."""
    x, y = digits()
    each = batch * settings.get("local_iterations", 1)
    held = tuple(np.arange(i * each, (i + 1) * each) for i in range(victims))
    usual = {"participants": victims, "rounds": 1, "local_iterations": 1, "local_lr": 0.1}
    plan = Plan(victims, batch_size=batch, **usual | settings)
    taps = [Tap(stage, client) for client in range(victims)]
    partition = Partition("one batch each", held, len(y))
    run = simulate(lenet(dtype), (x.to(dtype), y), partition, plan, defense, taps=taps)
    truth = [run.truth[tap] for tap in taps]
    observations = [run.observations[tap] for tap in taps]
    return observations, torch.stack([t[0] for t in truth]), torch.stack([t[1] for t in truth])
