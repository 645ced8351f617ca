"""The stacked engine against loops and autograd; the same bits however the work is cut."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_scenes import torchrun
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import iid
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses import (
    Clip,
    Defense,
    PerExample,
    Transformation,
    fed_cdp,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.defenses.clipping import layer_norms
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.federated.groups import nodes_within, tree_sum
from fl_privacy_lib.federated.stacked import BATCH_SLICE, stack
from fl_privacy_lib.models import build, parameters_of
from fl_privacy_lib.sampling import Plan

SCENES = {
    "mnist_cnn": ("training_cnn", (1, 28, 28)),
    "cifar10_cnn": ("training_cnn", (3, 32, 32)),
    "lenet": ("attacked_lenet", (1, 28, 28)),
    "mlp": ("mlp", (105,)),
}


def scene(name, clients=3, examples=12, seed=0):
    kind, shape = SCENES[name]
    generator = torch.Generator().manual_seed(seed)
    model = build(kind, shape, 10, generator)
    x = torch.rand(clients * examples, *shape, generator=generator)
    y = torch.randint(10, (clients * examples,), generator=generator)
    return model, (x, y), iid(clients * examples, clients, examples, np.random.default_rng(seed))


def plan_of(clients=3, **changes):
    values = {
        "participants": clients,
        "rounds": 1,
        "local_iterations": 3,
        "batch_size": 4,
        "local_lr": 0.5,
    }
    return Plan(clients=clients, **(values | changes))


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def update_of(model, run):
    return {name: run.weights[name] - w for name, w in parameters_of(model).items()}


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("rule", [(4.0, "layer"), (0.05, "layer"), (0.05, "all"), None], ids=str)
def test_without_noise_the_update_is_the_naive_loop_s(name, rule):
    """A small C gets a larger step: the update is read from weights, beside their rounding."""
    model, train, partition = scene(name, clients=2)
    step = 0.5 if rule is None or rule[0] > 1 else 5.0
    plan = plan_of(2, local_iterations=2, local_lr=step)
    defense = (
        non_private()
        if rule is None
        else fed_cdp(clip_norm=rule[0], noise_scale=0.0, scope=rule[1])
    )
    run = simulate(model, train, partition, plan, defense, engine="stacked", clients_per_chunk=2)
    data = [(train[0][held], train[1][held]) for held in partition.indices]
    batches = [plan.batches(c, 12, 0) for c in range(2)]
    expected = oracles.aggregated_update(model, data, batches, [0.5, 0.5], 4, step, rule)
    assert oracles.relative_distance(update_of(model, run), expected) <= 1e-5


@pytest.mark.parametrize("sampling", ["poisson", "one_pass_shuffled", "with_replacement"])
def test_every_sampling_and_unequal_clients(sampling):
    model, train, _ = scene("mnist_cnn", 4)
    ends = np.cumsum([0, 5, 20, 6, 17])
    partition = Partition("unequal", tuple(np.arange(a, b) for a, b in pairwise(ends)), 48)
    plan = plan_of(4, batch_sampling=sampling, client_sampling="poisson", participants=3, rounds=2)
    defense = fed_cdp(clip_norm=0.1, noise_scale=0.0)
    fast, slow = (
        simulate(model, train, partition, plan, defense, engine=e) for e in ("stacked", "generic")
    )
    assert oracles.relative_distance(update_of(model, fast), update_of(model, slow)) <= 1e-5


def test_an_empty_batch_gives_noise_alone():
    model, train, partition = scene("mlp", 2)
    plan = plan_of(2, batch_size=1, batch_sampling="poisson", local_iterations=30, seed=2)
    assert any(len(b) == 0 for c in range(2) for b in plan.batches(c, 12, 0))
    run = simulate(
        model, train, partition, plan, fed_cdp(clip_norm=0.1, noise_scale=0.0), engine="stacked"
    )
    other = simulate(
        model, train, partition, plan, fed_cdp(clip_norm=0.1, noise_scale=0.0), engine="generic"
    )
    assert oracles.relative_distance(update_of(model, run), update_of(model, other)) <= 1e-5


@pytest.mark.parametrize("batch", [BATCH_SLICE - 1, BATCH_SLICE, 2 * BATCH_SLICE + 5])
@pytest.mark.parametrize("scope", ["layer", "all"])
def test_a_large_batch_is_the_sum_of_its_slices(batch, scope):
    model, (x, y), _ = scene("mnist_cnn", 2, 80)
    form, weights = stack(model, (1, 28, 28)), parameters_of(model)
    x, y = x[:batch][None], y[:batch][None]
    clip = Clip(0.3, scope)
    flat = form.pack(weights, 1)
    out = torch.zeros_like(flat)
    norms = form.add_gradients(form.views(flat), x, y, clip.factors, out)
    gradients = example_gradients(model, {name: w[None] for name, w in weights.items()}, x, y)
    expected = {name: g.sum(1).double() for name, g in clip(gradients, leading=2).items()}
    assert oracles.relative_distance(form.unpack(out), expected) <= 1e-5
    for name, exact in layer_norms(gradients, 2).items():
        torch.testing.assert_close(norms[name], exact, rtol=1e-4, atol=1e-6)


ODD = {
    "padding, stride": lambda: nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)),
        nn.Sigmoid(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3, padding=2, stride=2),
        nn.Sigmoid(),
        nn.Conv2d(4, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    ),
    "overlapping pools": lambda: nn.Sequential(
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(2, 3, 3, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.LazyLinear(6),
        nn.Sigmoid(),
        nn.Linear(6, 5, bias=False),
    ),
    "cropped": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 3, 2),
        nn.Tanh(),
        nn.MaxPool2d(3),
        nn.Flatten(),
        nn.LazyLinear(5),
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_every_layer_s_gradients_are_autograd_s(kind):
    torch.manual_seed(1)
    model = ODD[kind]()
    x = torch.randn(2, 3, 2, 14, 15)
    model(x[0])  # fills the lazy layers in
    y = torch.randint(5, (2, 3))
    form, weights = stack(model, (2, 14, 15)), parameters_of(model)
    flat = form.pack(weights, 2)
    out = torch.zeros_like(flat)
    views = form.views(flat)
    form.add_gradients(
        views, x, y, lambda norms: {n: torch.ones_like(v) for n, v in norms.items()}, out
    )
    plain = torch.zeros_like(flat)
    form.add_gradients(views, x, y, None, plain)
    gradients = example_gradients(
        model, {name: w.expand(2, *w.shape) for name, w in weights.items()}, x, y
    )
    expected = {name: g.sum(1).double() for name, g in gradients.items()}
    assert oracles.relative_distance(form.unpack(out), expected) <= 2e-6
    assert oracles.relative_distance(form.unpack(plain), expected) <= 2e-6


def test_pixels_that_tie_send_their_gradient_to_one_place():
    """A flat image: every window's maximum is reached four times, and counts once."""
    model, _, _ = scene("mnist_cnn")
    x, y = torch.ones(1, 2, 1, 28, 28), torch.tensor([[1, 2]])
    form, weights = stack(model, (1, 28, 28)), parameters_of(model)
    flat = form.pack(weights, 1)
    out = torch.zeros_like(flat)
    form.add_gradients(form.views(flat), x, y, None, out)
    gradients = example_gradients(model, {name: w[None] for name, w in weights.items()}, x, y)
    assert (
        oracles.relative_distance(
            form.unpack(out), {n: g.sum(1).double() for n, g in gradients.items()}
        )
        <= 1e-5
    )


