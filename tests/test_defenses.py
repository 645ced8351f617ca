"""Defences: the distributions of clipping, the size and independence of noise, and what each
method fills.
"""

import math

import pytest
import torch
from defense_scenes import flat, noise_of, observed, of_std, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import WRONG_ALARM
from oracles import clip as naive_clip
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import (
    Clip,
    Defense,
    PerExample,
    Transformation,
    fed_cdp,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.defenses.clipping import layer_norms, scaled
from fl_privacy_lib.defenses.noise import DIVISORS, add_noise, keyed_generator, mean_std
from fl_privacy_lib.defenses.route import BatchNoise, ClientContext, ClipAndNoiseUpdate
from fl_privacy_lib.federated import Tap
from fl_privacy_lib.federated.stacked import local_noise

CPU = torch.device("cpu")


def uncorrelated(one, other):
    one, other = one.double(), other.double()
    correlation = float((one * other).sum() / (one.norm() * other.norm()))
    return abs(correlation) < stats.norm.isf(WRONG_ALARM / 2) / math.sqrt(len(one))


# --- clipping


def arrays(scale):
    # nothing between 0 and 1e-6: the squares of far smaller numbers are no normal floats
    numbers = st.floats(-scale, scale).map(lambda v: v if abs(v) > 1e-6 else 0.0)
    pair = st.tuples(
        *(hnp.arrays("float64", shape, elements=numbers) for shape in ((2, 3, 4), (2, 3, 2, 2)))
    )
    return pair.map(lambda p: {"a": torch.from_numpy(p[0]), "b": torch.from_numpy(p[1])})


gradients = arrays(1e6)
rules = st.builds(Clip, st.floats(1e-3, 1e3), st.sampled_from(["layer", "all"]))


@given(gradients, rules)
@settings(max_examples=150, deadline=None)
def test_clipping_equals_the_formula_row_by_row(gradient, rule):
    clipped = rule(gradient, leading=2)
    for client in range(2):
        for example in range(3):
            row = {name: g[client, example] for name, g in gradient.items()}
            expected = naive_clip(row, rule.clip_norm, rule.scope)
            for name in row:
                torch.testing.assert_close(
                    clipped[name][client, example], expected[name], rtol=1e-9, atol=0
                )


@given(gradients, rules)
@settings(max_examples=150, deadline=None)
def test_clipping_bounds_shrinks_keeps_direction_and_is_idempotent(gradient, rule):
    clipped = rule(gradient, leading=2)
    norms = layer_norms(clipped, 2)
    total = torch.stack(list(norms.values())).square().sum(0).sqrt()
    bounded = list(norms.values()) if rule.scope == "layer" else [total]
    assert all((n <= rule.bound() * (1 + 1e-12)).all() for n in bounded)
    assert float(total.max()) <= rule.bound() * math.sqrt(2) * (1 + 1e-12)
    again = rule(clipped, leading=2)
    factors = rule.factors(layer_norms(gradient, 2))
    for name, g in gradient.items():
        assert (clipped[name].abs() <= g.abs()).all()
        assert (clipped[name] * g >= 0).all()
        assert ((factors[name] > 0) & (factors[name] <= 1)).all()
        torch.testing.assert_close(scaled(gradient, factors)[name], clipped[name], rtol=0, atol=0)
        torch.testing.assert_close(again[name], clipped[name], rtol=1e-12, atol=0)


@given(gradients, st.sampled_from(["layer", "all"]))
@settings(max_examples=60, deadline=None)
def test_what_is_short_enough_is_left_alone(gradient, scope):
    norms = layer_norms(gradient, 2)
    enough = (
        float(torch.stack(list(norms.values())).square().sum(0).sqrt().max()) * (1 + 1e-9) + 1e-3
    )
    clipped = Clip(enough, scope)(gradient, leading=2)
    assert all(torch.equal(clipped[name], gradient[name]) for name in gradient)


@pytest.mark.parametrize("scope", ["layer", "all"])
def test_a_zero_gradient_stays_zero_and_can_be_differentiated(scope):
    zero = {
        "a": torch.zeros(1, 2, 3, requires_grad=True),
        "b": torch.zeros(1, 2, 2, 2, requires_grad=True),
    }
    clipped = Clip(4.0, scope)(zero, leading=2)
    assert not any(v.any() for v in clipped.values())
    total = torch.cat([v.flatten() for v in clipped.values()]).sum()
    slopes = torch.autograd.grad(total, list(zero.values()))
    assert all(torch.equal(slope, torch.ones_like(slope)) for slope in slopes)


def test_scope_decides_what_is_bounded():
    gradient = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[0.0, 4.0]])}
    layer, whole = Clip(1.0)(gradient, leading=1), Clip(1.0, "all")(gradient, leading=1)
    assert flat(layer).norm() == pytest.approx(math.sqrt(2)) and flat(
        whole
    ).norm() == pytest.approx(1)
    assert whole["a"][0, 0] / whole["b"][0, 1] == pytest.approx(3 / 4)


