"""Training under compensation: against a loop, both stages at their taps, accuracy and time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from compensation_scenes import CPU, FULL
from torch.nn import functional as F

from fl_privacy_lib.chapters.compensation import grid, training
from fl_privacy_lib.chapters.compensation.training import REPAIRS, Rounds, time_rounds, train
from fl_privacy_lib.defenses.compensation import Compensation
from fl_privacy_lib.defenses.risk import root_set
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.reproduction.loading import load_cached


def federated(method="risk_compensation", rounds=1, **changes):
    """Return a short training on digits from the grid's own arms."""
    asked = {"method": method} | changes
    arms = grid.trainings(FULL, "digits", "dga")
    (arm,) = (a for a in arms if asked.items() <= vars(a).items())
    plan = replace(arm.plan, rounds=rounds, local_lr=0.1)
    return replace(arm, seeds=1, root_dataset_size=4, plan=plan)


def test_the_federation_is_the_papers():
    point = grid.trainings(FULL, "digits", "dga")[0]
    (model, train_set, split, plan, defense), test = point.scene(0, CPU)
    assert (plan.clients, plan.participants, plan.rounds, plan.local_iterations, plan.local_lr) == (
        100, 10, 2000, 2, 0.01)  # fmt: skip
    assert split.sizes.tolist() == [10] * 100 == [plan.batch_size] * 100
    assert max(len(set(train_set[1][i].tolist())) for i in split.indices) == 2
    assert sum(p.numel() for p in model.parameters()) == 17_038
    assert not ({"per_client", "on_aggregate"} & set(defense._filled())) and len(test[1])


def test_convnet_trains_narrow_and_short(monkeypatch):
    """Table II's arms with σ on the gradient; none could be taken for the published setting."""
    arms = [a for a in grid.trainings(FULL, "mnist", "gia") if a.network != "attacked_lenet"]
    assert [(a.method, a.repair) for a in arms] == [
        ("non_private", "not_applicable"), ("risk_compensation", "right_variance"),
        ("risk_compensation", "no_repair"), ("gc", "not_applicable"),
        ("dp_gaussian", "not_applicable"), ("dp_laplace", "not_applicable")]  # fmt: skip
    assert {(a.network, a.plan.rounds, a.seeds) for a in arms} == {("convnet_16", 200, 1)}
    digits = load_cached("digits", train_only=False)
    larger = {f"{part}_x": np.kron(getattr(digits, f"{part}_x"), np.ones((1, 1, 2, 2), np.float32))
              for part in ("train", "validation")}  # fmt: skip
    monkeypatch.setattr(training, "load_cached", lambda *_, **__: replace(digits, **larger))
    (model, *_), _ = arms[0].scene(0, CPU)
    assert [m.out_channels for m in model if isinstance(m, torch.nn.Conv2d)][:2] == [16, 32]


