"""Leakage risk against finite differences, and slices: their cuts, their draw, their noise."""

import math
from functools import partial
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from compensation_scenes import dice, small_net
from defense_scenes import context, flat, of_std, plan_of, random_gradients, setting
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM
from scipy import stats
from torch.nn import functional as F

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.audit import statement
from fl_privacy_lib.defenses import Clip, Holding
from fl_privacy_lib.defenses.compensation import Compensation, law_share, risk_compensated
from fl_privacy_lib.defenses.representation import PrunedFeatures
from fl_privacy_lib.defenses.risk import layer_risks, root_set, sensitivity_slices
from fl_privacy_lib.defenses.slices import (
    SlicePerturbation,
    Slices,
    reservoir,
    risk_balanced,
    unflat,
)
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import build, parameters_of
from fl_privacy_lib.sampling import Plan

# ---- leakage risk --------------------------------------------------------------------------------


def jacobians(model, x, y):
    """Return name → [images] of Jacobians [d, pixels], column by column, by central differences."""
    found = {name: [] for name, _ in model.named_parameters()}
    model, step = model.double(), 1e-5
    for image, label in zip(x.double(), y, strict=True):
        columns = {name: [] for name in found}
        for pixel in range(image.numel()):
            nudge = torch.zeros(image.numel(), dtype=torch.float64)
            nudge[pixel] = step
            ends = []
            for sign in (1, -1):
                moved = image + sign * nudge.reshape(image.shape)
                loss = F.cross_entropy(model(moved[None]), label[None])
                ends.append(torch.autograd.grad(loss, list(model.parameters())))
            for name, plus, minus in zip(found, *ends, strict=True):
                columns[name].append((plus - minus).flatten() / (2 * step))
        for name, parts in columns.items():
            found[name].append(torch.stack(parts, 1))
    model.float()
    return found


def test_the_exact_risk_is_the_norm_of_finite_differences():
    model, x, y = small_net()
    expected = {n: float(np.mean([m.norm() for m in j])) for n, j in jacobians(model, x, y).items()}
    found = layer_risks(model, parameters_of(model), x, y, estimator="exact")
    assert found == pytest.approx(expected, rel=1e-3)


def test_the_all_ones_product_is_the_released_code_s():
    model, x, y = small_net()
    expected = {
        n: float(np.mean([m.sum(0).norm() for m in j])) / len(x)
        for n, j in jacobians(model, x, y).items()
    }
    found = layer_risks(model, parameters_of(model), x, y, estimator="all_ones")
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_hutchinson_is_unbiased_and_converges():
    """256 probes, mean of 20 seeds: within 5 % of the exact norm, as the record's full setting."""
    model, x, y = small_net()
    args = (model, parameters_of(model), x[:1], y[:1])
    exact = layer_risks(*args, estimator="exact")
    seeds = [layer_risks(*args, probes=64, generator=dice(s)) for s in range(4)]
    for name, value in exact.items():
        squares = [s[name] ** 2 for s in seeds]
        assert np.mean(squares) == pytest.approx(value**2, rel=0.25), name
        assert np.sqrt(np.mean(squares)) == pytest.approx(value, rel=0.1), name


@pytest.mark.parametrize("name", ["attacked_lenet", "training_cnn"])
def test_the_all_ones_product_sees_no_risk_in_the_last_layer(name):
    """The columns of (p − y) rᵀ sum to zero, whatever the input: so does its Jacobian."""
    model = build(name, (1, 28, 28), 10, dice(1))
    x, y = torch.rand(2, 1, 28, 28, generator=dice(2)), torch.tensor([4, 7])
    weights = parameters_of(model)
    found = layer_risks(model, weights, x, y, estimator="all_ones")
    true = layer_risks(model, weights, x, y, probes=2)
    last = [n for n in found if n.split(".")[0] == list(found)[-1].split(".")[0]]
    assert all(found[n] < 1e-4 * max(found.values()) < true[n] for n in last)


def test_bad_risk_settings_are_refused():
    model, x, y = small_net()
    weights = parameters_of(model)
    with pytest.raises(InputError, match="the root set is empty"):
        layer_risks(model, weights, x[:0], y[:0])
    with pytest.raises(InputError, match="estimator = 'exakt'"):
        layer_risks(model, weights, x, y, estimator="exakt")
    with pytest.raises(InputError, match="probes = 0"):
        layer_risks(model, weights, x, y, probes=0)


def test_a_root_set_has_the_bias_that_is_asked_for():
    labels = np.repeat(np.arange(10), [10, *[50] * 9])
    rng, pool = np.random.default_rng(0), np.arange(5, len(labels))
    for bias in (0.1, 0.6, 1.0):
        drawn = root_set(labels, pool, 4000, bias, rng)
        share = (labels[drawn] == 0).mean()
        assert share == pytest.approx(bias, abs=4 * (bias * (1 - bias) / 4000) ** 0.5 + 1e-9)
        rest = np.bincount(labels[drawn], minlength=10)[1:]
        assert bias == 1 or rest.min() > 0.7 * rest.mean()
        assert drawn.min() >= 5


