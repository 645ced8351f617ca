"""Gradient descent under compensation: closed forms, a loop in numpy, the proof."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fl_privacy_lib.defenses.compensation import law_edges
from fl_privacy_lib.defenses.descent import Descent
from fl_privacy_lib.defenses.slices import sliced_noise

SMALL = Descent("sum", False, 30, columns=12, draws=1)


def constants(descent):
    """Return d, the first squared gradient, φ, ψ and η, by hand."""
    size = int(descent.ratio * descent.columns) * descent.columns
    variance = (
        descent.share * descent.noise_std**2 * {"sum": 10, "mean": 0.1, "none": 0.1}[descent.repair]
    )
    phi = math.sqrt(size * descent.share * descent.noise_std**2)
    psi = (
        0.0
        if descent.repair == "none"
        else 2 * math.sqrt(size * law_edges(variance, descent.ratio)[1])
    )
    step = 1 / (
        2 + phi * math.sqrt(descent.rounds / 10) + psi ** (2 / 3) * descent.rounds ** (1 / 3)
    )
    return size, size * variance, phi, psi, step


def test_a_gradient_inside_the_printed_interval_never_falls():
    found = replace(SMALL, draws=3).run()
    assert found["mean_squared_gradient"] == pytest.approx([1, 1, 1], rel=1e-12)


def test_without_compensation_the_descent_has_its_closed_form():
    """x shrinks by 1 − η a round, and the noise of a round adds η²γσ²d/10."""
    descent = replace(SMALL, repair="none", columns=30, draws=40)
    _, first, phi, _, step = constants(descent)
    shrunk = (1 - step) ** (2 * np.arange(descent.rounds))
    noise = step**2 * phi**2 / 10 * (1 - shrunk) / (1 - (1 - step) ** 2)
    found = descent.run()["mean_squared_gradient"]
    expected = np.mean(first * shrunk + noise) / first
    assert abs(found.mean() - expected) < 5 * found.std() / math.sqrt(len(found))


@pytest.mark.parametrize("repair", ["none", "mean", "sum"])
def test_the_bound_solves_the_sum_of_the_proof_s_inequality(repair):
    descent = replace(SMALL, repair=repair, rounds=50)
    _, first, phi, psi, step = constants(descent)
    found = descent.run()
    bound = found["bound"][0] * first  # of the mean squared gradient
    fall = (step - step**2) / 2 * bound * descent.rounds
    noise = 2 * step**3 * psi**2 + step**2 * phi**2 / 20
    assert fall == pytest.approx(first / 2 + descent.rounds * noise)
    assert found["over_bound"] == pytest.approx(found["mean_squared_gradient"] / found["bound"])


@pytest.mark.parametrize(("repair", "feedback"), [("mean", False), ("mean", True), ("sum", True)])
def test_a_descent_is_a_loop_over_singular_vectors(repair, feedback):
    """What is left out are singular vectors whose squared values lie between the edges."""
    descent = replace(SMALL, repair=repair, feedback=feedback, rounds=12)
    size, first, _, _, step = constants(descent)
    rows, dice = size // descent.columns, torch.Generator().manual_seed(descent.seed)
    axes = torch.randn(rows, descent.columns, generator=dice, dtype=torch.float64)
    x = math.sqrt(first / descent.columns) * np.linalg.qr(axes.numpy())[0]
    low, high = law_edges(first / size, descent.ratio)
    weights, left, squares = torch.full((10,), 0.1, dtype=torch.float64), np.zeros_like(x), []
    for _ in range(descent.rounds):
        squares.append((x**2).sum())
        noise = sliced_noise(size, descent.share, descent.noise_std, weights, dice).numpy()
        arrived = x + noise.reshape(x.shape) + left
        u, s, v = np.linalg.svd(arrived, full_matrices=False)
        inside = (s**2 / rows > low) & (s**2 / rows < high)
        left_out = (u * (s * inside)) @ v
        left = left_out if feedback else left
        x = x - step * (arrived - left_out)
    found = descent.run()["mean_squared_gradient"]
    assert found == pytest.approx([np.mean(squares) / first], rel=1e-6)
