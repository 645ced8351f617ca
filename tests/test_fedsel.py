"""FedSel's training: losses, the two-stage step with its memory, all reports at once beside
one client at a time.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import Partition
from fl_privacy_lib.defenses import Holding, fed_cdp, non_private
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.route import Context
from fl_privacy_lib.defenses.two_stage import Perturbed, TwoStage, allocate, local_privacy
from fl_privacy_lib.federated import (
    MarginLoss,
    Tap,
    accuracy,
    example_gradients,
    simulate,
    simulate_reports,
)
from fl_privacy_lib.models import parameters_of
from fl_privacy_lib.sampling import Plan

K, D = 24, 7
LOSSES = [MarginLoss("logistic", 0.01), MarginLoss("hinge", 0.3)]


def reports_data(clients=K, features=D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(clients, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (clients,), generator=generator)


class Logits(torch.nn.Module):
    """From one margin to two logits, 0 and m: the softmax is then the logistic function of m."""

    def forward(self, m):
        return torch.nn.functional.pad(m, (1, 0))


def linear_margin(features):
    """The model of `simulate_reports`, for `simulate`: all weights 0."""
    linear = torch.nn.Linear(features, 1, bias=False)
    torch.nn.init.zeros_(linear.weight)
    return torch.nn.Sequential(linear, Logits())


def plan_of(**changes):
    values = {
        "clients": K,
        "participants": 6,
        "rounds": 4,
        "local_iterations": 1,
        "batch_size": 1,
        "client_sampling": "one_pass",
        "local_lr": 1.0,
        "server_lr": 0.3,
        "seed": 5,
    }
    return Plan(**(values | changes))


def largest(scores, generator):
    """Select the largest score: a selection without chance, and without ties.

    Clipped values move the weights by equal steps, and under the hinge a client's residual may hold
    nothing but two of those. A preference of 3 % for every later coordinate keeps the choice
    between them from rounding."""
    return (scores * 1.03 ** torch.arange(scores.shape[1])).argmax(1)


def drawn(scores, generator):
    """Select by a draw that depends on the scores, sometimes nothing."""
    odds = torch.cat([scores + 1e-3, scores.mean(1, keepdim=True)], 1)
    chosen = torch.multinomial(odds, 1, generator=generator)[:, 0]
    return torch.where(chosen == scores.shape[1], -1, chosen)


def noisy(values, generator):
    return values + torch.randn(values.shape, generator=generator, dtype=values.dtype)


def one_each(clients=K):
    return Partition("one each", tuple(np.array([c]) for c in range(clients)), clients)


# ---- losses --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_closed_gradients_against_automatic_ones(loss):
    (x, y), model = reports_data(), linear_margin(D).double()
    weight = torch.linspace(-1, 1, D, dtype=torch.float64)
    closed = loss.gradients(weight, x, y)
    found = example_gradients(model, {"0.weight": weight[None, None]}, x[None], y[None], loss)
    assert torch.allclose(closed, found["0.weight"][0, :, 0], atol=1e-14)
    assert 0 < ((2 * y - 1) * (x @ weight) < 1).sum() < K  # both sides of the hinge


@pytest.mark.parametrize("loss", LOSSES)
def test_closed_gradients_against_differences(loss):
    (x, y), step = reports_data(), 1e-6
    weight = torch.linspace(-1, 1, D, dtype=torch.float64)

    def value(w):
        t = 2.0 * y - 1
        base = (
            torch.log1p(torch.exp(-t * (x @ w)))
            if loss.kind == "logistic"
            else (1 - t * (x @ w)).clamp_min(0)
        )
        return base + loss.l2 / 2 * w.square().sum()

    for j in range(D):
        shift = torch.zeros_like(weight)
        shift[j] = step
        slope = (value(weight + shift) - value(weight - shift)) / (2 * step)
        assert torch.allclose(loss.gradients(weight, x, y)[:, j], slope, atol=1e-7)


def test_logistic_loss_of_the_margin_is_the_cross_entropy():
    (x, y), model = reports_data(), linear_margin(D).double()
    weights = {"0.weight": torch.linspace(-1, 1, D, dtype=torch.float64)[None, None]}
    margin = example_gradients(model, weights, x[None], y[None], MarginLoss())
    entropy = example_gradients(model, weights, x[None], y[None])
    assert torch.allclose(margin["0.weight"], entropy["0.weight"], atol=1e-14)


@pytest.mark.parametrize(("values", "word"), [({"kind": "hinged"}, "hinge"), ({"l2": -0.1}, "l2")])
def test_a_wrong_loss_gets_one_sentence(values, word):
    with pytest.raises(InputError, match=word):
        MarginLoss(**values)


def test_the_fast_engine_refuses_a_loss_that_it_does_not_know():
    (x, y), model = reports_data(), torch.nn.Sequential(torch.nn.Linear(D, 2)).double()
    loss, own = MarginLoss("hinge"), (plan_of(), non_private())
    with pytest.raises(InputError, match="hinge"):
        simulate(model, (x, y), one_each(), *own, loss=loss, engine="stacked")
    auto, generic = (
        simulate(model, (x, y), one_each(), *own, loss=loss, engine=e) for e in ("auto", "generic")
    )
    entropy = simulate(model, (x, y), one_each(), *own)
    assert torch.equal(auto.weights["0.weight"], generic.weights["0.weight"])
    assert not torch.allclose(auto.weights["0.weight"], entropy.weights["0.weight"])


def test_a_checkpoint_of_another_loss_is_not_continued(tmp_path):
    (x, y), model, path = reports_data(), linear_margin(D).double(), tmp_path / "state.pt"
    simulate(model, (x, y), one_each(), plan_of(), non_private(), loss=LOSSES[0], checkpoint=path)
    with pytest.raises(InputError):
        simulate(
            model,
            (x, y),
            one_each(),
            plan_of(),
            non_private(),
            loss=LOSSES[1],
            checkpoint=path,
            resume=True,
        )


# ---- the stage -----------------------------------------------------------------------


def naive(updates, chosen, perturb, clients, discount, scale):
    """Return what is sent and the memory, one client and one round at a time: Algorithm 1 in
    plain Python.
    """
    residual, momentum, sent = np.zeros((clients, D)), np.zeros((clients, D)), []
    for ids, rows in updates:
        out = np.zeros((len(ids), D))
        for i, (client, row) in enumerate(zip(ids, rows, strict=True)):
            residual[client] += row
            j = chosen(np.abs(residual[client]))
            if j < 0:
                continue
            value = residual[client, j] + discount * momentum[client, j]
            momentum[client, j], residual[client, j] = value, 0.0
            out[i, j] = scale * perturb(min(1.0, max(-1.0, value)))
        sent.append(out)
    return sent, residual, momentum


def test_the_stage_against_plain_python():
    """Clients return, some send nothing, values exceed the range: all against a loop."""
    rng = np.random.default_rng(1)
    updates = []
    for _ in range(9):
        ids = np.sort(rng.choice(K, 10, replace=False))
        updates.append((ids, rng.normal(scale=0.7, size=(10, D))))

    def select(scores, generator):
        return torch.where(scores.max(1).values > 0.9, scores.argmax(1), -1)

    stage = TwoStage(select, lambda v, g: 2 * v + 0.1, scale=3.0, clients=K, discount=0.6)
    expected, residual, momentum = naive(
        updates,
        lambda s: int(s.argmax()) if s.max() > 0.9 else -1,
        lambda v: 2 * v + 0.1,
        K,
        0.6,
        3.0,
    )
    state: dict = {}
    for (ids, rows), out in zip(updates, expected, strict=True):
        values = {"a": torch.tensor(rows[:, :3]).reshape(10, 1, 3), "b": torch.tensor(rows[:, 3:])}
        before = {name: v.clone() for name, v in values.items()}
        sent = stage(values, Context(0, ids.tolist(), [torch.Generator()], state=state))
        assert sent["a"].shape == (10, 1, 3) and sent["b"].shape == (10, D - 3)
        assert torch.allclose(torch.cat([sent["a"].flatten(1), sent["b"]], 1), torch.tensor(out))
        assert all(
            torch.equal(values[name], before[name]) for name in values
        )  # the caller's tensors are left alone
    assert np.allclose(state["residual"], residual) and np.allclose(state["momentum"], momentum)
    assert (residual != 0).any() and (momentum != 0).any()


def test_rows_with_generators_of_their_own_equal_clients_one_at_a_time():
    x, _ = reports_data()
    stage = TwoStage(drawn, noisy, clients=K, discount=0.5)
    together, apart = {}, {}
    for round in range(6):
        update = {"w": x * (round + 1)}
        keys = [keyed_generator(x.device, round, c) for c in range(K)]
        once = stage(update, Context(round, range(K), keys, state=together))["w"]
        for c in range(K):
            own = Context(round, (c,), [keyed_generator(x.device, round, c)], state=apart)
            assert torch.equal(stage({"w": update["w"][c : c + 1]}, own)["w"][0], once[c])
    assert all(torch.equal(together[name], apart[name]) for name in ("residual", "momentum"))
    assert ((once != 0).sum(1) <= 1).all() and (once != 0).any()


def test_without_memory_nothing_is_kept():
    x, _ = reports_data()
    state: dict = {}
    TwoStage(largest)({"w": x}, Context(0, range(K), [torch.Generator()], state=state))
    assert not state


def test_values_are_clipped_before_they_are_perturbed():
    seen = []

    def watch(values, generator):
        seen.append(values)
        return values

    x = torch.tensor([[5.0, 0.1], [-0.3, 0.2]])
    ctx = Context(0, (0, 1), [torch.Generator()])
    assert TwoStage(largest, watch)({"w": x}, ctx)["w"].tolist() == [
        [1.0, 0.0],
        [pytest.approx(-0.3), 0.0],
    ]
    assert Perturbed(watch)({"w": x}, ctx)["w"].max() == 1.0
    assert all(v.abs().max() <= 1 for v in seen)
    assert (
        TwoStage(largest)({"w": x}, ctx)["w"].max() == 5.0
    )  # the arms without noise send what they have


@pytest.mark.parametrize(
    ("values", "word"), [({"scale": 0.0}, "scale"), ({"discount": 1.0}, "discount")]
)
def test_a_wrong_stage_gets_one_sentence(values, word):
    with pytest.raises(InputError, match=word):
        TwoStage(largest, **values)


def test_a_client_beyond_the_memory_is_refused():
    with pytest.raises(InputError, match="clients = 3"):
        TwoStage(largest, clients=3)({"w": torch.ones(1, 2)}, Context(0, (3,), [torch.Generator()]))


# ---- reports -------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "defense",
    [
        non_private(),
        local_privacy("kept", TwoStage(largest, clients=K, discount=0.5)),
        local_privacy("clipped", TwoStage(largest, lambda v, g: 3 * v, scale=2.0, clients=K)),
        local_privacy("flat", Perturbed(lambda v, g: 2 * v)),
    ],
    ids=lambda d: d.name,
)
def test_simulate_reports_equals_one_client_at_a_time(loss, defense):
    """Three epochs, so that clients come back to what they kept."""
    train, model = reports_data(), linear_margin(D).double()
    plan = plan_of(rounds=12)
    slow = simulate(model, train, one_each(), plan, defense, loss=loss, evaluation=train)
    fast = simulate_reports(train, plan, defense, loss, evaluation=train, evaluate_every=1)
    assert torch.allclose(slow.weights["0.weight"], fast.weights["0.weight"], atol=1e-13)
    assert fast.weights["0.weight"].abs().max() > 0.1
    assert [(r.participants, r.accuracy) for r in slow.history] == [
        (r.participants, r.accuracy) for r in fast.history
    ]


def test_the_reports_noise_has_the_law_of_clients_one_at_a_time():
    """Mean and variance of one round's sum over 100 seeds; each bound fails by chance with
    probability below 1e-4.
    """
    train, model, stage = reports_data(), linear_margin(D).double(), TwoStage(drawn, noisy)
    ends = {"slow": [], "fast": []}
    for seed in range(100):
        plan = plan_of(rounds=1, participants=K, seed=seed)
        defense = local_privacy("drawn", stage)
        ends["slow"].append(
            simulate(model, train, one_each(), plan, defense, loss=LOSSES[0]).weights["0.weight"][0]
        )
        ends["fast"].append(
            simulate_reports(train, plan, defense, LOSSES[0]).weights["0.weight"][0]
        )
    slow, fast = (torch.stack(ends[name]) for name in ("slow", "fast"))
    assert not torch.allclose(slow, fast)
    error = ((slow.var(0) + fast.var(0)) / 100).sqrt()
    assert ((slow.mean(0) - fast.mean(0)).abs() < 4.9 * error).all()  # 7 coordinates, nearly normal
    assert (
        slow.var(0) / fast.var(0)
    ).log().abs().max() < 1.0  # its standard deviation is near √(4/99) = 0.2


def test_sending_the_raw_gradient_differs_only_by_where_the_learning_rate_stands():
    """Without clipping and noise, η at the client and η at the server give the same model."""
    train = reports_data()
    kept = local_privacy("kept", TwoStage(largest, clients=K, discount=0.5))
    runs = [
        simulate_reports(
            train, plan_of(rounds=12, local_lr=a, server_lr=b), kept, LOSSES[0]
        ).weights["0.weight"]
        for a, b in ((1.0, 0.3), (0.3, 1.0))
    ]
    assert torch.allclose(runs[0], runs[1], atol=1e-13)


def test_in_one_epoch_a_memory_changes_nothing():
    train = reports_data()
    with_, without = (
        simulate_reports(
            train,
            plan_of(),
            local_privacy("d", TwoStage(drawn, noisy, clients=k, discount=0.9)),
            LOSSES[0],
        )
        for k in (K, None)
    )
    assert torch.equal(with_.weights["0.weight"], without.weights["0.weight"])
    more = [
        simulate_reports(
            train,
            plan_of(rounds=8),
            local_privacy("d", TwoStage(drawn, noisy, clients=k)),
            LOSSES[0],
        )
        for k in (K, None)
    ]
    assert not torch.equal(more[0].weights["0.weight"], more[1].weights["0.weight"])


def test_a_round_without_clients_changes_nothing():
    """Poisson draws of one client in 40 leave most of the rounds empty."""
    train, defense = reports_data(), local_privacy("d", TwoStage(drawn, noisy, clients=K))
    plan = plan_of(rounds=20, participants=1, client_sampling="poisson")
    assert any(len(plan.participants_of(t)) == 0 for t in range(20))
    run = simulate_reports(train, plan, defense, LOSSES[0])
    assert len(run.history) == 20 and run.weights["0.weight"].isfinite().all()


def test_reports_refuse_what_they_would_pass_over():
    train, defense = reports_data(), non_private()
    for changes, data, evaluation, word in (
        ({"local_optimizer": "adam"}, train, None, "plain steps"),
        ({}, (train[0], 2 * train[1] - 1), None, "labels 0 or 1"),
        ({}, (train[0] * math.nan, train[1]), None, "finite"),
        ({}, train, (train[0][:0], train[1][:0]), "evaluation set is empty"),
    ):
        with pytest.raises(InputError, match=word):
            simulate_reports(data, plan_of(**changes), defense, LOSSES[0], evaluation=evaluation)


def test_simulate_reports_repeats_bit_by_bit_and_depends_on_the_seed():
    train, defense = reports_data(), local_privacy("d", TwoStage(drawn, noisy, clients=K))
    one, same, other = (
        simulate_reports(train, plan_of(rounds=8, seed=s), defense, LOSSES[0]) for s in (1, 1, 2)
    )
    assert torch.equal(one.weights["0.weight"], same.weights["0.weight"])
    assert not torch.equal(one.weights["0.weight"], other.weights["0.weight"])


def test_the_reports_model_is_a_linear_margin():
    train, model = reports_data(), linear_margin(D).double()
    options = {"evaluation": train, "evaluate_every": 9}
    run = simulate_reports(train, plan_of(), non_private(), LOSSES[0], **options)
    assert {n: w.shape for n, w in run.weights.items()} == {
        n: w.shape for n, w in parameters_of(model).items()
    }
    assert run.history[-1].accuracy == accuracy(model, run.weights, train)
    assert [r.accuracy is None for r in run.history] == [True, True, True, False]


@pytest.mark.parametrize(
    ("plan", "defense", "word"),
    [
        ({"batch_size": 2}, non_private(), "batch_size = 2"),
        ({"clients": 20}, non_private(), "24 examples"),
        ({}, fed_cdp("batch"), "fed_cdp_batch fills per_example"),
    ],
)
def test_more_than_one_example_a_client_is_refused(plan, defense, word):
    with pytest.raises(InputError, match=word):
        simulate_reports(reports_data(), plan_of(**plan), defense, LOSSES[0])


def test_a_tap_reads_what_the_stage_lets_out():
    """At the tap `update` of simulate stands one coordinate: what the server, and a listener,
    get.
    """
    train, model = reports_data(), linear_margin(D).double()
    tap = Tap("update", int(plan_of().participants_of(0)[0]))
    defense = local_privacy("d", TwoStage(largest))
    run = simulate(model, train, one_each(), plan_of(), defense, loss=LOSSES[0], taps=[tap])
    assert (run.observations[tap].values["0.weight"] != 0).sum() == 1


def test_one_pass_is_counted_once_an_epoch():
    plan = replace(plan_of(), rounds=9)  # two epochs of four rounds and the beginning of a third
    (event,) = fed_cdp("batch").events(plan, Holding(K, 1, 1))
    assert (event.uses, event.sampling, event.sampling_rate) == (3, "none", 1.0)


# ---- the allocation ------------------------------------------------------------------


@given(
    st.floats(0.01, 20),
    st.integers(2, 5000),
    st.integers(1, 10**5),
    st.floats(0.1, 5),
    st.floats(0, 1),
)
def test_the_allocation_spends_the_budget_and_serves_the_value_first(
    epsilon, d, batch, floor, ratio
):
    selection, value = allocate(epsilon, d, batch, floor=floor, largest_ratio=ratio)
    least = floor * math.sqrt(math.log(d) / batch)
    assert selection + value == pytest.approx(epsilon)
    assert 0 <= selection <= ratio * epsilon + 1e-12
    assert value >= min(least, epsilon) - 1e-9
    assert selection == pytest.approx(min(ratio * epsilon, max(0, epsilon - least)))


def test_more_clients_never_shift_budget_to_the_value():
    shares = [allocate(0.5, 123, b)[0] for b in (5, 20, 100, 500)]
    assert shares == sorted(shares) and shares[0] == 0 < shares[-1]
