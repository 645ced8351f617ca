"""The settings of an attack: masks, starts, tries, labels, and what the attacker knows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attack_scenes import SHAPE, digits, lenet, observe, refuse, successes
from oracles import gradient_of
from torch import nn

from fl_privacy_lib.attacks import PUBLISHED, Attack, infer_labels, reconstruct
from fl_privacy_lib.attacks.attack import start
from fl_privacy_lib.attacks.optimisers import LBFGS, SignedAdam
from fl_privacy_lib.defenses import fed_cdp, non_private, pruned, random_noise
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated import Observation, Tap, example_gradients
from fl_privacy_lib.metrics import mse
from fl_privacy_lib.models import build, parameters_of

# --- adaptive arms
#
# About one of a hundred victims is missed, and not the same one on every processor: of six, four
# are asked for.


@pytest.mark.long
def test_a_cosine_for_each_tensor_sees_through_clipping_without_knowing_the_bound():
    seen, truth, _ = observe(fed_cdp("batch", clip_norm=0.2))
    aware = reconstruct(lenet(), seen, SHAPE, Attack(objective="layer_cosine", max_iterations=60))
    naive = reconstruct(lenet(), seen, SHAPE, Attack(max_iterations=20))
    assert successes(aware, truth).sum() >= 4
    assert successes(naive, truth).sum() <= 1


def test_one_cosine_sees_through_a_clip_of_the_whole_gradient():
    seen, truth, _ = observe(fed_cdp("batch", clip_norm=0.2, scope="all"))
    aware = reconstruct(lenet(), seen, SHAPE, Attack(objective="cosine", max_iterations=60))
    assert successes(aware, truth).sum() >= 4


@pytest.mark.long
def test_who_leaves_out_the_zeros_sees_through_pruning():
    seen, truth, _ = observe(pruned(0.7, at="per_example"))
    aware = reconstruct(lenet(), seen, SHAPE, Attack(mask="zeros", max_iterations=80))
    naive = reconstruct(lenet(), seen, SHAPE, Attack(max_iterations=40))
    assert successes(aware, truth).sum() >= 4
    assert successes(naive, truth).sum() <= 1


@pytest.mark.long
def test_several_observations_say_more_than_one():
    noise = random_noise(0.02, "gaussian", at="per_example")
    once, truth, _ = observe(noise, rounds=1, victims=2)
    often, same, _ = observe(noise, rounds=4, victims=2)
    assert torch.equal(truth, same)
    errors = []
    for seen in (once, often):
        found = reconstruct(lenet(), seen, SHAPE, Attack(max_iterations=12))
        assert found.knowledge["reads"].startswith(f"{len(seen[0])} observation")
        errors.append(mse(found.images.numpy(), truth.numpy()).mean())
    assert errors[1] < errors[0] / 1.5


@pytest.mark.long
def test_a_prior_on_smooth_images_helps_against_noise():
    seen, truth, _ = observe(random_noise(0.02, "gaussian", at="per_example"))
    errors = [
        mse(
            reconstruct(
                lenet(), seen, SHAPE, Attack(objective="relative", tv=tv, max_iterations=12)
            ).images.numpy(),
            truth.numpy(),
        ).mean()
        for tv in (0.0, 1e-3)
    ]
    assert errors[1] < errors[0] / 1.2


# --- starts, tries, steps


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 10, 17)])
def test_a_patterned_start_repeats_its_tile(shape):
    images = start("patterned", 2, shape, torch.Generator().manual_seed(0))
    tall, wide = (math.ceil(n / 2) for n in shape[1:])
    for y in range(shape[1]):
        for x in range(shape[2]):
            assert torch.equal(images[:, :, y, x], images[:, :, y % tall, x % wide])
    assert images.unique().numel() == 2 * shape[0] * tall * wide


def test_the_best_of_several_tries_is_the_one_with_the_least_objective():
    seen, *_ = observe(random_noise(0.01, "gaussian", at="per_example"), victims=2)
    attack = Attack(
        max_iterations=1, steps=1, start="normal"
    )  # after one step paths have not parted yet
    alone, three = (reconstruct(lenet(), seen, SHAPE, replace(attack, tries=k)) for k in (1, 3))
    assert (three.loss <= alone.loss * (1 + 1e-4)).all() and (three.loss < 0.9 * alone.loss).any()
    assert three.images.shape == alone.images.shape and len(three.status) == 2
    single, *_ = observe(random_noise(0.01, "gaussian", at="per_example"), victims=1)
    one = reconstruct(lenet(), single, SHAPE, replace(attack, tries=3))
    torch.testing.assert_close(one.loss, three.loss[:1], rtol=1e-4, atol=0)


def test_when_one_try_has_converged_the_others_stop():
    seen, *_ = observe(non_private(), victims=2)
    running = []
    found = reconstruct(
        lenet(), seen, SHAPE, Attack(tries=3, max_iterations=60),
        on_iteration=lambda i, victims, images: running.append(victims.tolist()),
    )  # fmt: skip
    assert found.status == ["converged"] * 2
    assert len(running) == int(found.iterations.max()) and running[0] == [0, 1]


def test_the_box_keeps_every_step_among_images():
    def evaluate(x):
        assert ((x >= 0) & (x <= 1)).all()
        return (x - 3).square().sum(1), 2 * (x - 3)

    clamp = lambda x: x.clamp(0, 1)  # noqa: E731
    for made in (
        LBFGS(torch.rand(2, 5), project=clamp),
        SignedAdam(torch.rand(2, 5), 0.1, project=clamp),
    ):
        _, at = made.advance(evaluate)
        assert (at == 1).all()
    seen, truth, _ = observe(non_private())
    found = reconstruct(lenet(), seen, SHAPE, Attack(box=True, max_iterations=60))
    assert successes(found, truth).sum() >= 4


def test_signed_adam_is_adam_on_signs():
    x = torch.randn(2, 6, dtype=torch.float64)
    free = x.clone().requires_grad_(True)
    optimiser, ours = torch.optim.Adam([free], lr=0.05), SignedAdam(x, 0.05, steps=15)
    slope = lambda p: 2 * p * torch.linspace(1, 9, 6, dtype=torch.float64)  # noqa: E731
    for _ in range(15):
        free.grad = slope(free.detach()).sign()
        optimiser.step()
    _, at = ours.advance(lambda p: ((slope(p) * p).sum(1) / 2, slope(p)))
    torch.testing.assert_close(at, free.detach(), rtol=1e-9, atol=1e-9)


def test_the_rate_falls_three_times():
    rates = [
        Attack(decay=True, learning_rate=0.1, max_iterations=240).rate(i) for i in range(1, 241)
    ]
    assert [rates.count(r) for r in sorted(set(rates), reverse=True)] == [90, 60, 60, 30]
    assert rates[0] == 0.1 and rates[-1] == pytest.approx(1e-4)
    assert {Attack(max_iterations=50).rate(i) for i in range(1, 51)} == {1.0}
    used = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(
                torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
            )

        def forward(self, x):
            return x.flatten(1) @ self.weight.T

    model, image = Watched(), torch.rand(1, 2, 2)
    seen = seen_of(model, image, 1)
    attack = replace(
        PUBLISHED["grad_inversion"], start="patterned", max_iterations=8, steps=1, stop_loss=1e-30
    )
    reconstruct(
        model, [seen], (1, 2, 2), attack, on_iteration=lambda i, v, x: used.append(x.clone())
    )
    begin = start("patterned", 1, (1, 2, 2), keyed_generator(torch.device("cpu"), 0, "start", 0))
    assert 0.05 < float((begin - used[0][0]).abs().max()) <= 0.1 + 1e-6
    assert (
        float((used[7] - used[6]).abs().max()) <= 0.1 / 1000 * 11
    )  # momentum may make a step longer


def seen_of(model, image, label):
    values = {name: g[None] for name, g in gradient_of(model, image, torch.tensor(label)).items()}
    return Observation(
        Tap("example"), values, parameters_of(model), 0.1, 1, 1, non_private().public()
    )


# --- labels


def test_a_soft_label_is_found_with_its_image():
    seen, truth, labels = observe(non_private())
    found = reconstruct(lenet(), seen, SHAPE, replace(PUBLISHED["dlg"], max_iterations=80, tries=2))
    right = successes(found, truth)
    assert right.sum() >= 4 and torch.equal(found.labels[right], labels[right])
    assert found.knowledge["labels"] == "optimised with the images"


def batches(network, size, count, seed=0):
    """Return the model, mean gradients [count, …] and sorted labels [count, size] of batches."""
    model = build(network, SHAPE, 10, torch.Generator().manual_seed(seed))
    x, y = digits()
    index = torch.tensor(np.random.default_rng(seed).permutation(len(y))[: count * size]).view(
        count, size
    )
    weights = {name: p[None] for name, p in parameters_of(model).items()}
    each = example_gradients(model, weights, x[index].flatten(0, 1)[None], y[index].flatten()[None])
    mean = {name: g[0].unflatten(0, (count, size)).mean(1) for name, g in each.items()}
    return model, mean, y[index].sort(1).values


def one_stage(gradient, size):
    """The rule without its first stage: always the lowest row, with LLG's printed share."""
    sums = [g for g in gradient.values() if g.dim() == 3][-1].sum(-1).clone()
    share, rows, found = sums.clamp_max(0).sum(1) / size * 1.1, torch.arange(len(sums)), []
    for _ in range(size):
        lowest = sums.argmin(1)
        found.append(lowest)
        sums[rows, lowest] -= share
    return torch.stack(found, 1).sort(1).values