# ---- slices --------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.integers(1, 12),
    st.lists(st.floats(0, 10), min_size=8, max_size=8),
    st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_slices_partition_every_gradient(units, block, risks, count):
    sizes = [unit * block for unit in units]
    whole = math.gcd(*sizes)
    risks = [r + 1e-6 for r in risks[: len(sizes)]]
    for cut in (partial(risk_balanced, sizes, each, count) for each in (risks, sizes)):
        if count > sum(sizes) // whole:
            with pytest.raises(InputError, match="leave some empty"):
                cut()
            continue
        slices = cut()
        held = np.concatenate([np.arange(a, b) for a, b in pairwise(slices.edges)])
        assert np.array_equal(held, np.arange(sum(sizes)))  # each once, in order
        assert min(slices.sizes) > 0 and len(slices.sizes) == count
        assert all(edge % whole == 0 for edge in slices.edges)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 8), st.data())
@settings(max_examples=200, deadline=None)
def test_each_cut_is_the_block_border_nearest_to_its_share_of_risk(sizes, count, data):
    sizes = [7 * s for s in sizes]
    risks = [data.draw(st.integers(1, 9)) for _ in sizes]
    block = math.gcd(*sizes)
    if count > sum(sizes) // block:
        return
    passed, total = [0.0], 0.0
    for size, risk in zip(sizes, risks, strict=True):
        for _ in range(size // block):
            total += risk * block / size
            passed.append(total)
    edges = risk_balanced(sizes, risks, count).edges
    goals = [total * i / count for i in range(1, count)]
    free = [min(range(len(passed)), key=lambda e, g=g: abs(passed[e] - g)) for g in goals]
    best = [abs(passed[e] - g) for e, g in zip(free, goals, strict=True)]
    distinct = len({0, *free, len(passed) - 1}) == count + 1
    if distinct:
        found = [abs(passed[e // block] - g) for e, g in zip(edges[1:-1], goals, strict=True)]
        assert found == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("estimator", ["hutchinson", "all_ones"])
def test_slices_of_the_papers_networks_balance_their_risk(estimator):
    model = build("attacked_lenet", (1, 28, 28), 10, dice(3))
    x, y = torch.rand(4, 1, 28, 28, generator=dice(4)), torch.tensor([1, 5, 2, 8])
    risks = layer_risks(model, parameters_of(model), x, y, estimator=estimator, probes=2)
    sizes = [p.numel() for p in model.parameters()]
    slices = risk_balanced(sizes, list(risks.values()), 10)
    density = np.repeat(np.divide(list(risks.values()), sizes), sizes)
    each = [density[a:b].sum() for a, b in pairwise(slices.edges)]
    assert each == pytest.approx([sum(risks.values()) / 10] * 10, rel=0.05)


def test_slices_by_size_and_by_risk_differ_and_ones_forget_the_last_layer():
    model = build("attacked_lenet", (1, 28, 28), 10, dice(3))
    root = torch.rand(4, 1, 28, 28, generator=dice(4)), torch.tensor([1, 5, 2, 8])
    cuts = {kind: sensitivity_slices(model, root, 10, kind).edges
            for kind in ("size", "hutchinson", "all_ones")}  # fmt: skip
    last = sum(p.numel() for p in list(model.parameters())[:-2])
    inside = {kind: sum(edge >= last for edge in edges[1:-1]) for kind, edges in cuts.items()}
    assert len(set(cuts.values())) == 3
    assert inside["size"] >= 3 and inside["hutchinson"] >= 1 and inside["all_ones"] == 0


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Slices((1, 2)), "edges"),
        (lambda: Slices((0, 2, 2)), "edges"),
        (lambda: risk_balanced([4, 4], [0.0, 0.0], 2), "not all 0"),
        (lambda: risk_balanced([4, 4], [-1.0, 2.0], 2), "at least 0"),
        (lambda: risk_balanced([4, 4], [float("nan"), 2.0], 2), "finite"),
        (lambda: risk_balanced([4, 4], [1.0, 2.0], 0), "slices = 0"),
        (lambda: SlicePerturbation(10, 0.0, 1.0), "share = 0.0"),
        (lambda: SlicePerturbation(10, 1.5, 1.0), "share = 1.5"),
        (lambda: SlicePerturbation(10, 0.5, -1.0), "std = -1.0"),
        (lambda: Compensation(1.0, 0.2, ratio=0.0), "ratio = 0.0"),
        (lambda: Compensation(1.0, 0.2, variance="median"), "variance = 'median'"),
        (lambda: law_share(np.ones(1), 1.0, 0.5), "ratio = 0.5"),
        (lambda: PrunedFeatures(1.2), "fraction = 1.2"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(call, word):
    with pytest.raises(InputError, match=word) as error:
        call()
    assert str(error.value).endswith(".")


def test_every_set_of_slices_is_equally_likely():
    generator, draws = dice(5), 3000
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for _ in range(draws):
        counts[tuple(sorted(reservoir(5, 2, generator)))] += 1
    statistic = sum((c - draws / 10) ** 2 / (draws / 10) for c in counts.values())
    assert statistic < stats.chi2.isf(WRONG_ALARM, 9)


@pytest.mark.parametrize(("share", "noisy"), [(0.2, 2), (0.3, 3), (0.01, 1), (0.29, 2), (1.0, 10)])
def test_the_number_of_noisy_slices_is_the_papers(share, noisy):
    assert SlicePerturbation(10, share, 1.0).noisy == noisy  # max(1, ⌊γs⌋), as Algorithm 1


def perturbed(stage, seed=0, clients=2, scale=1.0):
    """Return updates of two tensors, and what the stage makes of them."""
    values = {n: scale * v[:, 0] for n, v in random_gradients(clients, seed=seed).items()}
    values["c"] = torch.zeros(clients, 999, dtype=torch.float64)  # [clients, 20], [clients], ...
    ctx = context(clients, seed=seed)
    stage.begin(ctx)
    return values, stage(values, ctx), ctx


def test_noise_lands_on_the_chosen_slices_only_and_the_state_is_left_empty():
    stage = SlicePerturbation(Slices((0, 20, 320, 620, 1020)), 0.5, 3.0)
    untouched = 0
    for seed in range(30):
        before, after, ctx = perturbed(stage, seed)
        noise = torch.cat([(after[n] - v)[..., None].flatten(1) for n, v in before.items()], 1)
        for row in noise:
            parts = row.split(stage.slices.sizes)
            noisy = [p for p in parts if (p != 0).any()]
            assert len(noisy) == 2 and all((p != 0).all() for p in noisy)
            assert of_std(torch.cat(noisy), 3.0)
            untouched += int((parts[0] == 0).all())
        assert not ctx.state
    assert 10 < untouched < 50  # half of 60: slices are drawn anew by every client


def test_clipping_bounds_the_update_and_scales_the_noise():
    stage = SlicePerturbation(Slices((0, 20, 320, 620, 1020)), 0.25, 2.0, clip_norm=0.5)
    before, after, _ = perturbed(stage, scale=40.0)
    clear = Clip(0.5, "all")(before, leading=1)
    assert float(flat({n: v[:1] for n, v in clear.items()}).norm()) == pytest.approx(0.5)
    noise = flat({n: after[n] - clear[n] for n in after})
    assert of_std(noise[noise != 0], 1.0) and (noise == 0).double().mean() > 0.5
    silent = stage.noiseless()
    values, same, _ = perturbed(silent, scale=40.0)
    assert torch.equal(flat(same), flat(Clip(0.5, "all")(values, leading=1)))


def test_slices_of_another_network_are_refused():
    with pytest.raises(InputError, match="cover 9 coordinates, the gradient has 1020"):
        perturbed(SlicePerturbation(Slices((0, 9)), 1.0, 1.0))


def test_each_participation_draws_its_own_slices_and_keeps_them():
    plan, clients = plan_of(clients=6, participants=6, rounds=1), range(6)
    model, train, partition = setting(6)
    defense = risk_compensated(8, share=0.25, std=5.0, compensated=False)
    taps = [Tap("update", client) for client in clients]
    noisy, clear = (
        simulate(model, train, partition, plan, d, taps=taps, engine="auto").observations
        for d in (defense, defense.noiseless())
    )
    like = {n: v[None] for n, v in parameters_of(model).items()}
    sizes, chosen = defense.per_client.of(like).sizes, []
    for tap in taps:
        noise = flat(noisy[tap].values) - flat(clear[tap].values)
        chosen.append([i for i, p in enumerate(noise.split(sizes)) if p.abs().max() > 1])
    assert all(len(slices) == 2 for slices in chosen) and len(set(map(tuple, chosen))) > 2


def test_no_epsilon_is_claimed_and_the_reason_is_the_untouched_share():
    plan, holding = Plan(20, 5, 3, 2, 4, local_lr=0.1), Holding(400, 20, 3)
    with pytest.raises(InputError, match=r"clip_norm = 0\.0"):
        risk_compensated(10, share=0.3, clip_norm=0.0)
    for clip_norm in (None, 1.0):
        defense = risk_compensated(10, share=0.3, clip_norm=clip_norm)
        with pytest.raises(InputError, match="30% of the gradient and sends the rest as it is"):
            defense.events(plan, holding)
        proved = statement(defense, plan, holding, delta=1e-5).proved
        assert math.isinf(proved.epsilon) and proved.reasons[0][0] == "noise on a part"
    with pytest.raises(InputError, match="nothing limits what one example can change"):
        risk_compensated(10, share=1.0).events(plan, holding)


def test_rows_become_tensors_again():
    like = {n: v[:, 0] for n, v in random_gradients().items()}
    rows = torch.cat([v[..., None].flatten(1) for v in like.values()], 1)
    assert all(torch.equal(like[n], v) for n, v in unflat(rows, like).items())
