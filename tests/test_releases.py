"""Counts that are easily too small, each against a closed form or a larger case."""

import math

import numpy as np
import pytest
import torch

from fl_privacy_lib import audit
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import noise_for, spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.accounting.schedules import rounded_down
from fl_privacy_lib.data import Partition
from fl_privacy_lib.defenses import Defense, Holding, PerExample, fed_cdp
from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.compensation import folded_shape
from fl_privacy_lib.defenses.noisy_stages import BatchNoise, ClipAndNoiseUpdate, TreeNoise
from fl_privacy_lib.defenses.releases import release
from fl_privacy_lib.defenses.route import ClientContext, Then
from fl_privacy_lib.defenses.rules import QuantileNorm
from fl_privacy_lib.defenses.schedule import Schedule
from fl_privacy_lib.sampling import Plan

DELTA = 1e-5
WHOLE = Clip(1.0, "all")


def epsilon(defense, plan, holding, **reading):
    return audit.statement(defense, plan, holding, delta=DELTA, **reading).proved.epsilon


def test_the_clip_that_acts_on_an_example_decides_and_not_that_of_the_noise():
    """Nine tensors of norm C make one gradient of norm 3C, whatever the noise is scaled with."""
    mixed = Defense("mixed", PerExample(Clip(4.0, "layer")), BatchNoise(Clip(4.0, "all"), 6.0))
    plan, holding = Plan(10, 10, 5, 1, 4, local_lr=0.1), Holding(40, 4, 9)
    alike = fed_cdp("batch", noise_scale=6.0, scope="layer")
    assert release(mixed, plan, holding).mu == pytest.approx(release(alike, plan, holding).mu)
    whole = fed_cdp("batch", noise_scale=6.0, scope="all")
    assert release(mixed, plan, holding).mu == pytest.approx(3 * release(whole, plan, holding).mu)


@pytest.mark.parametrize(
    ("leaves", "plan", "unit"),
    [
        (4, Plan(1, 1, 1, 4, 12, local_lr=1.0), "example"),  # every batch is the whole data
        (4, Plan(1, 1, 1, 4, 3, local_lr=1.0), "client"),
        (64, Plan(1, 1, 1, 64, 11, batch_sampling="poisson", local_lr=1.0), "example"),
    ],
)
def test_a_tree_covers_one_use_of_a_unit(leaves, plan, unit):
    """A unit in more steps than one moves a node more than once."""
    tree = Defense("tree", PerExample(WHOLE), TreeNoise(WHOLE, 6.0, leaves=leaves))
    with pytest.raises(InputError, match="one use of a unit"):
        epsilon(tree, plan, Holding(12, 12, 1), unit=unit)


def test_holders_of_one_example_may_share_the_worst_rounds():
    """Less noise costs more, and so does every further holder."""
    plan = Plan(5, 5, 10, 20, 2, batch_sampling="poisson", local_lr=1.0)
    falling = fed_cdp("batch", noise_scale=Schedule(6.0, 3.0, rounds=10), scope="all")
    steady = fed_cdp("batch", noise_scale=6.0, scope="all")
    found = {n: epsilon(falling, plan, Holding(1000, 200, 1, holders=n)) for n in (1, 2, 5)}
    assert found[1] < found[2] < found[5]
    assert found[5] > epsilon(steady, plan, Holding(1000, 200, 1, holders=5))


def counted(scale, summed=False, at="example"):
    """Return a defence whose bound follows counts, of examples or of updates."""
    rule = QuantileNorm(WHOLE, count_scale=scale, summed=summed)
    places = {
        "example": {"per_example": PerExample(rule), "per_batch": BatchNoise(rule, 1e4)},
        "update": {"per_client": ClipAndNoiseUpdate(rule, 6.0)},
    }
    return Defense("counted", on_aggregate=rule, initial_state=rule.start, **places[at])