def test_classes_with_a_negative_row_are_all_taken():
    _, mean, labels = batches("training_cnn", 8, 60)
    right = [
        float((rule(mean, 8) == labels).all(1).float().mean()) for rule in (infer_labels, one_stage)
    ]
    assert right[0] > 0.6 and right[0] > right[1] + 0.4
    negative = [g for g in mean.values() if g.dim() == 3][-1].sum(-1) < 0
    found = nn.functional.one_hot(infer_labels(mean, 8), 10).sum(1)
    assert (found[negative] >= 1).all()


# --- knowledge, presets


def test_what_the_attacker_knows_is_said():
    defense = fed_cdp("batch", clip_norm=0.5)
    seen, *_ = observe(defense, victims=2, rounds=2)
    known = reconstruct(
        lenet(), seen, SHAPE, Attack(clip_aware=True, mask="zeros", tv=0.1, max_iterations=1)
    ).knowledge
    assert known == {
        "reads": "2 observation(s) at the tap 'example'",
        "weights": "of the model, at every observation",
        "batch size": "1",
        "local training": "L = 1, η = 0.1",
        "labels": "inferred from the gradient",
        "defence": known["defence"],
        "replays it": "yes, without noise",
        "left out": "exact zeros",
        "prior on images": "total variation × 0.1",
        "truth": "unknown",
    }
    assert "fed_cdp_batch" in known["defence"] and "clip_norm=0.5" in known["defence"]