def test_a_scalar_parameter_is_a_tensor_too():
    gradient = {"scale": torch.tensor([[3.0, -8.0]])}  # [clients, batch], a parameter of shape ()
    torch.testing.assert_close(layer_norms(gradient, 2), {"scale": torch.tensor([[3.0, 8.0]])})
    torch.testing.assert_close(Clip(4.0)(gradient, 2), {"scale": torch.tensor([[3.0, -4.0]])})


# --- noise


@given(st.floats(0, 50), st.floats(1e-3, 50), st.integers(1, 600))
@settings(max_examples=50, deadline=None)
def test_mean_std_of_the_three_divisors(noise_scale, bound, batch):
    root, whole, none = (
        mean_std(noise_scale, bound, batch, how) for how in ("sqrt_batch", "batch", "none")
    )
    assert none == pytest.approx(noise_scale * bound)
    assert (root * math.sqrt(batch), whole * batch) == pytest.approx((none, none))


def test_keyed_generators_differ_in_any_part_of_the_key_and_only_there():
    keys: list[tuple] = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, "server")]
    keys += [(0, 0, 0, "arrival"), (0,), (0, 0)]
    draws = [torch.randn(2000, generator=keyed_generator(CPU, *key)) for key in keys]
    for i, key in enumerate(keys):
        assert torch.equal(draws[i], torch.randn(2000, generator=keyed_generator(CPU, *key)))
        assert all(uncorrelated(draws[i], draws[j]) for j in range(i))


def test_add_gaussian_gives_every_client_the_draw_of_its_own_generator():
    values = {"a": torch.zeros(3, 4), "b": torch.zeros(3, 2, 2)}
    together = add_noise(values, 2.0, [keyed_generator(CPU, c) for c in range(3)])
    for client in range(3):
        alone = {name: v[client : client + 1] for name, v in values.items()}
        noisy = add_noise(alone, 2.0, [keyed_generator(CPU, client)])
        assert all(torch.equal(noisy[name][0], together[name][client]) for name in values)
    assert torch.equal(add_noise(values, 0, [])["a"], values["a"])
    with pytest.raises(ValueError):
        add_noise(values, 1.0, [keyed_generator(CPU, 0)])


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("divide_by", DIVISORS)
@pytest.mark.parametrize("noise_at", ["example", "batch"])
def test_noise_on_the_batch_mean_has_mean_std(noise_at, divide_by, batch_size):
    defense = fed_cdp(noise_at, divide_by=divide_by, clip_norm=0.7, noise_scale=3.0)
    taps = [Tap("batch", client) for client in range(2)]
    noise = noise_of(defense, plan_of(batch_size), taps)
    std = mean_std(3.0, 0.7, batch_size, divide_by)
    divisor = {"sqrt_batch": math.sqrt(batch_size), "batch": batch_size, "none": 1}[divide_by]
    assert std == pytest.approx(2.1 / divisor)
    for tap in taps:
        assert of_std(noise[tap], std)
        assert not of_std(noise[tap], 1.05 * std)  # the test can tell


