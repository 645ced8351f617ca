"""Taps: each sees what the stages before it made, what was asked for, and nothing else."""

from functools import partial

import pytest
import torch
from federated_scenes import plan_of, same, setting
from oracles import client_update, gradient_of, relative_distance

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses import TAPS, Defense, PerExample, fed_cdp, fed_sdp, non_private
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import parameters_of


def add(constant):
    return lambda values, ctx: {name: v + constant for name, v in values.items()}


class AddPerExample(PerExample):
    """A per-example stage that adds 1 everywhere."""

    def __call__(self, gradients, ctx):
        return add(1.0)(gradients, ctx)


CONSTANTS = Defense("constants", AddPerExample(), add(10.0), add(100.0), add(1000.0), add(10000.0))


def test_every_tap_sees_what_the_stages_before_it_made():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(clients=4, participants=4, local_iterations=1)
    taps = [Tap(stage, client=2 if stage != "aggregate" else 0) for stage in TAPS]
    run = simulate(model, train, partition, plan, CONSTANTS, taps=taps)
    seen = {tap.stage: run.observations[tap].values for tap in taps}
    used = partition.indices[2][plan.batches(2, 6, 0)[0]]
    raw = [gradient_of(model, train[0][i], train[1][i]) for i in used]
    for name in seen["batch"]:
        mean = sum(g[name] for g in raw) / len(raw)
        example = torch.stack([g[name] for g in raw]) + 1
        torch.testing.assert_close(seen["example"][name], example)
        torch.testing.assert_close(seen["batch"][name], mean + 1 + 10)
        torch.testing.assert_close(seen["update"][name], -0.1 * (mean + 11) + 100)
        torch.testing.assert_close(seen["received"][name], -0.1 * (mean + 11) + 1100)
    everyone = [Tap("received", c) for c in range(4)]
    run = simulate(model, train, partition, plan, CONSTANTS, taps=[*everyone, Tap("aggregate")])
    for name in seen["aggregate"]:
        mean = torch.stack([run.observations[t].values[name] for t in everyone]).mean(0)
        torch.testing.assert_close(run.observations[Tap("aggregate")].values[name], mean + 10000)
        assert torch.equal(run.observations[Tap("aggregate")].values[name], seen["aggregate"][name])


def test_local_iterations_are_tapped_at_the_weights_they_start_from():
    model, train, partition = setting("mlp", torch.float64)
    plan = plan_of(participants=4, local_iterations=3)
    taps = [Tap("batch", 1, 0, i) for i in range(3)] + [Tap("update", 1)]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    *steps, update = (run.observations[t] for t in taps)
    weights = parameters_of(model)
    for step in steps:
        assert all(
            torch.allclose(step.weights[n], weights[n], rtol=1e-12, atol=1e-15) for n in weights
        )
        weights = {n: w - 0.1 * step.values[n] for n, w in weights.items()}
    assert same(update.weights, parameters_of(model))
    held = torch.as_tensor(partition.indices[1])
    expected = client_update(
        model, train[0][held], train[1][held], plan.batches(1, 6, 0), 3, 0.1, None
    )
    assert relative_distance(update.values, expected) <= 1e-12


@pytest.mark.parametrize("noise_at", ["client", "server"])
def test_fed_sdp_leaves_the_example_tap_bit_equal(noise_at):
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4)
    taps = [
        Tap(stage, c, 0, i) for stage in ("example", "batch") for c in range(4) for i in range(2)
    ]
    plain = simulate(model, train, partition, plan, non_private(), taps=taps).observations
    private = simulate(model, train, partition, plan, fed_sdp(noise_at), taps=taps).observations
    assert set(plain) == set(private) == set(taps)
    assert all(same(plain[t].values, private[t].values) for t in taps)
    assert all(same(plain[t].weights, private[t].weights) for t in taps)


def test_what_a_curious_server_reads_before_its_own_noise_is_the_raw_update():
    model, train, partition = setting("mlp")
    plan, taps = plan_of(participants=4), [Tap("update", 1), Tap("received", 1)]
    plain = simulate(model, train, partition, plan, non_private(), taps=taps).observations
    server = simulate(model, train, partition, plan, fed_sdp("server"), taps=taps).observations
    assert same(server[taps[0]].values, plain[taps[0]].values)
    assert not same(server[taps[1]].values, plain[taps[0]].values)


@pytest.mark.parametrize(
    "defense", [non_private(), fed_sdp("client"), fed_cdp("example"), fed_cdp("batch")]
)
def test_without_a_stage_on_arrival_received_is_the_update(defense):
    model, train, partition = setting("mlp")
    taps = [Tap("update", 2), Tap("received", 2)]
    seen = simulate(
        model, train, partition, plan_of(participants=4), defense, taps=taps
    ).observations
    assert same(seen[taps[0]].values, seen[taps[1]].values)