def test_undefended_training_is_the_loop_written_out():
    """Two epochs of a whole client's data each, and the mean of ten updates, by autograd."""
    (model, (x, y), split, plan, defense), _ = federated("non_private", rounds=2).scene(3, CPU)
    run = simulate(model, (x, y), split, plan, defense, engine="auto")
    weights = [p.detach().clone() for p in model.parameters()]
    for number in range(2):
        total = [torch.zeros_like(w) for w in weights]
        for client in plan.participants_of(number):
            local = [w.clone().requires_grad_() for w in weights]
            for _ in range(2):
                held = split.indices[client]
                named = dict(zip(dict(model.named_parameters()), local, strict=True))
                loss = F.cross_entropy(torch.func.functional_call(model, named, x[held]), y[held])
                steps = torch.autograd.grad(loss, local)
                local = [(w - 0.1 * g).detach().requires_grad_()
                         for w, g in zip(local, steps, strict=True)]  # fmt: skip
            total = [t + (a - w) / 10 for t, a, w in zip(total, local, weights, strict=True)]
        weights = [(w + t).detach() for w, t in zip(weights, total, strict=True)]
    for expected, found in zip(weights, run.weights.values(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


def row_of(observation):
    """Return what stands at a tap as one row [d]."""
    return torch.cat([v.flatten() for v in observation.values.values()]).double()


@pytest.mark.parametrize("noise_on", ["gradient", "update"])
@pytest.mark.parametrize("repair", list(REPAIRS))
def test_both_stages_run_in_a_training(repair, noise_on):
    """Ten noisy updates and the aggregate at their taps: slices noisy, and repaired as it says."""
    point = federated(noise_on=noise_on, repair=repair)
    (*args, plan, defense), _ = point.scene(0, CPU)
    ids = plan.participants_of(0).tolist()
    taps = [Tap("update", client) for client in ids]
    seen = simulate(*args, plan, defense, taps=[*taps, Tap("aggregate")]).observations
    clear = simulate(*args, plan, defense.noiseless(), taps=taps).observations
    sent, plain = (torch.stack([row_of(views[tap]) for tap in taps]) for views in (seen, clear))
    stage = defense.per_client
    for row in sent - plain:
        noisy = [p for p in row.split(stage.slices.sizes) if (p != 0).any()]
        assert len(noisy) == 2
        std = 0.1 * (0.1 if noise_on == "gradient" else 1.0)
        assert float(torch.cat(noisy).std()) == pytest.approx(std, rel=0.2)
    mean = sent.mean(0)
    form = REPAIRS[repair] | {"ratio": 6.0}
    asked = form.pop("compensated", True)
    expected = Compensation(std, 0.2, **form).repaired(mean, torch.full((10,), 0.1))
    expected = expected if asked else mean
    found = row_of(seen[Tap("aggregate")])
    assert float((found - expected).norm()) < 1e-4 * float(mean.norm())
    if repair == "right_variance":
        assert float((found - mean).norm()) > 0.05 * float(mean.norm())


def test_every_arm_takes_the_stacked_engine_with_the_draws_of_the_route():
    """Slices drawn at their stage are those that begin_client draws, by the generic path."""
    arms = [arm for arm in grid.trainings(FULL, "digits", "dga") if arm.noise_on != "update"]
    for arm in arms:
        short = replace(arm, root_dataset_size=4, plan=replace(arm.plan, rounds=2, local_lr=0.1))
        args, _ = short.scene(0, CPU)
        run = simulate(*args, engine="auto")
        assert run.engine == "stacked"
        drawn = replace(args[-1], begin_client=getattr(args[-1].per_client, "begin", None))
        if arm.repair in ("no_repair", "not_applicable") and arm.method != "gc":
            slow = simulate(*args[:-1], drawn, engine="generic")
            for name, w in slow.weights.items():  # the others keep or drop by a threshold
                assert torch.allclose(w, run.weights[name], atol=1e-4), (arm, name)


def test_slices_are_cut_on_images_that_nobody_holds(monkeypatch):
    pools = []

    def watched(labels, pool, *args):
        pools.append(pool)
        return root_set(labels, pool, *args)

    monkeypatch.setattr("fl_privacy_lib.defenses.compensation.root_set", watched)
    (_, _, split, *_), _ = federated(noise_on="gradient", repair="no_repair").scene(1, CPU)
    assert not set(pools[0]) & set(np.concatenate(split.indices)) and len(pools[0]) > 100


def test_a_training_is_measured_over_its_seeds_and_along_the_way():
    found = train(replace(federated("gc", rounds=20), seeds=2), CPU)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 2)
    assert [n for n in found if n.startswith("accuracy_after")] == [
        f"accuracy_after_{i}" for i in range(2, 21, 2)]  # fmt: skip
    assert (found["accuracy"] == found["accuracy_after_20"]).all()
    assert ((found["guess"] > 0.05) & (found["guess"] < 0.2)).all()
    one = federated("gc", rounds=20)
    args, test = replace(one, seed=1).scene(1, CPU)
    weights = simulate(*args, engine="auto").weights
    hits = torch.func.functional_call(args[0], weights, (test[0],)).argmax(1) == test[1]
    assert found["accuracy"][1] == pytest.approx(float(hits.float().mean()))


def test_rounds_are_timed_in_turn_and_compared_pair_by_pair(monkeypatch):
    clock, calls = [0.0], []

    def simulated(model, train_set, split, plan, defense, **options):
        calls.append(defense.name)
        clock[0] += {"non_private": 2.0, "gradient_compression": 3.0}[defense.name] * len(calls)

    monkeypatch.setattr(training, "simulate", simulated)
    monkeypatch.setattr(training.time, "process_time", lambda: clock[0])
    found = time_rounds(Rounds((federated("non_private"), federated("gc")), 2), CPU)
    assert calls == ["non_private", "gradient_compression"] * 3
    assert found["0"].tolist() == [0.0, 0.0]
    assert found["1"].tolist() == pytest.approx([3 * 4 / (2 * 3) - 1, 3 * 6 / (2 * 5) - 1])
    rows = grid.round_times(FULL, ("digits",))
    assert {row.key["method"] for row in rows} == {
        "risk_compensation", "gc", "dp_gaussian", "dp_laplace"}  # fmt: skip
    (run,) = {row.points[0] for row in rows}
    for row in rows:
        (i,) = (i for i, arm in enumerate(run.arms) if grid.key_of(arm) == row.key)
        assert row.values([{str(i): np.array([0.1, 0.3])}])["round_time_overhead"]["mean"] == 0.2