def test_counts_that_share_a_draw_of_noise_add_up_in_a_line():
    """A client moves each of L = 100 counts by its batch of four, under noise of one: μ = 400."""
    plan, holding = Plan(10, 10, 1, 100, 4, local_lr=0.1), Holding(4000, 400, 1)
    found = epsilon(counted(1.0, summed=True), plan, holding, unit="client", tap="aggregate")
    assert found == pytest.approx(gdp_epsilon(400.0, DELTA), rel=1e-3)
    apart = release(counted(1.0), plan, holding, "client", tap="aggregate").mu
    assert apart == pytest.approx(40.0, rel=1e-3)  # with a draw each, as √L


@pytest.mark.parametrize("tap", ["update", "received"])
def test_noise_on_the_sum_does_not_cover_who_reads_before_it(tap):
    plan = Plan(10, 10, 5, 1, 4, local_lr=0.1)
    kept = epsilon(counted(10.0, True, "update"), plan, Holding(40, 4, 1), unit="client", tap=tap)
    assert kept == math.inf


def test_every_rule_that_reports_counts_is_counted():
    precise, plan = counted(0.01, at="update"), Plan(4, 4, 1, 1, 15, local_lr=0.1)
    both = Defense(
        "both",
        PerExample(QuantileNorm(WHOLE, count_scale=10.0)),
        per_client=precise.per_client,
        on_aggregate=precise.on_aggregate,
        initial_state=precise.initial_state,
    )
    alone, together = (epsilon(d, plan, Holding(60, 15, 1), unit="client") for d in (precise, both))
    assert together > alone


def test_a_second_rule_reads_what_the_first_one_left():
    """Of a gradient of norm 4 the first leaves 1/2, which the second has nothing to clip of."""
    two = Then(PerExample(Clip(0.5, "all")), PerExample(WHOLE))
    values = {"w": torch.tensor([[[4.0, 0.0]]])}
    for norms in (None, {"w": torch.tensor([[4.0]])}):
        ctx = ClientContext(0, (0,), [torch.Generator()], batch_size=1, norms=norms)
        assert two(values, ctx)["w"].norm() == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [{"largest_client": 5}, {"largest_client": 600, "repeats": 601}])
def test_a_largest_client_is_no_smaller_than_the_smallest(bad):
    with pytest.raises(InputError):
        Holding(5000, 500, 1, **bad)


def test_repeats_may_lie_at_a_larger_client():
    skewed = Partition("skewed", (np.array([0]), np.array([1, 1, 1])), 2)
    assert Holding.of(skewed, 1).repeats == 3


@pytest.mark.parametrize("noise", [1e-200, 1e-30, 3e-5, 1e9, math.nan])
def test_a_noise_of_which_floats_give_no_bound_is_refused(noise):
    with pytest.raises(InputError, match="noise_multiplier"):
        Event(0.01, noise, "example", "add_remove")


def test_the_least_noise_still_has_a_bound():
    assert spend(Event(0.01, 1e-4, "example", "add_remove"), "rdp", DELTA).epsilon > 1e6
    one = spend(Event(1.0, 1e-4, "example", "add_remove", sampling="none"), "gdp", DELTA)
    assert one.epsilon == pytest.approx(gdp_epsilon(1e4, DELTA))


def test_a_steep_schedule_is_counted_in_no_more_levels_than_an_accountant_takes():
    values = np.geomspace(15.0, 0.1, 400)
    levels = rounded_down(values)
    assert len(levels) <= 64 and sum(levels.values()) == 400
    kept = np.sort(np.repeat(list(levels), list(levels.values())))
    assert np.all(kept <= np.sort(values) * (1 + 1e-9))


def test_numbers_that_are_none_get_one_sentence():
    for call, word in (
        (lambda: noise_for(1.0, lambda z: Event(0.01, z, "example", "add_remove"), "rdp", DELTA,
                           tolerance=1e-17), "tolerance = 1e-17"),
        (lambda: audit.visible_participation(0.5, 2.0, 1.0), "rate = 2"),
        (lambda: audit.visible_participation(0.5, 0.1, 0.0), "noise_multiplier = 0"),
        (lambda: QuantileNorm(Clip(Schedule(6.0, 2.0), "all")), "moves by counts alone"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            call()


def test_a_gradient_that_no_divisor_folds_as_wanted_is_one_column():
    assert folded_shape(10, 20.0, "divisor") == (10, 1)
