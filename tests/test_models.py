"""The networks: shapes, parameter counts, initial distributions, layers that are refused."""

import itertools
import math

import pytest
import torch
from oracles import WRONG_ALARM
from scipy import stats
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.models import (
    attacked_lenet,
    build,
    check_per_example,
    init_glorot,
    init_uniform,
    mlp,
    parameters_of,
    training_cnn,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "shape, classes", [((1, 28, 28), 10), ((3, 32, 32), 10), ((3, 32, 32), 62), ((2, 20, 31), 4)]
)
def test_training_cnn_counts_its_parameters_layer_by_layer(shape, classes):
    channels, height, width = shape
    after = [((n - 2) // 2 - 2) // 2 for n in (height, width)]
    expected = 32 * channels * 9 + 64 * 32 * 9 + classes * 64 * after[0] * after[1]
    model = training_cnn(shape, classes)
    assert count(model) == expected
    assert len(list(model.parameters())) == 3  # no biases: a layer is a tensor
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 30, 45)])
@pytest.mark.parametrize("convolutions", [3, 4])
def test_attacked_lenet_counts_its_parameters_layer_by_layer(shape, convolutions):
    channels, height, width = shape
    side = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2)
    expected = (
        (25 * channels * 12 + 12) + (convolutions - 1) * (25 * 12 * 12 + 12) + (12 * side * 10 + 10)
    )
    model = attacked_lenet(shape, 10, convolutions)
    assert count(model) == expected
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    strides = [layer.stride[0] for layer in model if isinstance(layer, nn.Conv2d)]
    assert strides == [2, 2, 1, 1][:convolutions]
    assert sum(isinstance(layer, nn.Sigmoid) for layer in model) == convolutions


@pytest.mark.parametrize("hidden", [(600, 100), (7,), ()])
def test_mlp_counts_its_parameters_layer_by_layer(hidden):
    widths = [30, *hidden, 2]
    model = mlp(30, 2, hidden)
    assert count(model) == sum(a * b for a, b in itertools.pairwise(widths))
    assert model(torch.zeros(3, 30)).shape == model(torch.zeros(3, 5, 6)).shape == (3, 2)
    assert sum(isinstance(layer, nn.ReLU) for layer in model) == len(hidden)


@pytest.mark.parametrize("half_width", [0.5, 0.03])
def test_init_uniform_draws_every_weight_and_bias_from_its_range(half_width):
    model = attacked_lenet((1, 28, 28), 10)
    assert init_uniform(model, seeded(), half_width) is model
    drawn = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert drawn.abs().max() <= half_width
    assert (
        stats.kstest(drawn.numpy(), stats.uniform(-half_width, 2 * half_width).cdf).pvalue
        > WRONG_ALARM
    )
    biases = torch.cat([p.detach() for p in model.parameters() if p.dim() == 1])
    assert biases.abs().min() > 0


def test_init_glorot_leaves_the_scale_of_a_normalisation_at_one():
    layers = torch.nn.Linear(4, 4), torch.nn.GroupNorm(2, 4), torch.nn.Linear(4, 2)
    model = init_glorot(torch.nn.Sequential(*layers), seeded())
    assert torch.equal(model[1].weight, torch.ones(4)) and not model[1].bias.any()


def test_init_glorot_draws_weights_from_its_range_and_clears_biases():
    model = init_glorot(attacked_lenet((3, 32, 32), 10), seeded())
    fans = {"0.weight": (75, 300), "2.weight": (300, 300), "9.weight": (768, 10)}
    for name, parameter in parameters_of(model).items():
        if name.endswith("bias"):
            assert not parameter.any()
        elif name in fans:
            limit = math.sqrt(6 / sum(fans[name]))
            assert parameter.abs().max() <= limit
            distribution = stats.uniform(-limit, 2 * limit)
            assert stats.kstest(parameter.flatten().numpy(), distribution.cdf).pvalue > WRONG_ALARM


@pytest.mark.parametrize(
    "name, shape",
    [("training_cnn", (1, 28, 28)), ("attacked_lenet", (3, 32, 32)), ("mlp", (4, 5)),
     ("linear", (7,))],
)  # fmt: skip
def test_build_depends_on_its_generator_alone(name, shape):
    torch.manual_seed(1)
    first = parameters_of(build(name, shape, 3, seeded(5)))
    torch.manual_seed(2)
    again = parameters_of(build(name, shape, 3, seeded(5)))
    other = parameters_of(build(name, shape, 3, seeded(6)))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)
    half = max(float(p.abs().max()) for p in first.values())
    assert half <= 0.5 if name == "attacked_lenet" else half < 1
    assert any(n.endswith("bias") for n in first) == (name == "attacked_lenet")


def test_parameters_of_is_detached_and_named():
    model = mlp(4, 2, (3,))
    weights = parameters_of(model)
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert not any(w.requires_grad for w in weights.values())


def test_batch_normalisation_in_training_mode_is_refused_by_name():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"layer '1' \(BatchNorm2d\).*freeze.*GroupNorm"):
        check_per_example(model)
    model.eval()
    check_per_example(model)
    model.train()
    model[1].eval()
    check_per_example(model)


def test_batch_normalisation_without_statistics_is_refused_even_when_frozen():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(InputError, match="normalises over the batch"):
        check_per_example(model)


def test_layers_that_keep_examples_apart_are_allowed():
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(5))
    check_per_example(nn.Sequential(*layers))
    for name, shape in (
        ("training_cnn", (1, 28, 28)),
        ("attacked_lenet", (1, 28, 28)),
        ("mlp", (9,)),
    ):
        check_per_example(build(name, shape, 2, seeded()))


@pytest.mark.parametrize(
    "bad, sentence",
    [
        (lambda: attacked_lenet((1, 28, 28), 10, 5), "convolutions = 5 must be 3"),
        (
            lambda: build("attacked", (1, 28, 28), 9, seeded()),
            r"'attacked' is not one .*mean attacked_lenet",
        ),
        (lambda: build("training_cnn", (30,), 2, seeded()), r"shape \(30,\); use 'mlp'"),
    ],
)
def test_bad_input_gets_one_sentence(bad, sentence):
    with pytest.raises(InputError, match=sentence):
        bad()
