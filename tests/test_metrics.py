"""Distances and rates: naive loops, closed forms and distributions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import brute_force_match, invert_score_test
from scipy import ndimage
from scipy.stats import norm

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.metrics import matched, mse, ssim, success, wilson_interval

UNIT = st.floats(0, 1, width=32)


def images(shape):
    return hnp.arrays(np.float32, shape, elements=UNIT)


def pair(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.random(shape), rng.random(shape)


def naive_mse(a, b):
    differences = [(float(a[i]) - float(b[i])) ** 2 for i in np.ndindex(a.shape)]
    return sum(differences) / len(differences)


def naive_ssim(a, b):
    """Return Wang et al.'s index of a channel, a 7×7 uniform window averaged where it fits."""
    n, c1, c2, scores = 49, 0.01**2, 0.03**2, []
    for i, j in itertools.product(range(a.shape[0] - 6), range(a.shape[1] - 6)):
        u, v = a[i : i + 7, j : j + 7], b[i : i + 7, j : j + 7]
        cov = ((u - u.mean()) * (v - v.mean())).sum() / (n - 1)
        top = (2 * u.mean() * v.mean() + c1) * (2 * cov + c2)
        scores.append(
            top / ((u.mean() ** 2 + v.mean() ** 2 + c1) * (u.var(ddof=1) + v.var(ddof=1) + c2))
        )
    return sum(scores) / len(scores)


def test_distances_equal_naive_loops_over_any_leading_axes():
    a, b = pair((2, 3, 2, 4, 5))
    for index in np.ndindex(2, 3):
        expected = naive_mse(a[index], b[index])
        assert mse(a, b)[index] == pytest.approx(expected, rel=1e-12)
    assert mse(a, b).shape == (2, 3)
    assert mse(a[0, 0], b[0, 0]).shape == ()


def test_ssim_equals_its_formula_channel_by_channel():
    a, b = pair((2, 3, 9, 11))
    a[1] = ndimage.gaussian_filter(a[1], 1)
    b[1] = np.clip(a[1] + 0.1 * b[1], 0, 1)
    for index in range(2):
        expected = np.mean([naive_ssim(a[index, c], b[index, c]) for c in range(3)])
        assert ssim(a, b)[index] == pytest.approx(expected, abs=1e-12)
    assert ssim(a, b).shape == (2,)


@given(images((2, 1, 8, 8)), images((2, 1, 8, 8)))
@settings(max_examples=60, deadline=None)
def test_every_distance_is_symmetric_and_bounded(a, b):
    for measure in (mse, ssim):
        np.testing.assert_allclose(measure(a, b), measure(b, a), rtol=1e-9, atol=1e-12)
    assert np.all((mse(a, b) >= 0) & (mse(a, b) <= 1))
    assert np.all(np.abs(ssim(a, b)) <= 1 + 1e-9)
    np.testing.assert_array_equal(success(a, b), (mse(a, b) < 0.01) & (ssim(a, b) > 0.6))


@given(images((3, 1, 8, 8)))
@settings(max_examples=60, deadline=None)
def test_an_image_is_at_no_distance_from_itself(a):
    assert not mse(a, a).any()
    np.testing.assert_allclose(ssim(a, a), 1)
    assert success(a, a).all()


def test_float32_images_are_compared_in_float64():
    a = np.full((1, 64, 64), 0.1, np.float32)
    assert mse(a, a + np.float32(1e-4)).dtype == np.float64
    assert float(mse(a, a + np.float32(1e-4))) == pytest.approx(1e-8, rel=1e-3)


def test_success_needs_both_a_small_error_and_the_same_structure():
    rng = np.random.default_rng(0)
    picture = np.zeros((1, 28, 28))
    picture[0, 8:20, 8:20] = 1
    near = np.clip(picture + 0.02 * rng.standard_normal(picture.shape), 0, 1)
    assert success(near, picture)
    flat = np.full((1, 28, 28), 0.5)
    noisy = flat + 0.09 * rng.standard_normal(flat.shape)  # small error, no structure left
    assert mse(noisy, flat) < 0.01 and ssim(noisy, flat) < 0.6 and not success(noisy, flat)
    pale = np.clip(picture * 0.7, 0, 1)  # structure kept, error too large
    assert mse(pale, picture) > 0.01 and ssim(pale, picture) > 0.6 and not success(pale, picture)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_matched_is_the_best_of_all_permutations(batch, seed):
    guess, truth = pair((batch, 2, 3, 3), seed)
    ordered = matched(guess, truth)
    cost = np.array([[naive_mse(g, t) for t in truth] for g in guess])
    assert mse(ordered, truth).sum() == pytest.approx(brute_force_match(cost), rel=1e-9)
    assert sorted(map(bytes, ordered)) == sorted(map(bytes, guess))  # the same images, each once


@given(st.permutations(range(5)), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_matched_undoes_any_order_of_the_batch(order, seed):
    guess, truth = pair((5, 1, 3, 3), seed)
    np.testing.assert_array_equal(matched(truth[order], truth), truth)
    np.testing.assert_array_equal(matched(guess[order], truth), matched(guess, truth))


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(
    "successes, trials", [(0, 1), (1, 1), (0, 16), (16, 16), (3, 16), (500, 1000), (1, 10**6)]
)
def test_wilson_interval_holds_the_rates_that_the_score_test_accepts(successes, trials, confidence):
    low, high = wilson_interval(successes, trials, confidence)
    expected = invert_score_test(successes, trials, norm.ppf((1 + confidence) / 2))
    assert (low, high) == pytest.approx(expected, rel=1e-7, abs=1e-12)
    # without any slack: a bound on the wrong side of the rate is an error bar of negative length
    assert 0 <= low <= successes / trials <= high <= 1


@pytest.mark.parametrize("trials", [1, 7, 1000])
def test_wilson_interval_at_none_and_all_has_a_closed_form(trials):
    z2 = norm.ppf(0.975) ** 2
    assert wilson_interval(0, trials) == pytest.approx((0, z2 / (trials + z2)), abs=1e-15)
    assert wilson_interval(trials, trials) == pytest.approx((trials / (trials + z2), 1), abs=1e-15)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
@settings(max_examples=100, deadline=None)
def test_wilson_interval_mirrors_and_widens(rate):
    successes, trials = rate
    low, high = wilson_interval(successes, trials)
    assert (1 - high, 1 - low) == pytest.approx(
        wilson_interval(trials - successes, trials), abs=1e-12
    )
    wider = wilson_interval(successes, trials, 0.99)
    assert wider[0] <= low + 1e-12 and high <= wider[1] + 1e-12


@pytest.mark.parametrize("successes, trials", [(-1, 5), (6, 5), (0, 0)])
def test_a_rate_that_is_none_is_refused(successes, trials):
    with pytest.raises(InputError, match=f"{successes} successes in {trials} trials"):
        wilson_interval(successes, trials)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, float("nan")])
def test_an_impossible_confidence_is_refused(confidence):
    with pytest.raises(InputError, match="confidence"):
        wilson_interval(1, 2, confidence)
