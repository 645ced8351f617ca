"""Stages that clip, and scale their Gaussian noise with the clipping bound's level S.

Each takes a `Clip`, whose bound is known beforehand, so that engines may fuse the stage, or a
`rules.Rule` that reads bound and level off the gradients themselves.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fl_privacy_lib._checks import InputError, in_range, one_of, refuse, whole_number
from fl_privacy_lib.defenses.clipping import Clip, Gradient, layer_norms, scaled
from fl_privacy_lib.defenses.noise import DIVISORS, add_noise, mean_std
from fl_privacy_lib.defenses.rules import FixedBound, Rule
from fl_privacy_lib.defenses.schedule import Schedule, Scheduled, value_at
from fl_privacy_lib.defenses.stage import Declaration, Noise, Stage


class NoisyStage(Stage):
    """What the three stages share: a clip or rule, and noise whose standard deviation is σ·S."""

    clip: Any  # Clip, Rule or None
    noise_scale: Scheduled
    divide_by: str = "none"
    scale: float = 1.0
    reports: ClassVar[bool] = True  # whether the stage is where its rule reports its counts

    def __post_init__(self) -> None:
        in_range(0, math.inf, noise_scale=self.sigma(), scale=self.scale)
        one_of(DIVISORS, divide_by=self.divide_by)
        if self.noise_scale and self.clip is None:
            raise InputError(
                f"noise_scale = {self.noise_scale} needs a bound to scale with: give a clip."
            )

    @property
    def is_fixed(self) -> bool:
        """Whether no rule has to see the gradients before the bound is known."""
        return not isinstance(self.clip, Rule)

    @property
    def rule(self) -> Any:
        """The clip as a rule, or the rule itself."""
        return FixedBound(self.clip) if self.is_fixed else self.clip

    def sigma(self, round: int = 0) -> float:
        """Return σ of a round."""
        return value_at(self.noise_scale, round)

    def declare(self) -> Declaration:
        """Return the rule's bound, the noise, and the counts that the rule reports here."""
        counts = self.rule.count_scale
        return Declaration(
            self.rule.clip,
            Noise(self.noise_scale, self.rule.level, self.divide_by, self.scale),
            # a bound that moves by counts has to be the same one at both stages that use it
            rule=None if counts is None else self.rule,
            count_scale=counts if self.reports else None,
            noise_on_sum=self.rule.summed,
        )

    def noiseless(self) -> Any:
        """Return the stage without noise, on the gradient and on the counts of its rule."""
        clip = self.clip if self.is_fixed else self.clip.noiseless()
        return replace(self, clip=clip, noise_scale=0.0)  # type: ignore[type-var]

    def add_scaled_noise(
        self, values: Gradient, norms: Gradient, unit: float, ctx: Any
    ) -> Gradient:
        """Return values [clients, …] with noise of standard deviation unit · S; at 0, none."""
        if not unit:
            return values
        stds = {name: unit * level for name, level in self.rule.levels(norms, ctx).items()}
        return add_noise(values, stds, ctx.generators)


@dataclass(frozen=True)
class PerExample(NoisyStage):
    """The stage per_example: every example's gradient is clipped and noised by itself.

    Parameters
    ----------
    clip : Clip, Rule or None
    noise_scale : float, ≥ 0, or Schedule
        σ; each example's gradient gets noise such that the *batch mean* carries `mean_std` of σS.
    divide_by : {'sqrt_batch', 'batch', 'none'}, see `mean_std`
    """

    clip: Clip | Rule | None = None
    noise_scale: Scheduled = 0.0
    divide_by: str = "sqrt_batch"

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return example gradients [clients, batch, …], clipped and noised one by one."""
        norms = ctx.norms if ctx.norms is not None else layer_norms(gradients, leading=2)
        clipped = scaled(gradients, self.rule.factors(norms, ctx))
        self.rule.tell(norms, ctx, ctx.batch_size)
        # averaging B independent draws divides a standard deviation by √B
        mean = mean_std(self.sigma(ctx.round), 1.0, ctx.batch_size, self.divide_by)
        unit = mean * ctx.batch_size**0.5
        return self.add_scaled_noise(clipped, norms, unit, ctx)


@dataclass(frozen=True)
class BatchNoise(NoisyStage):
    """The stage per_batch: noise on the batch mean, scaled with the level S of its examples.

    At on_aggregate, the updates of a round are the batch.

    Parameters
    ----------
    clip : Clip or Rule
        The one that the per-example stage has enforced.
    noise_scale : float, ≥ 0, or Schedule, σ
    divide_by : {'sqrt_batch', 'batch', 'none'}, see `mean_std`
    """

    clip: Clip | Rule
    noise_scale: Scheduled
    divide_by: str = "batch"
    reports: ClassVar[bool] = False

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [clients, …] with noise; ``ctx.norms`` are those before clipping."""
        # an empty Poisson batch has no norms, and the server knows none
        norms = getattr(ctx, "norms", None) or {
            name: v.new_zeros(len(v), 0) for name, v in values.items()
        }
        unit = mean_std(self.sigma(ctx.round), 1.0, ctx.batch_size, self.divide_by)
        return self.add_scaled_noise(values, norms, unit, ctx)


