"""The exact ε of the local mechanisms: closed form, enumeration and quadrature agree, and the
table comes out.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_dp_scenes import ONE_DIMENSIONAL, by_flipping, generator, signs_distribution
from scipy.integrate import quad

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.audit import local_statement
from fl_privacy_lib.audit.local import exact_epsilons, selection_epsilon, value_epsilon
from fl_privacy_lib.defenses.perturbation import (
    Compressed,
    Duchi,
    Flat,
    Piecewise,
    random_projection,
)
from fl_privacy_lib.defenses.selection import (
    Exponential,
    PerturbedEncoding,
    PerturbedSampling,
    RandomChoice,
)

BUDGETS = (0.5, 1, 2, 4)
# d, k (the data sets' k is 0.1 d): exact ε of PE with p = e^ε/(1 + e^ε) at the four budgets
ENCODING = {
    (2, 1): (0.664, 1.311, 2.519, 4.666),
    (10, 1): (0.571, 1.173, 2.407, 4.643),
    (32, 3): (0.520, 1.050, 2.137, 4.259),
    (114, 11): (0.505, 1.013, 2.036, 4.075),
    (123, 12): (0.505, 1.012, 2.033, 4.069),
    (300, 30): (0.502, 1.005, 2.013, 4.028),
}


def by_quadrature(epsilon, d, k):
    """PE's exact ε in another way: E[1/(1 + W)] and E[1/(2 + W)] as integrals of W's
    generating function.
    """
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    others = lambda s: (1 - p + p * s) ** (k - 1) * (p + (1 - p) * s) ** (d - k - 1)  # noqa: E731
    a = quad(others, 0, 1, epsabs=1e-13)[0]
    b = quad(lambda s: s * others(s), 0, 1, epsabs=1e-13)[0]
    return epsilon + math.log((p * a + (1 - p) * b) / ((1 - p) * a + p * b))


def largest_ratio(distributions):
    """The naive maximum over all pairs of inputs and all outputs."""
    pairs = itertools.permutations(distributions, 2)
    return max(
        math.log(a / b) for one, other in pairs for a, b in zip(one, other, strict=True) if a > 0
    )


def k_hot(d, k):
    return [np.isin(range(d), ones) for ones in itertools.combinations(range(d), k)]


# ---- selection -----------------------------------------------------------------------


@pytest.mark.parametrize(("d", "k"), ENCODING)
def test_encoding_exceeds_its_claim_by_this_much(d, k):
    for claimed, exact in zip(BUDGETS, ENCODING[d, k], strict=True):
        found = selection_epsilon(PerturbedEncoding(claimed, k, "e_eps"), d)
        assert found == pytest.approx(exact, abs=5.01e-4)
        assert found == pytest.approx(by_quadrature(claimed, d, k), rel=1e-9)
        assert claimed < found <= claimed + math.log(2)


def test_the_counter_example_by_hand():
    p = math.e / (1 + math.e)
    ratio = p * (1 + p) / ((1 - p) * (2 - p))
    assert math.log(ratio) == pytest.approx(1.3106, abs=5e-5)
    assert selection_epsilon(PerturbedEncoding(1.0, 1, "e_eps"), 2) == pytest.approx(
        math.log(ratio), rel=1e-12
    )
    distributions = [by_flipping(np.array(status), p) for status in ((1, 0), (0, 1))]
    assert largest_ratio(distributions) == pytest.approx(math.log(ratio), rel=1e-12)


@given(st.integers(2, 6), st.data(), st.floats(0.01, 20))
@settings(max_examples=40, deadline=None)
def test_closed_form_and_enumeration_agree(d, data, epsilon):
    k = data.draw(st.integers(1, d))
    mechanisms = [
        Exponential(epsilon),
        PerturbedSampling(epsilon, k),
        PerturbedEncoding(epsilon, k, "e_eps"),
        PerturbedEncoding(epsilon, k, "e_half_eps"),
        PerturbedSampling(math.inf, k),
        RandomChoice(),
    ]
    if k < d:
        mechanisms.append(PerturbedEncoding(epsilon, k))
    for mechanism in mechanisms:
        closed = selection_epsilon(mechanism, d)
        one_input = k == d and hasattr(mechanism, "k")
        ranked = isinstance(mechanism, Exponential)
        inputs = (
            itertools.permutations(range(d)) if ranked else k_hot(d, getattr(mechanism, "k", 1))
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log([mechanism.probabilities_given(scores) for scores in inputs])
            enumerated = np.nanmax(logs.max(0) - logs.min(0))  # NaN: impossible from all inputs
        assert closed == pytest.approx(enumerated, rel=1e-9, abs=1e-12)
        assert not one_input or closed == 0.0


@given(st.integers(2, 6), st.data(), st.floats(0.01, 8))
@settings(max_examples=30, deadline=None)
def test_encoding_by_brute_force_over_bits_and_pairs(d, data, epsilon):
    k = data.draw(st.integers(1, d - 1))
    mechanism = PerturbedEncoding(epsilon, k, data.draw(st.sampled_from(["e_eps", "e_half_eps"])))
    keep = mechanism.keep_probability(d)
    statuses = k_hot(d, k)
    found = largest_ratio([by_flipping(status, keep) for status in statuses])
    assert selection_epsilon(mechanism, d) == pytest.approx(found, rel=1e-7)


LARGE = [(2, 1), (123, 12), (10_000, 1), (10_000, 1000), (10_000, 9_999)]


@pytest.mark.parametrize(("d", "k"), LARGE)
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 50.0])
def test_the_tight_are_tight_and_the_calibrated_is(d, k, epsilon):
    calibrated = PerturbedEncoding(epsilon, k)
    for mechanism in (Exponential(epsilon), PerturbedSampling(epsilon, k), calibrated):
        assert selection_epsilon(mechanism, d) == pytest.approx(epsilon, rel=1e-9)
    assert selection_epsilon(PerturbedEncoding(epsilon, k, "e_eps"), d) > epsilon
    assert selection_epsilon(PerturbedEncoding(epsilon, k, "e_half_eps"), d) < epsilon
    assert selection_epsilon(RandomChoice(), d) == pytest.approx(0, abs=1e-12)
    assert selection_epsilon(PerturbedSampling(math.inf, k), d) == math.inf


def test_calibrated_probabilities():
    assert PerturbedEncoding(1.0, 12).keep_probability(123) == pytest.approx(0.7287, abs=5e-5)
    assert PerturbedEncoding(1.0, 1).keep_probability(2) == pytest.approx(0.6809, abs=5e-5)


def test_a_calibrated_encoding_of_a_pair_in_closed_form():
    """d = 2, k = 1: p(1 + p) = e^ε (1 - p)(2 - p) is a quadratic equation in p."""
    e = math.exp(0.7)
    root = (1 + 3 * e - math.sqrt((1 + 3 * e) ** 2 - 8 * e * (e - 1))) / (2 * (e - 1))
    assert PerturbedEncoding(0.7, 1).keep_probability(2) == pytest.approx(root, rel=1e-12)


# ---- values --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ONE_DIMENSIONAL)
@given(epsilon=st.floats(1e-3, 50))
@settings(max_examples=30, deadline=None)
def test_values_are_exactly_as_private_as_claimed(kind, epsilon):
    assert value_epsilon(kind(epsilon)) == pytest.approx(epsilon, rel=1e-9)


def test_a_wrong_law_is_found():
    class Wider(Piecewise):
        """Piecewise as if e^ε, not e^{ε/2}, stood in its probability."""

        def log_prob(self, outputs, values):
            near = Piecewise.log_prob(self, outputs, values)
            return near + np.where(near == near.max(), self.epsilon / 2, 0.0)

    assert value_epsilon(Wider(1.0)) == pytest.approx(1.5)


@pytest.mark.parametrize("kind", ONE_DIMENSIONAL)
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 7.0, 50.0])
def test_vectors_are_as_private_as_claimed_but_for_ties(kind, epsilon):
    odd, even = (Flat(kind, epsilon, d, reading="published") for d in (123, 100))
    assert value_epsilon(odd) == pytest.approx(epsilon, rel=1e-9)
    tied = math.log1p(math.exp(epsilon)) if kind is Duchi else epsilon
    assert value_epsilon(even) == pytest.approx(tied, rel=1e-9)
    assert value_epsilon(Flat(kind, epsilon, 100)) == pytest.approx(epsilon, rel=1e-9)
    compressed = Compressed(even, random_projection(200, 100, generator()))
    assert value_epsilon(compressed) == value_epsilon(even)


@pytest.mark.parametrize("d", [1, 2, 3, 4])
@pytest.mark.parametrize("calibrated", [False, True])
def test_duchis_vectors_by_brute_force(d, calibrated):
    """All corners and the middle of the cube of values: probabilities are linear in each, so
    corners are worst.
    """
    points = list(itertools.product((-1, 0, 1), repeat=d))
    for epsilon in (0.3, 1.0, 3.0):
        found = largest_ratio([signs_distribution(t, epsilon, calibrated)[1] for t in points])
        mechanism = Flat(Duchi, epsilon, d, reading="calibrated" if calibrated else "published")
        assert value_epsilon(mechanism) == pytest.approx(found, rel=1e-9)


# ---- both stages ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Duchi, Piecewise])
def test_two_stages_by_brute_force(kind):
    """All vectors over a few values, outputs (dimension, value): the worst pair attains the
    sum of both ε.
    """
    value, d = kind(0.9), 3
    ends = np.array([-1, 1]) * value.output_bound()
    vectors = [
        v
        for v in itertools.product((-3, -2, -1, 0, 1, 2, 3), repeat=d)
        if len(set(map(abs, v))) == d
    ]
    for selection in (Exponential(0.6), PerturbedEncoding(0.6, 1), PerturbedSampling(0.6, 2)):
        distributions = [
            selection.probabilities_given(np.abs(v))[:d, None]
            * np.exp(value.log_prob(ends, np.clip(v, -1, 1)[:, None]))
            for v in vectors
        ]  # each [d, 2]: a dimension and one of the extreme values
        found = math.log(np.max(np.max(distributions, 0) / np.min(distributions, 0)))
        assert sum(exact_epsilons(selection, value, d)) == pytest.approx(found, rel=1e-9)
        assert found == pytest.approx(selection_epsilon(selection, d) + 0.9)


def test_stages_and_epochs_add_up():
    selection, value = PerturbedEncoding(0.1, 12, "e_eps"), Piecewise(0.9)
    one = sum(exact_epsilons(selection, value, 123))
    assert one > 1.0
    assert local_statement(selection, value, 123, 3).proved.epsilon == pytest.approx(3 * one)
    flat = local_statement(None, Flat(Piecewise, 1.0, 123), 123, 2)
    assert flat.proved.epsilon == pytest.approx(2.0)
    assert sum(exact_epsilons(selection, None, 123)) == math.inf
    assert sum(exact_epsilons(PerturbedSampling(math.inf, 12), value, 123)) == math.inf
    assert sum(exact_epsilons(RandomChoice(), value, 123)) == pytest.approx(0.9)
    with pytest.raises(InputError, match="epochs = 0"):
        local_statement(selection, value, 123, 0)


def test_statements_say_both_numbers_and_why():
    both = local_statement(PerturbedEncoding(1.0, 3, "e_eps"), Piecewise(1.0), 32, epochs=2)
    assert both.paper.epsilon == 4.0
    assert both.proved.epsilon == pytest.approx(2 * 2.050, abs=1e-3)
    assert (both.proved.delta, both.proved.unit, both.paper.relation) == (
        0.0,
        "client",
        "replace_one",
    )
    assert [step for step, _ in both.proved.reasons] == ["selection", "value", "composition"]
    assert "1 is claimed; its exact distribution at d = 32 gives 1.05" in both.proved.reasons[0][1]
    assert "2 reports" in both.proved.reasons[2][1]
    projected = Compressed(Flat(Piecewise, 1.0, 2), random_projection(5, 2, generator()))
    for value in (Flat(Piecewise, 1.0, 5), projected):
        flat = local_statement(None, value, 5)
        assert (flat.paper.epsilon, flat.proved.unit) == (1.0, "local_report")
        assert flat.proved.epsilon == pytest.approx(1.0)
    clear = local_statement(PerturbedSampling(math.inf, 2), None, 5)
    assert clear.paper.epsilon == clear.proved.epsilon == math.inf
