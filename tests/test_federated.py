"""The simulation against naive loops; what each tap sees, what each stage is given, and what is kept."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from oracles import aggregated_update, client_update, gradient_of, relative_distance
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data.partition import Partition, iid
from fl_privacy_lib.defenses import TAPS, Clip, Defense, PerExample, fed_cdp, fed_sdp, non_private
from fl_privacy_lib.defenses.route import ClientContext, Context
from fl_privacy_lib.federated import Tap, accuracy, example_gradients, simulate
from fl_privacy_lib.models import build, mlp, parameters_of
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
    # under some seeds (3 is one) two values to be pooled are equal in float32 but not in float64
    generator = torch.Generator().manual_seed(0)
    count = clients * examples_per_client
    x = torch.rand((count, *shape), generator=generator, dtype=dtype)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    model = build(name, shape, CLASSES, generator).to(dtype)
    return model, (x, y), iid(count, clients, examples_per_client, np.random.default_rng(0))


def plan_of(**settings):
    usual = {"clients": 4, "participants": 3, "rounds": 1, "local_iterations": 2, "batch_size": 3}
    return Plan(**usual | {"local_lr": 0.1} | settings)


def expected_update(model, train, partition, plan, rule, update_rule=None, round=0):
    """Return the naive aggregate of one round under the plan's own draws."""
    ids = plan.participants_of(round)
    held = [torch.as_tensor(partition.indices[c]) for c in ids]
    data = [(train[0][own], train[1][own]) for own in held]
    batches = [plan.batches(int(c), len(own), round) for c, own in zip(ids, held, strict=True)]
    shares = [1 / plan.participants] * len(ids)
    return aggregated_update(model, data, batches, shares, plan.batch_size, plan.local_lr, rule, update_rule)


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


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
    weights = {n: torch.stack([w, 0.9 * w]) for n, w in parameters_of(model).items()}  # [clients, …]
    gradients = example_gradients(model, weights, x[:6].unflatten(0, (2, 3)), y[:6].reshape(2, 3))
    for client in range(2):
        own = build(*MODELS[kind], CLASSES, torch.Generator()).double()
        own.load_state_dict({n: w[client] for n, w in weights.items()})
        for example in range(3):
            expected = gradient_of(own, x[3 * client + example], y[3 * client + example])
            seen = {n: g[client, example] for n, g in gradients.items()}
            assert relative_distance(seen, expected) <= 1e-12


