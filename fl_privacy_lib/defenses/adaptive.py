"""Clipping bounds and noise levels that follow the gradients themselves, and what each costs.

A rule turns norms into bounds, and into the level S that noise is scaled with. Three stages apply a
rule: to every example, as noise on the batch mean, to a client's update. A rule that reads private
norms and tells nobody how much noise hides them has no ε (`MedianNorm`, `LargestNorm`). One that
pays for what it reads has one (`QuantileNorm`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fl_privacy_lib._checks import InputError, in_range, one_of, positive
from fl_privacy_lib.defenses.clipping import (
    Clip,
    Gradient,
    in_scope,
    layer_norms,
    scaled,
    shrink_factors,
)
from fl_privacy_lib.defenses.noise import DIVISORS, add_gaussian, mean_std, normal
from fl_privacy_lib.defenses.stage import Context, Declaration, Noise, Stage

BOUND = "quantile_bound"  # the name of the state; the counts have names of their own
STATISTICS = ("max", "mean")


class Rule:
    """What the stages ask of a rule; norms are tensors [clients, batch] by name, before clipping.

    Attributes
    ----------
    clip : a bound known beforehand, or None
    level : what S is, one of `stage.LEVELS`
    count_scale : standard deviation of the noise on the counts that it reports; None: it reports
        none
    """

    clip: Clip | None
    level: ClassVar[str] = "bound"
    count_scale: float | None = None

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return what each example's tensors are multiplied with, [clients, batch]."""
        raise NotImplementedError

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return S for every tensor, [clients]."""
        raise NotImplementedError

    def tell(self, norms: Gradient, ctx: Any, asked: int) -> None:
        """Report to the server what the rule needs of this batch, of `asked` norms a client; by default nothing."""

    def silent(self) -> "Rule":
        """Return the rule without the noise of its reports; by default the rule itself."""
        return self


@dataclass(frozen=True)
class MedianNorm(Rule):
    """Clip to the median norm of the batch, tensor by tensor: S is that median. No ε.

    Parameters
    ----------
    scope : {'layer', 'all'}, as in `Clip`

    Notes
    -----
    Source: Fed-CDP, section IV-C, where C is at most the median norm over the client's training
    set; here it is the median over the batch at hand, of an even number the mean of the middle two.
    Half of the examples are clipped.
    """

    scope: str = "layer"
    clip: ClassVar[None] = None  # type: ignore[misc]  # no bound is known beforehand
    level: ClassVar[str] = "median"

    def __post_init__(self) -> None:
        one_of(["layer", "all"], scope=self.scope)

    def _medians(self, norms: Gradient) -> Gradient:
        """Return tensors [clients, 1]; an empty batch has the median 0."""
        found = {}
        for name, n in in_scope(norms, self.scope).items():
            ordered, size = n.sort(dim=1).values, n.shape[1]
            middle = ordered[:, (size - 1) // 2 : size // 2 + 1] if size else n.new_zeros(len(n), 1)
            found[name] = middle.mean(1, keepdim=True)
        return found

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return min(1, median/norm), [clients, batch]."""
        return shrink_factors(in_scope(norms, self.scope), self._medians(norms))

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return the medians, [clients]."""
        return {name: median[:, 0] for name, median in self._medians(norms).items()}


@dataclass(frozen=True)
class LargestNorm(Rule):
    """Fed-αCDP's ℓ2-max rule: clip at a fixed bound, scale the noise with the largest norm left. No ε.

    Parameters
    ----------
    clip : Clip or None
        The fixed bound, so that S ≤ C; None: nothing is clipped and S has no limit.
    statistic : {'max', 'mean'}
        'max': S is the largest norm over the batch's examples and tensors, as printed. 'mean': the
        mean over the examples of each one's largest tensor norm, as in the released code.
    floor : float, ≥ 0; no norm counts as less (0.1 in the released code)

    Notes
    -----
    S is a statistic of the private batch, and the noise shows it: in d coordinates the level of the
    noise can be read off to about 1/√(2d). A neighbour whose S differs by a tenth forces ε ≥ 78 for
    d = 34,720 and δ ≤ 1/2 (`audit.l2_max_epsilon`); without a floor, a batch of zero gradients has
    no noise at all. Where an example reaches C on both sides, S = C and nothing leaks. Source:
    Fed-αCDP, section 5.2 and Algorithm 1; the released code clips at 32 with a floor of 0.1.
    """

    clip: Clip | None = None
    statistic: str = "max"
    floor: float = 0.0
    level: ClassVar[str] = "l2_max"

    def __post_init__(self) -> None:
        one_of(STATISTICS, statistic=self.statistic)
        in_range(0, math.inf, floor=self.floor)

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return the fixed clip's factors, [clients, batch]."""
        if self.clip is None:
            return {name: torch.ones_like(n) for name, n in norms.items()}
        return self.clip.factors(norms, ctx.round)

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return S, [clients], the same for every tensor."""
        left = torch.stack(
            list(scaled(norms, self.factors(norms, ctx)).values())
        )  # [tensors, clients, batch]
        largest = left.amax(0).clamp_min(self.floor)  # [clients, batch]
        if largest.shape[1] == 0:
            level = largest.new_full((len(largest),), self.floor)
        else:
            level = largest.amax(1) if self.statistic == "max" else largest.mean(1)
        return dict.fromkeys(norms, level)


@dataclass(frozen=True)
class QuantileNorm(Rule, Stage):
    """A bound that follows a quantile of the norms, read from noised counts of the examples (or updates) below it.

    Parameters
    ----------
    clip : Clip
        Of round 0, with the bound C_0. Its scope 'layer' keeps a bound for each tensor, 'all' one
        for all together.
    target : float, in [0, 1], the quantile
    rate : float, > 0; once a round the bound is multiplied by exp(−rate · (fraction below −
        target))
    count_scale : float, ≥ 0
        Standard deviation of the noise on every count. A unit moves each bound's count by at most
        1. The counts are a release beside the gradients: `Defense.events` counts both.

    Notes
    -----
    Source: Andrew, Thakkar, McMahan and Ramaswamy (2021), with their geometric update, target and
    rate. Their noise is on the sum over all clients; here every client noises its own counts, so
    that nobody need be trusted with them. A round's bound is a function of counts that are public
    already, and costs nothing more.
    """

    clip: Clip
    target: float = 0.5
    rate: float = 0.2
    count_scale: float = 10.0

    def __post_init__(self) -> None:
        positive(rate=self.rate)
        in_range(0, 1, target=self.target)
        in_range(0, math.inf, count_scale=self.count_scale)

    def declare(self) -> Declaration:
        """Return nothing: at on_aggregate, the rule reads what has been released."""
        return Declaration()

    def silent(self) -> "QuantileNorm":
        """Return the rule with clear counts."""
        return replace(self, count_scale=0.0)

    def noiseless(self) -> "QuantileNorm":
        """Return the stage that moves by clear counts."""
        return self.silent()

    def start(self) -> dict[str, Any]:
        """Return the defence's memory at round 0: bounds by tensor, or one for all."""
        return {BOUND: [self.clip.clip_norm]}

    def bounds(self, names: Iterable[str], ctx: Any) -> dict[str, float]:
        """Return the round's bound for every tensor."""
        if ctx.round and BOUND not in ctx.state:
            raise InputError(
                f"the quantile bound of round {ctx.round} is not known here: give the rule a clip with the bound that "
                "the server has published for this round."
            )
        known, listed = ctx.state.get(BOUND, [self.clip.clip_norm]), list(names)
        return dict(zip(listed, known if len(known) > 1 else known * len(listed), strict=True))

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return min(1, bound/norm), [clients, batch]."""
        return shrink_factors(in_scope(norms, self.clip.scope), self.bounds(norms, ctx))

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return the bounds, [clients]."""
        return {
            name: norms[name].new_full(norms[name].shape[:1], b)
            for name, b in self.bounds(norms, ctx).items()
        }

    def tell(self, norms: Gradient, ctx: Any, asked: int) -> None:
        """Report the noised counts of norms within the bound, [bounds]; an attacker's replay reports nothing."""
        if not ctx.generators:
            return
        bounds, seen = self.bounds(norms, ctx), in_scope(norms, self.clip.scope)
        names = list(seen) if self.clip.scope == "layer" else list(seen)[:1]
        for row, (generator, weight) in enumerate(zip(ctx.generators, ctx.weights, strict=True)):
            below = torch.stack([(seen[name][row] <= bounds[name]).sum() for name in names]).to(
                weight.dtype
            )
            if self.count_scale:
                below = below + self.count_scale * normal(below, generator)
            ctx.report("below", weight * below)
            ctx.report("asked", weight * asked)

    def __call__(self, values: Gradient, ctx: Context) -> Gradient:
        """Return the aggregate as it is and move the bounds for the next round: the stage on_aggregate."""
        if "below" in ctx.reports:
            fractions = (ctx.reports["below"] / ctx.reports["asked"]).tolist()
            known = ctx.state[BOUND]
            known = known if len(known) == len(fractions) else known * len(fractions)
            ctx.state[BOUND] = [
                bound * math.exp(-self.rate * (fraction - self.target))
                for bound, fraction in zip(known, fractions, strict=True)
            ]
        return values


