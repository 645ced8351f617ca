"""Local optimisers and the server's factor: against loops written out, and engine by engine."""

from dataclasses import replace

import pytest
import torch
from compiled_scenes import BOUND, SCENES, agrees, plan_of, scene, updates, without_noise
from federated_scenes import plan_of as small_plan
from federated_scenes import setting
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compiled import RULES, following

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.local_steps import MOMENTUM, local_steps

OPTIMIZERS = ("sgd", "momentum", "adam")


def naive(name, rate, gradients):
    """Return where the steps lead from zero, by the textbook's recursions."""
    position, velocity, square = 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        if name == "adam":
            velocity, square = 0.9 * velocity + 0.1 * g, 0.999 * square + 0.001 * g**2
            position -= rate * (velocity / (1 - 0.9**t)) / ((square / (1 - 0.999**t)) ** 0.5 + 1e-8)
        else:
            velocity = (MOMENTUM if name == "momentum" else 0.0) * velocity + g
            position -= rate * velocity
    return position


def peer(name, rate, gradients):
    """Return where PyTorch's optimisers lead from zero."""
    position = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    kind = {"adam": torch.optim.Adam}.get(name, torch.optim.SGD)
    optimizer = kind([position], rate, **{"momentum": MOMENTUM} if name == "momentum" else {})
    for g in gradients:
        position.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
    return float(position.detach())


numbers = st.floats(-10, 10).map(lambda g: round(g, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(st.lists(numbers, min_size=1, max_size=8), st.sampled_from([0.001, 0.3, 2.0]))
@settings(deadline=None)  # PyTorch's optimisers import a compiler when first used
def test_steps_are_those_of_the_recursions(name, gradients, rate):
    update = {"w": torch.zeros(1, dtype=torch.float64)}
    step = local_steps(plan_of(local_optimizer=name, local_lr=rate), update)
    for g in gradients:
        given_gradient = torch.tensor([g], dtype=torch.float64)
        step({"w": given_gradient, "unknown to the update": given_gradient})
        assert float(given_gradient) == g  # it is read, not written over
    for oracle in (naive, peer):
        expected = oracle(name, rate, gradients)
        assert float(update["w"]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_participation_takes_these_steps(optimizer):
    """The update is what the recursion makes of the gradients at the tap, at every iteration."""
    model, train, partition = setting("mlp", torch.float64)
    plan = small_plan(local_optimizer=optimizer, rounds=2, participants=4, local_iterations=3)
    taps = [Tap("batch", 1, 1, i) for i in range(3)]
    run = simulate(model, train, partition, plan, non_private(), taps=[*taps, Tap("update", 1, 1)])
    for name, update in run.observations[Tap("update", 1, 1)].values.items():
        gradients = [run.observations[tap].values[name] for tap in taps]
        assert torch.allclose(update, naive(optimizer, 0.1, gradients), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:])
@pytest.mark.parametrize("name", SCENES)
def test_the_compiled_engine_takes_the_same_steps(name, optimizer):
    # Adam's first steps are as long as its rate, whatever rounding leaves of a gradient near zero
    rate, bound = (0.002, 1e-2) if optimizer == "adam" else (0.3, BOUND)
    plan = plan_of(1, local_iterations=3, local_lr=rate, local_optimizer=optimizer)
    agrees(name, plan, without_noise(0.2, "layer"), bound=bound)


@pytest.mark.parametrize("rule", RULES)
def test_rules_that_follow_norms_meet_momentum(rule):
    plan = plan_of(1, batch_size=9, local_iterations=3, local_optimizer="momentum")
    agrees("small", plan, following(rule))


@pytest.mark.parametrize("engine", ["compiled", "generic"])
def test_the_noise_is_the_same_whatever_takes_the_step(engine):
    """The first step with momentum is that without, noise included."""
    parts, defense = scene("adult", 2), fed_cdp("batch", noise_scale=2.0)
    plan = plan_of(2, local_iterations=1)
    plain, moved = (
        updates(*parts, replace(plan, local_optimizer=name), defense, engine)
        for name in ("sgd", "momentum")
    )
    for name, update in plain.items():
        assert torch.allclose(moved[name], update, rtol=1e-5, atol=1e-6)


def test_the_server_multiplies_the_new_weights():
    """Two rounds written out: K_t models summed and divided by K_t − 1."""
    model, train, partition = setting("mlp", torch.float64)
    plan = small_plan(participants=3, rounds=2, weight_factor=3 / 2)
    taps = [Tap("update", int(c), r) for r in range(2) for c in plan.participants_of(r)]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    for name, weight in model.named_parameters():
        expected = weight.detach()
        for r in range(2):
            models = [
                expected + run.observations[tap].values[name] for tap in taps if tap.round == r
            ]
            expected = sum(models) / (len(models) - 1)
        assert torch.allclose(run.weights[name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local_optimizer": "rmsprop"}, "local_optimizer = 'rmsprop'"),
        ({"weight_factor": 0.0}, "weight_factor = 0"),
        ({"weight_factor": float("nan")}, "weight_factor = nan"),
    ],
)
def test_what_no_plan_has_is_refused(changes, words):
    with pytest.raises(InputError, match=words):
        plan_of(**changes)


def test_the_stacked_engine_does_not_know_an_optimiser():
    model, train, partition = setting("mlp")
    plan = small_plan(local_optimizer="adam")
    with pytest.raises(InputError, match=r"engine = 'stacked' .* local_optimizer = 'adam'"):
        simulate(model, train, partition, plan, non_private(), engine="stacked")