def test_example_gradients_of_soft_labels():
    model, (x, _), _ = setting("training_cnn 28×28×1", torch.float64)
    soft = torch.rand((1, 3, CLASSES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    soft = soft / soft.sum(-1, keepdim=True)
    weights = {n: w[None] for n, w in parameters_of(model).items()}
    gradients = example_gradients(model, weights, x[None, :3], soft)
    for example in range(3):
        expected = gradient_of(model, x[example], soft[0, example])
        assert relative_distance({n: g[0, example] for n, g in gradients.items()}, expected) <= 1e-12
    sharp = torch.nn.functional.one_hot(torch.tensor([[1, 4, 0]]), CLASSES).double()
    hard = example_gradients(model, weights, x[None, :3], torch.tensor([[1, 4, 0]]))
    one_hot = example_gradients(model, weights, x[None, :3], sharp)
    assert all(torch.allclose(one_hot[n], hard[n], rtol=1e-12, atol=1e-15) for n in hard)


# --- taps


def add(constant):
    return lambda values, ctx: {name: v + constant for name, v in values.items()}


class AddPerExample(PerExample):
    """A per-example stage that adds 1 everywhere."""

    def __call__(self, gradients, ctx):
        return add(1.0)(gradients, ctx)


CONSTANTS = Defense("constants", AddPerExample(), add(10.0), add(100.0), add(1000.0), add(10000.0))


def test_every_tap_sees_what_the_stages_before_it_made():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(clients=4, participants=4, local_iterations=1)
    taps = [Tap(stage, client=2 if stage != "aggregate" else 0) for stage in TAPS]
    run = simulate(model, train, partition, plan, CONSTANTS, taps=taps)
    seen = {tap.stage: run.observations[tap].values for tap in taps}
    own = partition.indices[2][plan.batches(2, 6, 0)[0]]
    raw = [gradient_of(model, train[0][i], train[1][i]) for i in own]
    for name in seen["batch"]:
        mean = sum(g[name] for g in raw) / len(raw)
        example = torch.stack([g[name] for g in raw]) + 1
        torch.testing.assert_close(seen["example"][name], example)
        torch.testing.assert_close(seen["batch"][name], mean + 1 + 10)
        torch.testing.assert_close(seen["update"][name], -0.1 * (mean + 11) + 100)
        torch.testing.assert_close(seen["received"][name], -0.1 * (mean + 11) + 1100)
    everyone = [Tap("received", c) for c in range(4)]
    run = simulate(model, train, partition, plan, CONSTANTS, taps=[*everyone, Tap("aggregate")])
    for name in seen["aggregate"]:
        mean = torch.stack([run.observations[t].values[name] for t in everyone]).mean(0)
        torch.testing.assert_close(run.observations[Tap("aggregate")].values[name], mean + 10000)
        assert torch.equal(run.observations[Tap("aggregate")].values[name], seen["aggregate"][name])


def test_local_iterations_are_tapped_at_the_weights_they_start_from():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(participants=4, local_iterations=3)
    taps = [Tap("batch", 1, 0, i) for i in range(3)] + [Tap("update", 1)]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    *steps, update = (run.observations[t] for t in taps)
    weights = parameters_of(model)
    for step in steps:
        assert all(torch.allclose(step.weights[n], weights[n], rtol=1e-12, atol=1e-15) for n in weights)
        weights = {n: w - 0.1 * step.values[n] for n, w in weights.items()}
    assert same(update.weights, parameters_of(model))
    own = torch.as_tensor(partition.indices[1])
    expected = client_update(model, train[0][own], train[1][own], plan.batches(1, 6, 0), 3, 0.1, None)
    assert relative_distance(update.values, expected) <= 1e-12


@pytest.mark.parametrize("noise_at", ["client", "server"])
def test_fed_sdp_leaves_the_example_tap_bit_equal(noise_at):
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4)
    taps = [Tap(stage, c, 0, i) for stage in ("example", "batch") for c in range(4) for i in range(2)]
    plain = simulate(model, train, partition, plan, non_private(), taps=taps).observations
    private = simulate(model, train, partition, plan, fed_sdp(noise_at), taps=taps).observations
    assert set(plain) == set(private) == set(taps)
    assert all(same(plain[t].values, private[t].values) for t in taps)
    assert all(same(plain[t].weights, private[t].weights) for t in taps)


def test_what_a_curious_server_reads_before_its_own_noise_is_the_raw_update():
    model, train, partition = setting("mlp")
    plan, taps = plan_of(participants=4), [Tap("update", 1), Tap("received", 1)]
    plain = simulate(model, train, partition, plan, non_private(), taps=taps).observations
    server = simulate(model, train, partition, plan, fed_sdp("server"), taps=taps).observations
    assert same(server[taps[0]].values, plain[taps[0]].values)
    assert not same(server[taps[1]].values, plain[taps[0]].values)


@pytest.mark.parametrize("defense", [non_private(), fed_sdp("client"), fed_cdp("example"), fed_cdp("batch")])
def test_without_a_stage_on_arrival_received_is_the_update(defense):
    model, train, partition = setting("mlp")
    taps = [Tap("update", 2), Tap("received", 2)]
    seen = simulate(model, train, partition, plan_of(participants=4), defense, taps=taps).observations
    assert same(seen[taps[0]].values, seen[taps[1]].values)


def test_only_what_was_asked_for_is_kept():
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4, rounds=2)
    assert not simulate(model, train, partition, plan, non_private()).observations
    taps = {Tap("batch", 1, 1, 1), Tap("received", 3, 0)}
    for defense in (non_private(), CONSTANTS):
        run = simulate(model, train, partition, plan, defense, taps=taps)
        assert set(run.observations) == set(run.truth) == taps


def test_the_truth_behind_a_tap_is_what_the_client_used():
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4, local_iterations=1)
    taps = [Tap("example", 1), Tap("update", 1), Tap("aggregate")]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    used = partition.indices[1][plan.batches(1, 6, 0)[0]]
    x, y = run.truth[taps[0]]
    assert torch.equal(x, train[0][used]) and torch.equal(y, train[1][used])
    assert sorted(run.truth[taps[1]][1].tolist()) == sorted(train[1][used].tolist())
    assert taps[2] not in run.truth


def test_an_observation_tells_the_public_plan_and_defence_and_nothing_else():
    model, train, partition = setting("mlp")
    plan, defense, tap = plan_of(participants=4), fed_cdp("batch"), Tap("update", 0)
    seen = simulate(model, train, partition, plan, defense, taps=[tap]).observations[tap]
    assert set(vars(seen)) == {
        "tap", "values", "weights", "local_lr", "local_iterations", "batch_size", "defense"
    }  # fmt: skip
    assert (seen.local_lr, seen.local_iterations, seen.batch_size) == (0.1, 2, 3)
    assert seen.defense == defense.public()


