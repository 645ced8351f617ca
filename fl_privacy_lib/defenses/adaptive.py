"""Stages that clip by a rule and scale their noise with the rule's level S.

Each of the three bases serves two stages: one under a rule that looks at the gradients (here), and
one with a bound known beforehand, which engines may fuse (in `route`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses.clipping import Gradient, layer_norms, scaled
from fl_privacy_lib.defenses.noise import DIVISORS, add_noise, example_std, mean_std
from fl_privacy_lib.defenses.stage import Declaration, Noise, Stage


class RuleStage(Stage):
    """What all bases share: a rule, and Gaussian noise whose standard deviation is σ times S."""

    rule: Any
    noise_scale: float
    divide_by: str = "none"
    scale: float = 1.0
    reports: ClassVar[bool] = True  # whether the stage is where its rule reports its counts

    def __post_init__(self) -> None:
        in_range(0, math.inf, noise_scale=self.noise_scale, scale=self.scale)
        one_of(DIVISORS, divide_by=self.divide_by)

    def declare(self) -> Declaration:
        """Return the rule's bound, the noise, and the counts that the rule reports here."""
        noise = Noise(self.noise_scale, self.rule.level, self.divide_by, self.scale)
        counts = self.rule.count_scale
        # A bound that moves by counts has to be the same one at both stages that use it.
        moving = None if counts is None else self.rule
        reported = counts if self.reports else None
        return Declaration(self.rule.clip, noise, moving, count_scale=reported)

    def add_scaled_noise(
        self, values: Gradient, norms: Gradient, unit: float, ctx: Any
    ) -> Gradient:
        """Return values [clients, …] with noise of standard deviation unit · S; at 0, none."""
        if not unit:
            return values
        stds = {name: unit * level for name, level in self.rule.levels(norms, ctx).items()}
        return add_noise(values, stds, ctx.generators)


class ExampleStage(RuleStage):
    """The stage per_example: every example's gradient is clipped and noised by itself.

    Each gets noise such that the *batch mean* carries `mean_std` of σS.
    """

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return example gradients [clients, batch, …], clipped and noised one by one."""
        norms = ctx.norms if ctx.norms is not None else layer_norms(gradients, leading=2)
        clipped = scaled(gradients, self.rule.factors(norms, ctx))
        self.rule.tell(norms, ctx, ctx.batch_size)
        unit = example_std(self.noise_scale, 1.0, ctx.batch_size, self.divide_by)
        return self.add_scaled_noise(clipped, norms, unit, ctx)


class BatchStage(RuleStage):
    """The stage per_batch: noise on the batch mean, scaled with the examples' level S."""

    reports: ClassVar[bool] = False

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [clients, …] with noise; ``ctx.norms`` are those before clipping."""
        # an empty Poisson batch has no norms
        norms = ctx.norms or {name: v.new_zeros(len(v), 0) for name, v in values.items()}
        unit = mean_std(self.noise_scale, 1.0, ctx.batch_size, self.divide_by)
        return self.add_scaled_noise(values, norms, unit, ctx)


class UpdateStage(RuleStage):
    """The stages per_client and on_arrival: a client's update is clipped and noised."""

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return updates [clients, …], clipped, with noise of standard deviation σS·scale."""
        # to a rule, an update is a batch of one
        norms = {name: n[:, None] for name, n in layer_norms(values, leading=1).items()}
        factors = {name: f[:, 0] for name, f in self.rule.factors(norms, ctx).items()}
        self.rule.tell(norms, ctx, 1)
        unit = self.noise_scale * self.scale
        return self.add_scaled_noise(scaled(values, factors), norms, unit, ctx)


@dataclass(frozen=True)
class AdaptiveStage(RuleStage):
    """What the stages under a `Rule` share."""

    rule: Any
    noise_scale: float = 0.0

    def noiseless(self) -> "AdaptiveStage":
        """Return the rule without noise, on the gradient and on its counts."""
        return replace(self, rule=self.rule.silent(), noise_scale=0.0)


@dataclass(frozen=True)
class AdaptiveClip(AdaptiveStage, ExampleStage):
    """Clip every example's gradient by a rule, and noise it with σ times the rule's level.

    Parameters
    ----------
    rule : Rule
    noise_scale, divide_by : as in `route.PerExample`; the *batch mean* carries `mean_std` of σS
    """

    divide_by: str = "sqrt_batch"


@dataclass(frozen=True)
class AdaptiveNoise(AdaptiveStage, BatchStage):
    """Noise the batch mean with σ times the level that a rule reads off the batch's own norms.

    Parameters
    ----------
    rule : Rule
    noise_scale, divide_by : as in `route.BatchNoise`
    """

    divide_by: str = "batch"


@dataclass(frozen=True)
class AdaptiveUpdate(AdaptiveStage, UpdateStage):
    """Clip every client's update by a rule, and noise it with σ times the rule's level.

    Parameters
    ----------
    rule : Rule
    noise_scale, scale : as in `route.ClipAndNoiseUpdate`
    """

    scale: float = 1.0
