"""Statements that are computed, not run: a claimed number beside the one that holds."""

from dataclasses import dataclass, field
from typing import Any

from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.reproduction.experiment import Row


def computed_row(key: dict[str, Any], metrics: dict[str, float]) -> Row:
    """Return a recorded row of values that are not random: standard deviation 0, n = 1."""
    values = {name: {"mean": value, "std": 0.0, "n": 1} for name, value in metrics.items()}
    return Row(key, (), lambda _: values)


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

    def row(self) -> Row:
        """Return the recorded row: both numbers, and by how much one exceeds the other."""
        words = " ".join(f"{name}={value}" for name, value in self.setting.items())
        numbers = ("claimed", "found", "setting")
        key = {name: value for name, value in vars(self).items() if name not in numbers} | {
            "local_iterations": self.setting.get("local_iterations", "not_applicable"),
            "setting": words or "not_applicable",
        }
        metrics = {
            "claimed": self.claimed,
            "found": self.found,
            "margin": -self.excess,
            "excess": self.excess,
        }
        return computed_row(key, metrics)

    @property
    def excess(self) -> float:
        """By how much what is found exceeds what is claimed."""
        return self.found - self.claimed
