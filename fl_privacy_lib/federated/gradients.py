"""Per-example gradients of any model: the first thing that stands on the route."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fl_privacy_lib._checks import in_range, one_of
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.models import Parameters, call

Loss = Callable[[Parameters, torch.Tensor, torch.Tensor], torch.Tensor]
"""``loss(weights, logits [N, classes], labels [N]) -> scalar``, the mean over the N examples."""


def cross_entropy(weights: Parameters, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy; labels may be soft, [N, classes], and the weights do not count."""
    return F.cross_entropy(logits, y)


@dataclass(frozen=True)
class MarginLoss:
    """Loss of a linear model by its margin m = ⟨w, x⟩, plus (ℓ2 / 2)‖w‖² for each example.

    Parameters
    ----------
    kind : {'logistic', 'hinge'}
        With labels y in {0, 1} and t = 2y − 1: ln(1 + e^{−tm}), or max(0, 1 − tm) of the support
        vector machine.
    l2 : float, ≥ 0

    Examples
    --------
    >>> x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([1])
    >>> MarginLoss("logistic").gradients(torch.zeros(2), x, y)
    tensor([[-0.5000, -1.0000]])
    """

    kind: str = "logistic"
    l2: float = 0.0

    def __post_init__(self) -> None:
        one_of(["logistic", "hinge"], kind=self.kind)
        in_range(0, float("inf"), l2=self.l2)

    def __call__(self, weights: Parameters, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean loss; the margin is the second logit minus the first."""
        margin = (2 * y - 1) * (logits[:, 1] - logits[:, 0])
        loss = F.softplus(-margin) if self.kind == "logistic" else F.relu(1 - margin)
        return loss.mean() + self.l2 / 2 * sum(w.square().sum() for w in weights.values())

    def gradients(self, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return every example's gradient in closed form, [n, d].

        Parameters
        ----------
        weight : [d]
        x : [n, d]
        y : [n], labels in {0, 1}
        """
        t = 2 * y - 1
        margin = t * (x @ weight)  # [n]
        slope = torch.sigmoid(-margin) if self.kind == "logistic" else (margin < 1).to(x.dtype)
        return (-t * slope)[:, None] * x + self.l2 * weight


def example_gradients(
    model: nn.Module,
    weights: Parameters,
    x: torch.Tensor,
    y: torch.Tensor,
    loss: Loss = cross_entropy,
) -> Gradient:
    """Return the gradient of every example of every client, without a loop.

    Parameters
    ----------
    weights : tensors [clients, *parameter shape]
    x : [clients, batch, *example shape]
    y : [clients, batch] class indices, or [clients, batch, classes] probabilities (soft labels)
        where the loss takes them

    Returns
    -------
    tensors [clients, batch, *parameter shape]

    Notes
    -----
    ``vmap(vmap(grad))``: any model whose examples do not interact (see `models.check_per_example`).
    """
    if x.shape[1] == 0:  # an empty Poisson batch
        return {name: w.new_zeros(len(w), 0, *w.shape[1:]) for name, w in weights.items()}
    gradient = grad(lambda w, x, y: loss(w, call(model, w, x[None]), y[None]))
    return vmap(vmap(gradient, in_dims=(None, 0, 0)))(weights, x, y)
