"""What works: shares of noise, the server's momentum, what is proved of a sum, cells and grid."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from defense_scenes import flat, of_std, setting
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from fed_cdp_scenes import EveryTry
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM
from scipy import stats
from scipy.integrate import trapezoid
from site_scenes import explorer_data

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.chapters.adaptive_attacks import grid as attackers
from fl_privacy_lib.chapters.adaptive_attacks.parameters import AdaptiveAttacks
from fl_privacy_lib.chapters.what_works import grid, reading, run
from fl_privacy_lib.chapters.what_works.calculator import noise_explorer, noise_needed
from fl_privacy_lib.chapters.what_works.parameters import WhatWorks
from fl_privacy_lib.chapters.what_works.shares import noise_left, noise_share
from fl_privacy_lib.chapters.what_works.training import ClientTraining, SummedTraining, calibrated
from fl_privacy_lib.data.partition import full_copies
from fl_privacy_lib.defenses import Clip, Defense, Holding, PerExample
from fl_privacy_lib.defenses.route import BatchNoise, ClipAndNoiseUpdate, Context
from fl_privacy_lib.defenses.rules import QuantileNorm
from fl_privacy_lib.defenses.transformations import Momentum
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.federated.stacked import local_noise
from fl_privacy_lib.reproduction.experiments import training
from fl_privacy_lib.reproduction.experiments.cells import Cell
from fl_privacy_lib.reproduction.experiments.searching import judged
from fl_privacy_lib.reproduction.paths import ROOT
from fl_privacy_lib.sampling import Plan

FULL = WhatWorks.of_profile("full")

# ---- shares --------------------------------------------------------------------------------------


@given(st.floats(0.01, 100), st.integers(2, 5000), st.data())
@settings(max_examples=200, deadline=None)
def test_a_margin_covers_exactly_as_many_as_it_says(z, clients, data):
    margin = data.draw(st.integers(0, clients - 1))
    gone = data.draw(st.integers(0, clients - 1))
    left = noise_left(noise_share(z, clients, margin), clients, gone)
    # the law that the names promise, beside the closed form
    assert (left >= z * (1 - 1e-9)) == (gone <= margin)
    assert left**2 == pytest.approx(z**2 * (clients - gone) / (clients - margin))


@pytest.mark.parametrize(("dropped", "colluding"), [(0, 0), (7, 0), (0, 5), (8, 4)])
def test_the_noise_that_a_server_cannot_subtract_is_normal_with_what_is_left(dropped, colluding):
    clients, many, share = 20, 40_000, noise_share(3.0, 20, margin=4)
    shares = np.random.default_rng(7).normal(0, share, (clients, many))
    arrived = shares[dropped:].sum(0)
    secret = arrived - shares[clients - colluding :].sum(0)
    left = noise_left(share, clients, dropped + colluding)
    assert of_std(torch.from_numpy(secret), left)
    assert not of_std(torch.from_numpy(secret), 1.05 * left)
    assert stats.kstest(secret / left, "norm").pvalue > WRONG_ALARM


@pytest.mark.parametrize("dropped", [0, 3, 12])
def test_the_routes_sum_carries_what_is_left_of_the_shares(dropped):
    clients, size, bound = 16, 4, 1e-4  # gradients are nothing beside the noise
    share, here = noise_share(2.0, clients, margin=3), clients - dropped
    model, train, partition = setting(clients=here)
    clip = Clip(bound, "all")
    defense = Defense("share", PerExample(clip), BatchNoise(clip, share))
    plan = Plan(here, here, 1, 1, size, batch_sampling="poisson", local_lr=1.0)
    tap = Tap("aggregate")
    mean = flat(
        simulate(model, train, partition, plan, defense, taps=[tap]).observations[tap].values
    )
    total = mean * here * size  # of all clients, in units of the gradient
    left = bound * noise_left(share, clients, dropped)
    assert of_std(total, left) and not of_std(total, 1.05 * left)


def test_without_noise_the_clients_sum_is_the_central_one():
    model, train, _ = setting(clients=4, examples_per_client=8)
    clip = Clip(0.01, "all")
    defense = Defense("clip", PerExample(clip))
    tap, found = Tap("aggregate"), []
    for clients in (1, 4):
        parts = np.split(np.arange(32), clients)
        partition = replace(full_copies(32, 1), indices=tuple(parts))
        plan = Plan(clients, clients, 1, 1, 32 // clients, batch_sampling="poisson", local_lr=1.0)
        seen = simulate(model, train, partition, plan, defense, taps=[tap]).observations[tap]
        found.append(flat(seen.values))
    assert float(found[0].norm()) > 0
    assert torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("function", "values", "word"),
    [
        (noise_share, (0.0, 10), "noise_multiplier = 0.0"),
        (noise_share, (1.0, 0), "clients = 0"),
        (noise_share, (1.0, 10, 10), "margin = 10 must lie between 0 and 9"),
        (noise_left, (1.0, 10, -1), "gone = -1"),
        (noise_left, (1.0, 10, 10), "gone = 10 must lie between 0 and 9"),
        (noise_needed, (0.001, 1.0, [10_000]), "no noise up to σ = 1500 keeps ε = 0.001"),
    ],
)
def test_a_bad_number_of_clients_gets_one_sentence(function, values, word):
    with pytest.raises(InputError) as error:
        function(*values)
    assert word in str(error.value) and str(error.value).endswith(".")


# ---- momentum ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_the_servers_momentum_is_that_of_torch(decay):
    model, (x, y), _ = setting(clients=1, examples_per_client=12)
    plan = Plan(1, 1, 6, 1, 12, batch_sampling="poisson", local_lr=0.05)
    ours = simulate(model, (x, y), full_copies(12, 1), plan,
                    Defense("momentum", on_aggregate=Momentum(decay))).weights  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=decay)
    for _ in range(6):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    for name, w in model.named_parameters():
        assert torch.allclose(ours[name], w, atol=1e-6)


def test_momentum_costs_nothing_and_is_kept_over_an_interruption(tmp_path):
    model, train, _ = setting(clients=1, examples_per_client=40)
    clip = Clip(0.1, "all")
    with_it, without = (
        Defense("m", PerExample(clip), BatchNoise(clip, 2.0), on_aggregate=stage)
        for stage in (Momentum(), None)
    )
    plan = Plan(1, 1, 5, 1, 8, batch_sampling="poisson", local_lr=0.5)
    held = Holding(40, 40, 3)
    assert with_it.events(plan, held) == without.events(plan, held)
    about = (model, train, full_copies(40, 1), plan, with_it)

    def stop(report):
        if report.round == 2:
            raise KeyboardInterrupt

    path = tmp_path / "c.pt"
    with pytest.raises(KeyboardInterrupt):
        simulate(*about, checkpoint=path, on_round=stop)
    resumed = simulate(*about, checkpoint=path, resume=True).weights
    whole = simulate(*about).weights
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


# ---- what is proved ------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["all", "layer"])
def test_a_sums_events_are_those_of_plain_dp_sgd(scope):
    point = SummedTraining("mnist", noise_scale=3.0, scope=scope)
    (event,) = point.events(60_000)
    z = 3.0 if scope == "all" else 3.0 / math.sqrt(3)
    assert event.noise_multiplier == pytest.approx(z)
    assert event.sampling_rate == pytest.approx(2048 / 60_000)
    assert (event.uses, event.unit, event.relation) == (400, "example", "add_remove")
    # who sees one client's own sum finds the same noise there, whatever the others add
    assert replace(point, noise_at="client").events(60_000) == (event,)


def test_noise_in_every_client_is_that_of_k_clients_on_their_sum():
    one, each = (SummedTraining("mnist", noise_scale=3.0, noise_at=at) for at in ("sum", "client"))
    ratio = each.defense.per_batch.noise_scale / one.defense.per_batch.noise_scale
    assert ratio == pytest.approx(math.sqrt(1000))


@pytest.mark.parametrize("epsilon", grid.NOISE)
def test_the_grids_noise_is_calibrated_to_its_epsilon(epsilon):
    point = grid.training(FULL, "mnist", epsilon)
    proved = spend(point.events(60_000), "pld", DELTA).epsilon
    assert 0.995 * epsilon < proved <= epsilon


def test_the_longer_training_has_its_epsilon_and_chapter_6s_example_gradients():
    ((point, *_),) = grid.PARTS["longer"][2](FULL, "mnist")
    assert 0.995 * 3 < spend(point.events(60_000), "pld", DELTA).epsilon <= 3
    assert point.batch_size * point.rounds == pytest.approx(10_000 * 600, rel=1e-3)


@pytest.mark.parametrize("epsilon", grid.FEATURES)
def test_the_linear_models_noise_is_calibrated_to_its_epsilon(epsilon):
    cells = grid.cells_of(grid.FEATURES, grid.LINEAR, FULL, "cifar10_scattering")
    (cell,) = (cell for cell in cells if cell.point.epsilon == epsilon)
    proved = spend(cell.point.events(50_000), "pld", DELTA).epsilon
    assert 0.995 * epsilon < proved <= epsilon
    assert (cell.around is None) == (epsilon == 3.0)  # whose search the others start from
    assert cell.point.network((3888,)) == "linear" and cell.keys["adversary"] == "sees_sums"
    assert cell.point.rounds == 400 and cell.point.momentum == 0


def test_every_step_of_the_waterfall_has_the_claimed_epsilon_and_as_many_gradients():
    ends = [grid.training(FULL, "mnist", grid.CLAIMED, **c) for c in grid.STEPS.values()]
    for z in {(p.noise_scale, p.scope, p.batch_size, p.rounds): p for p in ends}.values():
        assert 0.998 * 0.82 < spend(z.events(60_000), "pld", DELTA).epsilon <= 0.82
        assert z.batch_size * z.rounds == pytest.approx(2048 * 400, rel=1e-3)
    assert ends[[*grid.STEPS].index("momentum")] == grid.middle_of(FULL, **grid.MOMENTUM)


SAMPLED = [
    *((grid.training(FULL, "mnist", epsilon), 60_000) for epsilon in grid.NOISE),
    *((cell.point, 60_000) for cell in grid.PARTS["longer"][2](FULL, "mnist")),
    *((cell.point, 50_000) for cell in grid.PARTS["features"][2](FULL, "cifar10_scattering")),
    *((cell.point, 1) for cell in grid.client_cells(FULL, "mnist") if cell.point.clients == 1000),
]
"""Every recorded point whose ε comes from drawing, with N; other numbers of clients are alike."""


@pytest.mark.long
@pytest.mark.parametrize("point, examples", SAMPLED)
def test_proved_epsilon_agrees_with_two_peers(point, examples):
    opacus = pytest.importorskip("opacus.accountants")
    (event,) = point.events(examples)
    ours = spend(event, "pld", DELTA).epsilon
    drawn = PoissonSampledDpEvent(event.sampling_rate, GaussianDpEvent(event.noise_multiplier))
    google = PLDAccountant().compose(drawn, event.uses)
    assert ours == pytest.approx(google.get_epsilon(DELTA), rel=0.01)
    peer = opacus.PRVAccountant()
    peer.history = [(event.noise_multiplier, event.sampling_rate, event.uses)]
    assert ours == pytest.approx(peer.get_epsilon(delta=DELTA, eps_error=0.002), rel=0.01)


def test_calibration_returns_the_least_noise_to_three_decimals():
    point = SummedTraining("mnist", epsilon=0.3)
    scale = calibrated(point, 60_000)
    assert scale == round(scale, 3) == grid.NOISE[0.3]
    costs = [spend(replace(point, noise_scale=s).events(60_000), "pld", DELTA).epsilon
             for s in (scale, scale - 0.003)]  # fmt: skip
    assert costs[0] <= 0.3 < costs[1]


@pytest.mark.parametrize("rate", [0.034, 0.5, 1.0])
def test_two_copies_with_coins_of_their_own_cost_two_events_of_half_the_variance(rate):
    """The solution of *Break a sampling assumption*, by integration of one round."""
    scale, x = 1.234, np.linspace(-20, 24, 40_001)
    copies = stats.binom.pmf([0, 1, 2], 2, rate)
    with_both = sum(p * stats.norm.pdf(x, k, scale) for k, p in enumerate(copies))
    without = stats.norm.pdf(x, 0, scale)

    def delta_at(epsilon):
        return max(
            trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), x)
            for p, q in ((with_both, without), (without, with_both))
        )

    def counted(multiplier):
        event = Event(rate, multiplier, "example", "add_remove", uses=2)
        return spend(event, "pld", DELTA).epsilon

    bound = delta_at(counted(scale / math.sqrt(2)))
    assert bound <= DELTA * (1 + 1e-3) and delta_at(counted(scale)) > 2 * DELTA


# ---- whole clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", grid.CLIENT_NOISE)
def test_the_clients_noise_is_calibrated_to_their_epsilon(case):
    (point,) = (c.point for c in grid.client_cells(FULL, "mnist")
                if (c.point.clients, c.point.setting, c.point.epsilon) == case)  # fmt: skip
    (event,) = point.events()
    assert (event.sampling_rate, event.uses, event.unit, event.relation) == (
        0.1, 100, "client", "add_remove",
    )  # fmt: skip
    counts = 20 / point.participants if point.setting == "adaptive" else 0.0
    assert 1 / event.noise_multiplier**2 == pytest.approx(1 / point.noise_scale**2 + counts**2)
    assert 0.995 * case[2] < spend(event, "pld", DELTA).epsilon <= case[2]


@pytest.mark.parametrize("setting", ["fixed", "adaptive"])
def test_a_sum_of_updates_carries_its_noise_once_however_many_came(setting):
    point = ClientTraining("digits", setting=setting, clients=40, participants=4, rounds=1,
                           batch_size=2, noise_scale=3.0, clip_norm=0.5, local_lr=0.1)  # fmt: skip
    start, tap = training.scene(point, 0, torch.device("cpu")), Tap("aggregate")
    plan, bound = point.plan(1), 0.5 * 0.1
    clipped = Defense("clip", per_client=ClipAndNoiseUpdate(Clip(bound, "all"), 0.0))
    noisy, quiet = (
        flat(simulate(start.model, start.train, start.partition, plan, d, taps=[tap])
             .observations[tap].values)
        for d in (point.defense, clipped)
    )  # fmt: skip
    came = len(plan.participants_of(0))
    assert came != 4 and 0 < float(quiet.norm()) <= bound * came / 4 + 1e-6
    std = 3.0 * bound / 4
    assert of_std(noisy - quiet, std) and not of_std(noisy - quiet, 1.05 * std)


def test_an_adaptive_bound_moves_by_one_noisy_count_over_the_expected_clients():
    rule, bounds = QuantileNorm(Clip(1.0, "all"), 0.5, 0.2, 2.0, summed=True), []
    for seed in range(4000):
        ctx = Context(0, (0, 1, 2), [torch.Generator().manual_seed(seed)],
                      torch.full((3,), 0.25), {"quantile_bound": [1.0]}, batch_size=4)  # fmt: skip
        for weight, below in zip(ctx.weights, (1.0, 1.0, 0.0), strict=True):
            ctx.report("below", weight * torch.tensor([below]))
            ctx.report("asked", weight * 1)
        rule({}, ctx)
        bounds.append(ctx.state["quantile_bound"][0])
    fractions = 0.5 - np.log(bounds) / 0.2  # the update of Andrew et al., inverted
    assert stats.kstest((fractions - 2 / 4) / (2.0 / 4), "norm").pvalue > WRONG_ALARM


def test_clients_hold_equal_parts_and_no_example_twice():
    point = ClientTraining("digits", clients=50, participants=5, batch_size=2)
    split = training.scene(point, 0, torch.device("cpu")).partition
    assert split.kinds() == {(1,)} and len(set(split.sizes)) == 1


# ---- the calculator ------------------------------------------------------------------------------


@given(
    st.sampled_from([0.1, 0.82, 3.0, 8.0]),
    st.sampled_from([0.001, 0.034, 0.2]),
    st.lists(st.integers(10, 10_000), min_size=1, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_the_calculator_asks_for_enough_noise_and_hardly_more(budget, rate, steps):
    for rounds, scale in zip(steps, noise_needed(budget, rate, steps), strict=True):
        costs = [
            spend(Event(rate, z, "example", "add_remove", uses=rounds), "rdp", DELTA).epsilon
            for z in (scale, 0.97 * scale)
        ]
        assert costs[0] <= budget * (1 + 1e-9)
        assert costs[1] > budget or scale < 0.6 or rate == 0.001  # there fractional orders help


def test_the_calculators_start_is_the_recipe_with_a_coarser_accountant():
    explorer = noise_explorer((0.82, 3.0), (0.034,), (10, 400), (0.82, 0.034, 400))
    page = explorer._repr_html_()
    ((short, long),), _ = explorer_data(page)["values"]
    assert short < grid.NOISE[0.82] < long < 1.1 * grid.NOISE[0.82]
    assert f"standard deviation {long:.3g} times C" in page


# ---- attacks on the sum, in chapter 02's records -------------------------------------------------


def test_the_attacked_sums_and_uploads_carry_the_frontiers_noise():
    tables = attackers.recorded_grid(AdaptiveAttacks.of_profile("full"), ("mnist",))
    whole = [grid.NOISE[epsilon] for epsilon in (0.82, 3.0, 8.0)]
    shares = [round(noise_share(scale, SummedTraining("mnist").summed), 4) for scale in whole]
    for table in ("attacks/sum", "attacks/sum_learned"):
        scales = dict.fromkeys(cell.noise_scale for cell in tables[table])
        assert list(scales) == [0.0, *shares, *whole]
        assert all(c.clip_norm == SummedTraining("mnist").clip_norm for c in tables[table])


def test_the_attacked_view_is_the_sum_without_all_other_examples():
    """A batch of one leaves the route's noisy sum as what an example shows in chapter 02."""
    point = replace(SummedTraining("digits", noise_scale=0.768), batch_size=1)
    cell = replace(
        attackers._sums("digits", Cell, ("clip_aware",), {})[-1], noise_scale=point.noise_scale
    )
    clip = Clip(point.clip_norm, "all")
    assert cell.defense.per_example == PerExample(clip, point.noise_scale)
    assert point.defense.per_example == PerExample(clip)
    assert point.defense.per_batch == BatchNoise(clip, point.noise_scale)
    assert local_noise(cell.defense, 1, 0) == pytest.approx(0.0768)


