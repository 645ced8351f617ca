"""Rules for a clipping bound and for the level S that noise is scaled with, and what each costs.

A rule turns the norms of gradients into the factors that they are multiplied with, and into S. A
rule that reads private norms, and never says how much noise hides them, has no ε (`MedianNorm`,
`LargestNorm`). One that pays for what it reads has one (`QuantileNorm`). The stages that apply a
rule stand in `noisy_stages`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from fl_privacy_lib._checks import InputError, in_range, one_of, positive, refuse
from fl_privacy_lib.defenses.clipping import Clip, Gradient, in_scope, scaled, shrink_factors
from fl_privacy_lib.defenses.noise import normal
from fl_privacy_lib.defenses.stage import Declaration, Stage

BOUND = "quantile_bound"  # the name of the state; the counts have names of their own
Levels = Mapping[str, float | torch.Tensor]  # S by tensor: a number, or one a client [clients]


class Rule:
    """What the stages ask of a rule; by default, what a clip with a fixed bound answers.

    Attributes
    ----------
    clip : a bound known beforehand, to which all norms keep behind `factors`, or None
    level : what S is, see `stage.Noise`
    count_scale : standard deviation of the noise on the counts that it reports; None: it reports
        none
    summed : whether that noise is drawn once, on their sum

    Notes
    -----
    All methods take the norms before clipping: tensors [clients, batch], by name. A rule with
    `factors` or `levels` of its own names anew what holds of them, its `clip` or `level`.
    """

    clip: Clip | None
    level: ClassVar[str] = "bound"
    count_scale: float | None = None
    summed: bool = False

    def __init_subclass__(cls) -> None:
        for does, says in (("factors", "clip"), ("levels", "level")):
            if does in vars(cls) and says not in {
                *vars(cls),
                *vars(cls).get("__annotations__", ()),
            }:
                raise InputError(
                    f"the rule {cls.__name__} has {does} of its own, of which the inherited {says} "
                    f"need not be true: name {says} anew, since proofs rest on it."
                )

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return what each example's tensors are multiplied with, [clients, batch]."""
        if self.clip is None:
            return {name: torch.ones_like(n) for name, n in norms.items()}
        return self.clip.factors(norms, ctx.round)

    def levels(self, norms: Gradient, ctx: Any) -> Levels:
        """Return S for every tensor: a number, or one for each client, [clients]."""
        assert self.clip is not None  # where there is noise, `PerExample` asks for a clip
        return dict.fromkeys(norms, self.clip.bound(ctx.round))

    def tell(self, norms: Gradient, ctx: Any, asked: int) -> None:
        """Report what the rule needs of `asked` norms a client; by default nothing."""

    def noiseless(self) -> Any:
        """Return the rule without the noise of its reports; by default the rule itself."""
        return self


@dataclass(frozen=True)
class FixedBound(Rule):
    """A clip whose bound is known beforehand, as a rule; None clips nothing."""

    clip: Clip | None


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

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return min(1, median/norm), [clients, batch]."""
        medians = {name: median[:, None] for name, median in self.levels(norms, ctx).items()}
        return shrink_factors(in_scope(norms, self.scope), medians)

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return the medians, [clients]; an empty batch has the median 0."""
        return {
            name: torch.quantile(n, 0.5, dim=1) if n.shape[1] else n.new_zeros(len(n))
            for name, n in in_scope(norms, self.scope).items()
        }


@dataclass(frozen=True)
class LargestNorm(Rule):
    """Fed-αCDP's ℓ2-max rule: clip at a fixed bound; S is the largest norm that is left. No ε.

    Parameters
    ----------
    clip : Clip or None
        The fixed bound, so that S ≤ C; None: nothing is clipped and S has no limit.
    statistic : {'max', 'mean'}
        'max': S is the largest norm over the batch's examples and tensors, as printed. 'mean': the
        mean over the examples of each one's largest tensor norm, as in the released code.
    floor : float, ≥ 0
        No norm counts as less (0.1 in the released code).

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
        one_of(["max", "mean"], statistic=self.statistic)
        in_range(0, math.inf, floor=self.floor)

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return S, [clients], the same for every tensor; of an empty batch the floor."""
        clipped = scaled(norms, self.factors(norms, ctx))
        largest = torch.stack(list(clipped.values())).amax(0).clamp_min(self.floor)
        if not largest.shape[1]:  # [clients, batch]
            level = largest.new_full((len(largest),), self.floor)
        else:
            level = largest.amax(1) if self.statistic == "max" else largest.mean(1)
        return dict.fromkeys(norms, level)


