"""FedSel's lemmas and theorems beside exact values of ε and of variances (chapter 08)."""

from functools import partial

from fl_privacy_lib.audit.local import (
    AnySelection,
    budget,
    selection_epsilon,
    two_stage_epsilon,
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
)
from fl_privacy_lib.reproduction.statements import Case

SIZES = ((2, 1), (10, 1), (32, 3), (100, 10), (114, 11), (123, 12), (300, 30))
"""(d, k): two small ones, then a tenth of each data set's dimensions."""
EPSILONS = (0.5, 1.0, 2.0, 4.0)

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
    rows = []
    for d, k in SIZES:
        for e in EPSILONS:
            where = {"d": d, "k": k, "epsilon": e}
            built: dict[str, AnySelection] = {
                "lemma_1": Exponential(e),
                "lemma_3": PerturbedSampling(e, k),
            }
            built |= {
                f"lemma_2_{reading}": PerturbedEncoding(e, k, reading) for reading in READINGS
            }
            for claim, mechanism in built.items():
                rows.append(
                    _case(
                        claim,
                        f"d = {d}, k = {k}, ε₁ = {e:g}",
                        e,
                        selection_epsilon(mechanism, d),
                        setting=where,
                    )
                )
    return rows


def _values() -> list[Case]:
    rows = []
    for e in EPSILONS:
        kinds: tuple[type[Perturbation], ...] = (Piecewise, Duchi, Hybrid, Laplace)
        rows += [
            _case("value_perturbation", f"{kind.__name__}, ε₂ = {e:g}", e, value_epsilon(kind(e)),
                  setting={"mechanism": kind.__name__, "epsilon": e})
            for kind in kinds
        ]  # fmt: skip
        rows += [
            _case(
                "flat_duchi",
                f"d = {d}, ε = {e:g}",
                e,
                value_epsilon(Flat(Duchi, e, d, reading="published")),
                setting={"d": d, "epsilon": e, "parity": "odd" if d % 2 else "even"},
            )
            for d in (123, 100)
        ]
    return rows


def _two_stages() -> list[Case]:
    rows = []
    for e in EPSILONS:
        first, second = 0.1 * e, 0.9 * e
        for claim, select in (
            ("theorem_3_1", Exponential(first)), ("theorem_3_1", PerturbedSampling(first, 12)),
            ("theorem_3_1_pe", PerturbedEncoding(first, 12, "e_eps")),
        ):  # fmt: skip
            exact = two_stage_epsilon(select, Piecewise(second), 123)
            rows.append(_case(claim, f"{select.name}-pm, d = 123, ε = {e:g}", e, exact,
                              setting={"method": select.name, "epsilon": e}))  # fmt: skip
    return rows


def _epochs() -> list[Case]:
    rows = []
    for epochs in (1, 2, 10):
        total = budget(epochs, PerturbedSampling(0.1, 12), Piecewise(0.9), 123)
        rows.append(
            _case(
                "epochs",
                f"{epochs} epochs, ε = 1 each",
                float(epochs),
                total,
                privacy_unit="client",
                setting={"epochs": epochs},
            )
        )
    return rows


def _variances() -> list[Case]:
    """Return Theorem 3.2's cases: η·M(clip(Σ g)) against M(clip(Σ η g)), in and out of range."""
    rows = []
    for rate in (0.01, 0.1, 0.5):
        for total in (0.0, 0.3, 1.0, 3.0, 20.0):
            for kind in (Piecewise, Duchi, Hybrid, Laplace):
                noise = kind(1.0)
                adapted = rate**2 * float(noise.variance(min(1.0, total)))
                plain = float(noise.variance(min(1.0, rate * total)))
                rows.append(
                    _case(
                        "theorem_3_2",
                        f"{kind.__name__}, η = {rate:g}, Σg = {total:g}",
                        plain,
                        adapted,
                        quantity="variance",
                        accountant="none",
                        setting={"mechanism": kind.__name__, "rate": rate, "total": total},
                    )
                )
    return rows
