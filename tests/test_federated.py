"""The simulation against naive loops: rounds, gradients, randomness, evaluation, refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from federated_scenes import CLASSES, MODELS, plan_of, same, setting
from oracles import aggregated_update, gradient_of, relative_distance
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses import TAPS, Clip, Defense, PerExample, fed_cdp, fed_sdp, non_private
from fl_privacy_lib.federated import Tap, accuracy, example_gradients, simulate
from fl_privacy_lib.models import build, mlp, parameters_of


def expected_update(model, train, partition, plan, rule, update_rule=None, round=0):
    """Return the naive aggregate of one round under the plan's own draws."""
    ids = plan.participants_of(round)
    held = [torch.as_tensor(partition.indices[c]) for c in ids]
    data = [(train[0][part], train[1][part]) for part in held]
    batches = [plan.batches(int(c), len(part), round) for c, part in zip(ids, held, strict=True)]
    shares = [1 / plan.participants] * len(ids)
    return aggregated_update(
        model, data, batches, shares, plan.batch_size, plan.local_lr, rule, update_rule
    )


# --- the simulation against the naive loop


@pytest.mark.parametrize("scope", ["layer", "all"])
@pytest.mark.parametrize("clip_norm", [4.0, 0.05])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_one_round_equals_the_naive_loop(kind, clip_norm, scope, dtype, tolerance):
    model, train, partition = setting(kind, dtype)
    plan = plan_of()
    defense = fed_cdp("batch", clip_norm=clip_norm, noise_scale=0.0, scope=scope)
    run = simulate(model, train, partition, plan, defense, taps=[Tap("aggregate")])
    expected = expected_update(model, train, partition, plan, (clip_norm, scope))
    assert relative_distance(run.observations[Tap("aggregate")].values, expected) <= tolerance


@pytest.mark.parametrize("sampling", ["one_pass_shuffled", "with_replacement", "poisson"])
@pytest.mark.parametrize("defense, rules", [
    (non_private(), (None, None)),
    (fed_cdp("example", clip_norm=0.5, noise_scale=0.0), ((0.5, "layer"), None)),
    (fed_sdp("client", clip_norm=0.1, noise_scale=0.0), (None, 0.1)),
    (fed_sdp("server", clip_norm=0.1, noise_scale=0.0), (None, 0.1)),
])  # fmt: skip
def test_every_sampling_and_method_equals_the_naive_loop(sampling, defense, rules):
    model, train, partition = setting("training_cnn 28×28×1", torch.float64)
    plan = plan_of(participants=2, batch_sampling=sampling, local_iterations=4, batch_size=1)
    if sampling == "poisson":
        sizes = [len(b) for c in plan.participants_of(0) for b in plan.batches(int(c), 6, 0)]
        assert 0 in sizes and max(sizes) > 1
    run = simulate(model, train, partition, plan, defense, taps=[Tap("aggregate")])
    expected = expected_update(model, train, partition, plan, *rules)
    assert relative_distance(run.observations[Tap("aggregate")].values, expected) <= 1e-12


def test_poisson_clients_are_weighted_with_the_planned_number():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(participants=2, client_sampling="poisson", rounds=8)
    sizes = {len(plan.participants_of(r)) for r in range(8)}
    assert sizes - {2}
    taps = [Tap("aggregate", round=r) for r in range(8)]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    for round, tap in enumerate(taps):
        seen = run.observations[tap]
        if not len(plan.participants_of(round)):
            assert not any(v.any() for v in seen.values.values())
            continue
        model_then = build("mlp", (30,), CLASSES, torch.Generator()).double()
        model_then.load_state_dict(seen.weights)
        expected = expected_update(model_then, train, partition, plan, None, round=round)
        assert relative_distance(seen.values, expected) <= 1e-12


def test_rounds_follow_each_other_with_the_servers_step():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(rounds=3, server_lr=0.7)
    before = {name: w.clone() for name, w in parameters_of(model).items()}
    taps = [Tap("aggregate", round=r) for r in range(3)]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    weights = before
    for tap in taps:
        assert same(run.observations[tap].weights, weights)
        weights = {n: w + 0.7 * run.observations[tap].values[n] for n, w in weights.items()}
    assert same(run.weights, weights)
    assert same(parameters_of(model), before)  # the model that was handed in is as it was
    assert [report.round for report in run.history] == [0, 1, 2]
    expected = [tuple(plan.participants_of(r)) for r in range(3)]
    assert [report.participants for report in run.history] == expected


# --- example gradients


@pytest.mark.parametrize("kind", MODELS)
def test_example_gradients_equal_autograd_one_by_one(kind):
    model, (x, y), _ = setting(kind, torch.float64)
    weights = {
        n: torch.stack([w, 0.9 * w]) for n, w in parameters_of(model).items()
    }  # [clients, …]
    gradients = example_gradients(model, weights, x[:6].unflatten(0, (2, 3)), y[:6].reshape(2, 3))
    for client in range(2):
        copy = build(*MODELS[kind], CLASSES, torch.Generator()).double()
        copy.load_state_dict({n: w[client] for n, w in weights.items()})
        for example in range(3):
            expected = gradient_of(copy, x[3 * client + example], y[3 * client + example])
            seen = {n: g[client, example] for n, g in gradients.items()}
            assert relative_distance(seen, expected) <= 1e-12


