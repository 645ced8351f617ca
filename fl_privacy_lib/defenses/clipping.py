"""Clipping as data: from the norms of a gradient to the factors it is multiplied with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fl_privacy_lib._checks import InputError, one_of, positive
from fl_privacy_lib.accounting import schedules

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
    clip_norm : float, > 0
        The bound C.
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

    clip_norm: float
    scope: str = "layer"

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm)
        one_of(["layer", "all"], scope=self.scope)

    def factors(self, norms: Gradient, round: int = 0) -> Gradient:
        """Return the factors min(1, C/norm) for norms of any shape."""
        return shrink_factors(in_scope(norms, self.scope), dict.fromkeys(norms, self.bound(round)))

    def bound(self, round: int = 0) -> float:
        """Return the norm that no clipped unit exceeds in this round; noise is scaled with it."""
        return self.clip_norm

    def __call__(self, gradient: Gradient, leading: int, round: int = 0) -> Gradient:
        """Return the clipped gradient; norms are taken over all but the first `leading` axes."""
        return scaled(gradient, self.factors(layer_norms(gradient, leading), round))


DECAYS: dict[str, Callable[[float, float, int, int], np.ndarray]] = {
    "linear": lambda start, end, rounds, cycles: schedules.linear(start, end, rounds),
    "exponential": lambda start, end, rounds, cycles: schedules.exponential(start, end, rounds),
    "cyclic": schedules.cosine,
}
"""Schedules of a bound: linear; start (end/start)^{t/T}; cosine annealing, restarted each cycle."""


@lru_cache(maxsize=64)
def _bounds(kind: str, start: float, end: float, rounds: int, cycles: int) -> tuple[float, ...]:
    return tuple(float(bound) for bound in DECAYS[kind](start, end, rounds, cycles))


@dataclass(frozen=True)
class DecayingClip(Clip):
    """A clip whose bound falls over the rounds, by a schedule that no data enter.

    Noise scaled with the bound falls with it: the noise multiplier, and with it ε, stay what they
    are for a fixed bound. That is why the schedule may not look at the data.

    Parameters
    ----------
    clip_norm : float, > 0, the bound of round 0
    scope : {'layer', 'all'}, as in `Clip`
    end : float, > 0, where the schedule ends; the bound of every round from `rounds` on
    rounds : int, T; round T − 1 is still one step above the end
    kind : {'linear', 'exponential', 'cyclic'}, see `DECAYS`
    cycles : int, ≥ 1, of the cyclic kind

    Notes
    -----
    Source: Fed-CDP, section VII, "Fed-CDP(decay)": linear, from 6 to 2 in 100 rounds. The other two
    kinds are those of Fed-αCDP, section 5.3, which has them for σ.

    Examples
    --------
    >>> clip = DecayingClip(6.0, end=2.0, rounds=100)
    >>> clip.bound(0), clip.bound(50), clip.bound(100)
    (6.0, 4.0, 2.0)
    """

    end: float = 2.0
    rounds: int = 100
    kind: str = "linear"
    cycles: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(DECAYS, kind=self.kind)
        if self.end > self.clip_norm:
            raise InputError(
                f"end = {self.end} is above clip_norm = {self.clip_norm}: a decay falls, so swap "
                "the two."
            )
        self.bound()  # the schedule checks the rest

    def bound(self, round: int = 0) -> float:
        """Return the bound of a round."""
        bounds = _bounds(self.kind, self.clip_norm, self.end, self.rounds, self.cycles)
        return bounds[round] if round < self.rounds else self.end
