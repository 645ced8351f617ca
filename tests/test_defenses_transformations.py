"""Transformations, decaying and adaptive clipping: against loops, in distribution, on the
route, replayed, counted.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from defense_scenes import (
    context,
    flat,
    noise_of,
    observed,
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
from torch.func import grad, vmap

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.attacks.objective import replay
from fl_privacy_lib.audit import statement
from fl_privacy_lib.defenses import (
    Clip,
    Declaration,
    Defense,
    Holding,
    Noise,
    PerExample,
    Schedule,
    Stage,
    adaclip,
    dssgd,
    fed_alpha_cdp,
    fed_cdp,
    fed_cdp_decay,
    fed_sdp,
    median_clipped,
    non_private,
    pruned,
    quantile_clipped,
    random_noise,
)
from fl_privacy_lib.defenses.noise import add_noise
from fl_privacy_lib.defenses.releases import release
from fl_privacy_lib.defenses.route import BatchNoise, ClientContext, Then
from fl_privacy_lib.defenses.rules import LargestNorm, QuantileNorm
from fl_privacy_lib.defenses.schedule import SHAPES
from fl_privacy_lib.defenses.transformations import Pruned, RandomNoise, Selective, part
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.gradients import example_gradients

# --- pruning


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(0, 100),
    st.sampled_from(["all", "layer"]),
)
@settings(max_examples=150, deadline=None)
def test_pruning_leaves_exactly_so_many_of_the_largest_also_among_equals(
    values, cut, percent, scope
):
    values = [v or 1 for v in values]  # a kept coordinate is not zero
    parts = {"a": values[:cut], "b": values[cut:]}
    gradient = {
        name: torch.tensor([[v, v[::-1]]], dtype=torch.float64) for name, v in parts.items()
    }  # [1, 2, …]
    out = Pruned(percent / 100, scope, leading=2)(gradient, None)
    for row in range(2):
        before = {name: g[0, row].tolist() for name, g in gradient.items()}
        after = {name: g[0, row].tolist() for name, g in out.items()}
        groups = [list(before)] if scope == "all" else [[name] for name in before]
        for names in groups:
            pairs = [pair for name in names for pair in zip(before[name], after[name], strict=True)]
            left, gone = [p for p in pairs if p[1] != 0], [p for p in pairs if p[1] == 0]
            assert len(left) == len(pairs) - math.floor(Fraction(percent, 100) * len(pairs))
            assert all(old == new for old, new in left)
            assert (
                not left or not gone or max(abs(g[0]) for g in gone) <= min(abs(p[0]) for p in left)
            )


def test_a_part_is_that_of_the_written_number():
    for percent in range(101):
        assert all(part(percent / 100, n) == percent * n // 100 for n in (1, 30, 100, 34_720))
    assert part(0.1 + 0.2, 10) == 3 and part(0.29, 100) == 29 and part(0.2899, 100) == 28


def test_one_threshold_for_all_tensors_or_one_for_each():
    gradient = {
        "a": torch.tensor([[9.0, 8.0, 7.0, 6.0]]),
        "b": torch.tensor([[5.0, 4.0, 3.0, 2.0]]),
    }
    whole, layer = Pruned(0.5)(gradient, None), Pruned(0.5, "layer")(gradient, None)
    assert torch.equal(whole["a"], gradient["a"]) and not whole["b"].any()
    assert layer["a"].tolist() == [[9, 8, 0, 0]] and layer["b"].tolist() == [[5, 4, 0, 0]]


# --- noise of a fixed size, and random shares


@pytest.mark.parametrize("distribution", ["gaussian", "laplace"])
def test_random_noise_has_its_spread_and_its_law(distribution):
    noise = (
        RandomNoise(0.2, distribution)({"w": torch.zeros(2, 20_000)}, context(2))["w"]
        .double()
        .numpy()
    )
    cdf = {
        "gaussian": stats.norm(scale=0.2).cdf,
        "laplace": stats.laplace(scale=0.2 / math.sqrt(2)).cdf,
    }
    other = {"gaussian": "laplace", "laplace": "gaussian"}[distribution]
    assert stats.kstest(noise.ravel(), cdf[distribution]).pvalue > WRONG_ALARM
    assert stats.kstest(noise.ravel(), cdf[other]).pvalue < WRONG_ALARM  # the test can tell
    correlation = float(np.corrcoef(noise[0], noise[1])[0, 1])
    assert abs(correlation) < stats.norm.isf(WRONG_ALARM / 2) / math.sqrt(
        20_000
    )  # clients draw by themselves


@pytest.mark.parametrize(
    "at, tap", [("per_example", "example"), ("per_batch", "batch"), ("per_client", "update")]
)
def test_random_noise_stands_where_it_is_put(at, tap):
    place = Tap(tap, 1)
    added = noise_of(random_noise(0.5, at=at), plan_of(), [place])[place]
    assert of_std(added, 0.5) and not of_std(added, 0.525)


def test_a_random_share_is_drawn_evenly_among_what_passes():
    values = torch.linspace(-1, 1, 101)[None]  # 50 have a magnitude above a half
    stage = Selective(0.2, threshold=0.505)
    seen = torch.stack([stage({"w": values}, context(seed=s))["w"][0] for s in range(2000)])
    chosen = seen != 0
    passes = values[0].abs() > 0.505
    assert (chosen.sum(1) == 20).all() and not chosen[:, ~passes].any()
    assert torch.equal(seen[chosen], values.expand_as(seen)[chosen])
    counts = (
        chosen[:, passes].sum(0).numpy()
    )  # draws without replacement vary less than the multinomial distribution
    assert stats.chisquare(counts).pvalue > WRONG_ALARM
    few = Selective(0.9, threshold=0.95)({"w": values}, context())["w"]
    assert torch.equal(few != 0, values.abs() > 0.95)  # fewer pass than may be shared


def test_without_generators_everything_that_passes_is_kept():
    ctx = ClientContext(0, (0,), ())
    out = Selective(0.1, threshold=0.5)({"w": torch.tensor([[0.4, -0.6, 0.8]])}, ctx)
    torch.testing.assert_close(out["w"], torch.tensor([[0.0, -0.6, 0.8]]))


# --- decay of the bound


@pytest.mark.parametrize(
    "kind, formula",
    [
        ("linear", lambda t: 6 - 4 * t / 8),
        ("exponential", lambda t: 6 * 3 ** (-t / 8)),
        ("cyclic", lambda t: 2 + 2 * (1 + math.cos(math.pi * (t % 4) / 4))),
    ],
)
def test_the_bound_falls_by_its_formula_and_ends(kind, formula):
    clip = Clip(Schedule(6.0, 2.0, 8, kind, cycles=2))
    assert [clip.bound(t) for t in range(8)] == pytest.approx([formula(t) for t in range(8)])
    assert clip.bound(8) == clip.bound(1000) == 2.0
    norms = {"w": torch.tensor([[1.0, 3.0, 12.0]])}
    for t in (0, 5, 9):
        torch.testing.assert_close(
            clip.factors(norms, t)["w"], Clip(clip.bound(t)).factors(norms)["w"]
        )


@pytest.mark.parametrize("noise_at", ["example", "batch"])
def test_noise_falls_with_the_bound(noise_at):
    defense = fed_cdp_decay(
        noise_at, clip_norm=3.0, end=1.0, rounds=2, noise_scale=2.0, divide_by="batch"
    )
    taps = [Tap("batch", 0, round) for round in range(2)]
    for engine in ("generic", "stacked"):
        model, train, partition = setting()
        plan = plan_of(rounds=2, local_iterations=1)
        run = simulate(model, train, partition, plan, defense, taps=taps, engine=engine)
        for tap, bound in zip(taps, (3.0, 2.0), strict=True):
            # a batch mean's own gradient, of norm at most 6, adds at most 36 / 1.0 to a sum over
            # 78,200 coordinates
            assert of_std(flat(run.observations[tap].values), 2.0 * bound / 4)


# --- on the route


EVERY = [
    pruned(0.5),
    pruned(0.5, "per_example"),
    pruned(0.3, "per_batch", scope="layer"),
    random_noise(0.1),
    random_noise(0.1, "laplace", "per_batch"),
    random_noise(0.1, at="per_example"),
    dssgd(0.3, 1e-4),
    dssgd(0.3, at="per_example"),
    dssgd(0.5, at="per_batch"),
    fed_alpha_cdp("example"),
    fed_alpha_cdp("batch"),
    fed_alpha_cdp("code"),
    fed_alpha_cdp("batch", clip_norm=None),
    median_clipped("example"),
    median_clipped("batch", scope="all"),
    fed_cdp_decay(),
    fed_cdp_decay("batch", shape="cyclic", cycles=3),
    quantile_clipped(),
    quantile_updates("per_client", scope="layer"),
    quantile_updates("on_arrival"),
    adaclip(),
    adaclip(scope="layer"),
    pruned(0.5, "per_example", defense=fed_cdp()),
    pruned(0.5, defense=fed_sdp()),
    pruned(0.2, "per_example", defense=fed_cdp("batch")),
    pruned(0.2, "per_batch", defense=fed_cdp("batch")),
]


def label(defense):
    return f"{defense.name}:{','.join(k for k in defense.public() if k != 'name')}"


@pytest.mark.parametrize("defense", EVERY, ids=label)
def test_every_defence_trains_and_a_replay_of_the_true_gradients_shows_what_was_seen(defense):
    model, train, partition = setting()
    plan = plan_of(rounds=2, local_iterations=1)
    taps = [Tap("batch", 1), Tap("received", 1), Tap("update", 1)]
    noisy = simulate(model, train, partition, plan, defense, taps=taps)
    assert all(torch.isfinite(w).all() for w in noisy.weights.values())
    clear = simulate(model, train, partition, plan, defense.noiseless(), taps=taps)
    fast = simulate(model, train, partition, plan, defense.noiseless(), engine="auto")
    for name, w in clear.weights.items():
        torch.testing.assert_close(fast.weights[name], w, rtol=1e-4, atol=1e-6)
    index = partition.indices[1][plan.batches(1, 8, 0)[0]]
    weights = {name: p.detach()[None] for name, p in model.named_parameters()}
    true = example_gradients(model, weights, train[0][index][None], train[1][index][None])
    dummies = {
        name: torch.cat([g, g.flip(1)]).requires_grad_() for name, g in true.items()
    }  # [2, batch, …]
    for tap in taps:
        seen = replay(noisy.observations[tap], aware=True)(dummies)
        step = 1.0 if tap.stage == "batch" else -plan.local_lr
        if "dssgd" not in defense.name:  # a replay does not know what was drawn
            for name, value in clear.observations[tap].values.items():
                torch.testing.assert_close(seen[name][0], value / step, rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(seen[name][1], value / step, rtol=1e-4, atol=1e-6)
        slopes = torch.autograd.grad(
            flat(seen).square().sum(), list(dummies.values()), allow_unused=True
        )
        assert any(s is not None and s.any() for s in slopes)
        assert all(s is None or torch.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("defense", EVERY, ids=label)
def test_every_stage_can_be_vectorised_and_differentiated_without_a_generator(defense):
    rows = random_gradients(clients=3, batch=2, seed=4)
    quiet = defense.noiseless()

    def score(row):
        ctx = ClientContext(0, (0,), (), batch_size=2)
        values = {name: g[None] for name, g in row.items()}
        values = quiet.per_example(values, ctx) if quiet.per_example else values
        values = {name: g.mean(1) for name, g in values.items()}
        for stage in (quiet.per_batch, quiet.per_client, quiet.on_arrival):
            values = stage(values, ctx) if stage else values
        return sum((v**2).sum() for v in values.values())

    together = vmap(grad(score))(rows)
    for i in range(3):
        alone = grad(score)({name: g[i] for name, g in rows.items()})
        for name in rows:
            torch.testing.assert_close(together[name][i], alone[name])
            assert torch.isfinite(alone[name]).all()


def test_quiet_defences_carry_no_noise_anywhere_and_keep_their_rules():
    for defense in EVERY:
        text = str(defense.noiseless().public())
        assert not any(
            f"{field}={value}" in text
            for field in ("noise_scale", "std")
            for value in ("6.0", "0.1")
        )
        assert "count_scale=10.0" not in text and set(defense.noiseless().public()) == set(
            defense.public()
        )


def test_a_rule_is_put_behind_what_stands_there():
    both = pruned(0.5, "per_example", defense=fed_cdp())
    assert both.name == "fed_cdp_example+gradient_compression"
    assert both.per_example == Then(fed_cdp().per_example, Pruned(0.5, "all", 2))
    says = both.parts("per_example")[0].says
    assert says.clip == Clip(4.0) and says.noise.scale == 6.0
    tap = Tap("example", 1)
    seen = observed(both, plan_of(), [tap])[tap]
    first = observed(fed_cdp(), plan_of(), [tap])[tap]
    expected = Pruned(0.5, "all", 1)(first, None)
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    assert dssgd(defense=non_private()).name == "dssgd"


# --- what can be counted


PLAN = plan_of(5, clients=100, participants=10, rounds=20, local_iterations=10)
HOLDING = Holding(examples=5000, client_size=50, tensors=3)


@dataclass(frozen=True)
class Hiss(Stage):
    """A stage of one's own: noise, said to be scaled with a bound, and none is enforced."""

    noise_scale: float = 6.0

    def __call__(self, values, ctx):
        return add_noise(values, self.noise_scale, ctx.generators)

    def declare(self):
        return Declaration(noise=Noise(self.noise_scale))

    def noiseless(self):
        return Hiss(0.0)


