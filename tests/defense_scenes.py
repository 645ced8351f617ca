"""Small trainings and gradients for the tests of defences."""

import math

import numpy as np
import torch
from oracles import WRONG_ALARM
from scipy import stats

from fl_privacy_lib.data.partition import iid
from fl_privacy_lib.defenses import Clip
from fl_privacy_lib.defenses.route import ClientContext, ClipAndNoiseUpdate, Defense
from fl_privacy_lib.defenses.rules import QuantileNorm
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

SHAPE = (30,)


def of_std(noise, std):
    """Return whether the sum of squares fits N(0, std²) and the mean fits 0, each with
    WRONG_ALARM.
    """
    noise = noise.double().flatten()
    low, high = stats.chi2.ppf([WRONG_ALARM / 2, 1 - WRONG_ALARM / 2], len(noise))
    centred = abs(float(noise.mean())) < stats.norm.isf(WRONG_ALARM / 2) * std / math.sqrt(
        len(noise)
    )
    return bool(low <= float((noise / std).square().sum()) <= high) and centred


def flat(values):
    return torch.cat([v.double().flatten() for v in values.values()])


def setting(clients=4, examples_per_client=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = clients * examples_per_client
    x = torch.rand((count, *SHAPE), generator=generator)
    y = torch.randint(0, 2, (count,), generator=generator)
    partition = iid(count, clients, examples_per_client, np.random.default_rng(seed))
    return build("mlp", SHAPE, 2, generator), (x, y), partition


def observed(defense, plan, taps, clients=4):
    model, train, partition = setting(clients)
    run = simulate(model, train, partition, plan, defense, taps=taps)
    return {tap: run.observations[tap].values for tap in taps}


def noise_of(defense, plan, taps):
    """Return what a defence adds at each tap to what the same defence without noise shows there."""
    noisy, clear = observed(defense, plan, taps), observed(defense.noiseless(), plan, taps)
    return {tap: flat(noisy[tap]) - flat(clear[tap]) for tap in taps}


def plan_of(batch_size=4, **settings):
    return Plan(**{"clients": 4, "participants": 4, "rounds": 1, "local_iterations": 2} | settings,
                batch_size=batch_size, local_lr=0.1)  # fmt: skip


def context(clients=1, batch_size=3, seed=0, **more):
    generators = [torch.Generator().manual_seed(seed + i) for i in range(clients)]
    weights = torch.full((clients,), 1 / clients)
    return ClientContext(
        0, tuple(range(clients)), generators, weights, batch_size=batch_size, **more
    )


def quantile_updates(at, noise_scale=6.0, scope="all", clip_norm=4.0, **rule):
    """Return clipping of updates at a private quantile: at per_client or on_arrival."""
    bound = QuantileNorm(Clip(clip_norm, scope), **rule)
    stages = {at: ClipAndNoiseUpdate(bound, noise_scale), "on_aggregate": bound}
    return Defense("quantile_updates", initial_state=bound.start, **stages)


def random_gradients(clients=2, batch=3, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.rand(clients, batch, generator=g, dtype=torch.float64) * scale
    return {
        "a": torch.randn(clients, batch, 4, 5, generator=g, dtype=torch.float64)
        * sizes[..., None, None],
        "b": torch.randn(clients, batch, generator=g, dtype=torch.float64)
        * sizes,  # a scalar parameter
    }
