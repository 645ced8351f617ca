"""The papers' own accountant library, as it stands today, against ours."""

import logging

import pytest

from fl_privacy_lib.accounting.accountants import noise_for, spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.accounting.rdp import PAPER_ORDERS, rdp_spending, step_rdp

DELTA = 1e-5


@pytest.fixture(scope="module")
def analysis():
    """The analysis modules; TensorFlow itself is slow to load, and nothing else here needs it."""
    pytest.importorskip(
        "tensorflow_privacy", reason="install the extra tf-privacy (Python 3.11) for this"
    )
    from tensorflow_privacy.privacy.analysis import (
        compute_dp_sgd_privacy_lib,
        compute_noise_from_budget_lib,
        gdp_accountant,
        tree_aggregation_accountant,
    )

    logging.getLogger("absl").setLevel(logging.ERROR)
    return {
        "sgd": compute_dp_sgd_privacy_lib,
        "noise": compute_noise_from_budget_lib,
        "gdp": gdp_accountant,
        "tree": tree_aggregation_accountant,
    }


@pytest.mark.parametrize(
    ("batch", "noise", "epochs"), [(600, 6.0, 100), (256, 1.1, 5), (6_000, 2.0, 10)]
)
def test_epsilon_of_private_training(analysis, batch, noise, epochs):
    theirs, _ = analysis["sgd"].compute_dp_sgd_privacy(60_000, batch, noise, epochs, DELTA)
    steps = -(-epochs * 60_000 // batch)
    run = Event(batch / 60_000, noise, "example", "add_remove", uses=steps)
    # they keep the papers' orders, with today's conversion
    assert rdp_spending(run, DELTA, PAPER_ORDERS).epsilon == pytest.approx(theirs, rel=1e-9)
    assert spend(run, "rdp", DELTA).epsilon <= theirs * (1 + 1e-9)  # more orders


def test_the_papers_setting_gives_two_thirds_today(analysis):
    """What the papers report as 0.823 their own library states as 0.659 now."""
    theirs, _ = analysis["sgd"].compute_dp_sgd_privacy(60_000, 600, 6.0, 100, DELTA)
    assert theirs == pytest.approx(0.659, abs=5e-4)


def test_noise_for_a_budget(analysis):
    theirs = analysis["noise"].compute_noise(60_000, 600, 2.0, 100, DELTA, 0.5)

    def within(noise):
        run = Event(0.01, noise, "example", "add_remove", uses=10_000)
        return rdp_spending(run, DELTA, PAPER_ORDERS).epsilon

    assert within(theirs) == pytest.approx(2.0, abs=1e-4)
    ours = noise_for(
        2.0,
        lambda noise: Event(0.01, noise, "example", "add_remove", uses=10_000),
        "rdp",
        DELTA,
        1e-6,
    )
    assert ours == pytest.approx(theirs, rel=2e-3)  # the order sets differ a little


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.7])
def test_gaussian_releases(analysis, mu):
    assert gdp_epsilon(mu, DELTA) == pytest.approx(analysis["gdp"].eps_from_mu(mu, DELTA), rel=1e-6)


def test_a_plain_gaussian_is_a_tree_of_one_leaf(analysis):
    """Their tree accountant's divergence for a single release is that of the unsampled Gaussian."""
    orders = (1.5, 4.0, 32.0)
    theirs = analysis["tree"].compute_rdp_single_tree(6.0, 1, 1, 1, list(orders))
    ours = step_rdp(Event(1.0, 6.0, "example", "add_remove", sampling="none"), orders)[0]
    assert ours == pytest.approx(list(theirs), rel=1e-12)