@dataclass(frozen=True)
class Scaled(Hiss):
    """Noise that is scaled with a bound and a factor besides."""

    factor: float = 1.0

    def declare(self):
        return Declaration(Clip(4.0), Noise(self.noise_scale, factor=self.factor))


@pytest.mark.parametrize("stage", ["per_example", "per_batch", "per_client"])
def test_a_factor_of_the_noise_counts_wherever_it_stands(stage):
    """σ = 15 and a factor of 0.1 are proved to cost what σ = 1.5 does."""
    costs = [
        statement(
            Defense("x", **{"per_example": PerExample(Clip(4.0)), stage: noise}),
            PLAN,
            HOLDING,
            delta=1e-5,
        ).proved.epsilon
        for noise in (Scaled(15.0, 0.1), Scaled(1.5), Scaled(15.0))
    ]
    assert costs[0] == pytest.approx(costs[1]) and costs[2] < costs[1] < math.inf


LOOSE = {
    "nothing that .* adds stands before": [
        pruned(0.5),
        dssgd(0.3),
        pruned(0.5, "per_example", defense=fed_cdp(noise_scale=0.0)),
    ],
    "fixed number for each coordinate": [
        random_noise(0.1),
        random_noise(0.1, "laplace", "per_batch"),
        random_noise(0.1, at="per_example", defense=Defense("clipped", PerExample(Clip(4.0)))),
    ],
    "largest gradient norm": [fed_alpha_cdp(r) for r in ("example", "batch", "code")],
    "median gradient norm": [median_clipped("example"), median_clipped("batch")],
    "counts .* released without noise": [quantile_clipped(count_scale=0.0)],
    "covers no bound, since it clips nothing": [Defense("x", per_client=Hiss())],
    "may enlarge": [random_noise(0.1, at="per_example", defense=fed_cdp("batch"))],
    "bound that clips an example is not": [
        Defense("x", PerExample(QuantileNorm(Clip(4.0))), BatchNoise(Clip(4.0), 6.0)),
        Defense("x", PerExample(Clip(4.0)), BatchNoise(QuantileNorm(Clip(4.0)), 6.0)),
    ],
}