@dataclass(frozen=True)
class ClipAndNoiseUpdate(NoisyStage):
    """The stages per_client and on_arrival: a client's update is clipped and noised.

    Parameters
    ----------
    clip : Clip or Rule
    noise_scale, scale : float, ≥ 0; the noise's standard deviation per coordinate is σS·scale
    """

    clip: Clip | Rule
    noise_scale: Scheduled
    scale: float = 1.0

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return updates [clients, …], clipped, with noise of standard deviation σS·scale."""
        # to a rule, an update is a batch of one
        norms = {name: n[:, None] for name, n in layer_norms(values, leading=1).items()}
        factors = {name: f[:, 0] for name, f in self.rule.factors(norms, ctx).items()}
        self.rule.tell(norms, ctx, 1)
        unit = self.sigma(ctx.round) * self.scale
        return self.add_scaled_noise(scaled(values, factors), norms, unit, ctx)


@dataclass(frozen=True)
class TreeNoise(BatchNoise):
    """The stage per_batch with noise that is drawn along a binary tree over a round's steps.

    The sum of the first t steps carries one draw of σC/B for each 1 in t's binary digits, where
    fresh noise would make t of them. Every round has a tree of its own.

    Parameters
    ----------
    clip, noise_scale, divide_by : as in `BatchNoise`, of every node; a σ that is one number
    leaves : L ≥ 1, the steps of a round. Each example may be used in one of them, at most: the
        local iterations have to be one pass over the client's data

    Notes
    -----
    A step adds to one node on each level, of which there are at most as many as L has binary
    digits, h. So the whole tree is one Gaussian release of sensitivity C√h, and its multiplier
    σ/√h is what the stage declares. Source: Kairouz et al. (2021), Algorithm 1 and Theorem 4.1;
    the tree is that of Dwork et al. (2010) and Chan et al. (2011), without Honaker's refinement.
    """

    leaves: int = 1

    def declare(self) -> Declaration:
        """Return the clip, the noise multiplier of the whole tree, and the steps it is for."""
        whole_number(1, leaves=self.leaves)
        refuse({"the σ of a tree is one number: give noise_scale a number, not a schedule.":
                isinstance(self.noise_scale, Schedule)})  # fmt: skip
        height = self.leaves.bit_length()
        return replace(
            BatchNoise(self.clip, self.sigma() / height**0.5, self.divide_by).declare(),
            steps=self.leaves,
        )

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [1, …] with the noise by which the next prefix sum's noise differs."""
        noisy, step = super().__call__(values, ctx), ctx.iteration + 1
        refuse({f"a tree of leaves = {self.leaves} has no step {step}: give it as many leaves as "
                "there are local iterations.": step > self.leaves})  # fmt: skip
        # at each client, the nodes whose noise the prefix sum carries, by their level
        nodes = ctx.state.setdefault("tree", {}).setdefault(ctx.clients[0], {})
        if step == 1:
            nodes.clear()
        level = (step & -step).bit_length() - 1  # of the node that this step completes
        done = [nodes.pop(below) for below in range(level)]  # the nodes that it takes in
        nodes[level] = {name: noisy[name] - v for name, v in values.items()}
        return {name: v - sum(node[name] for node in done) for name, v in noisy.items()}
