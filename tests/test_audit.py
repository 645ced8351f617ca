"""What is released, how often, and what can be proved of it: against loops, integrals and the
facts that are known.
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant
from scipy.stats import chi2, norm

from fl_privacy_lib import audit
from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_delta, gdp_epsilon
from fl_privacy_lib.chapters.counting_privacy import arguments
from fl_privacy_lib.data import Partition, full_copies
from fl_privacy_lib.defenses import (
    Declaration,
    Defense,
    Holding,
    Noise,
    PerExample,
    fed_cdp,
    fed_sdp,
    non_private,
)
from fl_privacy_lib.defenses.limits import unbounded
from fl_privacy_lib.defenses.releases import release
from fl_privacy_lib.sampling import BatchSampling, Plan

DELTA = 1e-5
PAPER = Plan(1000, 100, 100, 100, 5, local_lr=0.05)
ONE = Holding(50_000, 500, 1)
THREE = Holding(50_000, 500, 3)


def proved(defense, plan=PAPER, holding=ONE, **reading):
    return audit.statement(defense, plan, holding, delta=DELTA, **reading).proved


# ---- what one participation releases -------------------------------------------------


@pytest.mark.parametrize(
    ("divide_by", "tensors", "expected"),
    [
        ("batch", 1, 6.0),
        ("sqrt_batch", 1, 13.416),
        ("none", 1, 30.0),
        ("batch", 3, 3.464),
        ("none", 4, 15.0),
    ],
)
def test_the_divisor_and_the_tensors_decide_the_multiplier(divide_by, tensors, expected):
    holding = Holding(50_000, 500, tensors)
    for where in ("example", "batch"):
        told = release(fed_cdp(where, divide_by=divide_by), PAPER, holding)
        assert told.noise_multiplier == pytest.approx(expected, abs=5e-4)
        assert told.uses == 1
    whole = release(fed_cdp("batch", divide_by=divide_by, scope="all"), PAPER, holding)
    assert whole.noise_multiplier == pytest.approx(expected * math.sqrt(tensors), abs=2e-3)


def moved(plan, size, copies, client, round):
    """How far the places in ``copies`` move each batch of a participation, in units of C/B: a
    naive count.
    """
    batches = plan.batches(client, size, round)
    return [sum(int(place in copies) for place in batch) for batch in batches]


@pytest.mark.parametrize("sampling", get_args(BatchSampling))
@pytest.mark.parametrize(
    ("size", "iterations", "batch"), [(12, 4, 3), (10, 7, 3), (5, 3, 5), (30, 2, 4)]
)
@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_no_participation_tells_more_than_the_release(sampling, size, iterations, batch, repeats):
    plan = Plan(3, 2, 4, iterations, batch, "fixed", sampling, local_lr=0.1, seed=5)
    told = release(fed_cdp("batch", noise_scale=1.0), plan, Holding(100, size, 1, 1, repeats))
    largest = 0.0
    for client, round in itertools.product(range(3), range(4)):
        for copies in itertools.islice(itertools.combinations(range(size), repeats), 40):
            largest = max(
                largest, math.sqrt(sum(k**2 for k in moved(plan, size, copies, client, round)))
            )
    assert largest <= told.mu * (
        1 + 1e-9
    )  # σ = 1 and M = 1: a shift of one example is one standard deviation
    if repeats == 1 and sampling.startswith("one_pass"):
        assert largest == pytest.approx(told.mu)


def test_a_client_moves_its_whole_batch_in_every_iteration():
    for defense, expected in (
        (fed_cdp("batch"), 5 * 10 / 6),
        (fed_cdp("example"), math.sqrt(500) / 6),
    ):
        assert release(defense, PAPER, ONE, "client").mu == pytest.approx(expected)
    poisson = replace(PAPER, batch_sampling="poisson")
    assert release(fed_cdp("batch"), poisson, ONE, "client").mu == pytest.approx(500 * 10 / 6)
    uneven = replace(ONE, largest_client=700)
    assert release(fed_cdp("batch"), poisson, uneven, "client").mu == pytest.approx(700 * 10 / 6)


def test_noise_per_example_under_poisson_counts_a_batch_of_one():
    """A batch of one example carries one draw of noise: the multiplier of that single noisy
    gradient.
    """
    poisson = replace(PAPER, batch_sampling="poisson")
    at_example = release(fed_cdp("example"), poisson, ONE, tap="example")
    at_batch = release(fed_cdp("example"), poisson, ONE, tap="batch")
    assert (
        at_batch.noise_multiplier
        == pytest.approx(at_example.noise_multiplier)
        == pytest.approx(6.0)
    )
    assert at_batch.uses == 100


def test_fed_sdp_releases_an_update_once():
    told = release(fed_sdp("client"), PAPER, THREE, "client")
    assert (told.noise_multiplier, told.uses) == (pytest.approx(6 / math.sqrt(3)), 1)
    assert release(fed_sdp("client"), PAPER, THREE, "example").noise_multiplier == pytest.approx(
        3 / math.sqrt(3)
    )
    coded = release(fed_sdp("client", participants=100), PAPER, ONE, "client")
    assert coded.noise_multiplier == pytest.approx(0.6)


# ---- no bound, and why ---------------------------------------------------------------


@dataclass(frozen=True)
class LargestNorm(PerExample):
    def declare(self):
        return Declaration(self.clip, Noise(self.noise_scale, "l2_max", self.divide_by))


@pytest.mark.parametrize(
    ("defense", "tap", "word"),
    [
        (non_private(), "aggregate", "no noise"),
        (fed_cdp("batch"), "example", "no noise"),
        (fed_sdp("server"), "update", "no noise"),
        (fed_sdp("client"), "batch", "no noise"),
        (fed_cdp("example", noise_scale=0.0), "aggregate", "no noise"),
        (Defense("x", per_batch=fed_cdp("batch").per_batch), "update", "no clipping"),
        (Defense("x", PerExample(), fed_cdp("batch").per_batch), "update", "no clipping"),
        (Defense("x", LargestNorm(fed_cdp().per_example.clip, 6.0)), "update", "noise level"),
    ],
)
def test_no_bound_is_infinite_with_its_reason(defense, tap, word):
    found = proved(defense, tap=tap)
    assert math.isinf(found.epsilon)
    ((step, _),) = found.reasons
    assert word in step
    with pytest.raises(InputError, match="has no events"):
        defense.events(PAPER, ONE, tap=tap)


def test_l2_max_can_be_named_by_the_caller():
    assert math.isinf(proved(fed_cdp("batch"), sensitivity="l2_max").epsilon)
    assert unbounded(fed_cdp("batch"), "update", "bound") is None
    assert math.isinf(audit.statement(non_private(), PAPER, ONE, delta=DELTA).paper.epsilon)


# ---- known values (section 7 of the critique) ----------------------------------------


@pytest.mark.parametrize(
    ("uses", "tensors", "expected"),
    [(1, 1, 0.594), (10, 1, 2.11), (100, 1, 8.0), (1, 3, 1.09), (10, 3, 3.94)],
)
def test_who_sees_participation(uses, tensors, expected):
    (event,) = fed_cdp("batch").events(PAPER, Holding(50_000, 500, tensors), participations=uses)
    assert (event.sampling, event.uses) == ("none", uses)
    assert spend(event, "gdp", DELTA).epsilon == pytest.approx(expected, rel=6e-3)


def test_one_noisy_gradient_replaced():
    (event,) = fed_cdp("example", divide_by="batch").events(
        replace(PAPER, batch_size=1), THREE, tap="example", relation="replace_one", participations=1
    )
    assert event.noise_multiplier == pytest.approx(1.732, abs=1e-3)
    assert spend(event, "gdp", DELTA).epsilon == pytest.approx(2.34, abs=0.01)


@pytest.mark.parametrize(("where", "expected"), [("batch", 69), ("example", 22)])
def test_a_client_is_not_an_example(where, expected):
    told = release(fed_cdp(where), PAPER, ONE, "client")
    assert gdp_epsilon(told.mu, DELTA) == pytest.approx(expected, abs=0.6)
    assert proved(fed_cdp(where), unit="client").epsilon > 100


def test_the_papers_count():
    both = audit.statement(fed_cdp("batch"), PAPER, THREE, delta=DELTA)
    assert both.paper.epsilon == pytest.approx(0.8227, abs=1e-4)
    assert (both.paper.unit, both.paper.sampling, both.paper.accountant) == (
        "example",
        "poisson",
        "moments_accountant",
    )
    sdp = audit.statement(fed_sdp("client"), PAPER, THREE, delta=DELTA).paper
    assert (sdp.unit, round(sdp.epsilon, 4)) == ("client", 0.8494)


@pytest.mark.parametrize(
    ("batch", "examples", "rounds", "expected"),
    [(3, 2_267, 60, 9.79), (4, 426, 3, 16.8), (3, 36_631, 10, 0.215)],
)
def test_the_papers_formula_on_the_papers_data(batch, examples, rounds, expected):
    plan = Plan(1000, 100, rounds, 100, batch, local_lr=0.1)
    assert audit.statement(
        fed_cdp("batch"), plan, Holding(examples, 300, 3), delta=DELTA
    ).paper.epsilon == pytest.approx(expected, rel=5e-3)


def test_a_rate_above_one_is_counted_as_one_and_said():
    found = audit.statement(fed_cdp("batch"), PAPER, Holding(100, 500, 3), delta=DELTA).paper
    assert any("above 1" in why for _, why in found.reasons)
    assert found.epsilon == pytest.approx(
        spend(
            Event(1.0, 6.0, "example", "add_remove", uses=10_000), "moments_accountant", DELTA
        ).epsilon
    )


# ---- batches drawn anew --------------------------------------------------------------


def test_central_training_is_counted_at_the_rate_of_its_batches():
    """n = 1,000, q = .01, T = 100, σ = 1: without the rate ε would be 91.8; Opacus, by
    another accountant, says .73.
    """
    plan = Plan(1, 1, 1, 100, 10, "fixed", "poisson", local_lr=0.1)
    central, holding = fed_cdp("batch", noise_scale=1.0, scope="all"), Holding(1000, 1000, 3)
    (event,) = central.events(plan, holding)
    assert (event.sampling_rate, event.noise_multiplier, event.uses, event.sampling) == (
        0.01,
        1.0,
        100,
        "poisson",
    )
    epsilon = spend(event, "pld", DELTA).epsilon
    assert epsilon == pytest.approx(0.718, abs=5e-4)
    assert proved(central, plan, holding).epsilon == epsilon
    (rounds,) = central.events(replace(plan, rounds=10, local_iterations=10), holding)
    assert rounds == event  # it never leaves: rounds cut nothing
    peer = PRVAccountant()
    for _ in range(100):
        peer.step(noise_multiplier=1.0, sample_rate=0.01)
    assert epsilon == pytest.approx(
        peer.get_epsilon(DELTA, eps_error=0.002), abs=0.012
    )  # it errs upwards by design


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"repeats": 2}, "stands twice at the client"),
        ({"tap": "example"}, "is seen alone"),
        ({"unit": "client"}, "owns every batch"),
        ({"noise_at": "example"}, "noise varies with the batch's size"),
    ],
)
def test_batches_are_not_amplified_where_it_is_not_proved(change, why):
    plan = Plan(1, 1, 1, 100, 10, "fixed", "poisson", local_lr=0.1)
    settings = {"repeats": 1, "tap": "update", "unit": "example", "noise_at": "batch"} | change
    holding = Holding(1000, 1000, 1, repeats=settings["repeats"])
    defense = fed_cdp(settings["noise_at"], scope="all")
    if settings["tap"] == "example":
        defense = fed_cdp("example", scope="all")
    for event in defense.events(plan, holding, tap=settings["tap"], unit=settings["unit"]):
        assert event.sampling == "none", why


def test_batches_without_replacement_are_amplified_for_replaced_examples():
    plan = Plan(1, 1, 1, 100, 10, "fixed", "with_replacement", local_lr=0.1)
    defense, holding = fed_cdp("batch", scope="all"), Holding(1000, 1000, 1)
    (replaced,) = defense.events(plan, holding, relation="replace_one")
    assert (replaced.sampling, replaced.sampling_rate, replaced.noise_multiplier) == (
        "fixed",
        0.01,
        3.0,
    )
    (removed,) = defense.events(plan, holding)
    assert removed.sampling == "none"  # no bound is known for removing from a sample of fixed size


def test_poisson_batches_of_a_single_client_are_private_training():
    """One client that always takes part: the central method, and no part of δ goes to who
    takes part.
    """
    plan = Plan(1, 1, 10, 20, 5, "fixed", "poisson", local_lr=0.1)
    found = proved(fed_cdp("batch"), plan, Holding(500, 500, 1))
    run = Event(0.01, 6.0, "example", "add_remove", uses=200)
    assert found.epsilon == pytest.approx(spend(run, "pld", DELTA).epsilon)
    assert "pld" in found.accountant and "B/n" in found.sampling


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement"])
def test_drawn_batches_never_cost_more_than_their_worst_case(sampling):
    plan = Plan(20, 5, 4, 10, 5, "fixed", sampling, local_lr=0.1)
    for relation in ("add_remove", "replace_one"):
        told = release(fed_cdp("batch"), plan, Holding(1_000, 50, 1), "example", relation)
        worst = audit.mixture_epsilon(audit.participations(plan), told.mu, DELTA)
        assert (
            proved(fed_cdp("batch"), plan, Holding(1_000, 50, 1), relation=relation).epsilon
            <= worst + 1e-9
        )
    with_copies = proved(fed_cdp("batch"), plan, Holding(1_000, 50, 1, 1, 2))
    assert with_copies.accountant == "gdp over participations"


# ---- distributions -------------------------------------------------------------------

SMALL = {
    "clients": 20,
    "participants": 4,
    "rounds": 5,
    "local_iterations": 4,
    "batch_size": 5,
    "local_lr": 0.1,
}


@given(
    st.sampled_from(["rounds", "participants", "local_iterations"]),
    st.sampled_from(get_args(BatchSampling)[:2]),
    st.sampled_from(["fixed", "poisson"]),
    st.sampled_from(["example", "client"]),
    st.floats(0.5, 8.0),
)
@settings(max_examples=40, deadline=None)
def test_more_use_never_costs_less(what, batches, clients, unit, noise):
    base = SMALL | {"batch_sampling": batches, "client_sampling": clients}
    defense, holding = fed_cdp("batch", noise_scale=noise), Holding(200, 10, 2)
    less = proved(defense, Plan(**base), holding, unit=unit).epsilon
    more = proved(defense, Plan(**(base | {what: base[what] * 2})), holding, unit=unit).epsilon
    assert more >= less - 1e-9


@given(
    st.floats(0.5, 8.0),
    st.floats(1.01, 3.0),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from(["example", "batch"]),
)
@settings(max_examples=40, deadline=None)
def test_noise_tensors_holders_and_relation(noise, factor, tensors, holders, where):
    plan = Plan(**SMALL)
    holding = Holding(200, 20, tensors, holders)
    here = proved(fed_cdp(where, noise_scale=noise), plan, holding).epsilon
    assert proved(fed_cdp(where, noise_scale=noise * factor), plan, holding).epsilon <= here + 1e-9
    assert (
        proved(
            fed_cdp(where, noise_scale=noise), plan, replace(holding, tensors=tensors + 1)
        ).epsilon
        >= here - 1e-9
    )
    assert (
        proved(
            fed_cdp(where, noise_scale=noise), plan, replace(holding, holders=holders + 1)
        ).epsilon
        >= here - 1e-9
    )
    assert (
        proved(fed_cdp(where, noise_scale=noise), plan, holding, relation="replace_one").epsilon
        >= here - 1e-9
    )
    assert proved(fed_cdp(where, noise_scale=noise), plan, holding, unit="client").epsilon >= 0


def test_events_follow_what_the_plan_really_does():
    """The uses of an example over a whole training, counted on the plan's own draws."""
    plan = Plan(6, 2, 8, 4, 3, "fixed", "one_pass_shuffled", local_lr=0.1, seed=3)
    for client in range(6):
        rounds = [r for r in range(8) if client in plan.participants_of(r)]
        if not rounds:
            continue
        used = sum(sum(int(2 in batch) for batch in plan.batches(client, 12, r)) for r in rounds)
        (event,) = fed_cdp("batch").events(plan, Holding(72, 12, 1), participations=len(rounds))
        assert used == event.uses


