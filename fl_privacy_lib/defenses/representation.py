"""Soteria: the gradient of one dense layer loses the columns of the features that tell least.

The paper on compensation calls it PLD. All other tensors leave in clear.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import jacrev

from fl_privacy_lib._checks import InputError, in_range
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext, Declaration, Transformation


def last_dense(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last dense layer of a model, and its weight's name.

    Raises
    ------
    InputError
        If the model has none.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        raise InputError("the model has no dense layer, whose gradient Soteria would prune.")
    return f"{found[-1][0]}.weight".removeprefix("."), found[-1][1]


def feature_scores(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return ‖∂r_f/∂x‖ / |r_f| for every feature r_f that the last dense layer reads, [n, f].

    Parameters
    ----------
    x : images [n, *shape]

    Notes
    -----
    Source: Sun et al. (2021), and its released code.
    """
    _, layer = last_dense(model)
    read: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))

    def features(image: torch.Tensor) -> torch.Tensor:
        read.clear()
        model(image[None])
        return read[0]

    try:
        slopes = torch.stack([jacrev(features)(image).flatten(1).norm(dim=1) for image in x])
        values = torch.stack([features(image) for image in x])  # [n, f]
    finally:
        hook.remove()
    return (slopes / values.abs().clamp_min(1e-12)).detach()


@dataclass(frozen=True)
class PrunedFeatures(Transformation):
    """Set the columns of the last dense layer's weight gradient with the lowest scores to zero.

    Parameters
    ----------
    fraction : float, in [0, 1], of the features whose columns are dropped

    Notes
    -----
    The scores are those of the model's own weights, so it stands at the first iteration of the
    first round only. The paper on compensation drops 60 % of them against its DGA and 80 % against
    its GIA.
    """

    fraction: float

    def __post_init__(self) -> None:
        in_range(0, 1, fraction=self.fraction)

    def declare(self) -> Declaration:
        """Return that a clipped gradient stays within its bound."""
        return Declaration(shrinks=True)

    def __call__(self, gradients: Gradient, ctx: ClientContext) -> Gradient:
        """Return example gradients [clients, batch, …] without these columns."""
        if ctx.model is None or ctx.examples is None:  # an attacker's replay
            return gradients
        if ctx.round or ctx.iteration:
            raise InputError(
                f"Soteria in round {ctx.round}, iteration {ctx.iteration}: its scores are known "
                "for the first weights only; use one round of one local iteration."
            )
        name, _ = last_dense(ctx.model)
        x = ctx.examples[0].flatten(0, -4)  # one client's examples, [batch, C, H, W]
        scores = feature_scores(ctx.model, x)
        edge = torch.quantile(scores, self.fraction, dim=1, keepdim=True)
        kept = (scores >= edge).to(gradients[name])  # [batch, f]
        return gradients | {name: gradients[name] * kept[None, :, None, :]}


def soteria(level: float = 0.6) -> Defense:
    """Return Soteria at the example; see `PrunedFeatures`. Guarantee: none."""
    return Defense("pld", per_example=PrunedFeatures(level))
