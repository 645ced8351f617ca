"""The cases behind the ledger's claims on privacy, and readings of one training (chapter 03).

Nothing here is random, and nothing is trained.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from scipy.stats import gamma

from fl_privacy_lib import audit
from fl_privacy_lib.accounting import conventions as given
from fl_privacy_lib.accounting import schedules
from fl_privacy_lib.accounting.accountants import Accountant, spend
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.accounting.gdp import gdp_epsilon
from fl_privacy_lib.chapters.counting_privacy import arguments
from fl_privacy_lib.chapters.counting_privacy.local_sampling import (
    class_gap,
    local_sampling_epsilon,
)
from fl_privacy_lib.defenses import Holding, fed_cdp
from fl_privacy_lib.defenses.releases import release
from fl_privacy_lib.reproduction.experiment import Case
from fl_privacy_lib.reproduction.experiments.setups import PAPER, SETUPS
from fl_privacy_lib.reproduction.published import load_published
from fl_privacy_lib.sampling import Plan

STATEMENTS = "audit/statements"
DELTA = given.DELTA
TENSORS = 3  # of the papers' image network: two convolutions and a dense layer, no bias
COORDINATES = 34_720  # of the same network
SHARES = (0.05, 0.1, 0.2, 0.5)  # K_t/K in Fed-CDP's Table II
_NOT_COUNTED: dict[str, Any] = {"sampling": "none", "accountant": "none", "delta": 0.0}


def _moments(rate: float, noise: float, steps: int) -> float:
    run = Event(rate, noise, "example", "add_remove", uses=steps)
    return spend(run, "moments_accountant", DELTA).epsilon


def _mnist(taking: int) -> float:
    """Return B·K_t/N for MNIST, where N = 50,000."""
    return audit.global_rate(5, taking, SETUPS["mnist"].examples)


def _paper_plan(**changes: Any) -> Plan:
    values = {"clients": 1000, "participants": 100, "local_lr": 0.05}
    return Plan(**({"rounds": 100, "local_iterations": 100, "batch_size": 5} | values | changes))


@cache  # no setting changes it
def statement_rows() -> tuple[Case, ...]:
    """Return all cases that the ledger's claims rest on."""
    return (
        *_smaller_than_fed_sdp(),
        *_same_rate_everywhere(),
        *_conditions(),
        *_client_level(),
        *_local_sampling(),
        *_mechanism(),
        *_composition(),
        *_printed_schedules(),
        *_printed_twice(),
        *readings(),
    )


def _smaller_than_fed_sdp() -> list[Case]:
    """Return the five trainings of Table VI, and the populations of Table II by the same count."""
    table = [
        Case(
            "smaller_than_fed_sdp",
            f"{dataset}, L = 100",
            _moments(given.CLIENT_RATE, 6.0, rounds),
            _moments(given.EXAMPLE_RATE, 6.0, rounds * 100),
            setting={"dataset": dataset, "local_iterations": 100, "rounds": rounds},
        )
        for dataset, rounds in given.ROUNDS.items()
    ]
    return table + [
        Case(
            "order_of_epsilons",
            f"K = {clients}, K_t = {taking}",
            _moments(taking / clients, 6.0, 100),
            _moments(_mnist(taking), 6.0, 10_000),
            setting={"K": clients, "K_t": taking, "q": f"{_mnist(taking):.4g}"},
        )
        for clients in (100, 1_000, 10_000)
        for taking in (round(clients * share) for share in SHARES)
    ]


def _same_rate_everywhere() -> list[Case]:
    return [
        Case(
            "one_rate_for_all",
            dataset,
            _moments(given.EXAMPLE_RATE, 6.0, 100 * given.ROUNDS[dataset]),
            _moments(rate, 6.0, 100 * given.ROUNDS[dataset]),
            setting={"B": data.batch_size, "K_t": 100, "N": data.examples, "q": f"{rate:.4g}"},
        )
        for dataset, data in ((name, SETUPS[name]) for name in PAPER)
        for rate in (audit.global_rate(data.batch_size, 100, data.examples),)
    ]