def test_example_gradients_of_soft_labels():
    model, (x, _), _ = setting("training_cnn 28×28×1", torch.float64)
    soft = torch.rand(
        (1, 3, CLASSES), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    soft = soft / soft.sum(-1, keepdim=True)
    weights = {n: w[None] for n, w in parameters_of(model).items()}
    gradients = example_gradients(model, weights, x[None, :3], soft)
    for example in range(3):
        expected = gradient_of(model, x[example], soft[0, example])
        assert (
            relative_distance({n: g[0, example] for n, g in gradients.items()}, expected) <= 1e-12
        )
    sharp = torch.nn.functional.one_hot(torch.tensor([[1, 4, 0]]), CLASSES).double()
    hard = example_gradients(model, weights, x[None, :3], torch.tensor([[1, 4, 0]]))
    one_hot = example_gradients(model, weights, x[None, :3], sharp)
    assert all(torch.allclose(one_hot[n], hard[n], rtol=1e-12, atol=1e-15) for n in hard)


# --- randomness

NOISY = [fed_cdp("example"), fed_cdp("batch"), fed_sdp("client"), fed_sdp("server")]


@pytest.mark.parametrize("defense", NOISY)
def test_a_run_repeats_bit_by_bit_and_depends_on_the_plans_seed(defense):
    model, train, partition = setting("mlp")
    runs = []
    for global_seed, seed in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(global_seed)
        runs.append(
            simulate(model, train, partition, plan_of(rounds=2, seed=seed), defense).weights
        )
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


@pytest.mark.parametrize("defense", NOISY)
def test_a_clients_noise_does_not_depend_on_who_else_takes_part(defense):
    model, train, partition = setting("mlp", clients=8)
    few, many = plan_of(clients=8, participants=3), plan_of(clients=8, participants=7)
    both = set(few.participants_of(0).tolist()) & set(many.participants_of(0).tolist())
    assert both and set(few.participants_of(0).tolist()) != both | set(
        many.participants_of(0).tolist()
    )
    places = (("example", 1), ("batch", 1), ("update", 0), ("received", 0))
    taps = [Tap(stage, client, 0, i) for client in both for stage, i in places]
    one, other = (
        simulate(model, train, partition, p, defense, taps=taps).observations for p in (few, many)
    )
    assert set(one) == set(other) == set(taps)
    assert all(same(one[t].values, other[t].values) for t in taps)


def test_taps_and_evaluation_do_not_change_a_run():
    model, train, partition = setting("mlp")
    plan, defense = plan_of(rounds=2), fed_cdp("example")
    bare = simulate(model, train, partition, plan, defense).weights
    taps = [Tap(s, int(c), r) for s in TAPS for r in range(2) for c in plan.participants_of(r)]
    assert same(
        simulate(model, train, partition, plan, defense, taps=taps, evaluation=train).weights, bare
    )


# --- evaluation and refusals


def test_accuracy_counts_hits_in_chunks_of_any_size():
    model, (x, y), _ = setting("mlp")
    weights = parameters_of(model)
    hits = [int(model(x[i : i + 1]).argmax()) == int(y[i]) for i in range(len(y))]
    for chunk in (1, 5, 1000):
        assert accuracy(model, weights, (x, y), chunk) == pytest.approx(sum(hits) / len(hits))
    assert 0 < sum(hits) < len(hits)
    with pytest.raises(InputError, match="this evaluation set is empty"):
        accuracy(model, weights, (x[:0], y[:0]))


def test_accuracy_is_reported_when_due_and_after_the_last_round():
    model, train, partition = setting("mlp")
    reports: list = []
    plan = plan_of(rounds=5)
    run = simulate(model, train, partition, plan, non_private(), evaluation=train, evaluate_every=2,
                   on_round=reports.append)  # fmt: skip
    assert [r.accuracy is not None for r in run.history] == [False, True, False, True, True]
    assert tuple(reports) == run.history
    assert run.history[-1].accuracy == accuracy(model, run.weights, train)
    silent = simulate(model, train, partition, plan, non_private())
    assert all(r.accuracy is None for r in silent.history)


def test_batch_normalisation_is_refused_in_training_and_allowed_frozen():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), norm, nn.Linear(4, CLASSES)).double()
    _, train, partition = setting("mlp", torch.float64)
    with pytest.raises(InputError, match="normalises over the batch"):
        simulate(model, train, partition, plan_of(), non_private())
    norm.load_state_dict(norm.state_dict() | {"running_mean": torch.full((4,), 0.3)})
    model.eval()
    defense = fed_cdp("batch", noise_scale=0)
    run = simulate(model, train, partition, plan_of(), defense, taps=[Tap("aggregate")])
    expected = expected_update(model, train, partition, plan_of(), (4.0, "layer"))
    assert relative_distance(run.observations[Tap("aggregate")].values, expected) <= 1e-12