def test_the_published_attacks_are_settings():
    assert PUBLISHED["cpl"] == Attack() and PUBLISHED["idlg"] == Attack(start="normal")
    assert PUBLISHED["dlg"] == Attack(start="normal", label_rule="joint")
    inversion = PUBLISHED["grad_inversion"]
    assert inversion.max_iterations * inversion.steps == 4800 and inversion.box and inversion.decay
    assert (inversion.objective, inversion.optimiser, inversion.tv) == (
        "cosine",
        "signed_adam",
        1e-4,
    )
    assert PUBLISHED["gia"].max_iterations * PUBLISHED["gia"].steps == 1000
    assert PUBLISHED["dga"].max_iterations == 500 and PUBLISHED["dga"].label_rule == "given"


# --- bad input


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"objective": "cosin"}, r"objective = 'cosin' is not one of .*did you mean cosine\?"),
        ({"label_rule": "guess"}, "label_rule = 'guess' is not one of"),
        ({"mask": "zero"}, r"did you mean zeros\?"),
        ({"tries": 0}, "tries = 0 must be a whole number of at least 1"),
        ({"tries": 1.5}, "tries = 1.5 must be a whole number"),
        ({"restarts": -1}, "restarts = -1 must be a whole number of at least 0"),
        ({"seed": -1}, "seed = -1 must be"),
        ({"steps": 0}, "steps = 0 must be"),
        ({"tv": -1.0}, "tv = -1.0 must lie"),
        ({"tv": math.nan}, "tv = nan must lie"),
        ({"stall": (0, 0.1)}, r"stall = \(0, 0.1\) must be"),
        ({"stall": (5, 1.0)}, r"stall = \(5, 1.0\) must be"),
        ({"stall": (5, math.nan)}, r"stall = \(5, nan\) must be"),
    ],
)
def test_impossible_settings_are_refused(wrong, sentence):
    refuse(sentence, lambda: Attack(**wrong))


