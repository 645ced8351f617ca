"""AdaClip: coordinates are centred and scaled before clipping, by moments of earlier releases."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fl_privacy_lib.defenses.clipping import Clip, Gradient, expand
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.noisy_stages import BatchNoise
from fl_privacy_lib.defenses.rules import Rule
from fl_privacy_lib.defenses.stage import Declaration, Stage

MOMENTS = "adaclip"  # the name of the state: (means, spreads), both tensors [clients, …]
MEAN_DECAY, SPREAD_DECAY = 0.99, 0.9  # β₁ and β₂ of the moving averages
FLOOR, CEILING = 1e-12, 1.0  # of a coordinate's estimated variance; the ceiling is a choice here


@dataclass(frozen=True)
class AdaClip(Rule, Stage):
    """The stage per_example: g → m + b · clip((g − m)/b), by coordinate, the clip to norm 1.

    Parameters
    ----------
    clip_norm : float, > 0
        C_0: the moments begin at m = 0 and one spread for all coordinates, with which the rule
        clips to C_0.
    scope : {'layer', 'all'}, of the clip to norm 1

    Notes
    -----
    With spreads s the scale is b_i = √(s_i Σ_j s_j), which gives (g − m)/b an expected squared norm
    of 1 with the least noise b² in all. The moments belong to one participation and are estimated
    from its own noisy batch means, so they cost nothing more; a zero gradient is not zero after
    centring, so an absent example moves a release like a replaced one. An attacker's replay knows
    the moments of the first iteration only. Source: Pichapati, Suresh, Yu, Reddi and Kumar (2019),
    Algorithm 1.
    """

    clip_norm: float = 4.0
    scope: str = "all"
    level: ClassVar[str] = "bound"

    def __post_init__(self) -> None:
        Clip(self.clip_norm, self.scope)  # checks both

    @property
    def clip(self) -> Clip:  # type: ignore[override]
        """The clip of the centred and scaled gradient."""
        return Clip(1.0, self.scope)

    def declare(self) -> Declaration:
        """Return the clip to norm 1, and the moments' rule that has to scale the noise, too."""
        return Declaration(self.clip, rule=self)

    def begin(self, ctx: Any) -> None:
        """Forget the moments of the participation before: the defence's begin_client."""
        ctx.state.pop(MOMENTS, None)

    def moments(self, like: Gradient, ctx: Any) -> tuple[Gradient, Gradient]:
        """Return m and s, tensors of the shapes of `like` [clients, …]."""
        if MOMENTS in ctx.state:
            return ctx.state[MOMENTS]
        sizes = {name: v[0].numel() for name, v in like.items()}
        if self.scope == "all":
            sizes = dict.fromkeys(sizes, sum(sizes.values()))
        means = {name: v.new_zeros(v.shape) for name, v in like.items()}
        spreads = {name: m + self.clip_norm / math.sqrt(sizes[name]) for name, m in means.items()}
        return means, spreads

    def scales(self, spreads: Gradient) -> Gradient:
        """Return b, of the shapes of the spreads [clients, …]."""
        sums = {name: s[..., None].flatten(1).sum(1) for name, s in spreads.items()}  # [clients]
        if self.scope == "all":
            sums = dict.fromkeys(sums, torch.stack(list(sums.values())).sum(0))
        return {name: (s * expand(sums[name], s)).sqrt() for name, s in spreads.items()}

    def levels(self, norms: Gradient, ctx: Any) -> Gradient:
        """Return b for batch means [clients, …], here in the place of norms."""
        return self.scales(self.moments(norms, ctx)[1])

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return example gradients [clients, batch, …], clipped in the scaled coordinates."""
        like = {name: g.new_empty(g.shape[:1] + g.shape[2:]) for name, g in gradients.items()}
        means, spreads = self.moments(like, ctx)
        m = {name: mean[:, None] for name, mean in means.items()}
        b = {name: scale[:, None] for name, scale in self.scales(spreads).items()}
        white = {name: (g - m[name]) / b[name] for name, g in gradients.items()}
        clipped = self.clip(white, leading=2, round=ctx.round)
        return {name: m[name] + b[name] * w for name, w in clipped.items()}

    def follow(self, noisy: Gradient, std: float, ctx: Any) -> None:
        """Move the moments after a noisy batch mean [clients, …], whose noise was std · b."""
        means, spreads = self.moments(noisy, ctx)
        b, beta, gamma = self.scales(spreads), MEAN_DECAY, SPREAD_DECAY
        new_means, new_spreads = {}, {}
        for name, g in noisy.items():
            variance = (g - means[name]).square() - (std * b[name]).square()
            new_means[name] = beta * means[name] + (1 - beta) * g
            new_spreads[name] = (
                gamma * spreads[name].square() + (1 - gamma) * variance.clamp(FLOOR, CEILING)
            ).sqrt()
        ctx.state[MOMENTS] = (new_means, new_spreads)


class AdaClipNoise(BatchNoise):
    """The stage per_batch: noise b times that of a clip to norm 1, and the moments' update.

    Parameters
    ----------
    clip : AdaClip
    noise_scale, divide_by : as in `BatchNoise`
    """

    def declare(self) -> Declaration:
        """Return the noise; a zero gradient is not zero after centring, see `Noise`."""
        declared = super().declare()
        noise = declared.noise and replace(declared.noise, centred=True)
        return replace(declared, noise=noise, rule=self.rule)

    def noiseless(self) -> "AdaClipNoise":
        """Return the moments' update alone."""
        return replace(self, noise_scale=0.0)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [clients, …] with noise."""
        means, _ = self.rule.moments(values, ctx)
        count = ctx.batch_size if ctx.examples is None else ctx.examples[1].shape[1]
        # m enters once, however many examples a Poisson batch holds: their number has no noise of
        # its own
        missing = 1 - count / ctx.batch_size
        centred = {name: v + missing * means[name] for name, v in values.items()}
        std = mean_std(self.sigma(ctx.round), 1.0, ctx.batch_size, self.divide_by)
        noisy = self.add_scaled_noise(centred, values, std, ctx)
        self.rule.follow(noisy, std, ctx)
        return noisy
