"""Scenes for the compiled engine, and its comparison with automatic differentiation in float64.

Where two values to be pooled, or an input of ReLU and zero, are nearly equal, rounding decides, and
a decision moves a gradient by more than any rounding. A scene that disagrees is passed over if it
holds such a place, and only then."""

import copy

import numpy as np
import torch
from oracles import relative_distance
from torch import nn
from torch.func import functional_call

from fl_privacy_lib.data import iid
from fl_privacy_lib.defenses import fed_cdp
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build
from fl_privacy_lib.sampling import Plan

SCENES = {
    "mnist": ("training_cnn", (1, 28, 28), 10),
    "cifar10": ("training_cnn", (3, 32, 32), 10),
    "lfw": ("training_cnn", (3, 32, 32), 62),
    "small": ("training_cnn", (1, 14, 14), 10),
    "adult": ("mlp", (105,), 2),
}
MARGIN = 3e-6  # several roundings of numbers of order 1
BOUND = 1e-5


def scene(name, clients=2, examples=30, seed=0):
    kind, shape, classes = SCENES[name] if isinstance(name, str) else name
    generator = torch.Generator().manual_seed(seed)
    model = build(kind, shape, classes, generator)
    x = torch.rand(clients * examples, *shape, generator=generator)
    y = torch.randint(classes, (clients * examples,), generator=generator)
    return model, (x, y), iid(clients * examples, clients, examples, np.random.default_rng(seed))


def plan_of(clients=2, **changes):
    values = {
        "participants": clients,
        "rounds": 1,
        "local_iterations": 2,
        "batch_size": 5,
        "local_lr": 0.3,
    }
    return Plan(clients=clients, **(values | changes))


def without_noise(clip_norm, scope):
    return fed_cdp(clip_norm=clip_norm, noise_scale=0.0, scope=scope)


def update_taps(plan):
    return [Tap("update", int(c), plan.rounds - 1) for c in plan.participants_of(plan.rounds - 1)]


def updates(model, train, partition, plan, defense, engine="compiled"):
    """Return the last round's updates, tensor by tensor."""
    run = simulate(model, train, partition, plan, defense, taps=update_taps(plan), engine=engine)
    assert run.engine == engine
    return named(run, plan)


def named(run, plan):
    return {
        f"{t.client} {n}": v
        for t in update_taps(plan)
        for n, v in run.observations[t].values.items()
    }


def exact(model, train, partition, plan, defense):
    """Return the updates by autograd in float64, and the least margin of a decision."""
    double = copy.deepcopy(model).double()
    inside = [
        Tap("batch", int(c), r, i)
        for r in range(plan.rounds)
        for c in plan.participants_of(r)
        for i in range(plan.local_iterations)
    ]
    taps = [*inside, *update_taps(plan)]
    run = simulate(double, (train[0].double(), train[1]), partition, plan, defense, taps=taps)
    margins = [margin(double, run.observations[tap].weights, run.truth[tap][0]) for tap in inside]
    return named(run, plan), min(margins)


def margin(model, weights, x):
    """Return the least |difference| that a ReLU or a maximum decides by."""
    least, layers = np.inf, list(model.named_children())
    for (name, layer), (_, follower) in zip(layers, [*layers[1:], ("", None)], strict=True):
        if len(x) and isinstance(layer, nn.ReLU):
            near = x.abs()
            if isinstance(follower, nn.MaxPool2d):
                windows = (
                    x[..., : x.shape[-2] // 2 * 2, : x.shape[-1] // 2 * 2]
                    .unfold(2, 2, 2)
                    .unfold(3, 2, 2)
                )
                first, second = windows.flatten(4).topk(2).values.unbind(-1)
                near = torch.where(first > 0, torch.minimum(first, first - second), -first)
            least = min(least, float(near[near > 0].min()))
        inner = {k.partition(".")[2]: w for k, w in weights.items() if k.startswith(f"{name}.")}
        x = functional_call(layer, inner, (x,))
    return least


def agrees(name, plan, defense, examples=30, prepare=lambda parts: parts, bound=BOUND):
    """Compare the updates with the exact ones."""
    for seed in range(12):
        parts = prepare(scene(name, plan.clients, examples, seed))
        (expected, least), values = exact(*parts, plan, defense), updates(*parts, plan, defense)
        assert values.keys() == expected.keys()
        if all(relative_distance({n: values[n]}, {n: v}) <= bound for n, v in expected.items()):
            return
        assert least < MARGIN
    raise AssertionError("no scene without a place that rounding decides")
