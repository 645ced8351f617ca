"""A defence's local stages as numbers for a kernel: the only place here that knows the stages."""

from dataclasses import dataclass
from math import hypot, inf
from typing import Any

import torch

from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.route import BatchNoise, Defense, PerExample
from fl_privacy_lib.defenses.rules import LargestNorm
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.stacked import local_noise


def stages(defense: Defense) -> tuple[Any, Any]:
    """Return the stages per_example and per_batch: of an empty place, one that does nothing."""
    return defense.per_example or PerExample(), defense.per_batch or BatchNoise(Clip(1.0), 0.0)


def is_supported(defense: Defense) -> bool:
    """Return whether a defence's local iterations are numbers, or rules from norms to numbers."""
    rule, late = stages(defense)
    if type(rule) is not PerExample or defense.begin_client is not None:
        return False
    is_clip = type(rule.clip) in (Clip, type(None)) or not rule.is_fixed
    return is_clip and type(late) is BatchNoise


@dataclass(frozen=True)
class Form:
    """A round's local stages.

    Attributes
    ----------
    stages : per_example and per_batch
    scope : {'layer', 'all', None}, what the bound is compared with; None: nothing is clipped
    bound : C of this round; ∞ where nothing is clipped, 0 where a rule finds it in the norms
    std : standard deviation per coordinate of the noise on a batch's mean, but for what a rule adds
    largest : whether `std` is in units of the batch's largest norm, see `LargestNorm`
    needs_norms : whether any other rule has to see the norms of each batch, see `answer`
    """

    stages: tuple[Any, Any]
    scope: str | None
    bound: float
    std: float
    largest: bool
    needs_norms: bool

    @classmethod
    def of(cls, defense: Defense, batch_size: int, round: int) -> "Form":
        """Return the numbers of a defence that `is_supported` has accepted."""
        rule, late = stages(defense)
        clip, std = rule.rule.clip, local_noise(defense, batch_size, round)
        scope, bound = (clip.scope, clip.bound(round)) if clip else (None, inf)
        follow = [stage for stage in (rule, late) if not stage.is_fixed]
        if any(stage.clip != LargestNorm(clip) for stage in follow) or (follow and std):
            return cls((rule, late), scope, bound if rule.is_fixed else 0.0, std, False, True)
        units = [mean_std(s.sigma(round), 1.0, batch_size, s.divide_by) for s in follow]
        return cls((rule, late), scope, bound, hypot(std, *units), bool(follow), False)

    def answer(self, norms: Gradient, ctx: ClientContext) -> tuple[Gradient, Gradient]:
        """Return a batch's factors [1, B] and its noise's standard deviations [1], by tensor.

        Parameters
        ----------
        norms : [1, B], before clipping
        """
        factors = self.stages[0].rule.factors(norms, ctx)
        self.stages[0].rule.tell(norms, ctx, ctx.batch_size)
        variances = {name: torch.full((1,), self.std**2) for name in norms}
        for stage in self.stages:
            if not stage.is_fixed and stage.noise_scale:
                unit = mean_std(stage.sigma(ctx.round), 1.0, ctx.batch_size, stage.divide_by)
                for name, level in stage.rule.levels(norms, ctx).items():
                    variances[name] = variances[name] + (unit * level) ** 2
        return factors, {name: v.sqrt() for name, v in variances.items()}
