"""Where no ε holds: how noise before a tap can fail to cover what one unit changes."""

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.defenses.stage import STAGES, TAPS, Declaration, Part, Route

_STATISTICS = {"l2_max": "largest gradient norm", "median": "median gradient norm"}
LOCAL = ("per_example", "per_batch")

Reason = tuple[str, str]
Rule = tuple[str, Declaration]  # the place of a rule, and what it says of itself


def parts_before(defense: Route, tap: str) -> list[tuple[Part, ...]]:
    """Return the rules at each place that a gradient passes until a tap.

    The place on_aggregate, which sees releases only, is left out.
    """
    return [defense.parts(place) for place in STAGES[: TAPS.index(tap) + 1][:4]]


def leading(defense: Route, tap: str) -> list[Rule]:
    """Return the first rule at each place before a tap: a guarantee rests on these alone."""
    return [(rules[0].place, rules[0].says) for rules in parts_before(defense, tap)
            if rules and rules[0].says is not None]  # fmt: skip


def noisy(defense: Route, tap: str) -> list[Rule]:
    """Return the leading rules that add noise scaled with a level, not of a fixed size."""
    return [
        (place, says)
        for place, says in leading(defense, tap)
        if says.noise and says.noise.level != "fixed"
    ]


def counting(defense: Route, tap: str) -> list[Rule]:
    """Return the leading rules before a tap that report counts beside the gradient."""
    return [rule for rule in leading(defense, tap) if rule[1].count_scale is not None]


def unbounded(defense: Route, tap: str, sensitivity: str | None = None) -> Reason | None:
    """Return why no Gaussian ε holds for who reads this tap, or None if one does.

    Parameters
    ----------
    defense : Defense
    tap : {'example', 'batch', 'update', 'received', 'aggregate'}
    sensitivity : {'bound', 'l2_max', 'median'} or None
        What the noise is scaled with: a bound known beforehand, or the largest or median norm in
        the batch itself. None: as the stages declare.

    Raises
    ------
    InputError
        If a locally private report stands before the tap.
    """
    one_of(TAPS, tap=tap)
    if any(says.local for _, says in leading(defense, tap)):
        raise InputError(
            f"{defense.name} is locally private: its ε is pure and has no Gaussian events; see "
            "audit.local_statement."
        )
    for place, name, says in sum(parts_before(defense, tap), ()):
        if says is None:
            return (
                "no proof",
                f"{name} at {place} does not say what it clips and how much noise it adds, so "
                "nothing is proved of what passes it: ε = ∞ until it is a "
                "fl_privacy_lib.defenses.Stage that declares both.",
            )
    reasons = [uncovered(defense, tap, place, sensitivity) for place, _ in noisy(defense, tap)]
    if not reasons:
        return _no_noise(defense, tap)
    if all(reasons):
        return reasons[0]
    for _, says in counting(defense, tap):
        if not says.count_scale or (says.noise_on_sum and tap != "aggregate"):
            return (
                "the counts are clear",
                "the counts that its bound follows are released without noise: ε = ∞.",
            )
    return None


def uncovered(
    defense: Route, tap: str, place: str, sensitivity: str | None = None
) -> Reason | None:
    """Return why the noise at one place by itself covers nothing, or None; see `unbounded`."""
    together = LOCAL if place in LOCAL else ("per_client", "on_arrival")
    levels = [says.noise.level for at, says in noisy(defense, tap) if at in together and says.noise]
    for level in [sensitivity] if sensitivity else levels:
        one_of(["bound", *_STATISTICS], sensitivity=level)
        if level != "bound":
            return (
                "the noise level is private",
                f"the noise is scaled with the {_STATISTICS[level]} of the private batch, and its "
                "level can be seen: with all gradients 0 on one side there is no noise at all, so "
                "δ = 1 for every ε. See `fl_privacy_lib.audit.l2_max_epsilon` for what a change of "
                "a few percent already gives.",
            )
    first = defense.parts(place)[0]
    if first.says is None or first.says.clip is None:
        return (
            "no clipping",
            f"the noise of {first.name} covers no bound, since it clips nothing: ε = ∞.",
        )
    return _not_clipped(defense, first.says) if place == "per_batch" else None


def _not_clipped(defense: Route, late: Declaration) -> Reason | None:
    """Return why noise on the batch mean covers nothing, or None where every example is clipped."""
    rules = [part.says or Declaration() for part in defense.parts("per_example")]
    if not rules or rules[0].clip is None:
        return (
            "no clipping",
            "the noise covers no bound, since no example's gradient is clipped: ε = ∞.",
        )
    first, *rest = rules
    if first.rule != late.rule:
        return (
            "two bounds",
            "the bound that clips an example is not the one that the noise is scaled with: ε = ∞.",
        )
    if rest and (first.noise is not None or not all(says.shrinks for says in rest)):
        return (
            "no bound after clipping",
            "what follows the clipping may enlarge what was clipped: ε = ∞.",
        )
    return None


def _no_noise(defense: Route, tap: str) -> Reason:
    rules = sum(parts_before(defense, tap), ())
    shares = [part.says.noise.share for part in rules if part.says and part.says.noise]
    if shares and max(shares) < 1:
        return (
            "noise on a part",
            f"{defense.name} adds noise to {max(shares):.0%} of the gradient and sends the rest as "
            "it is: ε = ∞.",
        )
    if shares:
        return (
            "noise without a bound",
            f"the noise that {defense.name} adds is a fixed number for each coordinate, and "
            "nothing limits what one example can change: ε = ∞.",
        )
    return (
        "no noise before the tap",
        f"nothing that {defense.name} adds stands before the tap '{tap}': ε = ∞.",
    )
