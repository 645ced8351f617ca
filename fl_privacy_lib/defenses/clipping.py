"""Clipping as data: from the norms of a gradient to the factors it is multiplied with."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fl_privacy_lib._checks import one_of, positive
from fl_privacy_lib.defenses.schedule import Scheduled, value_at

# tensor name → values; the leading axes say where on the route it stands
Gradient = dict[str, torch.Tensor]


def layer_norms(gradient: Gradient, leading: int) -> Gradient:
    """Return the ℓ2 norm of every tensor, over all but the first `leading` axes.

    Parameters
    ----------
    gradient : tensors [*leading axes, *parameter shape]
    leading : int, e.g. 2 for [clients, batch, …]

    Returns
    -------
    tensors [*leading axes] by the same names
    """
    return {
        name: torch.linalg.vector_norm(g[..., None].flatten(leading), dim=-1)
        for name, g in gradient.items()
    }


def expand(factor: float | torch.Tensor, like: torch.Tensor) -> float | torch.Tensor:
    """Return a factor, a number or a tensor [*leading axes], with the axes that it lacks."""
    if not isinstance(factor, torch.Tensor):
        return factor
    return factor[(...,) + (None,) * (like.dim() - factor.dim())]


def scaled(gradient: Gradient, factors: Mapping[str, float | torch.Tensor]) -> Gradient:
    """Return each tensor multiplied by its factor, broadcast over the parameter's own axes."""
    return {name: g * expand(factors[name], g) for name, g in gradient.items()}


def in_scope(norms: Gradient, scope: str) -> Gradient:
    """Return the norms that a bound is compared with: the tensors' ('layer'), or one for 'all'."""
    if scope == "layer":
        return norms
    return dict.fromkeys(norms, torch.linalg.vector_norm(torch.stack(list(norms.values())), dim=0))


def shrink_factors(norms: Gradient, bounds: Mapping[str, float | torch.Tensor]) -> Gradient:
    """Return min(1, bound/norm) by tensor, for norms and bounds that broadcast."""
    return {name: (bounds[name] / n.clamp_min(1e-30)).clamp_max(1.0) for name, n in norms.items()}


@dataclass(frozen=True)
class Clip:
    """Scale a gradient down so that its ℓ2 norm is at most C.

    Parameters
    ----------
    clip_norm : float, > 0, or Schedule
        The bound C, or the bounds C_t. Noise scaled with a scheduled bound changes with it: the
        noise multiplier, and with it ε, stay what they are for a fixed one.
    scope : {'layer', 'all'}
        'layer' clips every tensor to C by itself, as the Fed-CDP papers do; M tensors together then
        have a norm of up to C√M. 'all' clips the whole gradient to C, as DP-SGD does.

    Notes
    -----
    Source: Fed-CDP, Algorithm 2, ``g ← g / max(1, ‖g‖/C)``; Abadi et al. (2016) for 'all'.

    Examples
    --------
    >>> Clip(4.0).factors({"w": torch.tensor([2.0, 8.0])})
    {'w': tensor([1.0000, 0.5000])}
    """

    clip_norm: Scheduled
    scope: str = "layer"

    def __post_init__(self) -> None:
        positive(clip_norm=self.bound())
        one_of(["layer", "all"], scope=self.scope)

    def factors(self, norms: Gradient, round: int = 0) -> Gradient:
        """Return the factors min(1, C/norm) for norms of any shape."""
        return shrink_factors(in_scope(norms, self.scope), dict.fromkeys(norms, self.bound(round)))

    def bound(self, round: int = 0) -> float:
        """Return the norm that no clipped unit exceeds in this round; noise is scaled with it."""
        return value_at(self.clip_norm, round)

    def __call__(self, gradient: Gradient, leading: int, round: int = 0) -> Gradient:
        """Return the clipped gradient; norms are taken over all but the first `leading` axes."""
        return scaled(gradient, self.factors(layer_norms(gradient, leading), round))
