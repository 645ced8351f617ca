"""Clipping as data: from the norms of a gradient to the factors it is multiplied with."""

from dataclasses import dataclass

import torch

from fl_privacy_lib._checks import one_of, positive

Gradient = dict[str, torch.Tensor]  # tensor name → values; the leading axes say where on the route it stands


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
    return {name: torch.linalg.vector_norm(g[..., None].flatten(leading), dim=-1) for name, g in gradient.items()}


def scaled(gradient: Gradient, factors: Gradient) -> Gradient:
    """Return each tensor multiplied by its factor, broadcast over the parameter's own axes."""
    return {name: g * factors[name][(...,) + (None,) * (g.dim() - factors[name].dim())] for name, g in gradient.items()}


@dataclass(frozen=True)
class Clip:
    """Scale a gradient down so that its ℓ2 norm is at most C.

    Parameters
    ----------
    clip_norm : float, > 0
        The bound C.
    scope : {'layer', 'all'}
        'layer' clips every tensor to C on its own, as the Fed-CDP papers do; M tensors together then have a
        norm of up to C√M. 'all' clips the whole gradient to C, as DP-SGD does.

    Notes
    -----
    Source: Fed-CDP, Algorithm 2, ``g ← g / max(1, ‖g‖/C)``; Abadi et al. (2016) for 'all'.

    Examples
    --------
    >>> Clip(4.0).factors({"w": torch.tensor([2.0, 8.0])})
    {'w': tensor([1.0000, 0.5000])}
    """

    clip_norm: float
    scope: str = "layer"

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm)
        one_of(["layer", "all"], scope=self.scope)

    def factors(self, norms: Gradient, round: int = 0) -> Gradient:
        """Return the factors min(1, C/norm) for norms of any shape; a zero gradient keeps factor 1."""
        if self.scope == "all":
            total = torch.linalg.vector_norm(torch.stack(list(norms.values())), dim=0)
            norms = dict.fromkeys(norms, total)
        return {name: (self.bound(round) / n.clamp_min(1e-30)).clamp_max(1.0) for name, n in norms.items()}

    def bound(self, round: int = 0) -> float:
        """Return the norm that no clipped unit exceeds in this round: the sensitivity S that noise is scaled with."""
        return self.clip_norm

    def __call__(self, gradient: Gradient, leading: int, round: int = 0) -> Gradient:
        """Return the clipped gradient; norms are taken over all but the first `leading` axes."""
        return scaled(gradient, self.factors(layer_norms(gradient, leading), round))