@pytest.mark.parametrize(
    "word, defense", [(word, d) for word, found in LOOSE.items() for d in found]
)
def test_without_a_guarantee_there_are_no_events_and_one_sentence_says_why(word, defense):
    with pytest.raises(InputError, match=f"has no events.*{word}") as raised:
        defense.events(PLAN, HOLDING)
    assert str(raised.value).endswith(".") and ".." not in str(raised.value)


@pytest.mark.parametrize("noise_at", ["example", "batch"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("tap", ["example", "update"])
def test_a_decaying_bound_counts_like_a_fixed_one(noise_at, kind, tap):
    if (noise_at, tap) == ("batch", "example"):
        return
    decay = fed_cdp_decay(noise_at, shape=kind, rounds=20)
    assert decay.events(PLAN, HOLDING, tap=tap, participations=3) == fed_cdp(noise_at).events(
        PLAN, HOLDING, tap=tap, participations=3
    )


@pytest.mark.parametrize("scope, root", [("all", 1.0), ("layer", math.sqrt(3))])
@pytest.mark.parametrize(
    "unit, relation",
    [("example", "add_remove"), ("example", "replace_one"), ("client", "add_remove")],
)
def test_quantile_clipping_counts_gradients_and_counts_together(scope, root, unit, relation):
    shift = 5.0 if unit == "client" else 1.0
    gradients = 6.0 / (root * shift * (2.0 if relation == "replace_one" else 1.0))
    counts = 10.0 / (root * shift)
    told = release(quantile_clipped(scope=scope), PLAN, HOLDING, unit, relation)
    assert told.noise_multiplier == pytest.approx(1 / math.hypot(1 / gradients, 1 / counts))
    assert told.uses == (10 if unit == "client" else 1)
    update = release(quantile_updates("per_client", scope=scope), PLAN, HOLDING, unit, relation)
    factor = 1.0 if (unit, relation) == ("client", "add_remove") else 2.0
    assert update.noise_multiplier == pytest.approx(1 / math.hypot(factor * root / 6, root / 10))
    late = quantile_updates("on_arrival", scope=scope)
    assert release(late, PLAN, HOLDING, unit, relation, "received") == update
    with pytest.raises(InputError, match="nothing that"):
        release(late, PLAN, HOLDING, unit, relation, "update")


def test_copies_of_an_example_move_the_counts_as_often_as_the_gradients():
    twice = replace(HOLDING, repeats=2)
    for sampling in ("one_pass_fixed", "with_replacement"):
        plan = replace(PLAN, batch_sampling=sampling)
        alone = release(fed_cdp("batch", scope="all"), plan, twice)
        both = release(quantile_clipped(), plan, twice)
        assert both.mu == pytest.approx(alone.mu * math.hypot(1, 6 / 10))


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("scope, root", [("all", 1.0), ("layer", math.sqrt(3))])
def test_adaclip_counts_twice_the_sensitivity_under_both_relations(scope, root, relation):
    told = release(adaclip(scope=scope), PLAN, HOLDING, "example", relation)
    assert (told.noise_multiplier, told.uses) == (pytest.approx(6.0 / (2 * root)), 1)
    with pytest.raises(InputError, match="nothing that"):
        release(adaclip(), PLAN, HOLDING, tap="example")


def test_pruning_behind_noise_costs_nothing_but_noisy_examples_then_stand_alone():
    for at, base in (
        ("per_client", fed_sdp()),
        ("per_batch", fed_cdp("batch")),
        ("per_client", fed_cdp()),
    ):
        assert release(pruned(0.9, at, defense=base), PLAN, HOLDING) == release(base, PLAN, HOLDING)
    clipped = fed_cdp("batch")
    assert release(pruned(0.9, "per_example", defense=clipped), PLAN, HOLDING) == release(
        clipped, PLAN, HOLDING
    )
    each = pruned(0.9, "per_example", defense=fed_cdp(scope="all"))
    assert release(each, PLAN, HOLDING).noise_multiplier == pytest.approx(6.0)
    assert release(fed_cdp(scope="all"), PLAN, HOLDING).noise_multiplier == pytest.approx(
        6 * math.sqrt(5)
    )
    other = replace(
        fed_cdp(), per_batch=BatchNoise(Clip(4.0), 60.0)
    )  # pruned noise keeps to no bound of the mean's
    both = pruned(0.9, "per_example", defense=other)
    assert release(both, PLAN, HOLDING).noise_multiplier == pytest.approx(6.0 / math.sqrt(3))


def test_a_private_noise_level_spoils_the_batchs_noise_but_not_the_updates():
    loose = fed_alpha_cdp("example").per_example
    late = replace(fed_sdp(), per_example=loose)
    assert release(late, PLAN, HOLDING) == release(fed_sdp(), PLAN, HOLDING)
    with pytest.raises(InputError, match="largest gradient norm"):
        release(late, PLAN, HOLDING, tap="batch")
    with pytest.raises(InputError, match="largest gradient norm"):
        release(replace(fed_cdp("batch"), per_example=loose), PLAN, HOLDING)


# --- bad input


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: pruned(1.1), "fraction = 1.1"),
        (lambda: pruned(0.1, "per_round"), "at = 'per_round' is not one of"),
        (lambda: pruned(0.1, scope="layers"), "did you mean layer"),
        (lambda: random_noise(-1.0), "std = -1.0"),
        (lambda: random_noise(1.0, "uniform"), "distribution = 'uniform'"),
        (lambda: random_noise(1.0, at="x"), "at = 'x'"),
        (lambda: dssgd(2.0), "share = 2.0"),
        (lambda: dssgd(threshold=-1.0), "threshold = -1.0"),
        (lambda: fed_alpha_cdp("both"), "reading = 'both'"),
        (lambda: fed_alpha_cdp(clip_norm=0.0), "clip_norm = 0.0"),
        (lambda: LargestNorm(None, "sum"), "statistic = 'sum'"),
        (lambda: fed_alpha_cdp(divide_by="root"), "divide_by = 'root'"),
        (lambda: median_clipped("x"), "noise_at = 'x'"),
        (lambda: median_clipped(scope="x"), "scope = 'x'"),
        (lambda: quantile_clipped(target=2.0), "target = 2.0"),
        (lambda: quantile_clipped(rate=0.0), "rate = 0.0"),
        (lambda: quantile_clipped(count_scale=-1.0), "count_scale = -1.0"),
        (lambda: adaclip(clip_norm=0.0), "clip_norm"),
        (lambda: adaclip(scope="x"), "scope = 'x'"),
        (lambda: adaclip(noise_scale=-1.0), "noise_scale = -1.0"),
        (lambda: fed_cdp_decay(shape="lin"), "shape = 'lin' is not one of"),
        (lambda: fed_cdp_decay(rounds=0), "= 0 must be"),
        (lambda: fed_cdp_decay(end=0.0), "end = 0.0"),
    ],
)
def test_bad_input_gets_one_sentence(make, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        make()
    assert str(raised.value).endswith((".", "?)."))
