"""The cases behind the ledger's claims on privacy, and readings of one training (chapter 03).

Nothing here is random, and nothing is trained.
"""

import math
from typing import Any

from fl_privacy_lib import audit
from fl_privacy_lib.accounting import conventions as given
from fl_privacy_lib.accounting import schedules
from fl_privacy_lib.accounting.accountants import Accountant, Events, spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.defenses import Holding, fed_cdp
from fl_privacy_lib.defenses.releases import release
from fl_privacy_lib.reproduction.experiments.setups import PAPER, SETUPS
from fl_privacy_lib.reproduction.statements import Case
from fl_privacy_lib.sampling import Plan

STATEMENTS = "audit/statements"
DELTA = given.DELTA
TENSORS = 3  # of the papers' image network: two convolutions and a dense layer, no bias
COORDINATES = 34_720  # of the same network
PARTICIPANTS = 100


def _moments(rate: float, noise: float, steps: int) -> float:
    return spend(
        Event(rate, noise, "example", "add_remove", uses=steps), "moments_accountant", DELTA
    ).epsilon


def _paper_plan(**changes: Any) -> Plan:
    values = {
        "clients": 1000,
        "participants": 100,
        "rounds": 100,
        "local_iterations": 100,
        "batch_size": 5,
    }
    return Plan(**(values | {"local_lr": 0.05} | changes))


def statement_rows() -> list[Case]:
    """Return all cases that the ledger's claims rest on."""
    return [
        *_smaller_than_fed_sdp(),
        *_same_rate_everywhere(),
        *_conditions(),
        *_client_level(),
        *_mechanism(),
        *_composition(),
        *_printed_schedules(),
        *readings(),
    ]


def _smaller_than_fed_sdp() -> list[Case]:
    rows = []
    for dataset, rounds in given.ROUNDS.items():
        for iterations in (100, 200):
            example = _moments(given.EXAMPLE_RATE, 6.0, rounds * iterations)
            client = _moments(given.CLIENT_RATE, 6.0, rounds)
            rows.append(Case(
                "smaller_than_fed_sdp", f"{dataset}, L = {iterations}", client, example,
                setting={"dataset": dataset, "local_iterations": iterations, "rounds": rounds},
            ))  # fmt: skip
    return rows


def _same_rate_everywhere() -> list[Case]:
    rows = []
    for dataset in PAPER:
        batch, examples = SETUPS[dataset].batch_size, SETUPS[dataset].examples
        steps, rate = (
            given.ROUNDS[dataset] * given.LOCAL_ITERATIONS,
            audit.global_rate(batch, PARTICIPANTS, examples),
        )
        rows.append(
            Case(
                "one_rate_for_all",
                dataset,
                _moments(given.EXAMPLE_RATE, 6.0, steps),
                _moments(rate, 6.0, steps),
                setting={"B": batch, "K_t": PARTICIPANTS, "N": examples, "q": f"{rate:.4g}"},
            )
        )
    return rows


def _conditions() -> list[Case]:
    used = {
        "Fed-CDP, σ = 6": (0.01, 6.0),
        "Fed-SDP, σ = 6": (0.1, 6.0),
        "Fed-αCDP, σ = 15": (0.01, 15.0),
    }
    return [
        Case(
            "sampling_condition",
            name,
            1 / (16 * noise),
            rate,
            quantity="q against 1/(16σ)",
            accountant="none",
        )
        for name, (rate, noise) in used.items()
    ]


def _client_level() -> list[Case]:
    claimed = _moments(given.EXAMPLE_RATE, 6.0, 10_000)
    rows = []
    for name, defense in (("as printed", fed_cdp("example")), ("as coded", fed_cdp("batch"))):
        plan, one_tensor = _paper_plan(), Holding(50_000, 500, 1)
        once = gdp_epsilon(release(defense, plan, one_tensor, "client").mu, DELTA)
        whole = audit.statement(
            defense, plan, one_tensor, delta=DELTA, unit="client"
        ).proved.epsilon
        reading: dict[str, Any] = {
            "privacy_unit": "client",
            "sampling": "none",
            "accountant": "gdp",
        }
        rows.append(
            Case("billboard", f"{name}, one participation, M = 1", claimed, once, **reading)
        )
        rows.append(Case("billboard", f"{name}, 100 rounds, M = 1", claimed, whole, **reading))
    return rows