@dataclass(frozen=True)
class _UnderRule(Stage):
    """What the stages below share: a rule, and a noise of σ times its level."""

    rule: Rule
    noise_scale: float = 0.0

    def __post_init__(self) -> None:
        in_range(0, math.inf, noise_scale=self.noise_scale)

    def _declare(self, count_scale: float | None, **noise: Any) -> Declaration:
        made = Noise(self.noise_scale, self.rule.level, **noise) if self.noise_scale else None
        # the rules that leave no bound to prove with are no part of what two stages must agree on
        rule = self.rule if self.rule.level == "bound" else None
        return Declaration(self.rule.clip, made, rule, count_scale=count_scale)

    def noiseless(self) -> "_UnderRule":
        """Return the rule without noise, on the gradient and on its counts."""
        return replace(self, rule=self.rule.silent(), noise_scale=0.0)


@dataclass(frozen=True)
class AdaptiveClip(_UnderRule):
    """The stage per_example under a rule: clip every example's gradient, and noise it with σ times the rule's level.

    Parameters
    ----------
    rule : Rule
    noise_scale, divide_by : as in `route.PerExample`; the *batch mean* carries `mean_std` of σS
    """

    divide_by: str = "sqrt_batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(DIVISORS, divide_by=self.divide_by)

    def declare(self) -> Declaration:
        """Return the rule's bound, the noise per example and the counts."""
        return self._declare(self.rule.count_scale, divide_by=self.divide_by)

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return example gradients [clients, batch, …], clipped and noised one by one."""
        norms = ctx.norms if ctx.norms is not None else layer_norms(gradients, leading=2)
        clipped = scaled(gradients, self.rule.factors(norms, ctx))
        self.rule.tell(norms, ctx, ctx.batch_size)
        if not self.noise_scale:
            return clipped
        unit = mean_std(self.noise_scale, 1.0, ctx.batch_size, self.divide_by) * ctx.batch_size**0.5
        return add_gaussian(
            clipped, {n: unit * s for n, s in self.rule.levels(norms, ctx).items()}, ctx.generators
        )


@dataclass(frozen=True)
class AdaptiveNoise(_UnderRule):
    """The stage per_batch under a rule: noise on the batch mean, of σ times the level of the batch's own norms.

    Parameters
    ----------
    rule : Rule
    noise_scale, divide_by : as in `route.BatchNoise`
    """

    divide_by: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(DIVISORS, divide_by=self.divide_by)

    def declare(self) -> Declaration:
        """Return the noise, and the rule's bound that it is scaled with."""
        return self._declare(None, divide_by=self.divide_by)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [clients, …] with noise; ``ctx.norms`` holds the examples' norms before clipping."""
        if not self.noise_scale:
            return values
        norms = ctx.norms or {
            name: v.new_zeros(len(v), 0) for name, v in values.items()
        }  # an empty Poisson batch
        unit = mean_std(self.noise_scale, 1.0, ctx.batch_size, self.divide_by)
        return add_gaussian(
            values, {n: unit * s for n, s in self.rule.levels(norms, ctx).items()}, ctx.generators
        )


@dataclass(frozen=True)
class AdaptiveUpdate(_UnderRule):
    """The stages per_client and on_arrival under a rule: an update is a batch of one."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range(0, math.inf, scale=self.scale)

    def declare(self) -> Declaration:
        """Return the rule's bound, the noise of an update and the counts."""
        return self._declare(self.rule.count_scale, factor=self.scale)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return updates [clients, …], clipped, with noise of standard deviation σS·scale."""
        norms = {
            name: n[:, None] for name, n in layer_norms(values, leading=1).items()
        }  # [clients, 1]
        clipped = scaled(
            values, {name: f[:, 0] for name, f in self.rule.factors(norms, ctx).items()}
        )
        self.rule.tell(norms, ctx, 1)
        if not self.noise_scale:
            return clipped
        unit = self.noise_scale * self.scale
        return add_gaussian(
            clipped, {n: unit * s for n, s in self.rule.levels(norms, ctx).items()}, ctx.generators
        )
