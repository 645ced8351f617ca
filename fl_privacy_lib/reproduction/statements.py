"""Statements that are computed, not run: a claimed number beside the one that holds."""

from dataclasses import dataclass, field
from typing import Any

from fl_privacy_lib.accounting.conventions import DELTA


@dataclass(frozen=True)
class Case:
    """A claimed number beside a computed one, with the reading of both.

    ``found`` is what holds: exact, or a lower bound for a counter-example.
    """

    claim: str
    case: str
    claimed: float
    found: float
    quantity: str = "epsilon"
    privacy_unit: str = "example"
    relation: str = "add_remove"
    sampling: str = "poisson"
    accountant: str = "moments_accountant"
    delta: float = DELTA
    setting: dict[str, Any] = field(default_factory=dict)

    def key(self) -> dict[str, Any]:
        """Return the record's key columns."""
        words = " ".join(f"{name}={value}" for name, value in self.setting.items())
        return {
            "claim": self.claim,
            "case": self.case,
            "quantity": self.quantity,
            "privacy_unit": self.privacy_unit,
            "relation": self.relation,
            "sampling": self.sampling,
            "accountant": self.accountant,
            "delta": self.delta,
            "local_iterations": self.setting.get("local_iterations", "not_applicable"),
            "setting": words or "not_applicable",
        }

    @property
    def excess(self) -> float:
        """By how much what is found exceeds what is claimed."""
        return self.found - self.claimed

    def metrics(self) -> dict[str, float]:
        """Return what is recorded: both numbers, and by how much one exceeds the other."""
        return {
            "claimed": self.claimed,
            "found": self.found,
            "margin": -self.excess,
            "excess": self.excess,
        }