class Own(nn.ReLU):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.GELU()),
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10), Own()),
        nn.Sequential(nn.Conv2d(1, 2, 3, groups=1, padding="same"), nn.Flatten(), nn.LazyLinear(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(1152, 2)),
        nn.ModuleList([nn.Linear(784, 10)]),
    ],
)
def test_what_the_engine_does_not_know_it_leaves_alone(model):
    assert stack(model, (1, 28, 28)) is None


def test_unknown_models_and_rules_take_the_generic_path():
    model, train, partition = scene("mlp")
    unknown = nn.Sequential(*model, nn.Softplus())
    plan = plan_of()
    auto, generic = (
        simulate(unknown, train, partition, plan, fed_cdp(), engine=e) for e in ("auto", "generic")
    )
    assert same(auto.weights, generic.weights)
    with pytest.raises(InputError, match="a layer that it does not know"):
        simulate(unknown, train, partition, plan, fed_cdp(), engine="stacked")
    with pytest.raises(InputError, match="has a local rule"):
        simulate(
            model, train, partition, plan, replace(fed_cdp(), begin_client=print), engine="stacked"
        )
    with pytest.raises(InputError, match=r"fast.*auto, compiled, stacked, generic"):
        simulate(model, train, partition, plan, fed_cdp(), engine="fast")


