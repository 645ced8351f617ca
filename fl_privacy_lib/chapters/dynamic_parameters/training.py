"""Central training whose bound and noise scale change: one client that never leaves (chapter 06).

A round has one local iteration, so the paper's iterations are the rounds of the route.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.accounting import conventions
from fl_privacy_lib.accounting.conventions import PRINTED_NOISE
from fl_privacy_lib.defenses import (
    Clip,
    Defense,
    Gradient,
    Schedule,
    Transformation,
    adaclip,
    non_private,
    quantile_clipped,
)
from fl_privacy_lib.defenses.route import BatchNoise, PerExample
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.defenses.schedule import Scheduled
from fl_privacy_lib.reproduction.experiments.central import CentralTraining
from fl_privacy_lib.reproduction.experiments.training import MANY

DYNAMIC = {
    "dp_baseline": (False, False),
    "dp_dyns_cdecay": (True, False),
    "dp_dyns_l2max": (False, True),
    "dp_dyns": (True, True),
    "dp_dynsigma": (False, False),
    "dp_dyns_cdecay_sigma": (True, False),
    "dp_dyns_l2max_sigma": (False, True),
    "dp_dyns_sigma": (True, True),
}
"""Method → whether its bound decays, and whether S is the largest norm: the paper's Table I."""
DECAY = 3.0  # C_0 / C_T, or η_0 / η_T; the paper's is lost, Fed-CDP's goes from 6 to 2
RATES = {"dp_rate_decay": (1.0, 1 / DECAY), "dp_short_steps": ((1 + 1 / DECAY) / 2,) * 2}
"""The baseline at a falling share of its learning rate, and at the mean of these shares."""
METHODS = ("non_private", *DYNAMIC, *RATES, "dp_flat", "quantile_clip", "adaclip")
READINGS = ("batch", "sqrt_batch", "none", "code", "not_applicable")
"""What divides σS on the batch mean, B, √B or nothing; the paper's formula is lost.

'code': B, and where S is the largest norm, it is the mean of the examples' largest norms instead,
as in the released code of the later paper, Fed-αCDP.
"""
POLICIES = {name: conventions.POLICIES[name] for name in ("linear", "exponential", "cyclic")}
"""The schedules of ε that gave the tables."""
LOOKS = 100  # evaluations of a training that is judged, on all test examples


@dataclass(frozen=True)
class RateShare(Transformation):
    """A share of the server's step, which may fall over the rounds and costs no ε.

    The control for a decaying bound, under which a clipped step and its noise shrink alike.
    """

    share: Schedule

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return a round's share of the aggregate, [1, …]."""
        return {name: v * self.share.at(ctx.round) for name, v in values.items()}


@dataclass(frozen=True)
class Central(CentralTraining):
    """One cell: a training of Dynamic parameters.

    Parameters
    ----------
    setting : one of `READINGS`
    rounds : T, iterations
    noise_scale : σ where it is fixed
    noise_scale_policy : 'fixed', or how σ_t decays, one of `POLICIES`
    schedule : 'epsilon', the schedules of ε that gave the tables, or 'printed', σ from 15 to 4.85
    variance : 'scaled' with the sensitivity, or 'fixed' at (σC)² whatever it is, as in Table VII
    """

    rounds: int = 10_000
    batch_size: int = 600
    noise_scale_policy: str = "fixed"
    schedule: str = "epsilon"
    variance: str = "scaled"

    methods: ClassVar[tuple[str, ...]] = METHODS
    readings: ClassVar[tuple[str, ...]] = READINGS

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("fixed", *POLICIES), noise_scale_policy=self.noise_scale_policy)
        one_of(("epsilon", "printed"), schedule=self.schedule)
        one_of(("scaled", "fixed"), variance=self.variance)

    @property
    def bound(self) -> Scheduled:
        """C, or C_t where it decays: linearly, to a third unless `clip_end` says where."""
        if not DYNAMIC.get(self.method, (False, False))[0]:
            return self.clip_norm
        return Schedule(self.clip_norm, self.clip_end or self.clip_norm / DECAY, self.rounds)

    @property
    def sigma(self) -> Scheduled:
        """σ, or σ_t where it decays."""
        if self.noise_scale_policy == "fixed":
            return self.noise_scale
        shape, ends, cycles = POLICIES[self.noise_scale_policy]
        if self.schedule == "epsilon":
            return Schedule(*ends, self.rounds, shape, cycles, of_epsilon=True)
        return Schedule(*PRINTED_NOISE, self.rounds, self.noise_scale_policy)

    @property
    def defense(self) -> Defense:
        """What fills the route."""
        if self.method == "non_private":
            return non_private()
        if self.method == "quantile_clip":
            return quantile_clipped(
                clip_norm=self.clip_norm, noise_scale=self.noise_scale, scope="layer",
                count_scale=self.batch_size / 20,
            )  # fmt: skip
        if self.method == "adaclip":
            return adaclip(clip_norm=self.clip_norm, noise_scale=self.noise_scale, scope="layer")
        clip = Clip(self.bound, "all" if self.method == "dp_flat" else "layer")
        divide_by = "batch" if self.setting == "code" else self.setting
        level: Clip | LargestNorm = clip
        if self.variance == "fixed":
            level = Clip(self.clip_norm)
        elif DYNAMIC.get(self.method, (False, False))[1]:
            level = LargestNorm(clip, "mean" if self.setting == "code" else "max")
        share = RATES.get(self.method)
        return Defense(
            self.method, PerExample(clip), BatchNoise(level, self.sigma, divide_by),
            on_aggregate=RateShare(Schedule(*share, self.rounds)) if share else None,
        )  # fmt: skip

    def looks(self) -> tuple[int, int | None]:
        """Return how often a training is looked at: if it is judged, so often that it can stop."""
        return super().looks() if self.held_out or self.rounds < MANY else (LOOKS, None)
