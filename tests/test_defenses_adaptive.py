"""Bounds that follow the gradients, quantiles and AdaClip against loops; what each adds and
remembers.
"""

import math
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from defense_scenes import (
    context,
    flat,
    noise_of,
    of_std,
    plan_of,
    quantile_updates,
    random_gradients,
    setting,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import (
    Clip,
    Defense,
    adaclip,
    fed_alpha_cdp,
    median_clipped,
    quantile_clipped,
)
from fl_privacy_lib.defenses.adaclip import AdaClip, AdaClipNoise
from fl_privacy_lib.defenses.clipping import layer_norms
from fl_privacy_lib.defenses.route import BatchNoise, ClientContext, PerExample
from fl_privacy_lib.defenses.rules import BOUND, LargestNorm, MedianNorm, QuantileNorm
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.gradients import example_gradients

# --- bounds that follow the gradients


def naive_levels(norms, clip, statistic, floor):
    """Return S by a loop over one client's examples; norms: one dict of numbers an example."""
    tops = [max(floor, *(min(n, clip) for n in example.values())) for example in norms]
    return max(tops) if statistic == "max" else sum(tops) / len(tops)


@given(
    st.integers(0, 999),
    st.integers(1, 5),
    st.sampled_from(["max", "mean"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.03, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_largest_norm_is_that_of_a_loop(seed, batch, statistic, floor, scale):
    gradients = random_gradients(batch=batch, seed=seed, scale=scale)
    norms, rule = layer_norms(gradients, 2), LargestNorm(Clip(3.0), statistic, floor)
    levels = rule.levels(norms, context(2))
    for client in range(2):
        rows = [{name: float(n[client, j]) for name, n in norms.items()} for j in range(batch)]
        expected = naive_levels(rows, 3.0, statistic, floor)
        assert all(float(level[client]) == pytest.approx(expected) for level in levels.values())
    unlimited = LargestNorm(None, statistic, floor).levels(norms, context(2))["a"]
    assert bool((unlimited >= levels["a"] - 1e-12).all())


@pytest.mark.parametrize(
    "reading, tap, share",
    [
        ("example", "example", 1.0),
        ("example", "batch", 0.5),
        ("batch", "batch", 1.0),
        ("code", "batch", 0.25),
    ],
)
def test_fed_alpha_cdp_adds_the_noise_of_its_reading(reading, tap, share):
    defense, place = fed_alpha_cdp(reading, clip_norm=0.6, noise_scale=3.0), Tap(tap, 1)
    seen = noise_of(defense, plan_of(local_iterations=1), [place])[place]
    model, train, partition = setting()
    index = partition.indices[1][plan_of(local_iterations=1).batches(1, 8, 0)[0]]
    weights = {name: p.detach()[None] for name, p in model.named_parameters()}
    norms = layer_norms(
        example_gradients(model, weights, train[0][index][None], train[1][index][None]), 2
    )
    rows = [{name: float(n[0, j]) for name, n in norms.items()} for j in range(4)]
    level = (
        naive_levels(rows, 32.0, "mean", 0.1)
        if reading == "code"
        else naive_levels(rows, 0.6, "max", 0.0)
    )
    assert of_std(seen, 3.0 * level * share)
    assert not of_std(seen, 1.05 * 3.0 * level * share)
    at_example = Tap("example", 1)
    bare = noise_of(defense, plan_of(local_iterations=1), [at_example])[at_example]
    assert bool(bare.any()) == (
        reading == "example"
    )  # the other readings leave a type-2 adversary no noise


def test_both_printed_readings_are_one_law_on_the_batch_mean_if_divided_alike():
    tap = Tap("batch", 2)
    one = noise_of(fed_alpha_cdp("example", noise_scale=2.0), plan_of(), [tap])[tap].numpy()
    other = noise_of(
        fed_alpha_cdp("batch", noise_scale=2.0, divide_by="sqrt_batch"), plan_of(), [tap]
    )[tap].numpy()
    assert stats.ks_2samp(one, other).pvalue > WRONG_ALARM
    assert stats.ks_2samp(one, 1.1 * other).pvalue < WRONG_ALARM  # the test can tell


def test_noise_on_the_batch_has_the_same_level_in_the_fast_engine():
    model, train, partition = setting()
    tap = Tap("update", 1)
    plan = plan_of(local_iterations=1)
    for reading in ("batch", "code"):
        defense = fed_alpha_cdp(reading, noise_scale=50.0)
        spreads = []
        for engine in ("generic", "stacked"):
            run = simulate(model, train, partition, plan, defense, taps=[tap], engine=engine)
            spreads.append(float(flat(run.observations[tap].values).std()))
        # 78,200 coordinates: the ratio's relative deviation is 1/√78,200 = 0.36 %, so six of them
        # are 2.2 %
        assert spreads[0] == pytest.approx(spreads[1], rel=0.022)


@given(st.integers(0, 999), st.integers(1, 6), st.sampled_from(["layer", "all"]))
@settings(max_examples=60, deadline=None)
def test_the_median_is_numpys_and_half_of_the_examples_keep_their_norm(seed, batch, scope):
    gradients = random_gradients(batch=batch, seed=seed)
    norms, rule = layer_norms(gradients, 2), MedianNorm(scope)
    compared = {n: v.numpy() for n, v in norms.items()}
    if scope == "all":
        compared = dict.fromkeys(norms, np.sqrt(sum(v**2 for v in compared.values())))
    clipped = PerExample(rule)(gradients, context(2))
    for name, levels in rule.levels(norms, context(2)).items():
        expected = np.median(compared[name], axis=1)
        np.testing.assert_allclose(levels.numpy(), expected)
        for client in range(2):
            for j in range(batch):
                factor = min(1.0, expected[client] / compared[name][client, j])
                torch.testing.assert_close(
                    clipped[name][client, j], gradients[name][client, j] * factor
                )


@pytest.mark.parametrize("noise_at", ["example", "batch"])
def test_median_noise_has_each_tensors_own_level(noise_at):
    gradients = {"a": torch.randn(2, 4, 3000), "b": 5 * torch.randn(2, 4, 3000)}
    norms = layer_norms(gradients, 2)
    defense = median_clipped(noise_at, noise_scale=2.0, divide_by="batch")
    ctx = context(2, batch_size=4, norms=norms)
    clear = defense.noiseless().per_example(gradients, ctx)
    values = {name: g.mean(1) for name, g in defense.per_example(gradients, ctx).items()}
    if defense.per_batch:
        values = defense.per_batch(values, ctx)
    for name in gradients:
        for client in range(2):
            std = 2.0 * float(norms[name][client].quantile(0.5)) / 4
            noise = (values[name] - clear[name].mean(1))[client]
            assert of_std(noise, std) and not of_std(noise, 1.15 * std)


@pytest.mark.parametrize(
    "rule", [LargestNorm(Clip(3.0), "mean", 0.1), LargestNorm(), MedianNorm("all")]
)
def test_an_empty_batch_has_the_least_level(rule):
    noisy = BatchNoise(rule, 1.0)({"w": torch.zeros(1, 5000)}, context(batch_size=1))
    floor = getattr(rule, "floor", 0.0)
    assert of_std(noisy["w"], floor) if floor else not noisy["w"].any()


@pytest.mark.parametrize(
    ("method", "named"),
    [("factors", {"level": "bound"}), ("levels", {"clip": Clip(1.0)})],
)
def test_a_rule_that_changes_what_it_does_has_to_name_anew_what_holds(method, named):
    changed = {method: lambda self, norms, ctx: norms}
    missing = "clip" if method == "factors" else "level"
    with pytest.raises(InputError, match=f"Swollen has {method} of its own.*name {missing} anew"):
        type("Swollen", (LargestNorm,), changed | named)
    type("Swollen", (LargestNorm,), changed | {missing: getattr(LargestNorm, missing)})
    noted = {"__annotations__": {missing: "Any"}}  # a field without a default is a name, too
    type("Swollen", (LargestNorm,), changed | noted)


# --- quantiles


@pytest.mark.parametrize("at", ["per_example", "per_client", "on_arrival"])
@pytest.mark.parametrize("scope", ["layer", "all"])
def test_the_quantile_bound_moves_as_in_a_loop_over_clients_and_rounds(at, scope):
    build = quantile_clipped if at == "per_example" else partial(quantile_updates, at)
    defense = build(
        clip_norm=0.05, noise_scale=0.0, target=0.7, rate=0.9, count_scale=0.0, scope=scope
    )
    bounds, states = {}, []
    probe = replace(defense, on_aggregate=_remember(defense.on_aggregate, states))
    model, train, partition = setting()
    plan = plan_of(rounds=3, participants=3, local_iterations=2)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    bounds = dict.fromkeys(weights, 0.05)
    for round in range(3):
        updates, within = [], {name: [] for name in weights}
        for client in plan.participants_of(round):
            local = {name: w.clone() for name, w in weights.items()}
            for batch in plan.batches(client, 8, round):
                index = partition.indices[client][batch]
                x, y = train[0][index][None], train[1][index][None]
                found = example_gradients(model, {n: w[None] for n, w in local.items()}, x, y)
                rows = [{n: g[0, j] for n, g in found.items()} for j in range(4)]
                if at == "per_example":
                    rows = [_cut(row, bounds, scope, within) for row in rows]
                for name in local:
                    local[name] -= 0.1 * sum(row[name] for row in rows) / 4
            update = {name: local[name] - weights[name] for name in weights}
            updates.append(update if at == "per_example" else _cut(update, bounds, scope, within))
        weights = {name: w + sum(u[name] for u in updates) / 3 for name, w in weights.items()}
        bounds = {n: b * math.exp(-0.9 * (np.mean(within[n]) - 0.7)) for n, b in bounds.items()}
        run = simulate(model, train, partition, replace(plan, rounds=round + 1), probe)
        expected = list(bounds.values()) if scope == "layer" else list(bounds.values())[:1]
        assert states[-1] == pytest.approx(expected, rel=1e-5)
    for name, w in run.weights.items():
        torch.testing.assert_close(w, weights[name], rtol=1e-4, atol=1e-6)
    assert len({f"{b:.9f}" for s in states for b in s}) > 2  # they did move


def _remember(rule, states):
    def stage(values, ctx):
        values = rule(values, ctx)
        states.append(list(ctx.state[BOUND]))
        return values

    return stage


def _cut(row, bounds, scope, within):
    """Return one unit's tensors clipped in a loop, and note which norms were within the bound."""
    norms = {name: float(v.norm()) for name, v in row.items()}
    if scope == "all":
        norms = dict.fromkeys(norms, math.hypot(*norms.values()))
    for name, n in norms.items():
        within[name].append(n <= bounds[name])
    return {name: v * min(1.0, bounds[name] / norms[name]) for name, v in row.items()}


def test_the_bound_settles_at_the_quantile_of_norms_that_stay():
    norms = np.linspace(1.0, 3.0, 201)
    rule, state = (
        QuantileNorm(Clip(9.0, "all"), target=0.25, rate=0.2, count_scale=0.0),
        {BOUND: [9.0]},
    )
    for round in range(200):
        ctx = context(batch_size=201, state=state)
        ctx.round = round
        rule.tell({"w": torch.from_numpy(norms)[None]}, ctx, 201)
        rule({}, ctx)
    assert state[BOUND][0] == pytest.approx(np.quantile(norms, 0.25), abs=0.02)


def test_counts_carry_their_noise_and_the_bound_its_own():
    rule = QuantileNorm(Clip(2.0, "layer"), count_scale=5.0)
    norms = {f"w{i}": torch.full((1, 4), 1.0 + i) for i in range(3)}  # counts 4, 4 and 0
    reports = torch.zeros(4000, 3)
    for seed in range(4000):
        ctx = context(batch_size=4, seed=seed)
        rule.tell(norms, ctx, 4)
        reports[seed] = ctx.reports["below"]
        assert float(ctx.reports["asked"]) == 4
    assert of_std(reports - torch.tensor([4.0, 4.0, 0.0]), 5.0)
    assert not of_std(reports - torch.tensor([4.0, 4.0, 0.0]), 5.5)
    tap = Tap("batch", 1)
    noise = noise_of(quantile_clipped(clip_norm=0.5, noise_scale=3.0), plan_of(), [tap])[tap]
    assert of_std(noise, 3.0 * 0.5 / 4)
    tap = Tap("update", 1)
    noise = noise_of(
        quantile_updates("per_client", clip_norm=0.5, noise_scale=3.0), plan_of(), [tap]
    )[tap]
    assert of_std(noise, 1.5)


def test_who_replays_a_later_round_has_to_know_its_bound():
    ctx = ClientContext(3, (0,), (), batch_size=1)
    stage = PerExample(QuantileNorm(Clip(4.0, "all")))
    with pytest.raises(InputError, match="bound of round 3 is not known"):
        stage({"w": torch.ones(1, 1, 4)}, ctx)
    told = PerExample(QuantileNorm(Clip(1.0, "all")))
    ctx.round = 0
    assert float(told({"w": torch.ones(1, 1, 4)}, ctx)["w"].norm()) == pytest.approx(1.0)


def test_a_report_made_on_arrival_reaches_the_aggregate_beside_the_clients_own():
    seen = []

    def at_client(values, ctx):
        ctx.report("clients", torch.tensor(float(ctx.clients[0])))
        return values

    def at_server(values, ctx):
        ctx.report("arrived", torch.tensor(10.0 * ctx.clients[0]) + ctx.weights[0])
        return values

    def aggregate(values, ctx):
        seen.append({name: float(v) for name, v in ctx.reports.items()})
        return values

    model, train, partition = setting()
    plan, defense = (
        plan_of(rounds=2, participants=3),
        Defense("x", None, None, at_client, at_server, aggregate),
    )
    for engine in ("generic", "stacked"):
        seen.clear()
        simulate(model, train, partition, plan, defense, engine=engine)
        for round, reports in enumerate(seen):
            ids = sum(plan.participants_of(round))
            assert reports == pytest.approx({"clients": ids, "arrived": 10 * ids + 1})


# --- AdaClip

ADACLIP = sys.modules[AdaClip.__module__]  # the package gives its name to the method


def test_adaclip_equals_a_loop_over_iterations_and_examples(monkeypatch):
    for name, value in (("MEAN_DECAY", 0.6), ("SPREAD_DECAY", 0.7), ("FLOOR", 1e-6)):
        monkeypatch.setattr(ADACLIP, name, value)
    monkeypatch.setattr(ADACLIP, "CEILING", 0.5)
    defense = adaclip(clip_norm=0.3, noise_scale=0.0)
    model, train, partition = setting()
    plan = plan_of(local_iterations=3, rounds=2)  # two rounds: the moments begin anew
    taps = [Tap("batch", 1, 1, i) for i in range(3)] + [Tap("example", 1, 1, 2)]
    run = simulate(model, train, partition, plan, defense, taps=taps)
    start = run.observations[taps[0]].weights
    d = sum(w.numel() for w in start.values())
    mean, spread, weights = (
        np.zeros(d),
        np.full(d, 0.3 / math.sqrt(d)),
        {n: w.clone() for n, w in start.items()},
    )
    for i, batch in enumerate(plan.batches(1, 8, 1)):
        index = partition.indices[1][batch]
        found = example_gradients(
            model,
            {n: w[None] for n, w in weights.items()},
            train[0][index][None],
            train[1][index][None],
        )
        rows = [
            np.concatenate([g[0, j].double().numpy().ravel() for g in found.values()])
            for j in range(4)
        ]
        b = np.sqrt(spread * spread.sum())
        whitened = [(row - mean) / b for row in rows]
        done = [mean + b * w / max(1.0, np.linalg.norm(w)) for w in whitened]
        average = sum(done) / 4
        np.testing.assert_allclose(
            flat(run.observations[taps[i]].values).numpy(), average, rtol=2e-3, atol=2e-6
        )
        variance = np.clip((average - mean) ** 2, 1e-6, 0.5)
        mean, spread = 0.6 * mean + 0.4 * average, np.sqrt(0.7 * spread**2 + 0.3 * variance)
        parts = torch.from_numpy(average).float().split([w.numel() for w in weights.values()])
        weights = {
            n: w - 0.1 * p.view(w.shape) for p, (n, w) in zip(parts, weights.items(), strict=True)
        }
    shown = torch.cat(
        [v.flatten(1).double() for v in run.observations[taps[3]].values.values()], 1
    ).numpy()
    np.testing.assert_allclose(shown, np.stack(done), rtol=2e-3, atol=2e-6)


def test_adaclip_begins_as_a_clip_to_the_first_bound():
    gradients = random_gradients(scale=9.0)
    for scope in ("all", "layer"):
        begun = AdaClip(2.0, scope)(gradients, context(2))
        for name, value in Clip(2.0, scope)(gradients, 2).items():
            torch.testing.assert_close(begun[name], value)


def test_adaclip_noise_is_scaled_by_coordinate_and_taken_off_the_variance(monkeypatch):
    for name, value in (("SPREAD_DECAY", 0.0), ("FLOOR", 1e-9), ("CEILING", 1e9)):
        monkeypatch.setattr(ADACLIP, name, value)
    stage = AdaClipNoise(AdaClip(3.0), noise_scale=2.0)
    spreads = {"w": torch.linspace(0.1, 2.0, 20_000)[None]}
    ctx = context(batch_size=4, state={"adaclip": ({"w": torch.zeros(1, 20_000)}, spreads)})
    noise = stage({"w": torch.zeros(1, 20_000)}, ctx)["w"]
    b = (spreads["w"] * spreads["w"].sum()).sqrt()
    assert of_std(noise / b, 2.0 / 4) and not of_std(noise, float(noise.std()) * 1.05)
    seen = (noise.square() - (0.5 * b).square()).clamp(1e-9, 1e9)
    torch.testing.assert_close(ctx.state["adaclip"][1]["w"], seen.sqrt())


@given(st.integers(0, 9999), st.floats(0.0, 20.0))
@settings(max_examples=60, deadline=None)
def test_an_example_of_adaclip_moves_the_scaled_mean_by_at_most_two(seed, far):
    gradients = random_gradients(1, 3, seed, 5.0)
    rule = AdaClip(1.0)
    means = {
        "a": torch.full((1, 4, 5), far, dtype=torch.float64),
        "b": torch.full((1,), far, dtype=torch.float64),
    }
    g = torch.Generator().manual_seed(seed)
    spreads = {
        n: 0.1 + torch.rand(m.shape, generator=g, dtype=torch.float64) for n, m in means.items()
    }
    ctx = context(state={"adaclip": (means, spreads)})
    empty = {
        name: v * torch.tensor([0.0, 1.0, 1.0]).view(1, 3, *[1] * (v.dim() - 2))
        for name, v in gradients.items()
    }
    one, other, b = rule(gradients, ctx), rule(empty, ctx), rule.scales(spreads)
    moved = torch.cat([((one[n] - other[n]).sum(1) / b[n]).flatten() for n in b]).norm()
    assert float(moved) <= 2 + 1e-9


def test_zero_gradients_after_centring_do_move_by_more_than_one():
    rule = AdaClip(1.0)
    ctx = context(state={"adaclip": ({"w": torch.full((1, 1), 5.0)}, {"w": torch.ones(1, 1)})})
    one, other = (float(rule({"w": torch.full((1, 1, 1), g)}, ctx)["w"]) for g in (10.0, 0.0))
    assert one - other == pytest.approx(2.0)


def test_the_number_of_examples_in_a_poisson_batch_does_not_show_in_adaclips_mean():
    stage, like = AdaClipNoise(AdaClip(1.0), 0.0), {"w": torch.full((1, 3), 7.0)}
    for count in (0, 2, 5):
        ctx = context(batch_size=4, state={"adaclip": (like, {"w": torch.ones(1, 3)})})
        ctx.examples = (torch.zeros(1, count, 2), torch.zeros(1, count))
        summed = {"w": count * like["w"] / 4}  # examples that equal the mean, clipped to nothing
        torch.testing.assert_close(stage(summed, ctx)["w"], like["w"])
