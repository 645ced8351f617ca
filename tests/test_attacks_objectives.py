"""The objectives of gradient matching: distances, scales, priors, several observations."""

import math

import numpy as np
import pytest
import torch
from attack_scenes import SHAPE, lenet, observe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fl_privacy_lib.attacks.objective import (
    DISTANCES,
    Evidence,
    matching_objective,
    total_variation,
)
from fl_privacy_lib.defenses import non_private
from fl_privacy_lib.models import parameters_of


def gradients(seed, rows=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (4, 3), "b": (4,), "k": (2, 1, 3, 3), "scalar": ()}
    return {
        n: torch.randn(rows, *s, generator=generator, dtype=torch.float64)
        for n, s in shapes.items()
    }


def by_hand(kind, seen, target):
    """Return the distance of one row, from lists of numbers."""
    pairs = [(np.ravel(seen[n].numpy()), np.ravel(target[n].numpy())) for n in target]
    angle = lambda a, b: 1 - a @ b / math.sqrt((a @ a) * (b @ b))  # noqa: E731
    whole = [np.concatenate(side) for side in zip(*pairs, strict=True)]
    return {
        "squared": sum(((a - b) ** 2).sum() for a, b in pairs),
        "relative": sum(((a - b) ** 2).sum() for a, b in pairs)
        / sum((b**2).sum() for _, b in pairs),
        "cosine": angle(*whole),
        "layer_cosine": np.mean([angle(a, b) for a, b in pairs]),
    }[kind]


@pytest.mark.parametrize("kind", DISTANCES)
def test_every_distance_is_what_its_name_says_row_by_row(kind):
    seen, target = gradients(0), gradients(1)
    found = DISTANCES[kind](seen, target)
    for row in range(3):
        expected = by_hand(
            kind, {n: g[row] for n, g in seen.items()}, {n: g[row] for n, g in target.items()}
        )
        assert float(found[row]) == pytest.approx(expected, rel=1e-12)
    assert DISTANCES[kind](target, target).abs().max() < 1e-12


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_what_a_scale_changes(factors, seed):
    seen, target = gradients(seed), gradients(seed + 1)
    whole = {n: factors[0] * g for n, g in target.items()}
    each = {n: f * g for f, (n, g) in zip(factors, target.items(), strict=True)}
    close = lambda a, b: torch.allclose(a, b, rtol=1e-9)  # noqa: E731
    assert close(DISTANCES["cosine"](seen, whole), DISTANCES["cosine"](seen, target))
    assert close(DISTANCES["layer_cosine"](seen, each), DISTANCES["layer_cosine"](seen, target))
    both = {n: factors[0] * g for n, g in seen.items()}
    assert close(DISTANCES["relative"](both, whole), DISTANCES["relative"](seen, target))
    assert close(
        DISTANCES["squared"](both, whole), factors[0] ** 2 * DISTANCES["squared"](seen, target)
    )
    nothing = {n: torch.zeros_like(g) for n, g in seen.items()}
    assert close(DISTANCES["relative"](nothing, target), torch.ones(3, dtype=torch.float64))


def test_a_tensor_of_which_nothing_is_seen_has_no_say_in_the_layer_cosine():
    seen, target = gradients(0), gradients(1)
    target["b"][:] = 0
    fewer = {n: g for n, g in target.items() if n != "b"}
    assert torch.allclose(
        DISTANCES["layer_cosine"](seen, target),
        DISTANCES["layer_cosine"]({n: seen[n] for n in fewer}, fewer),
    )


def test_the_total_variation_is_the_mean_step_between_neighbours():
    images = torch.rand(2, 3, 2, 5, 4, dtype=torch.float64)
    for row in range(2):
        planes = images[row].flatten(0, 1).tolist()
        down = [abs(p[y + 1][x] - p[y][x]) for p in planes for y in range(4) for x in range(4)]
        across = [abs(p[y][x + 1] - p[y][x]) for p in planes for y in range(5) for x in range(3)]
        assert float(total_variation(images)[row]) == pytest.approx(
            np.mean(down) + np.mean(across), rel=1e-12
        )
    assert total_variation(torch.full((1, 1, 1, 4, 4), 0.3)) == 0
    assert total_variation(torch.tensor([[[[[0.0, 0.5]]]]])) == 0.5  # a single row of pixels


class Smooth(nn.Module):
    """Two pixels, three classes, curved everywhere."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weight = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(x.flatten(1)) @ self.weight.T + self.bias


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("joint", [False, True])
def test_the_slope_of_the_objective_is_its_derivative(distance, joint):
    model, shape, batch, rows = Smooth(), (1, 1, 2), 2, 2
    weights = parameters_of(model)
    view = lambda g: {n: v.mean(1) for n, v in g.items()}  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64)  # noqa: E731
    zeros = {"weight": draw(rows, 3, 2) > -1, "bias": draw(rows, 3) > -1}
    seen = [
        Evidence(
            {n: w * k for n, w in weights.items()},
            {n: draw(*z.shape) * z for n, z in zeros.items()},
            view,
            skip_zeros=k == 1,
        )
        for k in (1, 0.5)
    ]
    labels = None if joint else torch.tensor([[0, 2], [1, 1]])
    x = draw(rows, batch * 2 + (batch * 3 if joint else 0))
    value_of = lambda tv: matching_objective(  # noqa: E731
        model, seen, labels, shape, batch_size=batch, distance=distance, tv=tv
    )(torch.arange(rows))
    value, slope = value_of(0.7)(x)
    for row in range(rows):
        for i in range(x.shape[1]):
            nudge = torch.zeros_like(x)
            nudge[row, i] = 1e-6
            up, down = value_of(0.7)(x + nudge)[0], value_of(0.7)(x - nudge)[0]
            assert float(slope[row, i]) == pytest.approx(
                float((up - down)[row]) / 2e-6, rel=1e-5, abs=1e-7
            )
    prior = total_variation(x[:, :4].reshape(rows, batch, 1, 1, 2))
    assert torch.allclose(value - value_of(0.0)(x)[0], 0.7 * prior)


def test_the_objective_of_several_observations_is_their_sum():
    seen, images, labels = observe(non_private(), victims=2, rounds=3, local_lr=0.5)
    view = lambda g: {n: v.mean(1) for n, v in g.items()}  # noqa: E731

    def evidence(r):
        targets = {n: torch.stack([row[r].values[n][0] for row in seen]) for n in seen[0][r].values}
        return Evidence(seen[0][r].weights, targets, view)

    rows, x = torch.arange(2), torch.rand(2, 196)
    each = [matching_objective(lenet(), [evidence(r)], labels, SHAPE)(rows)(x) for r in range(3)]
    value, slope = matching_objective(lenet(), [evidence(r) for r in range(3)], labels, SHAPE)(
        rows
    )(x)
    torch.testing.assert_close(value, sum(e[0] for e in each))
    torch.testing.assert_close(slope, sum(e[1] for e in each), rtol=1e-3, atol=1e-4)
    at_truth = matching_objective(lenet(), [evidence(r) for r in range(3)], labels, SHAPE)(rows)(
        images.flatten(1)
    )[0]
    assert (at_truth < 1e-6).all()
    assert not torch.equal(seen[0][0].weights["0.weight"], seen[0][2].weights["0.weight"])