def test_a_kept_observation_is_a_copy():
    model, train, partition = setting("mlp")
    shared: dict = {}

    def remember(values, ctx):
        shared.setdefault("values", values)
        return values

    tap = Tap("update", 0)
    plan, defense = plan_of(participants=4), Defense("d", per_client=remember)
    run = simulate(model, train, partition, plan, defense, taps=[tap])
    before = {n: v.clone() for n, v in run.observations[tap].values.items()}
    for value in shared["values"].values():
        value.zero_()
    assert same(run.observations[tap].values, before)


def test_a_tap_ignores_the_client_or_iteration_that_its_stage_has_not():
    model, train, partition = setting("mlp")
    taps = [Tap("aggregate", client=2), Tap("update", 1, iteration=1), Tap("received", 1, 0, 7)]
    seen = simulate(model, train, partition, plan_of(participants=4), non_private(), taps=taps).observations
    assert set(seen) == {Tap("aggregate"), Tap("update", 1), Tap("received", 1)}
    assert all(tap in seen for tap in taps)
    assert Tap("batch", 1, 0, 1) != Tap("batch", 1) and Tap("update", 1) != Tap("update", 2)


@pytest.mark.parametrize(
    "tap", [Tap("update", 4), Tap("update", 0, 2), Tap("batch", 0, 0, 2), Tap("aggregate", 0, 2)]
)
def test_a_tap_outside_the_plan_is_refused(tap):
    model, train, partition = setting("mlp")
    with pytest.raises(InputError, match=r"lies outside the plan \(2 rounds, 4 clients, 2 local iterations"):
        simulate(model, train, partition, plan_of(rounds=2), non_private(), taps=[tap])


@pytest.mark.parametrize("place", [{"client": -1}, {"round": -1}, {"iteration": -1}])
def test_a_negative_tap_is_refused(place):
    with pytest.raises(InputError, match=f"{next(iter(place))} = -1"):
        Tap("batch", **place)


# --- what the stages are given


def diary(log):
    """Return a defence that changes nothing and notes its calls: (stage, context, shapes)."""

    def note(stage):
        def run(values, ctx):
            log.append((stage, ctx, {n: tuple(v.shape) for n, v in values.items()}))
            return values

        return run

    stages = {stage: note(stage) for stage in ("per_batch", "per_client", "on_arrival", "on_aggregate")}
    return Defense("diary", begin_client=lambda ctx: log.append(("begin", ctx, {})), **stages)


def test_the_order_of_stages_and_what_each_is_given():
    model, train, partition = setting("mlp")
    log: list = []
    plan = plan_of(participants=2, rounds=2)
    iterations = []

    def per_batch(values, ctx):
        iterations.append((ctx.round, ctx.clients[0], ctx.iteration))
        assert ctx.examples[0].shape == (1, 3, 30) and ctx.examples[1].shape == (1, 3)
        assert all(n.shape == (1, 3) for n in ctx.norms.values())
        assert ctx.batch_size == 3 and ctx.model is model
        return values

    for defense in (diary(log), Defense("own", per_batch=per_batch)):
        simulate(model, train, partition, plan, defense)
    expected, shape = [], (1, *parameters_of(model)["1.weight"].shape)
    for round in range(2):
        for _ in plan.participants_of(round):
            expected += ["begin", "per_batch", "per_batch", "per_client", "on_arrival"]
        expected.append("on_aggregate")
    assert [stage for stage, _, _ in log] == expected
    assert all(shapes["1.weight"] == shape for stage, _, shapes in log if stage != "begin")
    assert iterations == [(r, int(c), i) for r in range(2) for c in plan.participants_of(r) for i in range(2)]


def test_the_servers_context_holds_no_examples():
    model, train, partition = setting("mlp")
    log: list = []
    simulate(model, train, partition, plan_of(participants=2), diary(log))
    for stage, ctx, _ in log:
        if stage in ("on_arrival", "on_aggregate"):
            assert type(ctx) is Context and not isinstance(ctx, ClientContext)
            assert not {"examples", "norms", "model"} & set(vars(ctx))
            held = [v for v in vars(ctx).values() if isinstance(v, torch.Tensor)]
            assert not any(v.shape[-1:] == (30,) for v in held)
        else:
            assert isinstance(ctx, ClientContext)


def test_contexts_name_the_round_the_clients_and_their_weights():
    model, train, partition = setting("mlp")
    log: list = []
    plan = plan_of(participants=2, rounds=2)
    simulate(model, train, partition, plan, diary(log))
    for round in range(2):
        ids = tuple(int(c) for c in plan.participants_of(round))
        here = [(stage, ctx) for stage, ctx, _ in log if ctx.round == round]
        assert [ctx.clients for stage, ctx in here if stage == "per_client"] == [(c,) for c in ids]
        assert [ctx.clients for stage, ctx in here if stage == "on_arrival"] == [(c,) for c in ids]
        assert [ctx.clients for stage, ctx in here if stage == "on_aggregate"] == [ids]
        shares = [float(ctx.weights.sum()) for stage, ctx in here if stage == "per_client"]
        assert sum(shares) == pytest.approx(1)
        assert all(len(ctx.generators) == 1 for _, ctx in here)