@dataclass(frozen=True)
class QuantileNorm(Rule, Stage):
    """A bound that follows a quantile of the norms, read from noised counts of those below it.

    Parameters
    ----------
    clip : Clip
        Of round 0, with the bound C_0. Its scope 'layer' keeps a bound for each tensor, 'all' one
        for all together.
    target : float, in [0, 1]
        The quantile.
    rate : float, > 0
        Once a round the bound is multiplied by exp(−rate · (fraction below − target)).
    count_scale : float, ≥ 0
        Standard deviation of the noise on every count. A unit moves each bound's count by at most
        1. The counts are a release beside the gradients: `Defense.events` counts both.
    summed : bool
        Whether the noise is drawn once, by a trusted server on the sum of all counts, as published;
        else by every client on its own counts, so that nobody need be trusted with them.

    Notes
    -----
    Source: Andrew, Thakkar, McMahan and Ramaswamy (2021), with their geometric update, target and
    rate. A round's bound is a function of counts that are public already, and costs nothing more.
    What is counted are examples, or at per_client updates; a count becomes a fraction of those that
    are expected, since how many there were is no public number where clients are drawn.
    """

    clip: Clip
    target: float = 0.5
    rate: float = 0.2
    count_scale: float = 10.0
    summed: bool = False
    level: ClassVar[str] = "bound"

    def __post_init__(self) -> None:
        positive(rate=self.rate)
        in_range(0, 1, target=self.target)
        in_range(0, math.inf, count_scale=self.count_scale)
        refuse({"the bound of a quantile moves by counts alone: give its clip a number.":
                not isinstance(self.clip.clip_norm, float | int)})  # fmt: skip

    def declare(self) -> Declaration:
        """Return nothing: at on_aggregate, the rule reads what has been released."""
        return Declaration()

    def noiseless(self) -> "QuantileNorm":
        """Return the rule, and the stage, that moves by clear counts."""
        return replace(self, count_scale=0.0)

    def start(self) -> dict[str, Any]:
        """Return the defence's memory at round 0: bounds by tensor, or one for all."""
        return {BOUND: [self.clip.clip_norm]}

    def bounds(self, norms: Gradient, ctx: Any) -> dict[str, float]:
        """Return the round's bound for every tensor.

        Raises
        ------
        InputError
            If it is not the first round and the state holds no bound.
        """
        if ctx.round and BOUND not in ctx.state:
            raise InputError(
                f"the quantile bound of round {ctx.round} is not known here: give the rule a clip "
                "with the bound that the server has published for this round."
            )
        bounds = ctx.state.get(BOUND, [self.clip.clip_norm])
        return dict(zip(norms, np.broadcast_to(bounds, len(norms)).tolist(), strict=True))

    def factors(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return min(1, bound/norm), [clients, batch]."""
        return shrink_factors(in_scope(norms, self.clip.scope), self.bounds(norms, ctx))

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return the bounds, [clients]."""
        bounds = self.bounds(norms, ctx)
        return {name: n.new_full(n.shape[:1], bounds[name]) for name, n in norms.items()}

    def tell(self, norms: Gradient, ctx: Any, asked: int) -> None:
        """Report the noised counts of norms within the bound, [bounds]; in a replay nothing."""
        if not ctx.generators:
            return
        bounds, compared = self.bounds(norms, ctx), in_scope(norms, self.clip.scope)
        names = list(norms) if self.clip.scope == "layer" else list(norms)[:1]
        within = torch.stack([(compared[name] <= bounds[name]).sum(1) for name in names], 1)
        for row, (generator, weight) in enumerate(zip(ctx.generators, ctx.weights, strict=True)):
            count = within[row].to(weight.dtype)  # [bounds]
            if self.count_scale and not self.summed:
                count = count + self.count_scale * normal(count, generator)
            ctx.report("below", weight * count)
            ctx.report("asked", weight * asked)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the aggregate as it is and move the bounds, [bounds]: the stage on_aggregate."""
        if "below" in ctx.reports:
            below, (each, *_) = ctx.reports["below"], ctx.weights
            if self.summed:
                below = below + each * self.count_scale * normal(below, ctx.generators[0])
            fractions = (below / ctx.reports["asked"] * ctx.weights.sum()).tolist()
            bounds = np.broadcast_to(ctx.state[BOUND], len(fractions)).tolist()
            ctx.state[BOUND] = [
                bound * math.exp(-self.rate * (fraction - self.target))
                for bound, fraction in zip(bounds, fractions, strict=True)
            ]
        return values
