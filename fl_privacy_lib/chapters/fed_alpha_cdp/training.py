"""Trainings of Fed-αCDP: noise that follows the largest gradient, or a schedule (chapter 07)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fl_privacy_lib._checks import InputError, one_of
from fl_privacy_lib.accounting.conventions import NOISE_MULTIPLIER, POLICIES, PRINTED_NOISE
from fl_privacy_lib.defenses import (
    Defense,
    Schedule,
    adaclip,
    fed_alpha_cdp,
    fed_cdp,
    quantile_clipped,
)
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.defenses.schedule import Scheduled
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments.training import Training, scene
from fl_privacy_lib.reproduction.records import Values, numbers

DIVISORS = {"printed": "sqrt_batch", "algorithm_1": "none", "code": "batch"}
"""Reading of the noise → what divides σS on the batch mean: √B, nothing or B.

As printed in section 5.2, each example is noised; in Algorithm 1 the batch mean, and nothing
divides; the released code divides by B.
"""
READINGS = (*DIVISORS, "released", "not_applicable")
"""'released': B divides, S is the mean of the examples' largest norms, each at least 0.1, and
nothing below 32 is clipped, as in the released script."""
ALPHA = "fed_alpha_cdp"
FALLING = tuple(f"{ALPHA}_sigma_{policy}" for policy in POLICIES)
"""Fed-αCDP[σ], in Table 8's order."""
METHODS = (
    "non_private", "fed_sdp", "fed_cdp", "fed_cdp_decay", ALPHA, *FALLING,
    *(f"fed_cdp_sigma_{policy}" for policy in POLICIES), "quantile_clip", "adaclip",
    "fed_sdp_server", "dssgd", "gaussian",
)  # fmt: skip
PLAIN = METHODS[:4] + METHODS[-3:]  # of chapter 05, but for a reading that it does not have


@dataclass(frozen=True)
class AlphaTraining(Training):
    """One cell: a training of Fed-αCDP's paper.

    Parameters
    ----------
    setting : one of `READINGS`
    noise_scale : σ; where σ_t falls, the whole schedule is scaled by σ/6; of 'gaussian', noise of
        a fixed size on an update, its standard deviation
    schedule : 'epsilon', the schedules of ε that gave Table 8's rounds, or 'printed', from σ = 15
        to 4.85
    """

    schedule: str = "epsilon"

    methods: ClassVar[tuple[str, ...]] = METHODS
    readings: ClassVar[tuple[str, ...]] = READINGS

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("epsilon", "printed"), schedule=self.schedule)
        if self.setting == "released" and not self.method.startswith(ALPHA):
            raise InputError(
                f"setting = 'released' is Fed-αCDP's script, and not one of {self.method}: "
                "choose 'code'."
            )

    @property
    def sigma(self) -> Scheduled:
        """σ, or σ_t where the method's name says how it falls."""
        _, falls, policy = self.method.partition("_sigma_")
        if not falls:
            return self.noise_scale
        level = self.noise_scale / NOISE_MULTIPLIER
        if self.schedule == "printed":  # in one cycle; a floor keeps the cosine above 0
            first, last = PRINTED_NOISE
            return Schedule(level * first, level * last, self.rounds, policy)
        shape, (first, last), cycles = POLICIES[policy]
        return Schedule(first / level, last / level, self.rounds, shape, cycles, of_epsilon=True)

    @property
    def defense(self) -> Defense:
        """What fills the route; noise as printed stands on the batch mean, with the same law."""
        if self.method in PLAIN and self.setting != "algorithm_1":
            return super().defense
        divide_by, sigma = DIVISORS.get(self.setting), self.sigma
        if self.method.startswith(ALPHA):
            if self.setting == "released":
                return fed_alpha_cdp("code", noise_scale=sigma)
            clip_norm = self.clip_norm
            return fed_alpha_cdp(
                "batch", clip_norm=clip_norm, noise_scale=sigma, divide_by=divide_by
            )
        if self.method == "quantile_clip":
            quantile = quantile_clipped(
                clip_norm=self.clip_norm, noise_scale=self.noise_scale, scope="layer"
            )
            late: Any = quantile.per_batch
            return replace(quantile, per_batch=replace(late, divide_by=divide_by))
        if self.method == "adaclip":
            return adaclip(
                clip_norm=self.clip_norm, noise_scale=self.noise_scale, scope="layer",
                divide_by=str(divide_by),
            )  # fmt: skip
        return fed_cdp("batch", clip_norm=self.clip_norm, noise_scale=sigma, divide_by=divide_by)

    def looks(self) -> tuple[int, int | None]:
        """Return how often a training is looked at: if it is judged, each round on everything."""
        return super().looks() if self.held_out else (self.rounds, None)


@dataclass(frozen=True)
class Levels:
    """S of every iteration of one training with the largest norm as sensitivity.

    Parameters
    ----------
    arm : its training, of the first seed
    """

    arm: AlphaTraining


@dataclass(frozen=True)
class NotedNorm(LargestNorm):
    """The ℓ2-max rule, which keeps every S, a row for each iteration of some clients."""

    noted: list[np.ndarray] = field(default_factory=list, compare=False, repr=False)
    level: ClassVar[str] = LargestNorm.level

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return S, [clients]."""
        found = super().levels(norms, ctx)
        self.noted.append(next(iter(found.values())).cpu().numpy())
        return found


def measure_levels(point: Levels, device: torch.device) -> Result:
    """Return S of every iteration, [T, K_t·L]."""
    arm, defense = point.arm, point.arm.defense
    late: Any = defense.per_batch
    rule = NotedNorm(late.clip.clip)
    start = scene(arm, arm.seed, device)
    simulate(
        start.model, start.train, start.partition, arm.plan(arm.seed),
        replace(defense, per_batch=replace(late, clip=rule)), engine="auto",
    )  # fmt: skip
    return {"levels": np.concatenate(rule.noted).reshape(arm.rounds, -1)}


def level_values(point: Levels, result: Result) -> Values:
    """Return how large S is early and late, and how often it is the bound."""
    levels, bound = result["levels"], point.arm.clip_norm  # [T, K_t·L]
    tenth = max(1, len(levels) // 10)
    early, late = levels[:tenth], levels[-tenth:]
    values = {
        "early_level": early.ravel(),
        "late_level": late.ravel(),
        "early_at_bound": early.ravel() >= bound * (1 - 1e-6),
        "late_at_bound": late.ravel() >= bound * (1 - 1e-6),
        "level_over_early": [late.mean() / early.mean()],
        # what the rule σ₀ ≥ Cσ/S of section 5.3 asks for, with S the mean of the first round
        "asked_noise": [bound * NOISE_MULTIPLIER / early[0].mean()],
    }
    return {name: numbers(value) for name, value in values.items()}
