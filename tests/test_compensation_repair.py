"""The spectrum's law against its density, and the repair of an aggregate against numpy."""

import math

import numpy as np
import pytest
import torch
from compensation_scenes import dice
from defense_scenes import context, flat, plan_of, setting
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.compensation import (
    Compensation,
    folded_shape,
    law_distance,
    law_edges,
    law_share,
    rank_one,
    risk_compensated,
    spectrum,
)
from fl_privacy_lib.defenses.slices import SlicePerturbation
from fl_privacy_lib.federated import Tap, simulate


@pytest.mark.parametrize(("variance", "ratio"), [(1.0, 6.0), (0.3, 1.0), (2.0, 1.5), (5.0, 40.0)])
def test_the_law_is_the_integral_of_the_papers_density(variance, ratio):
    low, high = law_edges(variance, ratio)

    def density(x):  # equation 4
        return ratio * math.sqrt(max(0, (x - low) * (high - x))) / (2 * math.pi * variance * x)

    for part in (0.01, 0.3, 0.7, 0.99):
        x = low + part * (high - low)
        expected = integrate.quad(density, low, x, points=[low], limit=200)[0]
        assert law_share(np.array([x]), variance, ratio)[0] == pytest.approx(expected, abs=2e-5)
    assert law_share(np.array([low - 1e-9, high]), variance, ratio) == pytest.approx([0, 1])


def noise_spectrum(w, ratio, seed=0):
    matrix = torch.randn(int(w * ratio), w, generator=dice(seed), dtype=torch.float64)
    return spectrum(matrix)[0].numpy()


def test_the_spectrum_of_noise_follows_the_law_of_the_right_variance_only():
    eigenvalues = noise_spectrum(400, 6)  # as the paper's Q; independent noise on all coordinates
    assert law_distance(eigenvalues, 1.0, 6) <= 0.02
    assert min(law_distance(eigenvalues, v, 6) for v in (0.95, 1.05)) >= 0.03
    assert law_distance(eigenvalues, 100.0, 6) >= 0.9  # m² times too large, m = 10


def test_the_distance_is_scipys_kolmogorov_statistic():
    eigenvalues = noise_spectrum(60, 3)
    expected = stats.kstest(eigenvalues, lambda x: law_share(x, 1.1, 3)).statistic
    assert law_distance(eigenvalues[::-1], 1.1, 3) == pytest.approx(expected)


@given(st.integers(1, 100_000), st.floats(0.2, 40))
@settings(max_examples=200, deadline=None)
def test_padding_honours_every_ratio_and_loses_nothing(size, ratio):
    rows, columns = folded_shape(size, ratio)
    assert (rows - 1) * columns < size <= rows * columns
    if columns > 20 and rows > 20:
        assert rows / columns == pytest.approx(ratio, rel=0.1)


def test_divisors_cannot_honour_a_ratio():
    """The public code's shapes of a LeNet of 15,826 = 2 · 41 · 193 coordinates."""
    shapes = [folded_shape(15_826, q, "divisor") for q in (6, 12, 20)]
    assert shapes == [(386, 41), (7913, 2), (7913, 2)]


@pytest.mark.parametrize("centred", [False, True])
def test_the_second_moment_is_numpys(centred):
    matrix = torch.randn(30, 7, generator=dice(1), dtype=torch.float64) + 2
    m = matrix.numpy()
    expected = np.cov(m, rowvar=False) if centred else m.T @ m / 30
    values, vectors = spectrum(matrix, centred)
    assert (vectors * values @ vectors.T).numpy() == pytest.approx(expected)


def test_the_noise_variance_is_that_of_the_weighted_mean():
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    stage, one = SlicePerturbation(4, 0.5, 2.0), Compensation(2.0, 0.5)
    mean, draws = 0.0, 3000
    ctx = context(3)
    values = {"a": torch.zeros(3, 2), "b": torch.zeros(3, 6)}
    for _ in range(draws):
        stage.begin(ctx)
        sent = torch.cat(list(stage(values, ctx).values()), 1)  # [3, 8]
        mean += float((weights.float() @ sent).square().mean()) / draws
    assert one.noise_variance(weights) == pytest.approx(0.5 * 4 * 0.38)
    assert mean == pytest.approx(one.noise_variance(weights), rel=0.1)
    printed = Compensation(2.0, 0.5, variance="sum").noise_variance(torch.full((10,), 0.1))
    assert printed == pytest.approx(100 * one.noise_variance(torch.full((10,), 0.1)), rel=1e-5)


