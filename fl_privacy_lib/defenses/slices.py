"""Slices of a gradient, and noise on some of them, drawn anew in every participation.

A gradient's tensors, one after the other, are a row of d coordinates; a slice is a run of it. Noise
on a share of the slices hides no coordinate of the others: there is no guarantee.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from fl_privacy_lib._checks import InputError, in_range, positive, whole_number
from fl_privacy_lib.defenses.clipping import Clip, Gradient
from fl_privacy_lib.defenses.noise import add_noise
from fl_privacy_lib.defenses.stage import ClientContext, Declaration, Noise, Stage
from fl_privacy_lib.defenses.transformations import part


def flat(gradient: Gradient) -> torch.Tensor:
    """Return tensors [n, …] as rows [n, d], in their order."""
    return torch.cat([g[..., None].flatten(1) for g in gradient.values()], 1)


def unflat(rows: torch.Tensor, like: Gradient) -> Gradient:
    """Return rows [n, d] as tensors [n, …] of the shapes of `like`."""
    pieces = rows.split([g[0].numel() for g in like.values()], 1)
    return {n: p.reshape(len(rows), *like[n].shape[1:]) for n, p in zip(like, pieces, strict=True)}


@dataclass(frozen=True)
class Slices:
    """A partition of d coordinates into s runs, none of them empty.

    Parameters
    ----------
    edges : 0 = e_0 < e_1 < … < e_s = d; slice i has the coordinates e_i, …, e_{i+1} − 1

    Examples
    --------
    >>> Slices((0, 2, 5)).sizes
    [2, 3]
    """

    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.edges) < 2 or self.edges[0] or any(b <= a for a, b in pairwise(self.edges)):
            raise InputError(
                f"edges = {self.edges} are no partition: begin at 0 and let each be larger than "
                "the one before."
            )

    @property
    def sizes(self) -> list[int]:
        """The number of coordinates of each slice."""
        return [b - a for a, b in pairwise(self.edges)]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return what is said of slices, [n, s], said of each of their coordinates, [n, d]."""
        return values.repeat_interleave(torch.tensor(self.sizes, device=values.device), 1)


