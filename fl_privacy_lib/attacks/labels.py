"""Which labels a gradient betrays."""

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient


def infer_labels(gradient: Gradient, batch_size: int) -> torch.Tensor:
    """Return the labels that the last layer's weight gradient points at.

    Row c of that gradient is the mean over the batch of (p_c − 1[y = c])·features. With features that are never
    negative (sigmoid, ReLU) each example of class c pushes the row's sum down by about the same amount. So the
    lowest row is taken, one example's share is added back to it, and the same is done B times. For one example this
    is iDLG's rule, the lowest row.

    Parameters
    ----------
    gradient : tensors [rows, *parameter shape], in the order of the model's layers
    batch_size : int, B

    Returns
    -------
    tensor [rows, B] of class indices, ascending; a class may stand more than once

    Notes
    -----
    Source: iDLG (Zhao et al. 2020) for one example; the share is LLG's (Wainakh et al. 2022), here without an
    auxiliary data set.

    Examples
    --------
    >>> infer_labels({"w": torch.tensor([[[0.2, 0.1], [-0.9, -0.4], [0.7, 0.3]]])}, 1)
    tensor([[1]])
    >>> infer_labels({"w": torch.tensor([[[-0.2], [-1.2], [0.7], [0.7]]])}, 3)
    tensor([[0, 1, 1]])
    """
    weight = [g for g in gradient.values() if g.dim() == 3]  # [rows, classes, features]
    if not weight:
        raise InputError("no dense layer's weight gradient was observed, so no label can be inferred from it.")
    sums = weight[-1].sum(-1)  # [rows, classes]
    classes = sums.shape[1]
    share = sums.clamp_max(0).sum(1) / batch_size * (1 + 1 / classes)  # [rows], negative
    sums, rows, found = sums.clone(), torch.arange(len(sums), device=sums.device), []
    for _ in range(batch_size):
        lowest = sums.argmin(1)
        found.append(lowest)
        sums[rows, lowest] -= share
    return torch.stack(found, dim=1).sort(dim=1).values
