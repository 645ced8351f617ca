"""The compiled engine against autograd in float64; the same bits however the work is cut."""

import copy
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from compiled_scenes import SCENES, agrees, plan_of, scene, updates, without_noise
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import (
    Clip,
    Defense,
    PerExample,
    Schedule,
    fed_cdp,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.defenses.clipping import layer_norms
from fl_privacy_lib.defenses.route import BatchNoise, ClientContext
from fl_privacy_lib.defenses.rules import LargestNorm, MedianNorm, QuantileNorm
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated import compiled as package
from fl_privacy_lib.federated.compiled.engine import CompiledEngine
from fl_privacy_lib.federated.compiled.form import Form
from fl_privacy_lib.federated.compiled.network import network_of
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.federated.simulation import accuracy
from fl_privacy_lib.models import parameters_of, training_cnn

pytest.importorskip("numba", reason="the compiled engine needs the extra 'fast'")


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("batch", [1, 5, 13])
@pytest.mark.parametrize("rule", [(4.0, "layer"), (0.05, "layer"), (0.3, "all"), None], ids=str)
def test_updates_are_those_of_automatic_differentiation(name, batch, rule):
    defense = non_private() if rule is None else without_noise(*rule)
    agrees(name, plan_of(1, batch_size=batch, local_lr=0.3 if rule is None else 1.0), defense)


@pytest.mark.parametrize(
    "sampling", ["one_pass_fixed", "one_pass_shuffled", "with_replacement", "poisson"]
)
@pytest.mark.parametrize("name", ["small", "adult"])
def test_every_sampling(name, sampling):
    plan = plan_of(2, batch_sampling=sampling, rounds=2, participants=1)
    agrees(name, plan, Defense("decaying", PerExample(Clip(Schedule(0.4, 0.1, rounds=2)))))


@pytest.mark.parametrize("name", ["small", "adult"])
def test_empty_batches(name):
    plan = plan_of(1, batch_size=1, batch_sampling="poisson", local_iterations=12, seed=2)
    assert any(len(b) == 0 for b in plan.batches(0, 30, 0))
    agrees(name, plan, without_noise(0.2, "layer"))


def test_the_local_steps_of_fed_sdp():
    agrees("small", plan_of(), fed_sdp(clip_norm=0.01, noise_scale=0.0))


RULES = {
    "median": PerExample(MedianNorm()),
    "median of all": PerExample(MedianNorm("all")),
    "largest": PerExample(LargestNorm(Clip(0.2))),
    "quantile": PerExample(QuantileNorm(Clip(0.2), count_scale=1.0)),
}


def following(rule):
    """Return the defence of a rule; the quantile's bound moves at the server."""
    stage = RULES[rule]
    quantile = (
        {"on_aggregate": stage.rule, "initial_state": stage.rule.start}
        if rule == "quantile"
        else {}
    )
    return Defense(rule, stage, **quantile)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [4, 9, 31])
@pytest.mark.parametrize("name", ["small", "adult"])
def test_rules_that_follow_norms(name, rule, batch):
    plan = plan_of(1, batch_size=batch, rounds=2, local_iterations=1)
    agrees(name, plan, following(rule), examples=31)


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("sampling", ["one_pass_fixed", "poisson"])
@pytest.mark.parametrize("floor", [0.0, 0.1], ids=["in the kernel", "by the rule"])
def test_the_noise_of_a_rule_has_its_level(batch, sampling, floor):
    """One iteration: the noise has a deviation of σ times the largest norm, within 5 errors."""
    parts = scene("mnist", 1)
    plan = plan_of(1, batch_size=batch, local_iterations=1, local_lr=1.0, batch_sampling=sampling)
    rule = LargestNorm(Clip(1.3), floor=floor)
    noisy = Defense("noisy", PerExample(Clip(1.3)), BatchNoise(rule, 2.0))
    with_noise, plain = (updates(*parts, plan, d) for d in (noisy, noisy.noiseless()))
    added = torch.cat([(with_noise[n] - plain[n]).flatten() for n in plain]).double()
    index = parts[2].indices[0][plan.batches(0, 30, 0)[0]]
    weights = {n: w[None] for n, w in parameters_of(parts[0]).items()}
    norms = layer_norms(
        example_gradients(parts[0], weights, parts[1][0][index][None], parts[1][1][index][None]), 2
    )
    level = 2.0 * float(rule.levels(norms, ClientContext(0, (0,), []))["0.weight"]) / batch
    assert abs(added.std() / level - 1) <= 5 / math.sqrt(2 * len(added))


class Slower(LargestNorm):
    """The same rule under another name, which the kernel does not know."""