def test_hidden_participation_is_one_event_a_round():
    plan = Plan(20, 4, 7, 12, 5, "poisson", local_lr=0.1)
    (event,) = fed_cdp("batch").events(plan, Holding(200, 20, 1))
    assert (event.sampling_rate, event.uses, event.sampling) == (0.2, 7, "poisson")
    assert event.noise_multiplier == pytest.approx(6 / math.sqrt(3))  # three passes
    everyone = replace(plan, participants=20)
    assert fed_cdp("batch").events(everyone, Holding(200, 20, 1))[0].sampling == "none"
    with pytest.raises(InputError, match="replace_one"):
        fed_cdp("batch").events(replace(plan, client_sampling="fixed"), Holding(200, 20, 1))


def test_holding_of_a_partition():
    two = Partition("by hand", (np.array([0, 1, 1]), np.array([1, 2])), 4)
    assert Holding.of(two, 3) == Holding(4, 2, 3, 2, 2, 3, ((2, 1), (1,)))
    assert Holding.of(full_copies(10, 7), 1).holders == 7


# ---- arguments -----------------------------------------------------------------------


def test_hidden_and_visible_participation_against_integration():
    q, z, epsilon = 0.1, 1.5, 0.3
    x = np.linspace(-20, 20, 400_001)
    p, n = norm.pdf(x - 1 / z), norm.pdf(x)
    hidden, visible = audit.visible_participation(epsilon, q, z)
    assert hidden == pytest.approx(
        np.trapz(np.maximum((1 - q) * n + q * p - math.exp(epsilon) * n, 0), x), rel=1e-6
    )
    # an absent client is recognised: the two distributions share the part without it, which no test
    # can use
    assert visible == pytest.approx(
        q * np.trapz(np.maximum(p - math.exp(epsilon) * n, 0), x), rel=1e-6
    )
    assert visible > hidden


