"""Small federations for the tests of the simulation."""

from functools import cache

import numpy as np
import torch

from fl_privacy_lib.data.partition import iid
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

MODELS = {
    "training_cnn 28×28×1": ("training_cnn", (1, 28, 28)),
    "training_cnn 32×32×3": ("training_cnn", (3, 32, 32)),
    "attacked_lenet": ("attacked_lenet", (1, 28, 28)),
    "mlp": ("mlp", (30,)),
}
CLASSES = 5


@cache
def setting(kind, dtype=torch.float32, clients=4, examples_per_client=6):
    """Return a model, examples and a partition, the same for every test that asks for them."""
    name, shape = MODELS[kind]
    # Where two values to be pooled nearly tie, rounding decides which of them passes, and with it
    # the update: under seed 0 a relative change of 1e-6 in the pixels moves it by 4e-3 six times of
    # ten, under this seed by 1e-6 at most.
    generator = torch.Generator().manual_seed(2)
    count = clients * examples_per_client
    x = torch.rand((count, *shape), generator=generator, dtype=dtype)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    model = build(name, shape, CLASSES, generator).to(dtype)
    return model, (x, y), iid(count, clients, examples_per_client, np.random.default_rng(0))


def plan_of(**settings):
    usual = {"clients": 4, "participants": 3, "rounds": 1, "local_iterations": 2, "batch_size": 3}
    return Plan(**usual | {"local_lr": 0.1} | settings)


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