def _mechanism() -> list[Case]:
    claimed = _moments(given.EXAMPLE_RATE, 6.0, 10_000)
    bound = audit.sampled_gaussian_lower_bound
    toy, formula = bound(0.1, 6.0, 100, DELTA), _moments(0.001, 6.0, 10_000)
    few = {"K": 10, "K_t": 1, "n": 500, "B": 5, "L": 100, "T": 100}
    return [
        Case(
            "per_layer",
            "M = 3",
            claimed,
            bound(0.01, 6 / math.sqrt(TENSORS), 10_000, DELTA),
            accountant="pld, rounded down",
        ),
        Case(
            "proposition_1",
            "one client a round, only one gradient not zero",
            formula,
            toy,
            accountant="pld, rounded down",
            setting=few,
        ),
        Case(
            "l2_max",
            "one example raises the largest norm by a tenth",
            claimed,
            audit.l2_max_epsilon(1.1, COORDINATES, DELTA),
            sampling="none",
            accountant="Bhattacharyya, lower bound",
        ),
        Case(
            "theorem_5",
            "privacy loss above one half, one release",
            0.0,
            audit.gaussian_loss_exceeds(0.5, 6.0),
            quantity="probability",
            sampling="none",
            accountant="none",
            delta=0.0,
        ),
    ]


def _composition() -> list[Case]:
    once, twice = (gdp_epsilon(math.sqrt(holders) / 6, DELTA) for holders in (1, 2))
    shared = audit.shared_in_a_round(1000, 100, 10)
    return [
        Case(
            "parallel_composition",
            "two holders in one round, one use each",
            once,
            twice,
            sampling="none",
            accountant="gdp",
        ),
        Case(
            "parallel_composition",
            "two of ten holders meet in a round",
            0.0,
            shared,
            quantity="probability",
            sampling="none",
            accountant="none",
            delta=0.0,
        ),
    ]


def _printed_schedules() -> list[Case]:
    first, last = given.PRINTED_NOISE
    budget = _moments(given.EXAMPLE_RATE, 6.0, 10_000)
    printed = {
        "linear": schedules.linear(first, last, 10_000),
        "exponential": schedules.exponential(first, last, 10_000),
        "cosine arc": schedules.cosine_arc(first, last, 10_000),
    }
    rows = []
    for name, noise in printed.items():
        ledger = schedules.ledger_of(noise, given.EXAMPLE_RATE, "example", "add_remove")
        spent = spend(ledger, "moments_accountant", DELTA).epsilon
        rows.append(
            Case(
                "printed_schedules",
                name,
                budget,
                spent,
                setting={"sigma": f"{first:g} to {last:g}"},
            )
        )
    return rows


_IF_DRAWN = "bound if drawn as assumed"
Reading = tuple[str, str, Events, Accountant, str]


def readings() -> list[Case]:
    """Return one training under several readings: the papers' 0.823, and one change at a time."""
    run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    layers = Event(0.01, 6 / math.sqrt(TENSORS), "example", "add_remove", uses=10_000)
    honest = Event(0.1, 6.0, "example", "add_remove", uses=100)
    replaced = Event(0.01, 3.0, "example", "replace_one", uses=10_000, sampling="fixed")
    copies = Event(0.1, 6.0, "example", "add_remove", uses=1_000)
    listed: list[Reading] = [
        (
            "as published",
            "the papers' orders and conversion",
            run,
            "moments_accountant",
            "computed as published",
        ),
        ("today's conversion", "Rényi orders and conversion of today", run, "rdp", _IF_DRAWN),
        ("privacy loss distribution", "the composition itself", run, "pld", _IF_DRAWN),
        ("M = 3 tensors clipped", "multiplier σ/√M", layers, "moments_accountant", _IF_DRAWN),
        ("honest sampling", "K_t/K a round, T rounds", honest, "moments_accountant", "estimate"),
        ("replace one", "twice the sensitivity", replaced, "pld", _IF_DRAWN),
        (
            "all ten copies",
            "ten holders, K_t/K a round each",
            copies,
            "moments_accountant",
            "estimate",
        ),
    ]
    claimed = spend(run, "moments_accountant", DELTA).epsilon
    rows = []
    for name, change, event, accountant, standing in listed:
        spent = spend(event, accountant, DELTA)
        rows.append(Case("same_training", name, claimed, spent.epsilon, relation=spent.relation,
                         sampling=spent.sampling, accountant=accountant,
                         setting={"change": change, "standing": standing}))  # fmt: skip
    # exact at the batch means; a bound for whoever reads updates, which are computed from them
    at: dict[str, Any] = {"delta": DELTA, "tap": "batch"}
    coded, plan = fed_cdp("batch"), _paper_plan()
    inside = audit.statement(coded, plan, Holding(50_000, 500, 1), **at).proved
    everything = audit.statement(
        coded, plan, Holding(50_000, 500, TENSORS, 10), relation="replace_one", **at
    ).proved
    for name, change, proved in (
        ("an adversary inside", "reads every batch mean", inside),
        ("all of it", "M = 3, ten copies, replace one, inside", everything),
    ):
        rows.append(
            Case(
                "same_training",
                name,
                claimed,
                proved.epsilon,
                relation=proved.relation,
                sampling="none",
                accountant=proved.accountant,
                setting={"change": change, "standing": "exact"},
            )
        )
    return rows
