"""Which coordinates of an observed gradient an attacker leaves out, because it can tell that they were touched."""

from dataclasses import dataclass

import torch

from fl_privacy_lib.defenses.clipping import Gradient

MASKS = ("none", "zeros", "outliers")
BLOCK = 32  # consecutive coordinates that are judged together
EXCESS = 9.0  # times the usual squared deviation: three times the usual size


@dataclass(frozen=True)
class Usual:
    """What gradients look like at a victim's weights, found with images of the attacker's own.

    Attributes
    ----------
    mean, square : tensors [rows, …], the mean gradient and the mean squared deviation from it
    """

    mean: Gradient
    square: Gradient


def untouched(targets: Gradient, kind: str, usual: Usual | None = None) -> Gradient | None:
    """Return which coordinates are to be trusted.

    Parameters
    ----------
    targets : tensors [rows, …]
    kind : {'none', 'zeros', 'outliers'}
        'zeros': a coordinate that is exactly zero was pruned, or says nothing. 'outliers': a block
        of consecutive coordinates that deviates from the mean by more than three times what is
        usual was perturbed.
    usual : for 'outliers'

    Returns
    -------
    tensors [rows, …] of bool by the same names, or None for 'none': trust all

    Examples
    --------
    >>> untouched({"w": torch.tensor([[0.0, -0.3]])}, "zeros")
    {'w': tensor([[False,  True]])}
    """
    if kind == "none":
        return None
    if kind == "zeros":
        return {name: t != 0 for name, t in targets.items()}
    assert usual is not None
    return {name: _quiet(t - usual.mean[name], usual.square[name]) for name, t in targets.items()}


def _quiet(off: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return a mask of the shape of one tensor [rows, …], from its deviations and their usual squares."""
    flat, usual = off[..., None].flatten(1), square[..., None].flatten(1)  # [rows, size]
    block = torch.arange(flat.shape[1], device=flat.device) // BLOCK  # [size]
    total = flat.new_zeros(len(flat), int(block[-1]) + 1)
    found, expected = total.index_add(1, block, flat.square()), total.index_add(1, block, usual)
    return (found <= EXCESS * expected)[:, block].view_as(off)