@pytest.mark.parametrize(
    "defense",
    [
        fed_cdp("example", noise_scale=2.0),
        fed_cdp("example", noise_scale=2.0, divide_by="none"),
        fed_cdp("batch", noise_scale=2.0),
    ],
    ids=["example", "none", "batch"],
)
def test_one_draw_has_the_distribution_of_many(defense):
    """Mean and variance of what the noise adds, in both engines, over 4 x 78,000 coordinates.

    Each of the four statistics is asked to lie within 5 standard errors: a false alarm in 1 of
    400,000 runs."""
    model, train, partition = scene("mlp", 4)
    plan = plan_of(4, local_iterations=1, local_lr=1.0)
    for engine in ("stacked", "generic"):
        taps = [Tap("update", c) for c in range(4)]
        noisy = simulate(model, train, partition, plan, defense, taps=taps, engine=engine)
        clean = simulate(
            model, train, partition, plan, defense.noiseless(), taps=taps, engine=engine
        )
        draws = torch.cat([
            (noisy.observations[t].values[n] - clean.observations[t].values[n]).flatten()
            for t in taps for n in noisy.weights
        ]).double()  # fmt: skip
        std = {"example": 2 * 4 / 2, "none": 2 * 4, "batch": 2 * 4 / 4}[
            "batch"
            if defense.per_batch
            else "none"
            if defense.per_example.divide_by == "none"
            else "example"
        ]
        assert abs(draws.mean()) <= 5 * std / math.sqrt(len(draws))
        assert abs(draws.std() / std - 1) <= 5 / math.sqrt(2 * len(draws))
        rows = draws.view(4, -1)
        correlation = torch.corrcoef(rows) - torch.eye(4)
        assert correlation.abs().max() <= 6 / math.sqrt(rows.shape[1])  # clients draw independently


@pytest.mark.parametrize("name", SCENES)
def test_the_bits_do_not_depend_on_the_chunk(name):
    model, train, partition = scene(name, 5)
    plan = plan_of(5, rounds=2)
    runs = [
        simulate(
            model,
            train,
            partition,
            plan,
            fed_cdp(clip_norm=0.5),
            engine="stacked",
            clients_per_chunk=chunk,
        )
        for chunk in (1, 2, 5)
    ]
    assert same(runs[0].weights, runs[1].weights) and same(runs[0].weights, runs[2].weights)


def test_a_tap_inside_the_iterations_changes_no_other_client():
    model, train, partition = scene("mlp", 3)
    places = [Tap("update", 0), Tap("update", 2)]
    plain = simulate(model, train, partition, plan_of(), fed_cdp(), taps=places, engine="auto")
    more = [*places, Tap("example", 1)]
    watched = simulate(model, train, partition, plan_of(), fed_cdp(), taps=more, engine="auto")
    for place in places:
        assert same(plain.observations[place].values, watched.observations[place].values)
    example = watched.observations[Tap("example", 1)]
    assert all(v.shape[0] == 4 for v in example.values.values())
    assert watched.truth[Tap("example", 1)][0].shape == (4, 105)


@dataclass(frozen=True)
class Reporting(Transformation):
    """A stage of one's own that looks at everything a context promises."""

    def __call__(self, values, ctx):
        assert len(ctx.clients) == 1 and all(
            n.shape == ctx.examples[1].shape for n in ctx.norms.values()
        )
        ctx.report("norms", torch.stack([n.sum() for n in ctx.norms.values()]).double())
        return {name: v / 2 for name, v in values.items()}


@dataclass(frozen=True)
class Remembering(Transformation):
    def __call__(self, values, ctx):
        ctx.state["seen"] = ctx.state.get("seen", 0) + float(ctx.reports["norms"].sum())
        return {name: v + 1e-9 * ctx.state["seen"] for name, v in values.items()}


def no_state():
    return {}


CUSTOM = Defense(
    "custom",
    PerExample(Clip(0.5), 0.01),
    Reporting(),
    on_aggregate=Remembering(),
    initial_state=no_state,
)
STATELESS = replace(CUSTOM, initial_state=None)


def test_stages_of_one_s_own_see_norms_and_examples():
    model, train, partition = scene("mnist_cnn")
    quiet = CUSTOM.noiseless()
    fast, slow = (
        simulate(model, train, partition, plan_of(), quiet, engine=e)
        for e in ("stacked", "generic")
    )
    assert oracles.relative_distance(update_of(model, fast), update_of(model, slow)) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    "defense", [fed_cdp(clip_norm=0.5), STATELESS, fed_sdp()], ids=lambda d: d.name
)
def test_the_bits_do_not_depend_on_the_workers(defense):
    model, train, partition = scene("mlp", 5)
    plan = plan_of(5, rounds=2)
    taps = [Tap("update", 4, 1), Tap("example", 3), Tap("aggregate", round=1)]
    one, two = (
        simulate(model, train, partition, plan, defense, taps=taps, workers=w, engine="auto")
        for w in (1, 2)
    )
    assert same(one.weights, two.weights) and one.history == two.history
    assert set(one.observations) == set(two.observations) == set(taps) and set(one.truth) == set(
        two.truth
    )
    for tap in taps:
        assert same(one.observations[tap].values, two.observations[tap].values)