def _conditions() -> list[Case]:
    used = {
        "Fed-CDP, σ = 6": (0.01, 6.0),
        "Fed-SDP, σ = 6": (0.1, 6.0),
        "Fed-αCDP, σ = 15": (0.01, 15.0),
    }
    for taking in (200, 500, 1_000, 2_000, 5_000):  # the K_t above 100 in Table II
        used[f"Fed-CDP, K_t = {taking}"] = (_mnist(taking), 6.0)
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
    plan, holding = _paper_plan(), Holding(50_000, 500, 1)
    reading: dict[str, Any] = {"privacy_unit": "client", "sampling": "none", "accountant": "gdp"}
    in_full: dict[str, Any] = {"delta": DELTA, "unit": "client"}
    return [
        Case(
            "billboard",
            f"{name}, {what}, M = 1",
            _moments(given.EXAMPLE_RATE, 6.0, 10_000),
            found,
            **reading,
        )
        for name, defense in (("as printed", fed_cdp("example")), ("as coded", fed_cdp("batch")))
        for what, found in (
            (
                "one participation",
                gdp_epsilon(release(defense, plan, holding, "client").mu, DELTA),
            ),
            ("100 rounds", audit.statement(defense, plan, holding, **in_full).proved.epsilon),
        )
    ]


def _local_sampling() -> list[Case]:
    """Return the printed Proposition 1, and the sentence after it among 100 clients of MNIST."""
    shards = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 20)).reshape(100, 2)
    gap = class_gap(250.0 * (shards[:, :, None] == np.arange(10)).sum(1))
    cases = [
        (f"K = 100, K_t = {100 * share:g}{words}", round(100 * share), noise)
        for words, noise in (
            ("", 6.0),
            # a client's own update, which types 0 and 1 read: noise drawn for each of five examples
            (", noise as Algorithm 2 prints it", 6 * math.sqrt(5)),
        )
        for share in SHARES
    ]
    drawn: dict[str, Any] = {"clients": 100, "batch_sampling": "with_replacement"}
    return [
        Case("proposition_1", "100 clients of 500, two shards each", 0.0, gap, "probability",
             **_NOT_COUNTED),
        *(Case(
            "local_sampling", name, _moments(_mnist(taking), 6.0, 10_000),
            local_sampling_epsilon(_paper_plan(participants=taking, **drawn), 500, noise, DELTA),
            sampling="with_replacement", accountant="two numbers a round, lower bound",
            setting={"K": 100, "K_t": taking, "n": 500, "B": 5, "L": 100, "T": 100,
                     "z": f"{noise:.4g}"},
        ) for name, taking, noise in cases),
    ]  # fmt: skip


def _mechanism() -> list[Case]:
    claimed = _moments(given.EXAMPLE_RATE, 6.0, 10_000)
    # the density e^{-β|μ|} has β = Bε/2S; with S a tenth larger, β|μ| follows a gamma law, and
    # beyond this value of it the privacy loss is above one half
    far = (0.5 + COORDINATES * math.log(1.1)) / 0.1
    return [
        Case("per_layer", "M = 3", claimed,
             arguments.sampled_gaussian_lower_bound(0.01, 6 / math.sqrt(TENSORS), 10_000, DELTA),
             accountant="pld, rounded down"),
        Case("per_layer", "sensitivity of a sum in units of C, M = 3", 1.0, math.sqrt(TENSORS),
             "sensitivity", **_NOT_COUNTED),
        Case("l2_max", "one example raises the largest norm by a tenth", claimed,
             audit.l2_max_epsilon(1.1, COORDINATES, DELTA), sampling="none",
             accountant="Bhattacharyya, lower bound"),
        Case("theorem_5", "privacy loss above one half, one release", 0.0,
             arguments.gaussian_loss_exceeds(0.5, 6.0), "probability", **_NOT_COUNTED),
        Case("theorem_5", "the same with the printed density, one example raises S by a tenth",
             0.0, float(gamma.sf(far, COORDINATES)), "probability", **_NOT_COUNTED),
    ]  # fmt: skip


def _composition() -> list[Case]:
    """Return parallel composition on shared examples."""
    return [
        Case("parallel_composition", "two holders in one round, one use each",
             gdp_epsilon(1 / 6, DELTA), gdp_epsilon(math.sqrt(2) / 6, DELTA), sampling="none",
             accountant="gdp"),
        Case("parallel_composition", "two of ten holders meet in a round", 0.0,
             arguments.shared_in_a_round(1000, 100, 10), "probability", **_NOT_COUNTED),
    ]  # fmt: skip