def test_reports_are_summed_over_the_round_and_reach_the_aggregate():
    model, train, partition = setting("mlp")
    plan, seen = plan_of(participants=3, rounds=2), []

    def per_client(values, ctx):
        ctx.report("clients", torch.tensor(float(ctx.clients[0])))
        ctx.report("count", torch.ones(2))
        return values

    def on_aggregate(values, ctx):
        seen.append({name: v.clone() for name, v in ctx.reports.items()})
        return values

    simulate(model, train, partition, plan, Defense("d", per_client=per_client, on_aggregate=on_aggregate))
    for round, reports in enumerate(seen):
        assert float(reports["clients"]) == sum(plan.participants_of(round))  # this round's only
        assert torch.equal(reports["count"], torch.full((2,), 3.0))
    assert len(seen) == 2


def test_begin_client_is_called_once_a_participation():
    model, train, partition = setting("mlp")
    plan, begun = plan_of(participants=3, rounds=3, local_iterations=4), []
    defense = Defense("d", begin_client=lambda ctx: begun.append((ctx.round, ctx.clients[0])))
    simulate(model, train, partition, plan, defense)
    assert begun == [(r, int(c)) for r in range(3) for c in plan.participants_of(r)]


def test_state_lasts_over_the_rounds_and_begins_anew_with_each_run():
    model, train, partition = setting("mlp")
    plan, seen = plan_of(participants=2, rounds=3), []

    def per_client(values, ctx):
        ctx.state["client"] += 1
        return values

    def on_arrival(values, ctx):
        ctx.state["arrived"] += 1
        return values

    def on_aggregate(values, ctx):
        seen.append(dict(ctx.state))
        return values

    defense = Defense("d", per_client=per_client, on_arrival=on_arrival, on_aggregate=on_aggregate,
                      initial_state=lambda: {"client": 0, "arrived": 0})  # fmt: skip
    for _ in range(2):
        seen.clear()
        simulate(model, train, partition, plan, defense)
        assert seen == [{"client": 2 * r, "arrived": 2 * r} for r in (1, 2, 3)]


# --- randomness

NOISY = [fed_cdp("example"), fed_cdp("batch"), fed_sdp("client"), fed_sdp("server")]


@pytest.mark.parametrize("defense", NOISY)
def test_a_run_repeats_bit_by_bit_and_depends_on_the_plans_seed(defense):
    model, train, partition = setting("mlp")
    runs = []
    for global_seed, seed in ((1, 0), (2, 0), (3, 1)):
        torch.manual_seed(global_seed)
        runs.append(simulate(model, train, partition, plan_of(rounds=2, seed=seed), defense).weights)
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


@pytest.mark.parametrize("defense", NOISY)
def test_a_clients_noise_does_not_depend_on_who_else_takes_part(defense):
    model, train, partition = setting("mlp", clients=8)
    few, many = plan_of(clients=8, participants=3), plan_of(clients=8, participants=7)
    both = set(few.participants_of(0).tolist()) & set(many.participants_of(0).tolist())
    assert both and set(few.participants_of(0).tolist()) != both | set(many.participants_of(0).tolist())
    places = (("example", 1), ("batch", 1), ("update", 0), ("received", 0))
    taps = [Tap(stage, client, 0, i) for client in both for stage, i in places]
    one, other = (simulate(model, train, partition, p, defense, taps=taps).observations for p in (few, many))
    assert set(one) == set(other) == set(taps)
    assert all(same(one[t].values, other[t].values) for t in taps)


def test_taps_and_evaluation_do_not_change_a_run():
    model, train, partition = setting("mlp")
    plan, defense = plan_of(rounds=2), fed_cdp("example")
    bare = simulate(model, train, partition, plan, defense).weights
    taps = [Tap(s, c, r) for s in TAPS for c in range(4) for r in range(2)]
    assert same(simulate(model, train, partition, plan, defense, taps=taps, evaluation=train).weights, bare)


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


def test_a_partition_for_another_number_of_clients_is_refused():
    model, train, partition = setting("mlp")
    with pytest.raises(InputError, match="the partition has 4 clients, the plan 5"):
        simulate(model, train, partition, plan_of(clients=5), non_private())


def test_an_unknown_tap_is_refused_with_the_nearest_word():
    with pytest.raises(InputError, match=r"stage = 'updates' is not one of .*did you mean update\?"):
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
