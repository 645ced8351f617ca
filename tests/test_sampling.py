"""The sampling plan: the distribution of each sampling, its rates, independence of call order."""

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import WRONG_ALARM
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.sampling import BatchSampling, ClientSampling, Plan

PAPER = Plan(1000, 100, 100, 100, 5, local_lr=0.05)


def inside_binomial(successes: int, trials: int, rate: float) -> bool:
    low, high = stats.binom.ppf([WRONG_ALARM / 2, 1 - WRONG_ALARM / 2], trials, rate)
    return low <= successes <= high


@st.composite
def plans(draw):
    clients = draw(st.integers(1, 30))
    return Plan(
        clients=clients,
        participants=draw(st.integers(1, clients)),
        rounds=draw(st.integers(1, 5)),
        local_iterations=draw(st.integers(1, 12)),
        batch_size=draw(st.integers(1, 9)),
        client_sampling=draw(st.sampled_from(get_args(ClientSampling))),
        batch_sampling=draw(st.sampled_from(get_args(BatchSampling))),
        local_lr=0.1,
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(plans(), st.data())
@settings(max_examples=200, deadline=None)
def test_what_holds_for_every_plan(plan, data):
    size = data.draw(st.integers(plan.batch_size, 40))
    round_, client = (
        data.draw(st.integers(0, plan.rounds - 1)),
        data.draw(st.integers(0, plan.clients - 1)),
    )
    chosen = plan.participants_of(round_)
    assert set(chosen.tolist()) <= set(range(plan.clients))
    assert (np.diff(chosen) > 0).all()
    if plan.client_sampling != "poisson":
        assert len(chosen) == plan.participants
    batches = plan.batches(client, size, round_)
    assert len(batches) == plan.local_iterations
    for batch in batches:
        assert set(batch.tolist()) <= set(range(size))
        assert len(set(batch.tolist())) == len(batch)
        assert plan.batch_sampling == "poisson" or len(batch) == plan.batch_size
    uses = np.bincount(np.concatenate(batches), minlength=size)
    assert uses.max() <= plan.uses_per_participation(size)
    if plan.batch_sampling.startswith("one_pass"):
        total = plan.local_iterations * plan.batch_size
        assert uses.sum() == total
        assert uses.max() == plan.uses_per_participation(size)  # the worst case is attained
        assert uses.max() - uses.min() <= 1  # no second use before all have had a first


@given(plans(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_call_order_changes_nothing(plan, random):
    def draw(what):
        kind, round_, client = what
        if kind == "participants":
            return plan.participants_of(round_).tolist()
        return [batch.tolist() for batch in plan.batches(client, 9 + client % 3, round_)]

    asked = [("participants", r, 0) for r in range(plan.rounds)]
    asked += [("batches", r, c) for r in range(plan.rounds) for c in range(min(plan.clients, 4))]
    once = {what: draw(what) for what in asked}
    random.shuffle(asked)
    assert {what: draw(what) for what in asked + asked[:3]} == once


def test_fixed_order_is_the_same_in_every_round_and_differs_between_clients():
    a, b = (np.concatenate(PAPER.batches(7, 500, round_)) for round_ in (0, 99))
    assert np.array_equal(a, b)
    assert np.array_equal(np.sort(a), np.arange(500))
    assert not np.array_equal(a, np.concatenate(PAPER.batches(8, 500, 0)))
    assert not np.array_equal(a, np.arange(500))


@pytest.mark.parametrize("sampling", ["one_pass_shuffled", "with_replacement", "poisson"])
def test_other_samplings_differ_between_rounds_and_clients(sampling):
    plan = dataclasses.replace(PAPER, batch_sampling=sampling)
    first = np.concatenate(plan.batches(7, 500, 0)).tolist()
    assert first != np.concatenate(plan.batches(7, 500, 1)).tolist()
    assert first != np.concatenate(plan.batches(8, 500, 0)).tolist()
    # (round 1, client 2) and (round 2, client 1) are two draws, not one.
    assert (
        np.concatenate(plan.batches(2, 500, 1)).tolist()
        != np.concatenate(plan.batches(1, 500, 2)).tolist()
    )


def test_seeds_give_different_draws_even_if_they_are_large():
    draws = {
        tuple(dataclasses.replace(PAPER, seed=s).participants_of(1))
        for s in (0, 1, 2**32, 2**32 + 1, 2**63 - 1)
    }
    assert len(draws) == 5


def test_a_pass_that_ends_begins_again_without_a_short_batch():
    plan = Plan(1, 1, 1, 4, 3, local_lr=0.1)
    order = np.concatenate(plan.batches(0, 5, 0))
    assert order[:5].tolist() == order[5:10].tolist()
    assert order[10:].tolist() == order[:2].tolist()
    assert sorted(order[:5].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampling", "size", "most"),
    [
        ("one_pass_fixed", 500, 1),  # MNIST in the papers: exactly one epoch
        ("one_pass_fixed", 600, 1),
        ("one_pass_shuffled", 300, 2),
        ("one_pass_fixed", 250, 2),
        ("with_replacement", 500, 100),
        ("poisson", 500, 100),
    ],
)
def test_uses(sampling, size, most):
    plan = dataclasses.replace(PAPER, batch_sampling=sampling)
    assert plan.uses_per_participation(size) == most
    assert plan.client_rate == 0.1


def test_poisson_clients_have_the_stated_rate():
    plan = Plan(40, 10, 2000, 1, 1, client_sampling="poisson", local_lr=0.1, seed=5)
    chosen = [plan.participants_of(r) for r in range(plan.rounds)]
    assert inside_binomial(sum(map(len, chosen)), 40 * 2000, 0.25)
    assert inside_binomial(sum(3 in c for c in chosen), 2000, 0.25)
    assert inside_binomial(
        sum(3 in c and 4 in c for c in chosen), 2000, 0.25**2
    )  # independent clients
    assert len({len(c) for c in chosen}) > 5


def test_poisson_rounds_may_be_empty():
    plan = Plan(2, 1, 200, 1, 1, client_sampling="poisson", local_lr=0.1)
    empty = sum(len(plan.participants_of(r)) == 0 for r in range(200))
    assert inside_binomial(empty, 200, 0.25)


def test_fixed_clients_are_uniform():
    plan = Plan(40, 10, 2000, 1, 1, local_lr=0.1, seed=5)
    chosen = [plan.participants_of(r) for r in range(plan.rounds)]
    assert all(inside_binomial(sum(k in c for c in chosen), 2000, 0.25) for k in (0, 17, 39))
    together = sum(3 in c and 4 in c for c in chosen)
    assert inside_binomial(together, 2000, 10 * 9 / (40 * 39))  # without replacement


@given(st.integers(1, 40), st.data())
@settings(max_examples=50, deadline=None)
def test_an_epoch_takes_every_client_at_most_once(clients, data):
    participants = data.draw(st.integers(1, clients))
    rounds = clients // participants
    plan = Plan(
        clients,
        participants,
        2 * rounds,
        1,
        1,
        client_sampling="one_pass",
        local_lr=0.1,
        seed=clients,
    )
    for epoch in range(2):
        drawn = np.concatenate([plan.participants_of(epoch * rounds + r) for r in range(rounds)])
        assert len(set(drawn)) == len(drawn) == rounds * participants


def test_every_epoch_has_an_order_of_its_own():
    plan = Plan(40, 10, 4000, 1, 1, client_sampling="one_pass", local_lr=0.1, seed=5)
    first = [3 in plan.participants_of(4 * epoch) for epoch in range(1000)]
    assert inside_binomial(sum(first), 1000, 0.25)
    assert inside_binomial(
        sum(a and b for a, b in zip(first[::2], first[1::2], strict=True)), 500, 0.25**2
    )


@pytest.mark.parametrize("sampling", ["poisson", "with_replacement"])
def test_batches_drawn_anew_have_the_stated_rate(sampling):
    plan = Plan(1, 1, 100, 20, 5, batch_sampling=sampling, local_lr=0.1, seed=2)
    batches = [batch for r in range(100) for batch in plan.batches(0, 50, r)]
    assert inside_binomial(sum(7 in batch for batch in batches), 2000, 0.1)
    if sampling == "poisson":
        assert inside_binomial(sum(map(len, batches)), 2000 * 50, 0.1)
    both = 0.1**2 if sampling == "poisson" else 5 * 4 / (50 * 49)
    assert inside_binomial(sum(7 in b and 8 in b for b in batches), 2000, both)
    pairs = list(zip(batches[::2], batches[1::2], strict=True))
    assert inside_binomial(
        sum(7 in a and 7 in b for a, b in pairs), 1000, 0.01
    )  # iterations are independent
    assert (len({len(b) for b in batches}) > 1) == (sampling == "poisson")


def test_shuffled_passes_put_an_example_at_every_iteration_equally_often():
    plan = Plan(1, 1, 3000, 4, 5, batch_sampling="one_pass_shuffled", local_lr=0.1)
    at = [
        next(i for i, batch in enumerate(plan.batches(0, 20, r)) if 13 in batch)
        for r in range(3000)
    ]
    assert stats.chisquare(np.bincount(at, minlength=4)).pvalue > WRONG_ALARM


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clients": 0}, "clients = 0"),
        ({"participants": 1001}, "choose at most 1000"),
        ({"rounds": 2.5}, "rounds = 2.5"),
        ({"local_iterations": True}, "local_iterations = True"),
        ({"batch_size": -1}, "batch_size = -1"),
        ({"client_sampling": "poison"}, "did you mean poisson"),
        ({"batch_sampling": "one_pass"}, "batch_sampling = 'one_pass'"),
        ({"local_lr": 0.0}, "local_lr = 0.0"),
        ({"server_lr": float("nan")}, "server_lr = nan"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**63}, "below 2"),
    ],
)
def test_impossible_plans_are_refused(change, says):
    with pytest.raises(InputError, match=says):
        dataclasses.replace(PAPER, **change)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: PAPER.participants_of(100), "round = 100 must lie between 0 and 99"),
        (lambda: PAPER.participants_of(-1), "round = -1"),
        (lambda: PAPER.batches(1000, 500, 0), "client = 1000 must lie between 0 and 999"),
        (lambda: PAPER.batches(0, 4, 0), "batch_size = 5 is more than the client's 4"),
        (lambda: PAPER.batches(0, 0, 0), "client_size = 0"),
        (lambda: PAPER.uses_per_participation(4), "batch_size = 5"),
        (
            lambda: dataclasses.replace(PAPER, batch_sampling="poisson").batches(0, 4, 0),
            "batch_size = 5",
        ),
    ],
)
def test_impossible_draws_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call()


def test_a_plan_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER.rounds = 3  # type: ignore[misc]
