"""Soteria: the features that it drops, by a loop, and where it may stand."""

import pytest
import torch
from compensation_scenes import small_net
from defense_scenes import context
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.representation import feature_scores, soteria


def test_soteria_drops_the_features_with_the_lowest_scores():
    model, x, y = small_net()
    scores = feature_scores(model, x)
    hidden = nn.Sequential(*list(model)[:-1])
    for image, row in zip(x, scores, strict=True):
        for f in range(5):
            moved = image[None].clone().requires_grad_()
            value = hidden(moved)[0, f]
            (slope,) = torch.autograd.grad(value, moved)
            assert float(row[f]) == pytest.approx(
                float((slope.norm() / value.abs()).detach()), rel=1e-4
            )
    gradients = {n: torch.ones(1, 3, *p.shape) for n, p in model.named_parameters()}
    ctx = context(1, model=model, examples=(x[None], y[None]))
    kept = soteria(0.6).per_example(gradients, ctx)
    assert all(torch.equal(kept[n], g) for n, g in gradients.items() if n != "6.weight")
    for row, score in zip(kept["6.weight"][0], scores, strict=True):
        dropped = (row == 0).all(0)
        assert int(dropped.sum()) == 3  # of 5 features those below the 60th percentile
        assert score[dropped].max() < score[~dropped].min()


def test_soteria_stands_at_the_first_weights_only():
    model, x, y = small_net()
    gradients = {n: torch.ones(1, 3, *p.shape) for n, p in model.named_parameters()}
    ctx = context(1, model=model, examples=(x[None], y[None]), iteration=1)
    with pytest.raises(InputError, match="one round of one local iteration"):
        soteria().per_example(gradients, ctx)
    with pytest.raises(InputError, match="no dense layer"):
        feature_scores(nn.Conv2d(1, 1, 3), x)
    assert soteria().per_example(gradients, context(1)) is gradients  # an attacker's replay
