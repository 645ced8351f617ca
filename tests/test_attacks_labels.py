"""Where attacks start, and the labels they read off a gradient."""

import math

import numpy as np
import pytest
import torch
from digit_scenes import SHAPE, digits, lenet
from oracles import WRONG_ALARM
from scipy import stats

from fl_privacy_lib.attacks import infer_labels
from fl_privacy_lib.attacks.attack import CHOICES, start
from fl_privacy_lib.federated import example_gradients
from fl_privacy_lib.models import build, parameters_of

# --- starts


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 7, 10), (2, 1, 5)])
def test_a_patterned_start_tiles_one_quarter(shape):
    images = start("patterned", 3, shape, torch.Generator().manual_seed(0))
    assert images.shape == (3, *shape)
    assert images.min() >= 0 and images.max() <= 1
    tall, wide = math.ceil(shape[1] / 2), math.ceil(shape[2] / 2)
    quarter = images[..., :tall, :wide]
    assert torch.equal(images[..., tall:, :wide], quarter[..., : shape[1] - tall, :])
    assert torch.equal(images[..., :, wide:], images[..., :, : shape[2] - wide])
    assert (
        quarter.unique().numel() == quarter.numel()
    )  # every image and channel has a quarter of its own


def test_starts_follow_their_laws():
    for kind, distribution in (
        ("normal", stats.norm()),
        ("patterned", stats.uniform()),
    ):
        drawn = start(kind, 50, (1, 20, 20), torch.Generator().manual_seed(1))
        independent = drawn[..., :10, :10].flatten().numpy()
        assert stats.kstest(independent, distribution.cdf).pvalue > WRONG_ALARM
    assert (
        start("normal", 50, (1, 20, 20), torch.Generator().manual_seed(1)).unique().numel() > 19_000
    )


@pytest.mark.parametrize("kind", CHOICES["start"])
def test_a_start_depends_on_its_generator_alone(kind):
    torch.manual_seed(0)
    one = start(kind, 2, SHAPE, torch.Generator().manual_seed(4))
    torch.manual_seed(1)
    assert torch.equal(one, start(kind, 2, SHAPE, torch.Generator().manual_seed(4)))
    assert not torch.equal(one, start(kind, 2, SHAPE, torch.Generator().manual_seed(5)))


# --- labels


def gradients_of(model, x, y):
    weights = {name: p[None] for name, p in parameters_of(model).items()}
    return {name: g[0] for name, g in example_gradients(model, weights, x[None], y[None]).items()}


@pytest.mark.parametrize("name", ["attacked_lenet", "training_cnn", "mlp"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_label_of_one_example_is_found_for_every_class(name, seed):
    model = build(name, SHAPE, 10, torch.Generator().manual_seed(seed))
    x, y = digits()
    every = torch.arange(10).repeat(5)  # each image with each label, its own and others
    found = infer_labels(gradients_of(model, x[:50], every), 1)
    assert torch.equal(found[:, 0], every)
    assert torch.equal(infer_labels(gradients_of(model, x[:50], y[:50]), 1)[:, 0], y[:50])


@pytest.mark.parametrize("labels", [
    [2, 7], [0, 3, 5, 9], [1, 4, 6, 8], [5, 5], [0, 0, 0, 9], [3, 3, 7, 7], [4, 4, 4, 4],
    [1, 1, 1, 6, 6, 6],
])  # fmt: skip
def test_the_labels_of_a_small_batch_are_found_with_their_counts(labels):
    model = build("training_cnn", SHAPE, 10, torch.Generator().manual_seed(0))
    x, y = digits()
    chosen = [np.flatnonzero(y.numpy() == c) for c in range(10)]
    for draw in range(5):
        index = [chosen[c][(7 * draw + 3 * i) % len(chosen[c])] for i, c in enumerate(labels)]
        mean = {n: g.mean(0)[None] for n, g in gradients_of(model, x[index], y[index]).items()}
        assert infer_labels(mean, len(labels)).tolist() == [labels]


def test_most_labels_of_a_batch_are_found_on_the_attacked_network():
    x, y = digits()
    right, draws = 0, 40
    for draw in range(draws):
        index = np.random.default_rng(draw).permutation(len(y))[:4]
        mean = {n: g.mean(0)[None] for n, g in gradients_of(lenet(), x[index], y[index]).items()}
        counts = [
            np.bincount(v, minlength=10)
            for v in (infer_labels(mean, 4)[0].numpy(), y[index].numpy())
        ]
        right += np.minimum(*counts).sum()
    assert right / (4 * draws) > 0.75  # guessing finds about a third


def test_labels_do_not_depend_on_scale_or_neighbours_and_come_in_order():
    x, y = digits()
    model = build("training_cnn", SHAPE, 10, torch.Generator().manual_seed(0))
    gradients = gradients_of(model, x[:12], y[:12])
    rows = {n: g.unflatten(0, (4, 3)).mean(1) for n, g in gradients.items()}
    found = infer_labels(rows, 3)
    assert torch.equal(infer_labels({n: 1e-3 * g for n, g in rows.items()}, 3), found)
    assert torch.equal(found.sort(1).values, found)
    for row in range(4):
        assert torch.equal(
            infer_labels({n: g[row : row + 1] for n, g in rows.items()}, 3)[0], found[row]
        )


def test_labels_are_read_from_the_last_dense_layer():
    first, last = torch.zeros(1, 4, 3), torch.zeros(1, 5, 4)
    first[0, 2], last[0, 1] = -1.0, -1.0
    found = infer_labels({"first": first, "bias": torch.full((1, 4), -9.0), "last": last}, 1)
    assert found.tolist() == [[1]]