def test_examples_that_are_no_tensors_are_named():
    model, (x, y), partition = setting("mlp")
    with pytest.raises(InputError, match="examples or labels are a ndarray: make them a tensor"):
        simulate(model, (x, y.numpy()), partition, plan_of(), non_private())


def test_values_that_are_not_finite_and_labels_that_are_no_classes_are_refused():
    """One infinite value becomes NaN behind any clipping; a label of −100 would be passed over."""
    model, (x, y), partition = setting("mlp")
    broken = x.clone()
    broken[0] *= math.inf
    with pytest.raises(InputError, match="values that are not finite"):
        simulate(model, (broken, y), partition, plan_of(), non_private())
    for labels in (y - 100, y.double(), y.int()):
        with pytest.raises(InputError, match="takes classes from 0"):
            simulate(model, (x, labels), partition, plan_of(), non_private())


def test_what_would_fail_rounds_later_is_refused_at_once():
    model, train, partition = setting("mlp")
    seen = []
    with pytest.raises(InputError, match="this evaluation set is empty"):
        simulate(model, train, partition, plan_of(), non_private(), on_round=seen.append,
                 evaluation=(train[0][:0], train[1][:0]), evaluate_every=2)  # fmt: skip
    large = replace(plan_of(), batch_size=int(partition.sizes.min()) + 1)
    with pytest.raises(InputError, match="examples of a client that takes part"):
        simulate(model, train, partition, large, non_private(), on_round=seen.append)
    assert not seen


def test_a_partition_for_another_number_of_clients_is_refused():
    model, train, partition = setting("mlp")
    with pytest.raises(InputError, match="the partition has 4 clients, the plan 5"):
        simulate(model, train, partition, plan_of(clients=5), non_private())


@pytest.mark.parametrize(
    "name, value",
    [("evaluate_every", 0), ("save_every", 0), ("workers", 1.5), ("clients_per_chunk", 0)],
)
def test_a_count_that_is_none_gets_one_sentence(name, value):
    model, train, partition = setting("mlp")
    with pytest.raises(InputError, match=f"{name} = {value} must be a whole number"):
        simulate(model, train, partition, plan_of(), non_private(), **{name: value})


def test_data_that_do_not_fit_together_get_one_sentence():
    model, (x, y), partition = setting("mlp")
    with pytest.raises(InputError, match=f"{len(x)} examples have 3 labels"):
        simulate(model, (x, y[:3]), partition, plan_of(), non_private())
    with pytest.raises(InputError, match="4 examples have 3 labels"):
        simulate(model, (x, y), partition, plan_of(), non_private(), evaluation=(x[:4], y[:3]))
    with pytest.raises(InputError, match=f"one of {len(x)} examples, and there are 5"):
        simulate(model, (x[:5], y[:5]), partition, plan_of(), non_private())


def test_an_unknown_tap_is_refused_with_the_nearest_word():
    with pytest.raises(
        InputError, match=r"stage = 'updates' is not one of .*did you mean update\?"
    ):
        Tap("updates")


def test_a_large_clip_changes_nothing_and_a_small_one_bounds_the_update():
    model, train, partition = setting("mlp", torch.float64)
    plan, tap = plan_of(participants=4), Tap("update", 0)
    runs = [simulate(model, train, partition, plan, d, taps=[tap]).observations[tap].values
            for d in (non_private(), Defense("d", per_example=PerExample(Clip(1e9))),
                      Defense("d", per_example=PerExample(Clip(1e-3, "all"))))]  # fmt: skip
    assert relative_distance(runs[1], runs[0]) <= 1e-12
    length = math.sqrt(sum(float(v.square().sum()) for v in runs[2].values()))
    assert 0 < length <= plan.local_iterations * plan.local_lr * 1e-3 * (1 + 1e-9)


def test_a_client_of_its_own_order_may_hold_an_example_twice():
    model, train, _ = setting("mlp", torch.float64)
    partition = Partition("by hand", (np.array([5, 5, 2]), np.array([1, 0, 5])), len(train[1]))
    plan = plan_of(clients=2, participants=2, local_iterations=1)
    run = simulate(model, train, partition, plan, non_private(), taps=[Tap("aggregate")])
    expected = expected_update(model, train, partition, plan, None)
    assert relative_distance(run.observations[Tap("aggregate")].values, expected) <= 1e-12


def test_a_model_with_a_scalar_parameter_can_be_trained():
    class Tempered(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = mlp(30, CLASSES, (4,)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * self.inner(x)

    torch.manual_seed(0)
    model = Tempered().double()
    _, train, partition = setting("mlp", torch.float64)
    defense = fed_cdp("batch", clip_norm=0.05, noise_scale=0.0)
    run = simulate(model, train, partition, plan_of(), defense, taps=[Tap("aggregate")])
    expected = expected_update(model, train, partition, plan_of(), (0.05, "layer"))
    assert relative_distance(run.observations[Tap("aggregate")].values, expected) <= 1e-12
