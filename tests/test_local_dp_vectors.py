"""Vectors under local privacy: laws, means, wrong input, and compressed reports."""

import math

import numpy as np
import pytest
import torch
from local_dp_scenes import WRONG_ALARM, fits, generator, signs_distribution
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.perturbation import (
    Compressed,
    Duchi,
    Flat,
    Hybrid,
    Laplace,
    Piecewise,
    random_projection,
)

VECTORS = [
    Flat(Piecewise, 1.0, 6),
    Flat(Piecewise, 6.0, 6),
    Flat(Hybrid, 1.0, 6),
    Flat(Hybrid, 8.0, 3),
    Flat(Piecewise, 1.0, 6, scaled=False),
    Flat(Hybrid, 6.0, 6, scaled=False),
    Flat(Laplace, 2.0, 6),
    Flat(Duchi, 1.0, 6, reading="published"),
    Flat(Duchi, 1.0, 6),
    Flat(Duchi, 2.0, 5),
    Flat(Duchi, 1.5, 1),
]


@pytest.mark.parametrize("mechanism", VECTORS, ids=str)
def test_vectors_have_their_mean(mechanism):
    n, d = 30_000, mechanism.d
    t = torch.linspace(-1, 0.8, d, dtype=torch.float64)
    drawn = mechanism(t.expand(n, d), generator(11)).numpy()
    sent = mechanism.sampled / d
    mean = t.numpy() * (1 if mechanism.scaled else sent)
    if mechanism.mechanism is Duchi:
        variance = mechanism.duchi_bound() ** 2 - t.numpy() ** 2
        assert np.abs(drawn) == pytest.approx(mechanism.duchi_bound())
    else:  # a coordinate is sent with probability `sent`, and then enlarged
        factor = 1 / sent if mechanism.scaled else 1.0
        variance = factor**2 * sent * (mechanism.inner.variance(t) + t.numpy() ** 2) - mean**2
        assert np.abs(drawn).max() <= factor * mechanism.inner.output_bound() * (1 + 1e-12)
    limit = stats.norm.isf(WRONG_ALARM / 2 / d)
    assert (np.abs(drawn.mean(0) - mean) < limit * np.sqrt(variance / n)).all()
    four = ((drawn - mean) ** 4).mean(0) / variance**2
    ratio = ((drawn - mean) ** 2).mean(0) / variance
    assert (np.abs(ratio - 1) < 1.2 * limit * np.sqrt(np.maximum(four - 1, 1e-4) / n)).all()


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5])
def test_duchis_vectors_have_the_law_of_their_description(d, calibrated):
    t, epsilon, n = np.linspace(-1, 0.7, d), 1.3, 30_000
    mechanism = Flat(Duchi, epsilon, d, reading="calibrated" if calibrated else "published")
    cube, distribution = signs_distribution(t, epsilon, calibrated)
    assert mechanism.duchi_bound() * distribution @ cube == pytest.approx(t)  # unbiased, exactly
    if not calibrated:
        half = 2 ** (d - 1) + (0 if d % 2 else math.comb(d, d // 2) / 2)
        c = half / math.comb(d - 1, (d - 1) // 2 if d % 2 else d // 2)
        assert mechanism.duchi_bound() == pytest.approx(
            c * (math.exp(epsilon) + 1) / (math.exp(epsilon) - 1)
        )
    drawn = mechanism(torch.tensor(t).expand(n, d), generator(d)).numpy()
    code = ((drawn > 0) @ (2 ** np.arange(d)[::-1])).astype(int)
    assert fits(np.bincount(code, minlength=2**d), distribution)


def test_the_bound_of_a_long_vector():
    exact = [Flat(Duchi, 50.0, d).duchi_bound() for d in (10_000, 9_999)]
    assert exact == pytest.approx([math.sqrt(math.pi / 2 * 10_000)] * 2, rel=0.01)  # Stirling
    assert math.isfinite(Flat(Duchi, 1e-3, 10_000).duchi_bound())


def test_how_many_coordinates_are_sent():
    for epsilon, sent in [(0.1, 1), (4.9, 1), (5.0, 2), (7.4, 2), (12.6, 5), (50.0, 8)]:
        mechanism = Flat(Piecewise, epsilon, 8)
        drawn = mechanism(torch.full((50, 8), 0.3), generator())
        assert ((drawn != 0).sum(1) == sent).all()
        assert mechanism.sampled == sent
        assert mechanism.inner.epsilon == pytest.approx(epsilon / sent)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Flat(Piecewise, 0.0, 3), "epsilon = 0.0"),
        (lambda: Flat(Piecewise, 1.0, 0), "d = 0 must be a whole number of at least 1"),
        (
            lambda: Flat(Laplace, 1.0, 3, scaled=False),
            "Laplace sends all coordinates and has no factor d",
        ),
        (lambda: Flat(Duchi, 1.0, 3, scaled=False), "Duchi sends all"),
        (
            lambda: Flat(Hybrid, 1.0, 3)(torch.zeros(2, 4), generator()),
            r"\[2, 4\]: give one row per client, \[n, 3\]",
        ),
        (lambda: random_projection(3, 4, generator()), "q = 4 must lie between 1 and 3"),
        (
            lambda: Compressed(Flat(Piecewise, 1.0, 2), torch.zeros(3, 4))(
                torch.zeros(1, 4), generator()
            ),
            r"\[1, 3\]: give one row per client, \[n, 2\]",
        ),
    ],
)
def test_wrong_vectors_say_what_to_do(wrong, says):
    with pytest.raises(InputError, match=says):
        wrong()


