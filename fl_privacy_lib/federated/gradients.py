"""Per-example gradients of any model: the first thing that stands on the route."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.models import Parameters


def example_loss(model: nn.Module, weights: Parameters, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of one example.

    Parameters
    ----------
    weights : parameters by name
    x : [*example shape]
    y : scalar class index, or [classes] probabilities (a soft label)
    """
    logits = functional_call(model, weights, (x[None],))
    return cross_entropy(logits, y[None])


def example_gradients(model: nn.Module, weights: Parameters, x: torch.Tensor, y: torch.Tensor) -> Gradient:
    """Return the gradient of every example of every client, without a loop.

    Parameters
    ----------
    weights : tensors [clients, *parameter shape], each client's own weights
    x : [clients, batch, *example shape]
    y : [clients, batch] or [clients, batch, classes]

    Returns
    -------
    tensors [clients, batch, *parameter shape]

    Notes
    -----
    ``vmap(vmap(grad))``: any model whose examples do not interact (see `models.check_per_example`).
    """
    if x.shape[1] == 0:  # an empty Poisson batch
        return {name: w.new_zeros(len(w), 0, *w.shape[1:]) for name, w in weights.items()}
    gradient = grad(lambda w, x, y: example_loss(model, w, x, y))
    return vmap(vmap(gradient, in_dims=(None, 0, 0)))(weights, x, y)