# ---- cells and grid ------------------------------------------------------------------------------


def test_a_recorded_row_names_its_training():
    rows = [*itertools.chain.from_iterable(
        kind(make(FULL, d), EveryTry()) for name, (_, datasets, make, kind) in grid.PARTS.items()
        if not name.startswith(("search", "audit")) for d in datasets
    )]  # fmt: skip
    assert len(rows) == 2 + 7 + 3 + 5 + 5 + 1 + 1 + 3 + 3 + 8
    for row in rows:
        text = {k: str(v) for k, v in row.key.items()}
        assert training.point_of(text, type(row.points[0])) == row.points[0]
        of_clients = isinstance(row.points[0], ClientTraining)
        assert row.key["delta"] == 1e-5 and row.key["unit"] == (
            "client" if of_clients else "example"
        )
        aggregated = {"noise_in_clients": "sees_updates", "": "sees_sums"}
        assert row.key["adversary"] == (
            "sees_models" if row.key["route"] in ("tree_aggregation", "dp_fedavg")
            else aggregated[row.key.get("step") if row.key.get("step") in aggregated else ""]
        )  # fmt: skip


def test_a_rate_is_searched_where_a_claim_judges_and_taken_over_elsewhere():
    cells = [
        *grid.frontier_cells(grid.MOMENTUM, (grid.CLAIMED, 3.0), FULL, "mnist"),
        *grid.frontier_cells(grid.MOMENTUM, (0.3, 1.5, 8.0), FULL, "mnist", ()),
    ]
    asked = {c.point.epsilon: len(c.search(EveryTry()).asked) for c in cells}
    assert asked[0.82] >= 12 and asked[3.0] == 3
    assert [asked[e] for e in (0.3, 1.5, 8.0)] == [0, 0, 0]
    (taken,) = (row for row in judged(cells, EveryTry()) if row.points[0].epsilon == 8)
    assert taken.points[0].local_lr == 0.0158
    for data in ("mnist", "fashion_mnist"):
        plain = grid.frontier_cells(grid.PLAIN, tuple(grid.NOISE), FULL, data)
        asked = {c.point.epsilon: len(c.search(EveryTry()).asked) for c in plain}
        whole = {0.82} if data == "mnist" else set()
        assert {e for e, n in asked.items() if n != 3} == whole
    steps = {c.point.seed for c in grid.waterfall_cells(FULL, "mnist")}
    assert steps.isdisjoint({c.point.seed for c in plain})  # no seed confirms itself


