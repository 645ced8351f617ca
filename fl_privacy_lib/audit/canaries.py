"""Canaries on the route: gradients that are put in beside a batch, and who watches for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.noise import mean_std
from fl_privacy_lib.defenses.noisy_stages import BatchNoise
from fl_privacy_lib.defenses.stage import Transformation

FAR = 1e3  # of a canary's raw gradient, in units of C: it is always clipped


@dataclass(frozen=True, eq=False)
class Canaries(Transformation):
    """The stage per_batch of a defence, with canaries in the batch and an adversary behind it.

    A canary's gradient is long, along one coordinate of its own in each tensor that is clipped by
    itself (of the largest tensor, where the whole gradient is). The adversary knows everything but
    the canaries' coins and draws: it subtracts the batch's sum from the release. Its score is the
    log-likelihood of a canary that was put in, against one that was left out.

    Parameters
    ----------
    clip : Clip, of the stage before it, which clips batch and canaries alike
    noise : BatchNoise with noise, the stage that it stands in for
    present : bool [m], the coins
    homes : int [m, 2], the client and the local iteration at which a canary is drawn
    scores : float [m], zeros that fill as the run goes on
    rate : the probability, each time, with which it is drawn
    every : a canary has its turn once in so many rounds, in a fixed order; 1: in each
    seed : of these draws
    """

    clip: Clip
    noise: BatchNoise
    present: np.ndarray
    homes: np.ndarray
    scores: np.ndarray
    rate: float = 1.0
    every: int = 1
    seed: int = 0

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the batch mean [1, …] with canaries and noise, and score the canaries."""
        place, turns = (ctx.clients[0], ctx.iteration), np.arange(len(self.homes)) + ctx.round
        here = np.flatnonzero((self.homes == place).all(1) & (turns % self.every == 0))
        rng = np.random.default_rng([self.seed, ctx.round, *place])
        drawn = here[(rng.random(len(here)) < self.rate) & self.present[here]]
        names = sorted(values, key=lambda name: values[name].numel())
        names = names if self.clip.scope == "layer" else names[-1:]
        rows = {n: v.new_zeros(1, len(drawn), v[0].numel()) for n, v in values.items()}
        bound, size = self.clip.bound(ctx.round), ctx.batch_size
        for n in names:
            rows[n][0, range(len(drawn)), drawn % rows[n].shape[-1]] = FAR * bound
        sums = {n: g.sum(1) for n, g in self.clip(rows, leading=2, round=ctx.round).items()}
        inside = {n: v + sums[n].reshape(v.shape) / size for n, v in values.items()}
        released = self.noise(inside, ctx)
        moved = [(released[n] - values[n]).flatten().double().cpu().numpy() * size for n in names]
        seen = sum(tensor[here % len(tensor)] for tensor in moved)  # along each canary, over C
        std = size * mean_std(self.noise.sigma(ctx.round), bound, size, self.noise.divide_by)
        ratio = bound * (seen - len(names) * bound / 2) / std**2
        absent = np.log(max(1 - self.rate, 1e-300))  # certain draws leave no other case
        self.scores[here] += np.logaddexp(np.log(self.rate) + ratio, absent)
        return released
