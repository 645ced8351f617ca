"""Events, ledgers and spendings: what they hold, and what they refuse in one clear sentence."""

import dataclasses

import numpy as np
import pytest

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.accounting.accountants import (
    ACCOUNTANTS,
    first_step_beyond,
    noise_for,
    spend,
    spending_curve,
)
from fl_privacy_lib.accounting.events import Event, Ledger
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.accounting.rdp import integer_rdp, step_rdp
from fl_privacy_lib.accounting.recompute import recompute
from fl_privacy_lib.accounting.schedules import (
    ledger_of,
    linear,
    triangular,
)

STEP = Event(0.01, 6.0, "example", "add_remove")
MANY = ledger_of(np.linspace(5, 15, 65), 0.01, "example", "add_remove")
MANY_REPLACED = ledger_of(np.linspace(5, 15, 65), 0.01, "example", "replace_one")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Event(0.01, 0.0, "example", "add_remove"),
            ["noise_multiplier = 0", "infinite", "above 0"],
        ),
        (
            lambda: Event(0.01, -1.0, "example", "add_remove"),
            ["noise_multiplier = -1.0", "between"],
        ),
        (
            lambda: Event(0.01, float("nan"), "example", "add_remove"),
            ["noise_multiplier = nan", "between"],
        ),
        (lambda: Event(1.5, 6.0, "example", "add_remove"), ["sampling_rate = 1.5", "at most 1"]),
        (
            lambda: Event(0.0, 6.0, "example", "add_remove"),
            ["sampling_rate = 0.0", "greater than 0"],
        ),
        (lambda: Event(float("nan"), 6.0, "example", "add_remove"), ["sampling_rate = nan"]),
        (
            lambda: Event(0.01, 6.0, "exmaple", "add_remove"),
            ["unit = 'exmaple'", "did you mean example"],
        ),
        (lambda: Event(0.01, 6.0, "example", "replace"), ["did you mean replace_one"]),
        (
            lambda: Event(0.01, 6.0, "example", "add_remove", sampling="poison"),
            ["sampling", "poisson"],
        ),
        (lambda: Event(0.01, 6.0, "example", "add_remove", uses=0), ["uses = 0", "at least 1"]),
        (
            lambda: Event(0.01, 6.0, "example", "add_remove", uses=2.5),
            ["uses = 2.5", "whole number"],
        ),
        (
            lambda: Event(0.01, 6.0, "example", "add_remove", sampling="none"),
            ["'none'", "sampling_rate = 1"],
        ),
        (
            lambda: Event(0.01, 6.0, "example", "add_remove", sampling="fixed"),
            ["'fixed'", "replace_one"],
        ),
        (lambda: Ledger(()), ["no event", "at least one Event"]),
        (lambda: spend([], "rdp", 1e-5), ["no event"]),
        (
            lambda: Ledger((STEP, Event(0.1, 6.0, "client", "add_remove"))),
            ["mixes units", "client, example", "each unit by itself"],
        ),
        (
            lambda: Ledger((STEP, Event(0.01, 3.0, "example", "replace_one"))),
            ["mixes relations", "add_remove, replace_one"],
        ),
        (lambda: Ledger.of(STEP).first(2), ["steps = 2", "1 releases"]),
        (lambda: spend(STEP, "rdp", 1.0), ["delta = 1.0", "less than 1"]),
        (lambda: spend(STEP, "base", 0.0), ["delta = 0.0", "greater than 0"]),
        (lambda: spend(STEP, "moment_accountant", 1e-5), ["did you mean moments_accountant"]),
        (lambda: spend(STEP, "gdp", 1e-5), ["q = 0.01", "'pld' or 'rdp'"]),
        (lambda: gdp_epsilon(0.0, 1e-5), ["mu = 0.0", "greater than 0"]),
        (lambda: spend(MANY, "pld", 1e-5), ["65 different", "'rdp'"]),
        (lambda: spend(MANY_REPLACED, "rdp", 1e-5), ["65 different", "replace_one"]),
        (lambda: spending_curve(STEP, "pld", 1e-5), ["'pld'", "use 'rdp'"]),
        (lambda: spending_curve(STEP, "gdp", 1e-5), ["'gdp'", "use 'rdp'"]),
        (lambda: first_step_beyond(STEP, -1.0, "rdp", 1e-5), ["budget = -1.0"]),
        (lambda: integer_rdp(np.array([0.1]), np.array([1.0]), (2.5,)), ["2.5", "whole numbers"]),
        (lambda: step_rdp(STEP, (1.0,)), ["orders", "greater than 1"]),
        (
            lambda: noise_for(
                0.001, lambda z: Event(0.01, z, "example", "add_remove"), "moments_accountant", 1e-5
            ),
            ["epsilon = 0.001", "out of reach", "0.0225"],
        ),
        (lambda: noise_for(-1.0, lambda z: STEP, "rdp", 1e-5), ["epsilon = -1.0"]),
        (lambda: linear(0.0, 1.0, 3), ["start = 0.0"]),
        (lambda: linear(1.0, 2.0, 0), ["steps = 0"]),
        (lambda: triangular(1.0, 2.0, 3, cycles=0), ["cycles = 0"]),
        (lambda: recompute("fed_cdp", "table_5", []), ["fed_cdp/table_5", "fed_cdp/table_6"]),
    ],
)
def test_bad_input_gets_one_clear_sentence(call, words):
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert message.endswith((".", ")"))
    for word in words:
        assert word in message