def test_a_steps_rates_lie_around_the_ends_for_a_step_of_equal_length():
    found = {c.keys["step"]: c for c in grid.waterfall_cells(FULL, "mnist")}
    assert found["small_bound"].factor == pytest.approx(10)  # no momentum: 1/(1 - 0.9)
    assert found["flat_clip"].factor == pytest.approx(10 * 0.1 / 4)
    assert list(found) == [*grid.STEPS][::-1]


def test_parts_have_names_of_their_own_and_tables_that_are_judged(tmp_path):
    parts = run.EXPERIMENT.parts(FULL, tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    known = yaml.safe_load((ROOT / "results/settings.yml").read_text())
    claims = yaml.safe_load((ROOT / "results/claims.yml").read_text())
    wanted = {c["table"] for c in claims if c["chapter"] == "10" and "table" in c}
    recorded = {part.table for part in parts}
    attacked = {"attacks/sum", "attacks/sum_learned"}  # by chapter 02
    assert wanted >= attacked and wanted <= (recorded | attacked) & set(known)
    (asked, *rest) = (part.rows(part.datasets) for part in parts)
    assert len(asked) == 7 and {p.rounds for row in asked for p in row.points} == {40}
    assert not any(rows for part, rows in zip(parts[1:], rest, strict=True)
                   if not part.name.startswith(("search", "audit")))  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_cell_trains_and_learns_without_noise(tmp_path, activation):
    sizes = {"rounds": 30, "batch_size": 200, "local_lr": 5.0}
    point = SummedTraining("digits", noise_scale=0.0, activation=activation, **sizes)
    used = {type(m).__name__ for m in training.scene(point, 0, torch.device("cpu")).model}
    assert ("Tanh" in used) == (activation == "tanh") != ("ReLU" in used)
    result = training.measure(point, torch.device("cpu"), tmp_path)
    assert result["accuracy"][0] > 0.6 > 3 * result["guess"][0]


def test_a_margin_has_to_leave_somebody():
    for margin in (10, 20):
        with pytest.raises(InputError, match=f"margin = {margin} leaves none of clients = 10"):
            WhatWorks.checked(clients=10, margin=margin)
    assert WhatWorks.checked(clients=10, margin=9).margin == 9


def test_what_chapter_06_proves_of_its_trainings_is_finite_here_too():
    """Chapter 10 must not show ε = ∞ for a training that chapter 06 has a proof of."""
    proved = {
        "dp_baseline", "dp_dyns_cdecay", "dp_rate_decay", "dp_short_steps", "dp_flat",
        "quantile_clip", "adaclip",
    }  # fmt: skip
    shown = {c["method"]: c["epsilon"] for c in reading.recorded() if c["chapter"] == "06"}
    assert {"dp_baseline", "dp_rate_decay", "dp_dyns_l2max"} <= set(shown)
    for method, epsilon in shown.items():
        assert math.isfinite(epsilon) == (method in proved), method
