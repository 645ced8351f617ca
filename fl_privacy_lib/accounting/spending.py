"""An ε with everything that must be said beside it."""

from dataclasses import dataclass

from fl_privacy_lib.accounting.events import Ledger, Relation, Unit

_UNITS = {"example": "one example", "client": "one client", "local_report": "one local report"}
_RELATIONS = {"add_remove": "adding or removing it", "replace_one": "replacing it"}


@dataclass(frozen=True)
class Spending:
    """What a sequence of releases costs, and under which reading.

    Parameters
    ----------
    epsilon : float
        ε ≥ 0; ``inf`` if the accountant gives no bound.
    delta : float
        The δ that stands beside ε in the papers: the target, or the δ of one step.
    composition_delta : float
        The δ for which ε really holds. It differs from ``delta`` for base, advanced and optimal
        composition, which add up q·δ of every step and their own slack.
    unit, relation, sampling : str
        Who is protected, against which change, under which sampling assumption.
    accountant : str
        Name as in `fl_privacy_lib.accounting.accountants.ACCOUNTANTS`.
    steps : int
        Number of releases.
    order : float or None
        The Rényi order that gives ε, for accountants that have one.
    caveats : tuple of str
        Conditions of the accountant's theorem that the releases do not meet, one sentence each.
    """

    epsilon: float
    delta: float
    composition_delta: float
    unit: Unit
    relation: Relation
    sampling: str
    accountant: str
    steps: int
    order: float | None = None
    caveats: tuple[str, ...] = ()

    @classmethod
    def on(
        cls,
        ledger: Ledger,
        accountant: str,
        epsilon: float,
        delta: float,
        composition_delta: float | None = None,
        order: float | None = None,
        caveats: tuple[str, ...] = (),
    ) -> "Spending":
        """Return the spending of a ledger; without a ``composition_delta`` it is ``delta``."""
        return cls(
            epsilon=float(epsilon),
            delta=delta,
            composition_delta=delta if composition_delta is None else float(composition_delta),
            unit=ledger.unit,
            relation=ledger.relation,
            sampling=ledger.sampling,
            accountant=accountant,
            steps=ledger.steps,
            order=order,
            caveats=caveats,
        )

    def __str__(self) -> str:
        return (
            f"ε = {self.epsilon:.4g} at δ = {self.composition_delta:.3g} for {_UNITS[self.unit]}, "
            f"{_RELATIONS[self.relation]}; sampling: {self.sampling}; accountant: {self.accountant}; "
            f"{self.steps} releases"
        )
