"""Local mechanisms: probabilities against definitions, draws, and moments against integrals.

A statistical test fails wrongly with probability WRONG_ALARM at most; its seed is fixed, so it does
so always or never."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_dp_scenes import ONE_DIMENSIONAL, WRONG_ALARM, by_flipping, fits, generator
from scipy import stats
from scipy.integrate import quad

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.perturbation import (
    Duchi,
    Hybrid,
    Laplace,
    Piecewise,
)
from fl_privacy_lib.defenses.selection import (
    READINGS,
    Exponential,
    PerturbedEncoding,
    PerturbedSampling,
    RandomChoice,
)
from fl_privacy_lib.defenses.values import HYBRID_FROM

EPSILONS = st.floats(0.01, 50)


def all_selections(epsilon, k):
    private = [Exponential(epsilon), PerturbedSampling(epsilon, k)]
    return [
        *private,
        *(PerturbedEncoding(epsilon, k, reading) for reading in READINGS),
        PerturbedSampling(math.inf, k),
        RandomChoice(),
    ]


# ---- selection: the distributions, from their definitions ----


@given(st.integers(2, 7), st.data(), st.floats(0.01, 8), st.sampled_from(READINGS))
@settings(max_examples=40, deadline=None)
def test_encoding_has_the_law_of_flipped_bits(d, data, epsilon, reading):
    k = data.draw(st.integers(1, d - 1))
    status = np.array(data.draw(st.permutations([1] * k + [0] * (d - k))))
    mechanism = PerturbedEncoding(epsilon, k, reading)
    keep = mechanism.keep_probability(d)
    if reading != "calibrated":
        power = epsilon if reading == "e_eps" else epsilon / 2
        assert keep == pytest.approx(math.exp(power) / (1 + math.exp(power)), rel=1e-12)
    assert mechanism.probabilities_given(status) == pytest.approx(
        by_flipping(status, keep), rel=1e-9, abs=1e-15
    )


@given(st.integers(2, 9), st.data(), st.floats(0.01, 20))
@settings(max_examples=40, deadline=None)
def test_ranking_and_sampling_have_their_laws(d, data, epsilon):
    ranks = data.draw(st.permutations(range(1, d + 1)))
    weights = [math.exp(epsilon * z / (d - 1)) for z in ranks]
    assert Exponential(epsilon).probabilities_given(ranks)[:d] == pytest.approx(
        np.array(weights) / sum(weights), rel=1e-12
    )
    k = data.draw(st.integers(1, d))
    status = np.array(ranks) > d - k
    top = math.exp(epsilon) * k / (d - k + math.exp(epsilon) * k)
    expected = [top / k if one else (1 - top) / (d - k) for one in status]
    assert PerturbedSampling(epsilon, k).probabilities_given(status)[:d] == pytest.approx(
        expected, rel=1e-6
    )
    assert PerturbedSampling(math.inf, k).probabilities_given(status)[:d] == pytest.approx(
        status / k
    )
    assert RandomChoice().probabilities_given(status) == pytest.approx(
        np.append(np.full(d, 1 / d), 0)
    )


@given(st.lists(st.integers(0, 2), min_size=2, max_size=5), st.data(), st.floats(0.1, 5))
@settings(max_examples=40, deadline=None)
def test_ties_have_the_mean_law_of_all_orders(scores, data, epsilon):
    d = len(scores)
    k = data.draw(st.integers(1, d - 1))
    orders = [
        o for o in itertools.permutations(range(d)) if sorted(scores) == [scores[j] for j in o]
    ]
    for mechanism in all_selections(epsilon, k):
        distributions = []
        for order in orders:
            ranks = np.empty(d, dtype=int)
            ranks[list(order)] = np.arange(1, d + 1)
            distributions.append(
                mechanism.probabilities_given(
                    ranks if isinstance(mechanism, Exponential) else ranks > d - k
                )
            )
        assert mechanism.probabilities_given(scores) == pytest.approx(
            np.mean(distributions, axis=0), rel=1e-9, abs=1e-15
        )


@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 50.0, 500.0])
@pytest.mark.parametrize(
    ("d", "k"), [(2, 1), (123, 12), (10_000, 1), (10_000, 1000), (10_000, 9999)]
)
def test_laws_stay_laws_at_the_extremes(epsilon, d, k):
    for mechanism in all_selections(epsilon, k):
        distribution = mechanism.rank_probabilities(d)
        assert np.isfinite(distribution).all() and (distribution >= 0).all()
        assert math.fsum(distribution) == pytest.approx(1, rel=1e-10)
        assert (np.diff(distribution[:-1]) >= 0).all()  # a larger score is never less likely


# ---- selection: the draws ------------------------------------------------------------


@pytest.mark.parametrize(
    "scores", [[0.3, 0.1, 0.9, 0.5, 0.2], [0, 0.7, 0, 0, 0.7], [1] * 5, [0, 0, 0.4, 0.1, 0]]
)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_draws_follow_the_law_with_and_without_ties(scores, k):
    rows = torch.tensor(scores, dtype=torch.float32).expand(20_000, 5)
    for mechanism in all_selections(1.2, k):
        chosen = mechanism(rows, generator(k))
        observed = np.bincount(np.where(chosen < 0, 5, chosen), minlength=6)
        assert fits(observed, mechanism.probabilities_given(scores)), mechanism


def test_a_top_k_of_all_is_uniform_among_what_is_sent():
    rows = torch.rand(1, 4, generator=generator(6)).expand(20_000, 4)
    for mechanism in (
        PerturbedSampling(math.inf, 4),
        PerturbedSampling(2.0, 4),
        PerturbedEncoding(0.5, 4, "e_eps"),
    ):
        chosen = mechanism(rows, generator(7))
        none = mechanism.rank_probabilities(4)[-1]
        distribution = np.append(np.full(4, (1 - none) / 4), none)
        assert fits(np.bincount(np.where(chosen < 0, 4, chosen), minlength=5), distribution)


@given(st.integers(2, 12), st.integers(0, 40), st.data(), st.floats(0.1, 50))
@settings(max_examples=60, deadline=None)
def test_every_row_is_chosen_for_by_itself(d, n, data, epsilon):
    k, seed = data.draw(st.integers(1, d - 1)), data.draw(st.integers(0, 1000))
    scores = torch.randint(0, 5, (n, d), generator=generator(seed)).float()
    for mechanism in all_selections(epsilon, k):
        chosen = mechanism(scores, generator(seed))
        assert chosen.shape == (n,) and chosen.dtype == torch.int64
        assert ((chosen >= -1) & (chosen < d)).all()
        for row, j in zip(scores.tolist(), chosen.tolist(), strict=True):
            assert j >= 0 or isinstance(mechanism, PerturbedEncoding)
            assert mechanism.epsilon != math.inf or row[j] >= sorted(row)[d - k]


def test_the_largest_is_found_among_ten_thousand():
    scores = torch.rand(20, 10_000, generator=generator(5))
    assert (PerturbedSampling(math.inf, 1)(scores, generator()) == scores.argmax(1)).all()
    assert (PerturbedSampling(50.0, 1)(scores, generator()) == scores.argmax(1)).all()
    assert (PerturbedEncoding(50.0, 1)(scores, generator()) == scores.argmax(1)).all()
    assert (
        Exponential(500.0)(scores[:, :9], generator()) == scores[:, :9].argmax(1)
    ).all()  # e^62 from rank to rank
    top = scores.topk(1000, dim=1).values[:, -1]
    for mechanism in (
        PerturbedSampling(math.inf, 1000),
        PerturbedSampling(50.0, 1000),
        PerturbedEncoding(50.0, 1000, "e_eps"),
    ):
        chosen = mechanism(scores, generator())
        assert (scores.gather(1, chosen[:, None])[:, 0] >= top).all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Exponential(0.0), "epsilon = 0.0 must be a finite number greater than 0"),
        (lambda: PerturbedSampling(-1.0, 2), "epsilon = -1.0"),
        (lambda: PerturbedEncoding(math.nan, 2), "epsilon = nan"),
        (lambda: Exponential(501.0), "between 0 and 500"),
        (lambda: PerturbedSampling(math.inf, 0), "k = 0 must be a whole number of at least 1"),
        (lambda: PerturbedSampling(1.0, 1.5), "k = 1.5 must be a whole number"),
        (lambda: PerturbedEncoding(1.0, 1, "e_epsilon"), "did you mean e_eps"),
        (
            lambda: PerturbedSampling(1.0, 4)(torch.rand(2, 3), generator()),
            "k = 4 is more than the d = 3 dimensions",
        ),
        (
            lambda: Exponential(1.0)(torch.rand(2, 1), generator()),
            "d = 1 leaves nothing to select from",
        ),
        (lambda: PerturbedEncoding(1.0, 1).probabilities_given([1]), "d = 1 leaves nothing"),
        (lambda: PerturbedEncoding(1.0, 3).rank_probabilities(3), "k = d = 3 puts every dimension"),
        (
            lambda: PerturbedSampling(math.inf, 1)(
                torch.tensor([[0.0, 1.0], [math.nan, 1.0]]), generator()
            ),
            "scores hold NaN or infinity, which cannot be ranked",
        ),
        (
            lambda: Exponential(1.0)(torch.tensor([[0.0, math.inf]]), generator()),
            "scores hold NaN or infinity, which cannot be ranked",
        ),
        (
            lambda: PerturbedSampling(math.inf, 1)(torch.rand(3), generator()),
            r"\[3\]: give one row per client",
        ),
    ],
)
def test_wrong_selections_say_what_to_do(wrong, says):
    with pytest.raises(InputError, match=says):
        wrong()


# ---- one value -----------------------------------------------------------------------


def moment(mechanism, t, power):
    """E[output^power]: the atoms added up, the density integrated between the places where it
    jumps.
    """
    duchi = Duchi(mechanism.epsilon).output_bound()
    has_atoms = isinstance(mechanism, Duchi | Hybrid)
    total = (
        sum(y**power * math.exp(mechanism.log_prob(y, t)) for y in (-duchi, duchi))
        if has_atoms
        else 0.0
    )
    if isinstance(mechanism, Duchi):
        return total
    density = lambda y: y**power * math.exp(mechanism.log_prob(y, t))  # noqa: E731
    if isinstance(mechanism, Laplace):
        reach = 100 / mechanism.epsilon
        return (
            quad(density, t - reach, t, epsabs=1e-12, limit=200)[0]
            + quad(density, t, t + reach, limit=200)[0]
        )
    end = mechanism.output_bound()
    wide, narrow = (
        Piecewise(mechanism.epsilon).output_bound() + 1,
        Piecewise(mechanism.epsilon).output_bound() - 1,
    )
    cuts = [-end, (wide * t - narrow) / 2, (wide * t + narrow) / 2, end]
    return total + sum(quad(density, a, b)[0] for a, b in itertools.pairwise(cuts) if b > a)


@given(st.sampled_from(ONE_DIMENSIONAL), st.floats(0.05, 12), st.floats(-1, 1))
@settings(max_examples=80, deadline=None)
def test_moments_are_those_of_the_law(kind, epsilon, t):
    mechanism = kind(epsilon)
    second = float(mechanism.variance(t)) + t**2
    assert moment(mechanism, t, 0) == pytest.approx(1, rel=1e-7)
    assert moment(mechanism, t, 1) == pytest.approx(t, abs=1e-7 * math.sqrt(second))
    assert moment(mechanism, t, 2) == pytest.approx(second, rel=1e-6)


def test_variances_are_the_printed_ones():
    e, t = 1.7, 0.4
    half = math.exp(e / 2)
    piecewise = t**2 / (half - 1) + (half + 3) / (3 * (half - 1) ** 2)
    duchi = ((math.exp(e) + 1) / (math.exp(e) - 1)) ** 2 - t**2
    assert Piecewise(e).variance(t) == pytest.approx(piecewise)
    assert Duchi(e).variance(t) == pytest.approx(duchi)
    assert Hybrid(e).variance(t) == pytest.approx((1 - 1 / half) * piecewise + duchi / half)
    assert Hybrid(e).variance(0.9) == pytest.approx(
        Hybrid(e).variance(0.0)
    )  # above ε* it is constant
    assert Laplace(e).variance(t) == pytest.approx(8 / e**2)
    assert HYBRID_FROM == pytest.approx(0.61, abs=0.005)
    assert Hybrid(0.6).variance(t) == Duchi(0.6).variance(t)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", ONE_DIMENSIONAL)
def test_draws_follow_the_law_of_the_output(kind, epsilon):
    mechanism, n, atom = kind(epsilon), 40_000, Duchi(epsilon).output_bound()
    atoms = [-atom, atom] if kind in (Duchi, Hybrid) else []
    end = min(mechanism.output_bound(), 12 / epsilon + 1) * (1 + 1e-9)
    edges = np.linspace(-end, end, 14)
    for t in (-1.0, -0.3, 0.0, 0.8, 1.0):
        drawn = mechanism(torch.full((n,), t, dtype=torch.float64), generator(7)).numpy()
        assert np.abs(drawn).max() <= mechanism.output_bound() * (1 + 1e-12)
        distribution = [mass(mechanism, t, *cell) for cell in itertools.pairwise(edges)]
        distribution += np.exp(mechanism.log_prob(atoms, t)).tolist()
        counts = [
            *np.histogram(drawn[~np.isin(drawn, atoms)], edges)[0],
            *((drawn == y).sum() for y in atoms),
        ]
        common = np.array(distribution) * n > 10  # the others are counted together
        rest = max(0.0, 1 - np.array(distribution)[common].sum())
        distribution, counts = (
            np.append(np.array(distribution)[common], rest),
            np.append(np.array(counts)[common], 0),
        )
        counts[-1] = n - counts.sum()
        assert fits(counts, distribution / distribution.sum())


def mass(mechanism, t, low, high):
    """P(low < output < high) without atoms, by the midpoint rule."""
    grid = np.linspace(low, high, 20_001)
    return float(np.exp(mechanism.log_prob((grid[1:] + grid[:-1]) / 2, t)).mean() * (high - low))


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", ONE_DIMENSIONAL)
def test_draws_have_their_mean_and_variance(kind, epsilon):
    mechanism, n, limit = (
        kind(epsilon),
        40_000,
        stats.norm.isf(WRONG_ALARM / 20),
    )  # 5 values, 2 tests, 2 sides
    for t in (-1.0, -0.3, 0.0, 0.8, 1.0):
        drawn = mechanism(torch.full((n,), t, dtype=torch.float64), generator(8)).numpy()
        off = (drawn - t) / math.sqrt(float(mechanism.variance(t)))
        assert abs(off.mean()) < limit / math.sqrt(n)
        assert abs(np.mean(off**2) - 1) < limit * math.sqrt(max(np.mean(off**4) - 1, 1e-4) / n)


@given(
    st.sampled_from(ONE_DIMENSIONAL),
    EPSILONS,
    st.lists(st.floats(-1, 1), max_size=20),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_shape_and_type_and_bound_are_kept(kind, epsilon, values, double):
    t = torch.tensor(values, dtype=torch.float64 if double else torch.float32)
    drawn = kind(epsilon)(t, generator())
    assert drawn.shape == t.shape and drawn.dtype == t.dtype and drawn.isfinite().all()
    assert (drawn.abs() <= kind(epsilon).output_bound() * (1 + 1e-6)).all()
    assert (kind(epsilon).variance(t) >= 0).all()


@pytest.mark.parametrize("kind", ONE_DIMENSIONAL)
def test_whole_numbers_are_refused(kind):
    """What comes back has the values' type: rounded, it would be biased."""
    with pytest.raises(InputError, match="whole numbers"):
        kind(1.0)(torch.ones(3, dtype=torch.int64), generator())


def test_values_outside_are_refused():
    outside = torch.tensor([0.5, -3.25, 1.5])
    for kind in ONE_DIMENSIONAL:
        with pytest.raises(InputError, match=r"3\.25, above 1: scale or clip the values"):
            kind(1.0)(outside, generator())
        with pytest.raises(InputError, match="NaN or infinity"):
            kind(1.0)(torch.tensor([math.inf]), generator())
        for epsilon in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(InputError, match="epsilon"):
                kind(epsilon)
