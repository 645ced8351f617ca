"""A defence's local stages as numbers for a kernel: the only place here that knows the stages."""

from dataclasses import dataclass
from math import inf

import torch

from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.route import BatchNoise, Defense, PerExample
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.stacked import local_noise


def is_supported(defense: Defense) -> bool:
    """Return whether a defence's local iterations are numbers, or rules from norms to numbers."""
    rule, late = defense.per_example or PerExample(), defense.per_batch
    if type(rule) is not PerExample or defense.begin_client is not None:
        return False
    is_clip = type(rule.clip) in (Clip, type(None)) or not rule.is_fixed
    return is_clip and type(late) in (BatchNoise, type(None))


@dataclass(frozen=True)
class Form:
    """A round's local stages.

    Attributes
    ----------
    scope : {'layer', 'all', None}, what the bound is compared with; None: nothing is clipped
    bound : C of this round; ∞ where nothing is clipped
    std : standard deviation per coordinate of the noise on a batch's mean, but for what a rule adds
    needs_norms : whether a rule has to see the norms of each batch, see `answer`
    """

    defense: Defense
    scope: str | None
    bound: float
    std: float
    needs_norms: bool

    @classmethod
    def of(cls, defense: Defense, batch_size: int, round: int) -> "Form":
        """Return the numbers of a defence that `is_supported` has accepted."""
        rule, late = defense.per_example, defense.per_batch
        if rule is not None and not rule.is_fixed:  # no number is known before the norms are
            std = local_noise(Defense("late", per_batch=late), batch_size, round)
            return cls(defense, "layer", 0.0, std, True)
        clip, std = rule.clip if rule else None, local_noise(defense, batch_size, round)
        scope, bound = (clip.scope, clip.bound(round)) if clip else (None, inf)
        return cls(defense, scope, bound, std, late is not None and not late.is_fixed)

    def answer(self, norms: Gradient, ctx: ClientContext) -> tuple[Gradient, Gradient]:
        """Return a batch's factors [1, B] and its noise's standard deviations [1], by tensor.

        Parameters
        ----------
        norms : [1, B], before clipping
        """
        rule, late, size = self.defense.per_example, self.defense.per_batch, ctx.batch_size
        factors = {name: torch.ones_like(n) for name, n in norms.items()}
        variances = {name: torch.full((1,), self.std**2) for name in norms}
        if rule is not None:
            factors = rule.rule.factors(norms, ctx)
            rule.rule.tell(norms, ctx, size)
        for stage in (rule, late):
            if stage is not None and not stage.is_fixed and stage.noise_scale:
                unit = mean_std(stage.sigma(ctx.round), 1.0, size, stage.divide_by)
                for name, level in stage.rule.levels(norms, ctx).items():
                    variances[name] = variances[name] + (unit * level) ** 2
        return factors, {name: v.sqrt() for name, v in variances.items()}