def test_a_ledger_knows_its_events():
    ledger = Ledger(
        (
            Event(0.01, 6.0, "example", "add_remove", uses=3),
            Event(1.0, 2.0, "example", "add_remove", sampling="none"),
        )
    )
    assert ledger.relation == "add_remove"
    assert ledger.steps == 4
    assert ledger.rates.tolist() == [0.01, 1.0]
    assert ledger.noise.tolist() == [6.0, 2.0]
    assert ledger.sampled.tolist() == [True, False]
    assert Ledger.of(ledger) is ledger


@pytest.mark.parametrize(
    ("steps", "uses"), [(1, [1]), (3, [3]), (4, [3, 1]), (7, [3, 4]), (8, [3, 4, 1])]
)
def test_the_first_releases_of_a_ledger(steps, uses):
    ledger = Ledger(
        tuple(
            Event(0.01, z, "example", "add_remove", uses=n)
            for z, n in ((6.0, 3), (5.0, 4), (4.0, 1))
        )
    )
    cut = ledger.first(steps)
    assert cut.uses.tolist() == uses
    assert cut.noise.tolist() == [6.0, 5.0, 4.0][: len(uses)]


@pytest.mark.parametrize("accountant", [name for name in ACCOUNTANTS if name != "gdp"])
def test_a_spending_says_what_stands_beside_epsilon(accountant):
    run = Event(0.1, 6.0, "client", "add_remove", uses=100)
    spent = spend(run, accountant, 1e-5)
    assert (spent.ledger.events, spent.accountant, spent.delta) == ((run,), accountant, 1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spent.epsilon = 0.0


def test_the_delta_of_a_composition_is_the_sum_of_its_steps():
    run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    assert spend(run, "base", 1e-5).composition_delta == pytest.approx(
        1e-3
    )  # k q δ_0, a hundred times δ_0
    assert spend(run, "optimal", 1e-5).composition_delta == pytest.approx(1e-3 + 1e-5)
    for accountant in ("zcdp", "moments_accountant", "rdp", "pld"):
        assert spend(run, accountant, 1e-5).composition_delta == 1e-5


def test_caveats_name_the_condition_that_fails():
    fine = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    assert spend(fine, "zcdp", 1e-5).caveats == ()
    assert spend(fine, "advanced", 1e-5).caveats == ()
    assert "q < 1/(16σ)" in spend(Event(0.1, 6.0, "client", "add_remove"), "zcdp", 1e-5).caveats[0]
    assert "σ ≥ 1" in spend(Event(0.01, 0.5, "example", "add_remove"), "zcdp", 1e-5).caveats[0]
    assert (
        "Rényi order" in spend(Event(0.01, 1.1, "example", "add_remove"), "zcdp", 1e-5).caveats[-1]
    )
    assert (
        spend(Event(1.0, 0.5, "example", "add_remove", sampling="none"), "zcdp", 1e-5).caveats == ()
    )
    assert "ε_0 < 1" in spend(Event(0.01, 4.0, "example", "add_remove"), "base", 1e-5).caveats[0]
    assert (
        "add up to"
        in spend(Event(0.5, 6.0, "example", "add_remove", uses=100), "base", 0.02).caveats[-1]
    )


def test_zcdp_is_too_small_where_its_condition_fails():
    """The caveat is not a formality: with σ < 1 the formula falls below the exact ε of one step."""
    run = Event(0.01, 0.05, "example", "add_remove")
    exact = np.log1p(0.01 * np.expm1(gdp_epsilon(1 / 0.05, 1e-5 / 0.01)))
    assert spend(run, "zcdp", 1e-5).epsilon < 0.1 * exact