def test_each_place_divides_by_default_as_its_source_does():
    printed = fed_cdp(clip_norm=0.7, noise_scale=3.0)
    assert (
        printed == fed_cdp("example", clip_norm=0.7, noise_scale=3.0) and printed.per_batch is None
    )
    tap = Tap("batch", 1)
    assert of_std(noise_of(printed, plan_of(), [tap])[tap], 2.1 / 2)
    assert of_std(
        noise_of(fed_cdp("batch", clip_norm=0.7, noise_scale=3.0), plan_of(), [tap])[tap], 2.1 / 4
    )


@pytest.mark.parametrize("divide_by", DIVISORS)
def test_example_and_batch_noise_are_one_law_on_the_batch_mean(divide_by):
    tap = Tap("batch", 2)
    at_example = fed_cdp("example", divide_by=divide_by, noise_scale=2.0)
    at_batch = fed_cdp("batch", divide_by=divide_by, noise_scale=2.0)
    one, other = (noise_of(d, plan_of(), [tap])[tap].numpy() for d in (at_example, at_batch))
    assert stats.ks_2samp(one, other).pvalue > WRONG_ALARM
    assert stats.ks_2samp(one, 1.1 * other).pvalue < WRONG_ALARM  # the test can tell
    assert stats.kstest(one / mean_std(2.0, 4.0, 4, divide_by), "norm").pvalue > WRONG_ALARM


@pytest.mark.parametrize("divide_by", DIVISORS)
def test_what_the_example_tap_shows_carries_the_noise_that_averages_to_mean_std(divide_by):
    tap = Tap("example", 1)
    defense = fed_cdp("example", divide_by=divide_by, clip_norm=0.7, noise_scale=3.0)
    noise = noise_of(defense, plan_of(), [tap])[tap]
    assert of_std(noise, mean_std(3.0, 0.7, 4, divide_by) * 2)
    at_batch = fed_cdp("batch", divide_by=divide_by, clip_norm=0.7, noise_scale=3.0)
    assert not noise_of(at_batch, plan_of(), [tap])[tap].any()  # clipped, and noiseless


@pytest.mark.parametrize("noise_at", ["example", "batch"])
def test_a_poisson_batch_of_any_size_carries_mean_std_or_is_refused(noise_at):
    defense = fed_cdp(noise_at, divide_by="batch", clip_norm=0.7, noise_scale=3.0)
    plan = plan_of(1, local_iterations=8, batch_sampling="poisson")
    sizes = [len(b) for b in plan.batches(0, 8, 0)]
    assert 0 in sizes and max(sizes) > 1
    taps = [Tap("batch", 0, 0, iteration) for iteration in range(8)]
    try:
        values = observed(defense, plan, taps)
    except InputError:
        return
    for tap, size in zip(taps, sizes, strict=True):
        # the gradient itself, at most 0.7 · 2 a tensor, is lost in a sum of squares of 78,200 ·
        # 4.41
        assert of_std(flat(values[tap]), 2.1), f"a batch of {size}"


def test_noise_is_fresh_for_every_client_iteration_and_round():
    taps = [Tap("batch", c, r, i) for c in range(2) for r in range(2) for i in range(2)]
    for noise_at in ("example", "batch"):
        defense = fed_cdp(noise_at, clip_norm=1e-3, noise_scale=1e3)
        values = observed(defense, plan_of(rounds=2), taps)
        for i, tap in enumerate(taps):
            assert all(uncorrelated(flat(values[tap]), flat(values[other])) for other in taps[:i])


@pytest.mark.parametrize(
    "noise_at, tap", [("client", Tap("update", 1)), ("server", Tap("received", 1))]
)
@pytest.mark.parametrize("participants", [None, 4])
def test_fed_sdp_noises_the_update_and_its_mean_as_it_says(noise_at, tap, participants):
    defense = fed_sdp(noise_at, clip_norm=0.7, noise_scale=3.0, participants=participants)
    mean = Tap("aggregate")
    noise = noise_of(defense, plan_of(), [tap, mean])
    std = 2.1 if participants is None else 2.1 / 2
    assert of_std(noise[tap], std) and of_std(noise[mean], std / 2)