def test_only_what_was_asked_for_is_kept():
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4, rounds=2)
    assert not simulate(model, train, partition, plan, non_private()).observations
    taps = {Tap("batch", 1, 1, 1), Tap("received", 3, 0)}
    for defense in (non_private(), CONSTANTS):
        run = simulate(model, train, partition, plan, defense, taps=taps)
        assert set(run.observations) == set(run.truth) == taps


def test_the_truth_behind_a_tap_is_what_the_client_used():
    model, train, partition = setting("mlp")
    plan = plan_of(participants=4, local_iterations=1)
    taps = [Tap("example", 1), Tap("update", 1), Tap("aggregate")]
    run = simulate(model, train, partition, plan, non_private(), taps=taps)
    used = partition.indices[1][plan.batches(1, 6, 0)[0]]
    x, y = run.truth[taps[0]]
    assert torch.equal(x, train[0][used]) and torch.equal(y, train[1][used])
    assert sorted(run.truth[taps[1]][1].tolist()) == sorted(train[1][used].tolist())
    assert taps[2] not in run.truth


def test_an_observation_tells_the_public_plan_and_defence_and_nothing_else():
    model, train, partition = setting("mlp")
    plan, defense, tap = plan_of(participants=4), fed_cdp("batch"), Tap("update", 0)
    seen = simulate(model, train, partition, plan, defense, taps=[tap]).observations[tap]
    assert set(vars(seen)) == {
        "tap", "values", "weights", "local_lr", "local_iterations", "batch_size", "defense"
    }  # fmt: skip
    assert (seen.local_lr, seen.local_iterations, seen.batch_size) == (0.1, 2, 3)
    assert seen.defense == defense.public()


def test_a_kept_observation_is_a_copy():
    model, train, partition = setting("mlp")
    shared: dict = {}

    def remember(values, ctx):
        shared.setdefault("values", values)
        return values

    tap = Tap("update", 0)
    plan, defense = plan_of(participants=4), Defense("d", per_client=remember)
    run = simulate(model, train, partition, plan, defense, taps=[tap])
    before = {n: v.clone() for n, v in run.observations[tap].values.items()}
    for value in shared["values"].values():
        value.zero_()
    assert same(run.observations[tap].values, before)


def test_a_tap_ignores_the_client_or_iteration_that_its_stage_has_not():
    model, train, partition = setting("mlp")
    taps = [Tap("aggregate", client=2), Tap("update", 1, iteration=1), Tap("received", 1, 0, 7)]
    seen = simulate(
        model, train, partition, plan_of(participants=4), non_private(), taps=taps
    ).observations
    assert set(seen) == {Tap("aggregate"), Tap("update", 1), Tap("received", 1)}
    assert all(tap in seen for tap in taps)
    assert Tap("batch", 1, 0, 1) != Tap("batch", 1) and Tap("update", 1) != Tap("update", 2)


@pytest.mark.parametrize(
    "tap", [Tap("update", 4), Tap("update", 0, 2), Tap("batch", 0, 0, 2), Tap("aggregate", 0, 2)]
)
def test_a_tap_outside_the_plan_is_refused(tap):
    model, train, partition = setting("mlp")
    with pytest.raises(
        InputError, match=r"lies outside the plan \(2 rounds, 4 clients, 2 local iterations"
    ):
        simulate(model, train, partition, plan_of(rounds=2), non_private(), taps=[tap])


@pytest.mark.parametrize("stage", ["example", "batch", "update", "received"])
def test_a_tap_of_a_client_that_takes_no_part_is_refused(stage):
    model, train, partition = setting("mlp")
    plan = plan_of(rounds=2, participants=2)
    for round in range(2):
        present = plan.participants_of(round).tolist()
        for client in range(4):
            run = partial(
                simulate, model, train, partition, plan, non_private(),
                taps=[Tap(stage, client, round)],
            )  # fmt: skip
            if client in present:
                assert len(run().observations) == 1
                continue
            with pytest.raises(InputError, match=f"client {client} takes no part") as caught:
                run()
            assert f"plan.participants_of({round})" in str(caught.value)


@pytest.mark.parametrize("place", [{"client": -1}, {"round": -1}, {"iteration": -1}])
def test_a_negative_tap_is_refused(place):
    with pytest.raises(InputError, match=f"{next(iter(place))} = -1"):
        Tap("batch", **place)
