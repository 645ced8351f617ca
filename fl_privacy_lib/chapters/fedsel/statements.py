"""FedSel's lemmas and theorems beside exact values of ε and of variances (chapter 08)."""

from functools import partial
from itertools import product

from fl_privacy_lib.audit.local import (
    exact_epsilons,
    selection_epsilon,
    value_epsilon,
)
from fl_privacy_lib.defenses.perturbation import (
    Duchi,
    Flat,
    Hybrid,
    Laplace,
    Perturbation,
    Piecewise,
)
from fl_privacy_lib.defenses.selection import (
    READINGS,
    Exponential,
    PerturbedEncoding,
    PerturbedSampling,
    Selection,
)
from fl_privacy_lib.reproduction.experiment import Case

SIZES = ((2, 1), (10, 1), (32, 3), (100, 10), (114, 11), (123, 12), (300, 30))
"""(d, k): two small ones, then a tenth of each data set's dimensions."""
EPSILONS = (0.5, 1.0, 2.0, 4.0)
KINDS: tuple[type[Perturbation], ...] = (Piecewise, Duchi, Hybrid, Laplace)

_case = partial(
    Case,
    privacy_unit="local_report",
    relation="replace_one",
    sampling="none",
    accountant="exact distribution",
    delta=0.0,
)


def statement_rows() -> list[Case]:
    """Return all cases that the ledger's claims on guarantees and variances rest on."""
    return [*_selections(), *_values(), *_two_stages(), *_epochs(), *_variances()]


def _selections() -> list[Case]:
    return [
        _case(
            claim,
            f"d = {d}, k = {k}, ε₁ = {e:g}",
            e,
            selection_epsilon(mechanism, d),
            setting={"d": d, "k": k, "epsilon": e},
        )
        for (d, k), e in product(SIZES, EPSILONS)
        for claim, mechanism in _selections_of(e, k).items()
    ]


def _selections_of(e: float, k: int) -> dict[str, Selection]:
    encodings = {f"lemma_2_{reading}": PerturbedEncoding(e, k, reading) for reading in READINGS}
    return {"lemma_1": Exponential(e), "lemma_3": PerturbedSampling(e, k), **encodings}


def _values() -> list[Case]:
    single = [
        _case(
            "value_perturbation",
            f"{kind.__name__}, ε₂ = {e:g}",
            e,
            value_epsilon(kind(e)),
            setting={"mechanism": kind.__name__, "epsilon": e},
        )
        for e, kind in product(EPSILONS, KINDS)
    ]
    return single + [
        _case(
            "flat_duchi",
            f"d = {d}, ε = {e:g}",
            e,
            value_epsilon(Flat(Duchi, e, d, reading="published")),
            setting={"d": d, "epsilon": e, "parity": "odd" if d % 2 else "even"},
        )
        for e, d in product(EPSILONS, (123, 100))
    ]


def _two_stages() -> list[Case]:
    return [
        _case(
            claim,
            f"{name}-pm, d = 123, ε = {e:g}",
            e,
            sum(exact_epsilons(select, Piecewise(0.9 * e), 123)),
            setting={"method": name, "epsilon": e},
        )
        for e in EPSILONS
        for claim, name, select in (
            ("theorem_3_1", "exp", Exponential(0.1 * e)),
            ("theorem_3_1", "ps", PerturbedSampling(0.1 * e, 12)),
            ("theorem_3_1_pe", "pe", PerturbedEncoding(0.1 * e, 12, "e_eps")),
        )
    ]


def _epochs() -> list[Case]:
    return [
        _case(
            "epochs",
            f"{epochs} epochs, ε = 1 each",
            float(epochs),
            epochs * sum(exact_epsilons(PerturbedSampling(0.1, 12), Piecewise(0.9), 123)),
            privacy_unit="client",
            setting={"epochs": epochs},
        )
        for epochs in (1, 2, 10)
    ]


def _variances() -> list[Case]:
    """Return Theorem 3.2's cases: η·M(clip(Σ g)) against M(clip(Σ η g)), in and out of range."""
    return [
        _case(
            "theorem_3_2",
            f"{kind.__name__}, η = {rate:g}, Σg = {total:g}",
            float(kind(1.0).variance(min(1.0, rate * total))),
            rate**2 * float(kind(1.0).variance(min(1.0, total))),
            quantity="variance",
            accountant="none",
            setting={"mechanism": kind.__name__, "rate": rate, "total": total},
        )
        for rate, total, kind in product((0.01, 0.1, 0.5), (0.0, 0.3, 1.0, 3.0, 20.0), KINDS)
    ]
