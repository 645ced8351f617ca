"""Noise along a tree, for steps whose examples nobody draws at random."""

from dataclasses import dataclass
from typing import Any

from fl_privacy_lib._checks import positive
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noisy_stages import BatchNoise
from fl_privacy_lib.defenses.stage import Declaration


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
        """Return the clip, and the noise multiplier of the whole tree."""
        positive(leaves=self.leaves)
        height = self.leaves.bit_length()
        return BatchNoise(self.clip, self.sigma() / height**0.5, self.divide_by).declare()

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return batch means [1, …] with the noise by which the next prefix sum's noise differs."""
        noisy, step = super().__call__(values, ctx), ctx.iteration + 1
        # at each client, the nodes whose noise the prefix sum carries, by their level
        trees = ctx.state.setdefault("tree", {})
        nodes = trees.setdefault(ctx.clients[0], {})
        if step == 1:
            nodes.clear()
        level = (step & -step).bit_length() - 1  # of the node that this step completes
        done = [nodes.pop(below) for below in range(level)]  # the nodes that it takes in
        nodes[level] = {name: noisy[name] - v for name, v in values.items()}
        return {name: v - sum(node[name] for node in done) for name, v in noisy.items()}
