"""Transformations that hide without a guarantee: pruning, selective sharing, noise of fixed size.

Each is a stage that can stand at the example, the batch or the update, alone or after another rule
(`route.Then`). None bounds what one example can change, so alone none has an ε, whatever noise it
adds; `Defense.events` says so. The server's momentum hides nothing; it only reads what is released.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noise import add_noise, draws, laplace, normal
from fl_privacy_lib.defenses.stage import Declaration, Noise, Stage, Transformation

DISTRIBUTIONS = {"gaussian": normal, "laplace": laplace}


def part(fraction: float, size: int) -> int:
    """Return ⌊fraction · size⌋ for the decimal as written: 0.29 · 100 is 29, not 28.999…."""
    return math.floor(fraction * size * (1 + 1e-12))


def largest(scores: Gradient, keep: Callable[[int], int], scope: str, leading: int) -> Gradient:
    """Return masks of the largest scores of every row.

    Parameters
    ----------
    scores : tensors [*leading axes, …]
    keep : how many of n scores; exactly so many are kept, also where scores are equal
    scope : {'layer', 'all'}: of each tensor, or of all tensors together
    leading : axes that stand before a gradient's own

    Returns
    -------
    bool tensors by the same names and of the same shapes
    """
    flat = {
        name: s.detach()[..., None].flatten(leading) for name, s in scores.items()
    }  # [*leading, n]
    if scope == "all":
        whole = _top(torch.cat(list(flat.values()), -1), keep)
        masks = dict(zip(flat, whole.split([f.shape[-1] for f in flat.values()], -1), strict=True))
    else:
        masks = {name: _top(f, keep) for name, f in flat.items()}
    return {name: mask.reshape(scores[name].shape) for name, mask in masks.items()}


def _top(flat: torch.Tensor, keep: Callable[[int], int]) -> torch.Tensor:
    # unsorted: seven times as fast as a sort, which an attacker's replay would pay at every step
    chosen = flat.topk(keep(flat.shape[-1]), dim=-1, sorted=False).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter(-1, chosen, True)


@dataclass(frozen=True)
class Pruned(Transformation):
    """Set the smallest coordinates of a gradient to zero.

    Parameters
    ----------
    fraction : float, in [0, 1], p; of n coordinates n − ⌊pn⌋ of the largest magnitudes are left
    scope : {'all', 'layer'}
        'all': one threshold for the whole gradient. 'layer': one for each tensor.
    leading : int, axes that stand before a gradient's own: 2 at the example, else 1

    Notes
    -----
    Source: Fed-αCDP, section 4.1, sorts "the gradients", without a word on tensors; the released
    code of the attack that its 40, 50 and 80 % come from (Wei et al. 2020) has one threshold for
    all tensors. Lin et al. (2018), whom both cite, have one for each tensor.

    Examples
    --------
    >>> Pruned(0.5)({"w": torch.tensor([[3.0, -1.0, 2.0, -4.0]])}, None)["w"]
    tensor([[ 3.,  0.,  0., -4.]])
    """

    fraction: float
    scope: str = "all"
    leading: int = 1

    def __post_init__(self) -> None:
        in_range(0, 1, fraction=self.fraction)
        one_of(["all", "layer"], scope=self.scope)

    def declare(self) -> Declaration:
        """Return that a clipped gradient stays within its bound."""
        return Declaration(shrinks=True)

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return gradients [*leading axes, …] with the other coordinates at zero."""
        magnitudes = {name: g.abs() for name, g in gradients.items()}
        masks = largest(magnitudes, lambda n: n - part(self.fraction, n), self.scope, self.leading)
        return {name: torch.where(masks[name], g, 0.0) for name, g in gradients.items()}


@dataclass(frozen=True)
class RandomNoise(Stage):
    """Add noise of a fixed size to every coordinate, whatever the gradient's size.

    Parameters
    ----------
    std : float, ≥ 0
        Standard deviation per coordinate, for both distributions. A Laplace distribution of scale b
        has √2 b.
    distribution : {'gaussian', 'laplace'}

    Notes
    -----
    Source: Fed-αCDP, section 4.2, which calls its 0.01 a variance; in the released code of the
    attack (Wei et al. 2020) 0.01 is the Gaussian's standard deviation and the Laplace
    distribution's scale b.
    """

    std: float
    distribution: str = "gaussian"

    def __post_init__(self) -> None:
        in_range(0, math.inf, std=self.std)
        one_of(DISTRIBUTIONS, distribution=self.distribution)

    def declare(self) -> Declaration:
        """Return the noise, which no bound goes with."""
        return Declaration(noise=Noise(self.std, "fixed"))

    def noiseless(self) -> "RandomNoise":
        """Return the stage that adds nothing."""
        return replace(self, std=0.0)

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return gradients [clients, …] plus independent noise."""
        return add_noise(gradients, self.std, ctx.generators, DISTRIBUTIONS[self.distribution])


@dataclass(frozen=True)
class Selective(Transformation):
    """Share a random part of the coordinates whose magnitude passes a threshold (DSSGD).

    Parameters
    ----------
    share : float, in [0, 1]
        Of n coordinates ⌊share · n⌋ are drawn at random among those that pass; all of these, if
        they are fewer.
    threshold : float, ≥ 0, τ; a coordinate passes with |g| > τ, in units of what stands at this
        stage
    scope : {'all', 'layer'}, what n counts
    leading : int, as in `Pruned`

    Notes
    -----
    Without generators (an attacker's replay) nothing is drawn, and all that passes is kept: which
    of them were shared can be read off what was received. The source adds noise to the values and
    to the choice of coordinates, with an ε for a parameter, not for an example or a client; here
    there is none, as in Fed-αCDP (section 4.1). Source: Shokri and Shmatikov (2015).
    """

    share: float = 0.1
    threshold: float = 0.0
    scope: str = "all"
    leading: int = 1

    def __post_init__(self) -> None:
        in_range(0, 1, share=self.share)
        in_range(0, math.inf, threshold=self.threshold)
        one_of(["all", "layer"], scope=self.scope)

    def declare(self) -> Declaration:
        """Return that nothing grows."""
        return Declaration(shrinks=True)

    def __call__(self, gradients: Gradient, ctx: Any) -> Gradient:
        """Return gradients [clients, …] with everything that is not shared at zero."""
        shared = {name: g.abs() > self.threshold for name, g in gradients.items()}
        if ctx.generators:
            lots = draws(
                gradients,
                ctx.generators,
                lambda g, own: torch.rand(g.shape, generator=own, device=g.device, dtype=g.dtype),
            )
            lots = {name: torch.where(shared[name], lot, -1.0) for name, lot in lots.items()}
            first = largest(lots, lambda n: part(self.share, n), self.scope, self.leading)
            shared = {name: shared[name] & first[name] for name in shared}
        return {name: torch.where(shared[name], g, 0.0) for name, g in gradients.items()}


@dataclass(frozen=True)
class Momentum(Transformation):
    """The server's momentum, v ← γ v + u: it reads what is released, and costs nothing.

    Parameters
    ----------
    decay : γ in [0, 1)

    Notes
    -----
    Source: Polyak (1964); on the server of a federated training, Hsu, Qi and Brown (2019).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        in_range(0, 1, decay=self.decay)

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the velocity, [1, …], and keep it."""
        last = ctx.state.get("velocity")
        moved = {n: v + self.decay * last[n] for n, v in values.items()} if last else dict(values)
        ctx.state["velocity"] = moved
        return moved
