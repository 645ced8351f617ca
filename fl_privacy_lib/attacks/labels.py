"""Which labels a gradient betrays."""

import torch
from torch import nn
from torch.nn import functional as F

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.models import Parameters, call

UNKNOWN = -1  # stands for a label that the gradient does not betray


def last_dense(gradient: Gradient) -> torch.Tensor:
    """Return the weight gradient of the last dense layer, [rows, classes, features]."""
    dense = [g for g in gradient.values() if g.dim() == 3]
    if not dense:
        raise InputError(
            "no dense layer's weight gradient was observed, so no label can be inferred from it."
        )
    return dense[-1]


def infer_labels(gradient: Gradient, batch_size: int) -> torch.Tensor:
    """Return the labels that the last layer's weight gradient points at.

    Row c of that gradient is the mean over the batch of (p_c − 1[y = c])·features. With features
    that are never negative (sigmoid, ReLU) only an example of class c can push the row's sum below
    zero, and each pushes by about the same amount, its share. So every class with a negative sum is
    taken once, the lowest first, and one share is added back to it. The labels still missing are
    taken one by one, always the lowest row. For one example this is iDLG's rule, the lowest row.

    Parameters
    ----------
    gradient : tensors [rows, *parameter shape], in the order of the model's layers
    batch_size : int, B

    Returns
    -------
    tensor [rows, B] of class indices, ascending; a class may stand more than once. A row whose sums
    are all alike (a gradient of zeros) or no numbers betrays nothing and holds −1.

    Notes
    -----
    Source: iDLG (Zhao et al. 2020) for one example; LLG (Wainakh et al. 2022) for both stages, here
    without an auxiliary data set. LLG's share, the negative sums / B × (1 + 1/classes), is too
    small where many classes are present. Here each present class is taken to hide as much of a
    positive part as the median positive row shows.

    Examples
    --------
    >>> infer_labels({"w": torch.tensor([[[0.2, 0.1], [-0.9, -0.4], [0.7, 0.3]]])}, 1)
    tensor([[1]])
    >>> infer_labels({"w": torch.tensor([[[-0.2], [-1.2], [0.7], [0.7]]])}, 3)
    tensor([[0, 1, 1]])
    >>> infer_labels({"w": torch.zeros(1, 3, 2)}, 2)
    tensor([[-1, -1]])
    """
    sums = last_dense(gradient).sum(-1)  # [rows, classes]
    present = sums < 0  # [rows, classes], classes that are certain and not yet taken
    hidden = torch.where(sums > 0, sums, torch.nan).nanmedian(1).values.nan_to_num(0.0)  # [rows]
    share = (sums.clamp_max(0).sum(1) - present.sum(1) * hidden) / batch_size  # [rows], negative
    silent = ~torch.isfinite(sums).all(1) | (sums.amax(1) == sums.amin(1))
    sums, rows, columns = sums.clone(), torch.arange(len(sums), device=sums.device), []
    for _ in range(batch_size):
        first = torch.where(present, sums, torch.inf)
        lowest = torch.where(present.any(1), first.argmin(1), sums.argmin(1))
        columns.append(lowest)
        sums[rows, lowest] -= share
        present[rows, lowest] = False
    labels = torch.stack(columns, dim=1).sort(dim=1).values
    return torch.where(silent[:, None], UNKNOWN, labels)


def label_counts(
    model: nn.Module, weights: Parameters, gradient: Gradient, images: torch.Tensor, batch_size: int
) -> torch.Tensor:
    """Return how often each class stands in a batch, by comparison with the attacker's images.

    The sum of row c of the last dense layer's weight gradient is the mean of p_c·F − 1[y = c]·F
    over the batch, F the sum of an example's features. On a network that has not learned yet p and
    F hardly depend on the image, so the attacker's images tell both; what remains of a row is −F/B
    for each example of its class. It needs the gradient's true scale: after clipping `infer_labels`
    is the better rule.

    Parameters
    ----------
    weights : tensors […], at which the gradient was taken
    gradient : tensors [rows, …], of a batch's mean loss
    images : [N, *shape], any images; the nearer to the victims', the better
    batch_size : int, B

    Returns
    -------
    tensor [rows, classes] of int, each row adding up to B

    Notes
    -----
    Source: LLG (Wainakh et al. 2022), its variants with the model's weights and auxiliary data.
    """
    with torch.no_grad():
        p = torch.softmax(call(model, weights, images), -1)  # [N, classes]
    unlikely = p.argmin(1)  # any label would do; here 1 − p is far from 0
    shared = {name: w[None] for name, w in weights.items()}
    gradients = example_gradients(model, shared, images[None], unlikely[None])
    rows = torch.arange(len(images), device=images.device)
    sums = last_dense({name: g[0] for name, g in gradients.items()}).sum(-1)  # [N, classes]
    features = sums[rows, unlikely] / (p[rows, unlikely] - 1)  # F, [N]
    remainder = last_dense(gradient).sum(-1) - (p * features[:, None]).mean(0)  # [rows, classes]
    counts = torch.zeros_like(remainder, dtype=torch.long)
    for _ in range(batch_size):
        taken = F.one_hot(remainder.argmin(1), remainder.shape[1])  # [rows, classes]
        counts = counts + taken
        remainder = remainder + taken * features.mean() / batch_size
    return counts