@pytest.mark.parametrize(
    ("ratio", "dimension"), [(1.5, 40), (1.1, 2_000), (1.05, 34_720), (2.0, 10)]
)
@pytest.mark.parametrize("delta", [1e-5, 0.5])
def test_l2_max_is_below_the_exact_epsilon(ratio, dimension, delta):
    """Equal means: the better-likelihood test looks at the squared length only, which is chi-
    square.
    """
    bound = audit.l2_max_epsilon(ratio, dimension, delta)
    edge = (
        2 * (dimension * math.log(ratio) + bound) / (1 - ratio**-2)
    )  # where log(q/p) = bound; q is the noisier distribution
    noisier = chi2.logsf(edge / ratio**2, dimension)
    quieter = chi2.logsf(edge, dimension)
    exact = math.exp(noisier) - math.exp(bound + quieter)
    assert exact >= delta * (1 - 1e-9)


def test_l2_max_known_values_and_bad_input():
    assert [round(audit.l2_max_epsilon(r, 34_720, 0.5)) for r in (1.05, 1.1)] == [20, 78]
    assert audit.l2_max_epsilon(1.001, 3, 0.1) == 0
    assert audit.l2_max_epsilon(2.0, 34_720, 0.5) > 3_000
    for bad in ({"ratio": 1.0}, {"delta": 0.0}, {"dimension": 0}):
        with pytest.raises(InputError):
            audit.l2_max_epsilon(**({"ratio": 1.1, "dimension": 10, "delta": 0.1} | bad))


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.1, 6.0, 100), (0.01, 2.0, 500)])
def test_the_lower_bound_lies_just_below_the_upper(rate, noise, steps):
    low = arguments.sampled_gaussian_lower_bound(rate, noise, steps, DELTA)
    high = spend(Event(rate, noise, "example", "add_remove", uses=steps), "pld", DELTA).epsilon
    assert 0.95 * high < low <= high