@dataclass(frozen=True)
class Dying:
    """Ends the process that simulates the last client."""

    how: str

    def __call__(self, values, ctx):
        if ctx.clients[0] == 2:
            import os
            import signal

            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the last client is broken")
        return values


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "worker 1 ended with ValueError: the last client"),
        ("killed", "worker 1 was killed by signal 9"),
    ],
)
def test_a_worker_that_dies_ends_the_run_with_its_message(how, message):
    from fl_privacy_lib.federated.groups import WorkerError

    model, train, partition = scene("mlp")
    with pytest.raises(WorkerError, match=message):
        simulate(
            model, train, partition, plan_of(), Defense("dying", per_client=Dying(how)), workers=2
        )


def test_what_workers_cannot_do_is_said():
    model, train, partition = scene("mlp")
    with pytest.raises(InputError, match="keeps a state"):
        simulate(model, train, partition, plan_of(), CUSTOM, workers=2)
    closure = Defense("closure", per_client=lambda values, ctx: values)
    with pytest.raises(InputError, match="top of a module"):
        simulate(model, train, partition, plan_of(), closure, workers=2)


class Interrupted(Exception):
    pass


def test_a_run_resumes_with_the_same_bits(tmp_path):
    model, train, partition = scene("mlp")
    plan, taps = plan_of(rounds=4), [Tap("update", 1, 0), Tap("example", 0, 3)]
    options = {"taps": taps, "evaluation": train, "checkpoint": tmp_path / "run.pt"}
    whole = simulate(model, train, partition, plan, CUSTOM, taps=taps, evaluation=train)

    def stop(report):
        if report.round == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        simulate(model, train, partition, plan, CUSTOM, on_round=stop, **options)
    rounds = []
    rest = simulate(
        model,
        train,
        partition,
        plan,
        CUSTOM,
        resume=True,
        on_round=lambda r: rounds.append(r.round),
        **options,
    )
    assert rounds == [2, 3]
    assert same(whole.weights, rest.weights) and whole.history == rest.history
    assert set(whole.observations) == set(rest.observations)
    assert same(whole.observations[taps[0]].values, rest.observations[taps[0]].values)
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    with pytest.raises(InputError, match="belongs to a run with other settings"):
        simulate(model, train, partition, replace(plan, seed=1), CUSTOM, resume=True, **options)


SCRIPT = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
from test_engine import fed_cdp, plan_of, scene, simulate
model, train, partition = scene("mlp", 5)
run = simulate(model, train, partition, plan_of(5, rounds=2), fed_cdp(clip_norm=0.5))
torch.save(run.weights, {out!r} + str(dist.get_rank()))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_processes_of_torchrun_are_workers(tmp_path):
    out = str(tmp_path / "weights")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(out=out))
    torchrun(script)
    model, train, partition = scene("mlp", 5)
    alone = simulate(model, train, partition, plan_of(5, rounds=2), fed_cdp(clip_norm=0.5))
    for rank in range(2):
        assert same(alone.weights, torch.load(out + str(rank)))


@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 99))
def test_the_bits_of_a_sum_do_not_depend_on_where_it_is_cut(count, cuts, seed):
    values = (
        10.0
        ** torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(seed)).double()
    )

    def blocks(low, high):
        return iter(
            [({"w": values[i : i + 1].clone()}, [{"i": torch.tensor(i)}]) for i in range(low, high)]
        )

    whole, reports = tree_sum((0, count), {}, blocks(0, count))
    bounds = sorted({0, count, *(min(c, count) for c in cuts)})
    sums = {}
    for low, high in pairwise(bounds):
        stream = blocks(low, high)
        nodes = nodes_within(low, high, (0, count))
        sums |= {node: tree_sum(node, {}, stream) for node in nodes}
        assert next(stream, None) is None
    again, same_reports = tree_sum((0, count), sums, iter(()))
    assert torch.equal(whole["w"], again["w"]) and torch.isclose(whole["w"], values.sum())
    for reported in (reports, same_reports):
        assert [int(r["i"]) for r in reported] == list(range(count))