def _printed_schedules() -> list[Case]:
    first, last = given.PRINTED_NOISE
    spent = {
        name: spend(ledger, "moments_accountant", DELTA).epsilon
        for name, noise in (
            ("linear", schedules.linear(first, last, 10_000)),
            ("exponential", schedules.exponential(first, last, 10_000)),
            ("cosine, to a floor of 0.05", schedules.cosine(first, 0.05, 10_000)),
            ("staircase", schedules.staircase(first, last, 10_000)),
        )
        for ledger in (schedules.ledger_of(noise, given.EXAMPLE_RATE, "example", "add_remove"),)
    }
    budget, setting = _moments(given.EXAMPLE_RATE, 6.0, 10_000), f"{first:g} to {last:g}"
    within = [("printed_schedules", name, budget, found) for name, found in spent.items()]
    least = [
        ("exponential_spends_least", f"exponential, against {name}", other, spent["exponential"])
        for name, other in spent.items()
        if name != "exponential"
    ]
    return [Case(*case, setting={"sigma": setting}) for case in within + least]


def _printed_twice() -> list[Case]:
    """Return Fed-CDP's accuracies that differ between its Table IV and Fed-αCDP's Table 5."""
    both = load_published("fed_cdp/table_4").merge(
        load_published("fed_alpha_cdp/table_5"),
        on=["dataset", "method", "clip"],
        suffixes=("", "_again"),
    )
    return [
        Case("printed_twice", f"{row.dataset}, C = {row.clip}",
             min(float(row.value), float(row.value_again)),
             max(float(row.value), float(row.value_again)), "accuracy", **_NOT_COUNTED)
        for row in both[both["value"] != both["value_again"]].itertuples()
    ]  # fmt: skip


_IF_DRAWN = "bound if drawn as assumed"


def readings() -> list[Case]:
    """Return one training under several readings: the papers' 0.823, and one change at a time."""
    run = Event(0.01, 6.0, "example", "add_remove", uses=10_000)
    layers = replace(run, noise_multiplier=6 / math.sqrt(TENSORS))
    replaced = Event(0.01, 3.0, "example", "replace_one", uses=10_000, sampling="fixed")
    rounds, copies = (replace(run, sampling_rate=0.1, uses=uses) for uses in (100, 1_000))
    moments: Accountant = "moments_accountant"
    listed: list[tuple[str, str, Event, Accountant, str]] = [
        ("as published", "the papers' orders and conversion", run, moments,
         "computed as published"),
        ("today's conversion", "Rényi orders and conversion of today", run, "rdp", _IF_DRAWN),
        ("privacy loss distribution", "the composition itself", run, "pld", _IF_DRAWN),
        ("M = 3 tensors clipped", "multiplier σ/√M", layers, moments, _IF_DRAWN),
        ("honest sampling", "K_t/K a round, T rounds", rounds, moments, "estimate"),
        ("replace one", "twice the sensitivity", replaced, "pld", _IF_DRAWN),
        ("all ten copies", "ten holders, K_t/K a round each", copies, moments, "estimate"),
    ]  # fmt: skip
    claimed = spend(run, moments, DELTA).epsilon
    # exact at the batch means; a bound for whoever reads updates, which are computed from them
    at: dict[str, Any] = {"delta": DELTA, "tap": "batch"}
    coded, plan, all_copies = fed_cdp("batch"), _paper_plan(), Holding(50_000, 500, TENSORS, 10)
    inside = audit.statement(coded, plan, Holding(50_000, 500, 1), **at).proved
    everything = audit.statement(coded, plan, all_copies, relation="replace_one", **at).proved
    return [
        Case("same_training", name, claimed, spent.epsilon, relation=event.relation,
             sampling=event.sampling, accountant=accountant,
             setting={"change": change, "standing": standing})
        for name, change, event, accountant, standing in listed
        for spent in (spend(event, accountant, DELTA),)
    ] + [
        Case("same_training", name, claimed, proved.epsilon, relation=proved.relation,
             sampling="none", accountant=proved.accountant,
             setting={"change": change, "standing": "exact"})
        for name, change, proved in (
            ("an adversary inside", "reads every batch mean", inside),
            ("all of it", "M = 3, ten copies, replace one, inside", everything),
        )
    ]  # fmt: skip