def test_loss_of_one_gaussian_by_simulation_and_never_zero():
    x = np.random.default_rng(0).standard_normal(400_000) + 1 / 2
    assert arguments.gaussian_loss_exceeds(0.4, 2.0) == pytest.approx(
        np.mean(x / 2 - 1 / 8 > 0.4), abs=4e-3
    )
    assert arguments.gaussian_loss_exceeds(5.0, 6.0) > 0
    assert gdp_delta(0.4, 0.5) < arguments.gaussian_loss_exceeds(0.4, 2.0)


def test_holders_that_meet_in_a_round():
    draws = list(itertools.combinations(range(6), 3))
    meet = sum(len(set(one) & {0, 1, 2}) >= 2 for one in draws) / len(draws)
    assert arguments.shared_in_a_round(6, 3, 3) == pytest.approx(meet)
    assert arguments.shared_in_a_round(6, 3, 1) == 0


# ---- bad input -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "reading",
    [
        {"unit": "local_report"},
        {"relation": "swap"},
        {"tap": "exmple"},
        {"delta": 1.0},
        {"delta": 0.0},
        {"sensitivity": "max"},
    ],
)
def test_a_wrong_reading_gets_one_sentence(reading):
    with pytest.raises(InputError) as error:
        audit.statement(fed_cdp("batch"), PAPER, ONE, **({"delta": DELTA} | reading))
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    "bad", [{"tensors": 0}, {"holders": 1.5}, {"repeats": 501}, {"client_size": -1}]
)
def test_a_wrong_holding_gets_one_sentence(bad):
    with pytest.raises(InputError):
        Holding(**({"examples": 100, "client_size": 500, "tensors": 1} | bad))


def test_wrong_counts_get_one_sentence():
    with pytest.raises(InputError, match="participations"):
        fed_cdp("batch").events(PAPER, ONE, participations=0)
    with pytest.raises(InputError, match="holders"):
        audit.participations(Plan(3, 1, 1, 1, 1, local_lr=0.1), 4)
    with pytest.raises(InputError, match="batch_size"):
        release(fed_cdp("batch"), PAPER, Holding(100, 3, 1))