@pytest.mark.parametrize("noise_at, stage", [("client", "update"), ("server", "received")])
def test_fed_sdp_clips_every_tensor_of_the_update(noise_at, stage):
    tap = Tap(stage, 0)
    raw = observed(non_private(), plan_of(), [tap])[tap]
    bound = 0.5 * min(float(v.norm()) for v in raw.values())
    clipped = observed(fed_sdp(noise_at, clip_norm=bound, noise_scale=0.0), plan_of(), [tap])[tap]
    for name, value in naive_clip(raw, bound, "layer").items():
        torch.testing.assert_close(clipped[name], value)
        assert float(clipped[name].norm()) == pytest.approx(bound)


# --- defences as descriptions


@pytest.mark.parametrize(
    "defense, filled",
    [
        (non_private(), ()),
        (fed_sdp("client"), ("per_client",)),
        (fed_sdp("server"), ("on_arrival",)),
        (fed_cdp("example"), ("per_example",)),
        (fed_cdp("batch"), ("per_example", "per_batch")),
    ],
)
def test_a_method_fills_its_stages_and_says_so(defense, filled):
    assert set(defense.public()) == {"name", *filled}
    quiet = defense.noiseless()
    assert set(quiet.public()) == set(defense.public()) and quiet.name == defense.name
    assert all(getattr(quiet, s).noise_scale == 0 for s in filled)
    kept = [(getattr(quiet, s).clip, getattr(defense, s).clip) for s in filled]
    assert all(now == before for now, before in kept)


class Halve(Transformation):
    def __call__(self, values, ctx):
        return {name: v / 2 for name, v in values.items()}


def test_noiseless_leaves_a_stage_without_noise_as_it_is():
    halve = Halve()
    assert Defense("own", per_client=halve).noiseless().per_client is halve


def test_a_stage_uses_norms_that_are_known_already():
    ctx = ClientContext(0, (0,), (), batch_size=2, norms={"a": torch.tensor([[8.0, 1.0]])})
    values = PerExample(Clip(4.0))({"a": torch.ones(1, 2, 3)}, ctx)["a"]
    torch.testing.assert_close(values[0], torch.tensor([[0.5] * 3, [1.0] * 3]))


def test_noise_on_the_examples_is_what_is_left_on_their_mean():
    for rule in (PerExample(), PerExample(Clip(4.0))):
        assert local_noise(Defense("", per_example=rule), 4, 0) == 0
    noisy = Defense("", per_example=PerExample(Clip(4.0), 6.0, "batch"))
    assert local_noise(noisy, 4, 0) == pytest.approx(6)  # σC/B


@pytest.mark.parametrize(
    "bad, sentence",
    [
        (lambda: Clip(0.0), "clip_norm = 0.0 must be a finite number greater than 0"),
        (lambda: Clip(float("nan")), "clip_norm = nan"),
        (lambda: Clip(1.0, "layers"), "'layers' is not one of layer, all.*did you mean layer"),
        (lambda: PerExample(None, 6.0), "noise_scale = 6.0 needs a bound.*give a clip"),
        (lambda: PerExample(Clip(1.0), -1.0), "noise_scale = -1.0"),
        (lambda: PerExample(Clip(1.0), 1.0, "root"), "divide_by = 'root' is not one of"),
        (lambda: BatchNoise(Clip(1.0), 1.0, "root"), "divide_by = 'root' is not one of"),
        (lambda: BatchNoise(Clip(1.0), float("nan")), "noise_scale = nan"),
        (lambda: ClipAndNoiseUpdate(Clip(1.0), -2.0), "noise_scale = -2.0"),
        (lambda: mean_std(1, 1, 1, "sqrt"), "divide_by = 'sqrt' is not one of"),
        (lambda: fed_cdp("client"), "noise_at = 'client' is not one of example, batch"),
        (lambda: fed_cdp("batch", noise_scale=-1), "noise_scale = -1"),
        (lambda: fed_sdp("batch"), "noise_at = 'batch' is not one of client, server"),
        (lambda: fed_sdp(noise_scale=-1), "noise_scale = -1"),
        (lambda: fed_sdp(participants=0), "participants = 0"),
    ],
)
def test_bad_input_gets_one_sentence(bad, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        bad()
    assert str(raised.value).endswith((".", "?)."))