@pytest.mark.parametrize("name", ["small", "adult"])
@pytest.mark.parametrize("scope", ["layer", "all"])
@pytest.mark.parametrize("batch", [1, 4, 9])
@pytest.mark.parametrize("place", ["example", "batch", "both"])
def test_the_kernel_scales_noise_as_the_rule_does(name, scope, batch, place):
    """The same draws give the same updates, empty batches included where they may occur."""
    clip, sampling = Clip(0.2, scope), "poisson" if place == "batch" else "with_replacement"
    plan = plan_of(2, batch_size=batch, batch_sampling=sampling, local_iterations=6)
    places = {
        "example": lambda rule: Defense("noisy", PerExample(rule, 2.0)),
        "batch": lambda rule: Defense("noisy", PerExample(clip), BatchNoise(rule, 2.0)),
        "both": lambda rule: Defense("noisy", PerExample(rule, 2.0), BatchNoise(rule, 3.0)),
    }
    ways = [places[place](kind(clip)) for kind in (LargestNorm, Slower)]
    assert [Form.of(way, batch, 0).needs_norms for way in ways] == [False, True]
    inside, outside = (updates(*scene(name), plan, way) for way in ways)
    for key, values in outside.items():
        assert ((inside[key] - values).abs() <= 1e-4 * values.abs().max()).all()


@pytest.mark.parametrize(
    "defense", [fed_cdp("example", noise_scale=2.0), fed_cdp("batch", noise_scale=2.0)], ids=str
)
@pytest.mark.parametrize("name", ["mnist", "adult"])
def test_the_noise_of_a_fixed_clip(name, defense):
    """Mean and variance within 5 standard errors; clients and iterations draw independently."""
    parts, plan = scene(name, 3), plan_of(3, local_iterations=2, local_lr=1.0)
    noisy, plain = (updates(*parts, plan, d) for d in (defense, defense.noiseless()))
    one = replace(plan, local_iterations=1)
    first, start = (updates(*parts, one, d) for d in (defense, defense.noiseless()))
    std = 2 * 4 / (5 if defense.per_batch else math.sqrt(5))
    size = 3
    rows = torch.stack(
        [
            torch.cat([(first[k] - start[k]).flatten() for k in start if k.startswith(f"{c} ")])
            for c in range(size)
        ]
    ).double()
    both = torch.stack(
        [
            torch.cat([(noisy[k] - plain[k]).flatten() for k in plain if k.startswith(f"{c} ")])
            for c in range(size)
        ]
    ).double()
    assert abs(rows.mean()) <= 5 * std / math.sqrt(rows.numel())
    assert abs(rows.std() / std - 1) <= 5 / math.sqrt(2 * rows.numel())
    later = (
        both - rows
    )  # the second iteration's draws, and what the first one's moved the gradients
    together = torch.corrcoef(torch.cat([rows, later])) - torch.eye(2 * size)
    assert together[:size, :size].abs().max() <= 6 / math.sqrt(rows.shape[1])
    if name == "adult":
        # its gradients, clipped to 4 in each of three tensors, are no longer small beside the noise
        return
    assert together.abs().max() <= 0.05


@pytest.mark.parametrize("name", ["mnist", "lfw", "adult"])
def test_norms(name):
    model, train, _ = scene(name)
    plan, weights = plan_of(batch_size=7, local_iterations=1), parameters_of(model)
    batch, ctx = np.array([3, 0, 41, 17, 8, 21, 30]), ClientContext(0, (0,), [], batch_size=7)
    CompiledEngine(network_of(model, train), weights, train, plan, without_noise(0.1, "all")).train(
        [[batch]], [ctx]
    )
    x, double = train[0][batch].double()[None], {n: w.double()[None] for n, w in weights.items()}
    expected = layer_norms(
        example_gradients(copy.deepcopy(model).double(), double, x, train[1][batch][None]), 2
    )
    for key, norms in expected.items():
        assert ((ctx.norms[key] - norms).abs() / norms).max() <= 1e-6


def leading(gap):
    """Return a change of a scene that makes label 1 right, its logit ahead by at least the gap."""

    def prepare(parts):
        model, (x, y), partition = parts
        with torch.no_grad():
            last = list(model.parameters())[-1]
            last.zero_()
            last[1] = 1.0
            last *= gap / model(x)[:, 1].min()
        return model, (x, torch.ones_like(y)), partition

    return prepare


@pytest.mark.parametrize("name", ["small", "adult"])
def test_nearly_and_wholly_saturated_examples(name):
    """p − 1 is 3e-7 and would be lost in float32; under 1e-25 a gradient counts as zero."""
    plan, defense = plan_of(1, batch_size=3, local_iterations=1), without_noise(4.0, "layer")
    agrees(name, plan, defense, prepare=leading(15))
    assert all(not v.any() for v in updates(*leading(200)(scene(name, 1)), plan, defense).values())


@pytest.mark.parametrize("name", ["small", "adult"])
def test_gradients_whose_squares_float32_does_not_hold(name):
    def prepare(parts):
        with torch.no_grad():
            list(parts[0].parameters())[-1].mul_(1e-30)
        return parts

    agrees(name, plan_of(1, local_iterations=1), without_noise(4.0, "layer"), prepare=prepare)


def test_images_of_zeros_have_no_gradient_in_the_convolutions():
    model, (x, y), partition = scene("mnist", 1)
    fast = updates(model, (torch.zeros_like(x), y), partition, plan_of(1), fed_cdp(noise_scale=0.0))
    assert all(not v.any() for v in fast.values())