def repaired_error(seed, common=False, **changes):
    """Return the error of a low-rank matrix plus noise after compensation, over that before."""
    generator = dice(seed)
    rows, columns = folded_shape(4800, 6)
    left = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    right = 2 * torch.randn(1, columns, generator=generator, dtype=torch.float64)
    signal = ((torch.ones_like(left) if common else left) @ right).flatten()
    noise = torch.randn(signal.shape, generator=generator, dtype=torch.float64)
    found = Compensation(1.0, 1.0, **changes).repaired(signal + noise, torch.ones(1))
    return float((found - signal).norm() / noise.norm())


def test_the_right_form_repairs_a_low_rank_aggregate():
    assert all(repaired_error(seed) < 0.5 for seed in range(25))


def test_the_centred_form_destroys_a_common_row():
    assert all(repaired_error(seed, common=True) < 0.5 for seed in range(5))
    assert all(repaired_error(seed, common=True, centred=True) > 1.5 for seed in range(5))


def test_the_repair_is_the_projection_written_out():
    generator = dice(3)
    row = torch.randn(100, generator=generator, dtype=torch.float64) * 3
    one, weights = Compensation(1.0, 0.5, ratio=4.0), torch.full((4,), 0.25)
    c = np.zeros(20 * 5)
    c[:100] = row.numpy()
    c = c.reshape(20, 5)
    low, high = law_edges(0.5 / 4, 4.0)
    values, vectors = np.linalg.eigh(c.T @ c / 20)
    for keep, data in (("outside", (values <= low) | (values >= high)), ("above", values >= high)):
        expected = c @ sum((np.outer(p, p) for p in vectors.T[data]), np.zeros((5, 5)))
        found = Compensation(1.0, 0.5, 4.0, keep=keep).repaired(row, weights)
        assert found.numpy() == pytest.approx(expected.flatten())
    assert torch.equal(Compensation(0.0, 0.5).repaired(row, weights), row)
    assert one.folded(row[:99]).flatten()[99] == 0


def test_the_server_compensates_what_the_clients_sent():
    plan = plan_of(clients=4, participants=4)
    model, train, partition = setting(4)
    tap = Tap("aggregate")
    kinds = [risk_compensated(5, share=0.4, std=0.5, ratio=3.0, compensated=c) for c in (0, 1)]
    plain, repaired = (
        simulate(model, train, partition, plan, d, taps=[tap]).observations[tap].values
        for d in kinds
    )
    row = flat(plain)
    expected = kinds[1].on_aggregate.repaired(row.float(), torch.full((4,), 0.25))
    assert flat(repaired).numpy() == pytest.approx(expected.double().numpy(), abs=1e-5)
    assert not torch.allclose(flat(repaired), row, atol=1e-3)
    with pytest.raises(InputError, match="needs the weights"):
        ctx = context(1)
        ctx.weights = None
        kinds[1].on_aggregate({"w": torch.zeros(1, 4)}, ctx)


def test_a_repair_is_measured_against_signal_and_noise():
    signal, noise = torch.full((60,), 2.0), torch.randn(60, generator=dice(1))
    stage, weights = Compensation(1.0, 1.0, ratio=2.0), torch.ones(1)
    found = stage.errors(signal, noise, weights)
    repaired = stage.repaired(signal + noise, weights)
    assert found["error_ratio"] == pytest.approx(float((repaired - signal).norm() / noise.norm()))
    assert found["zero_ratio"] == pytest.approx(float(signal.norm() / noise.norm()))
    same = Compensation(0.0, 1.0).errors(signal, noise, weights)
    assert same["error_ratio"] == pytest.approx(1.0) and not same["improved"]


def test_a_matrix_of_rank_one_has_rank_one():
    one, equal = (rank_one(30, 7, dice(1), common).reshape(30, 7) for common in (False, True))
    assert torch.linalg.matrix_rank(one) == 1 and one.std() > 0.3
    assert (equal == equal[0]).all() and equal[0].std() > 0.3