def test_every_flat_form_enforces_the_range():
    for mechanism in VECTORS:
        with pytest.raises(InputError, match=r"the largest .value. is 2, above 1"):
            mechanism(torch.full((4, mechanism.d), 2.0), generator())


def test_no_clients_are_no_reports():
    for mechanism in VECTORS:
        assert mechanism(torch.zeros(0, mechanism.d), generator()).shape == (0, mechanism.d)


def test_compressed_recovers_the_projection_of_the_mean():
    n, d, q = 40_000, 8, 3
    matrix = random_projection(d, q, generator(1)) * math.sqrt(q / d)
    t = torch.linspace(-0.4, 0.5, d, dtype=torch.float64)
    y = (matrix @ t).numpy()
    assert np.abs(y).max() < 1  # nothing to clip here
    mechanism = Compressed(Flat(Piecewise, 2.0, q), matrix)
    drawn = mechanism(t.expand(n, d), generator(2))
    reports = mechanism.inner(t.expand(n, d) @ matrix.T, generator(2))
    assert torch.allclose(drawn.mean(0), mechanism.recover(reports.mean(0)))
    inverse = np.linalg.inv(matrix.numpy() @ matrix.numpy().T)
    inverse = (
        matrix.numpy().T @ inverse
    )  # [d, q], the pseudo-inverse of a matrix with independent rows
    assert mechanism.inverse.numpy() == pytest.approx(inverse)
    # one of q coordinates is sent, q times as large: E[r rᵀ] = q diag(E[Y²])
    covariance = q * np.diag(Piecewise(2.0).variance(y) + y**2) - np.outer(y, y)
    spread = np.sqrt(np.diag(inverse @ covariance @ inverse.T))
    limit = stats.norm.isf(WRONG_ALARM / 2 / d)
    assert (np.abs(drawn.mean(0).numpy() - inverse @ y) < limit * spread / math.sqrt(n)).all()
    assert drawn.std(0).numpy() == pytest.approx(spread, rel=0.05)
    whole = Compressed(
        Flat(Laplace, 1e9, d), math.sqrt(0.01 * d) * random_projection(d, d, generator(3))
    )
    assert torch.allclose(whole(t[None], generator()), t[None], atol=1e-5)  # q = d loses nothing


def test_compressed_clips_what_it_projects():
    mechanism = Compressed(Flat(Piecewise, 1.0, 1), torch.ones(1, 4, dtype=torch.float64))
    far, at_the_end = (mechanism(torch.full((5, 4), v), generator()) for v in (1.0, 0.25))
    assert far.shape == (5, 4) and (far == at_the_end).all()


def test_a_projection_keeps_lengths_on_average():
    ones = torch.ones(5, dtype=torch.float64)
    squares = torch.stack(
        [(random_projection(5, 4, generator(s)) @ ones).square().sum() for s in range(2000)]
    )
    # each is 5 χ²₄/4: mean 5, variance 25/2
    assert abs(float(squares.mean()) - 5) < stats.norm.isf(WRONG_ALARM / 2) * math.sqrt(12.5 / 2000)
