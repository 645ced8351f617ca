"""What the stages of a route are given, in which order, and what they keep between rounds."""

import pytest
import torch
from federated_scenes import plan_of, setting

from fl_privacy_lib.defenses import Defense
from fl_privacy_lib.defenses.route import ClientContext, Context
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.models import parameters_of


def diary(log):
    """Return a defence that changes nothing and notes its calls: (stage, context, shapes)."""

    def note(stage):
        def run(values, ctx):
            log.append((stage, ctx, {n: tuple(v.shape) for n, v in values.items()}))
            return values

        return run

    stages = {
        stage: note(stage) for stage in ("per_batch", "per_client", "on_arrival", "on_aggregate")
    }
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
    assert iterations == [
        (r, int(c), i) for r in range(2) for c in plan.participants_of(r) for i in range(2)
    ]


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

    simulate(
        model,
        train,
        partition,
        plan,
        Defense("d", per_client=per_client, on_aggregate=on_aggregate),
    )
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