def test_what_does_not_fit_the_model_is_refused_at_once():
    seen, _, labels = observe(non_private(), victims=2)
    calls, usual = [], Attack()

    def run(these=seen, shape=SHAPE, attack=usual, **more):
        return lambda: reconstruct(
            lenet(), these, shape, attack, on_iteration=lambda *a: calls.append(a), **more
        )

    values = seen[1][0].values
    short = [seen[0], [replace(seen[1][0], values=values | {"0.bias": torch.zeros(1, 5)})]]
    refuse(r"gradient of 0.bias has shape \(5,\), the model's parameter \(12,\)", run(short))
    missing = [
        seen[0],
        [replace(seen[1][0], values={n: v for n, v in values.items() if n != "0.bias"})],
    ]
    refuse("gradient of 0.bias has shape None", run(missing))
    more = [seen[0], [replace(seen[1][0], values=values | {"extra": values["0.bias"]})]]
    refuse("gradient of extra has shape", run(more))
    refuse(r"no image of shape \(3, 14, 14\)", run(shape=(3, 14, 14)))
    refuse("observed equally often", run([seen[0], seen[1] * 2]))
    refuse("label_rule = 'given' needs the labels", run(attack=PUBLISHED["dga"]))
    refuse("labels must lie between 0 and 9", run(labels=torch.full((2, 1), 10)))
    refuse(r"labels have shape \(1, 2\), not \(2, 1\)", run(labels=labels.T))
    assert not calls


def test_victims_that_say_nothing_are_counted_and_the_others_attacked():
    seen, truth, _ = observe(non_private(), victims=4)
    zero, bad = (
        {n: torch.full_like(v, k) for n, v in seen[0][0].values.items()} for k in (0.0, math.nan)
    )
    mixed = [
        seen[0],
        [replace(seen[1][0], values=zero)],
        [replace(seen[2][0], values=bad)],
        seen[3],
    ]
    attacks = (
        Attack(max_iterations=40),
        replace(PUBLISHED["dlg"], max_iterations=50, tries=2),
        Attack(objective="layer_cosine", max_iterations=40),
    )
    for attack in attacks:
        found = reconstruct(lenet(), mixed, SHAPE, attack, snapshots=(1,))
        assert [found.status[i] for i in (1, 2)] == ["hopeless"] * 2
        assert found.status.count("hopeless") == 2
        assert (
            found.iterations[1] == 0
            and torch.isinf(found.loss[1])
            and torch.isfinite(found.images).all()
        )
        assert successes(found, truth)[[0, 3]].any()
        if attack.label_rule == "inferred":
            assert found.labels[1].tolist() == [-1] and found.labels[2].tolist() == [-1]
    nobody = reconstruct(lenet(), mixed[1:3], SHAPE, Attack(), snapshots=(5,))
    assert nobody.status == ["hopeless"] * 2 and nobody.snapshots[5].shape == (2, 1, *SHAPE)
