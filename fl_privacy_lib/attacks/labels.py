"""Which labels a gradient betrays."""

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient

UNKNOWN = -1  # stands for a label that the gradient does not betray


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
    dense = [g for g in gradient.values() if g.dim() == 3]
    if not dense:
        raise InputError(
            "no dense layer's weight gradient was observed, so no label can be inferred from it."
        )
    sums = dense[-1].sum(-1)  # [rows, classes]
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