@given(
    st.integers(10, 35),
    st.sampled_from([1, 3]),
    st.integers(2, 70),
    st.integers(1, 15),
    st.integers(0, 9),
)
@settings(max_examples=12, deadline=None)
def test_any_image_and_any_number_of_classes(side, channels, classes, batch, seed):
    plan = plan_of(1, batch_size=batch, local_iterations=1, seed=seed)
    agrees(("training_cnn", (channels, side, side), classes), plan, without_noise(0.1, "layer"), 15)


@given(st.integers(1, 70), st.integers(2, 40), st.integers(1, 30))
@settings(max_examples=12, deadline=None)
def test_any_vector_and_any_number_of_classes(features, classes, batch):
    agrees(("mlp", (features,), classes), plan_of(1, batch_size=batch), without_noise(0.1, "all"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mnist", "adult"])
def test_the_bits_depend_neither_on_the_chunk_nor_on_the_workers(name):
    parts, plan, taps = (
        scene(name, 5, 10),
        plan_of(5, rounds=2),
        [Tap("update", 4, 1), Tap("example", 3)],
    )
    runs = [
        simulate(*parts, plan, fed_cdp(clip_norm=0.5), engine="compiled", taps=taps, **cut)
        for cut in ({}, {"clients_per_chunk": 5}, {"workers": 2})
    ]
    for run in runs[1:]:
        assert all(torch.equal(w, run.weights[n]) for n, w in runs[0].weights.items())
        for tap in taps:
            values = run.observations[tap].values
            assert all(
                torch.equal(v, values[n]) for n, v in runs[0].observations[tap].values.items()
            )


@pytest.mark.parametrize("name", ["mnist", "lfw", "adult"])
def test_accuracy_through_the_kernel(name):
    model, train, partition = scene(name, 2, 200)
    run = simulate(
        model, train, partition, plan_of(), non_private(), engine="compiled", evaluation=train
    )
    assert run.history[-1].accuracy == accuracy(model, run.weights, train)


class Own(nn.ReLU):
    pass


def changed(position, module):
    model = training_cnn((1, 28, 28), 10)
    model[position] = module
    return model


def hooked():
    model = training_cnn((1, 28, 28), 10)
    model[3].register_forward_hook(lambda *_: None)
    return model


def frozen():
    model = training_cnn((1, 28, 28), 10)
    model[0].weight.requires_grad_(False)
    return model


def sharing():
    relu = nn.ReLU()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 784, bias=False),
        relu,
        nn.Linear(784, 784, bias=False),
        relu,
        nn.Linear(784, 10, bias=False),
    )


UNKNOWN = {
    "subclass": lambda: changed(1, Own()),
    "bias": lambda: changed(0, nn.Conv2d(1, 32, 3)),
    "padding": lambda: changed(2, nn.MaxPool2d(2, ceil_mode=True)),
    "channels": lambda: changed(0, nn.Conv2d(1, 16, 3, bias=False)),
    "tanh": lambda: changed(4, nn.Tanh()),
    "hooks": hooked,
    "frozen": frozen,
    "shared module": sharing,
    "double": lambda: training_cnn((1, 28, 28), 10).double(),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_the_engine_does_not_know_it_leaves_alone(kind):
    assert network_of(UNKNOWN[kind](), (torch.zeros(2, 1, 28, 28), torch.tensor([0, 1]))) is None


@pytest.mark.parametrize(
    "train",
    [
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, 10])),
        (torch.zeros(2, 1, 28, 28), torch.tensor([0, -1])),
        (torch.zeros(2, 1, 28, 28), torch.rand(2, 10)),
        (torch.zeros(2, 1, 28, 28).transpose(2, 3)[:, :, ::2], torch.tensor([0, 1])),
        (torch.zeros(2, 1, 28, 30), torch.tensor([0, 1])),
    ],
    ids=["class 10 of 10", "class −1", "soft labels", "in pieces", "no square"],
)
def test_examples_that_a_kernel_must_not_read(train):
    assert network_of(training_cnn((1, 28, 28), 10), train) is None


def test_without_it_stacked_answers_and_one_sentence_says_why(monkeypatch):
    model, train, partition = scene("adult")
    unknown = nn.Sequential(*model, nn.ReLU())
    assert (
        simulate(unknown, train, partition, plan_of(), fed_cdp(), engine="auto").engine == "stacked"
    )
    with pytest.raises(
        InputError, match="the model or its examples have a form that it does not know"
    ):
        simulate(unknown, train, partition, plan_of(), fed_cdp(), engine="compiled")
    with pytest.raises(InputError, match="has a local rule that it does not know"):
        simulate(
            model,
            train,
            partition,
            plan_of(),
            replace(fed_cdp(), per_batch=print),
            engine="compiled",
        )
    assert (
        simulate(model, train, partition, plan_of(), fed_cdp(), engine="auto").engine == "compiled"
    )
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    assert (
        simulate(model, train, partition, plan_of(), fed_cdp(), engine="auto").engine == "stacked"
    )
    with pytest.raises(InputError, match="numba is not installed"):
        simulate(model, train, partition, plan_of(), fed_cdp(), engine="compiled")


def test_nothing_is_compiled_on_import():
    code = "import sys, fl_privacy_lib.federated; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