def risk_balanced(sizes: Sequence[int], risks: Sequence[float], count: int) -> Slices:
    """Return slices of equal leakage risk, as nearly as blocks allow.

    Parameters
    ----------
    sizes : coordinates of each tensor, in their order
    risks : leakage risk of each tensor, ≥ 0; its coordinates share it equally
    count : int, s, slices

    Raises
    ------
    InputError
        If there are fewer blocks than slices, or no risk to balance.

    Notes
    -----
    A block has as many coordinates as the greatest common divisor of the tensors' sizes, and no
    slice cuts one. Unlike the released code's greedy filling, the cuts lie where the summed risk
    passes i/s of its total, so no slice overlaps another, and none is empty. Source: Wang et al.
    (2022), section IV-B.

    Examples
    --------
    >>> risk_balanced([4, 3], [3.0, 1.0], 2).edges
    (0, 3, 7)
    """
    whole_number(1, slices=count)
    block = math.gcd(*sizes)
    blocks = [size // block for size in sizes]
    if count > sum(blocks):
        raise InputError(
            f"{count} slices of a gradient of {sum(blocks)} blocks ({block} coordinates each, the "
            "tensors' greatest common divisor) leave some empty: ask for fewer slices."
        )
    passed = np.repeat(np.divide(risks, blocks), blocks).cumsum()  # risk up to each block's end
    if not (np.isfinite(passed).all() and min(risks) >= 0 and passed[-1] > 0):
        raise InputError(f"risks = {list(risks)} must be finite, at least 0, and not all 0.")
    goals = passed[-1] * np.arange(1, count) / count
    after = np.searchsorted(passed, goals * (1 - 1e-12))  # the block in which a goal is passed
    before = np.where(after > 0, passed[after - 1], 0.0)
    cuts = after + (passed[after] - goals <= goals - before)  # the nearer of its two ends
    step = np.arange(1, count)
    cuts = np.maximum.accumulate(np.maximum(cuts, 1) - step) + step  # each beyond the last
    cuts = np.minimum(cuts, sum(blocks) - count + step)  # and room for those that follow
    return Slices((0, *(block * cuts).tolist(), sum(sizes)))


def reservoir(count: int, chosen: int, generator: torch.Generator) -> list[int]:
    """Return so many of `count` positions, every set of them equally likely.

    Source: Wang et al. (2022), Algorithm 1, lines 7 to 13.
    """
    kept = list(range(chosen))
    for i in range(chosen, count):
        j = int(torch.randint(0, i + 1, (), generator=generator, device=generator.device))
        if j < chosen:
            kept[j] = i
    return kept


@dataclass(frozen=True)
class SlicePerturbation(Stage):
    """Add Gaussian noise to randomly chosen slices of an update, and leave the others as they are.

    Parameters
    ----------
    slices : Slices, or how many of equal size
    share : float, in (0, 1], γ; max(1, ⌊γs⌋) slices are chosen once a participation, by `begin`
    std : float, ≥ 0, σ per coordinate, in units of the update
    clip_norm : float or None
        B: the update is clipped to it first, and the noise has standard deviation σB.

    Notes
    -----
    Source: Wang et al. (2022), Algorithm 1; section V-C for the clipping.
    """

    slices: Slices | int
    share: float
    std: float
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        in_range(0, math.inf, std=self.std)
        positive(clip_norm=1.0 if self.clip_norm is None else self.clip_norm)
        whole_number(1, slices=self.count)
        if not 0 < self.share <= 1:
            raise InputError(f"share = {self.share} must be above 0 and at most 1.")

    @property
    def count(self) -> int:
        """The number of slices, s."""
        return self.slices if isinstance(self.slices, int) else len(self.slices.sizes)

    @property
    def noisy(self) -> int:
        """How many slices get noise."""
        return max(1, part(self.share, self.count))

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on a coordinate of a chosen slice."""
        return self.std * (self.clip_norm or 1.0)

    def of(self, gradient: Gradient) -> Slices:
        """Return the slices of a gradient, tensors [n, …]."""
        sizes = [g[0].numel() for g in gradient.values()]
        slices = (
            risk_balanced(sizes, sizes, self.slices)
            if isinstance(self.slices, int)
            else self.slices
        )
        if slices.edges[-1] != sum(sizes):
            raise InputError(
                f"the slices cover {slices.edges[-1]} coordinates, the gradient has {sum(sizes)}: "
                "cut them for this network."
            )
        return slices

    def declare(self) -> Declaration:
        """Return noise that covers a part of the coordinates only."""
        clip = Clip(self.clip_norm, "all") if self.clip_norm else None
        return Declaration(clip, Noise(self.std, "fixed", share=self.noisy / self.count))

    def noiseless(self) -> "SlicePerturbation":
        """Return the clipping alone."""
        return replace(self, std=0.0)

    def begin(self, ctx: ClientContext) -> None:
        """Draw which slices get noise in this participation: the defence's begin_client."""
        chosen = torch.zeros(len(ctx.generators), self.count)  # [clients, s]
        for row, generator in zip(chosen, ctx.generators, strict=True):
            row[reservoir(self.count, self.noisy, generator)] = 1.0
        ctx.state[self._key(ctx)] = chosen

    @staticmethod
    def _key(ctx: ClientContext) -> str:
        return f"slices of {ctx.clients}"  # several clients may begin before the first ends

    def __call__(self, values: Gradient, ctx: ClientContext) -> Gradient:
        """Return updates [clients, …] with noise on the chosen slices.

        Where nothing else draws in a participation, its slices may as well be drawn here.
        """
        if self.clip_norm:
            values = Clip(self.clip_norm, "all")(values, leading=1, round=ctx.round)
        if not self.std:
            ctx.state.pop(self._key(ctx), None)
            return values
        like = next(iter(values.values()))
        if self._key(ctx) not in ctx.state:
            self.begin(ctx)
        chosen = ctx.state.pop(self._key(ctx)).to(like)  # [clients, s]
        std = unflat(self.noise_std * self.of(values).spread(chosen), values)
        return add_noise(values, std, ctx.generators)


def sliced_noise(
    size: int, share: float, std: float, weights: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return the noise of ten slices of equal size on an aggregate, [d].

    Parameters
    ----------
    size : int, d
    share, std : as in `SlicePerturbation`
    weights : of the updates, [m] in float64
    generator : of all of them
    """
    cut = Slices(tuple(np.linspace(0, size, 11).astype(int).tolist()))
    stage, count = SlicePerturbation(cut, share, std), len(weights)
    ctx = ClientContext(0, range(count), [generator] * count, weights)
    stage.begin(ctx)
    return weights @ stage({"w": torch.zeros(count, size, dtype=torch.float64)}, ctx)["w"]
