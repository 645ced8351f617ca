"""Which coordinates of an observed gradient an attacker leaves out, since they were touched."""

from dataclasses import dataclass

import torch

from fl_privacy_lib.defenses.clipping import Gradient

MASKS = ("none", "zeros", "outliers")
BLOCK = 32  # consecutive coordinates that are judged together
EXCESS = 9.0  # times the usual squared deviation: three times the usual size


@dataclass(frozen=True)
class Usual:
    """What gradients of the attacker's own images look like at a victim's weights.

    Attributes
    ----------
    mean, square : tensors [rows, …], the mean gradient and the mean squared deviation from it
    """

    mean: Gradient
    square: Gradient


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, …] as [rows, size]; [rows] has size 1."""
    return tensor[..., None].flatten(1)


def masked(gradient: Gradient, trusted: Gradient | None) -> Gradient:
    """Return a gradient with zeros where it is not trusted; None trusts all of it."""
    if trusted is None:
        return gradient
    return {name: g * trusted[name] for name, g in gradient.items()}


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
    return {
        name: _is_usual(t - usual.mean[name], usual.square[name]) for name, t in targets.items()
    }


def _is_usual(deviation: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """Return a mask [rows, …] for one tensor, from its deviations and their usual squares."""
    flat, usual = rows_of(deviation), rows_of(square)  # [rows, size]
    block = torch.arange(flat.shape[1], device=flat.device) // BLOCK  # [size]
    zeros = flat.new_zeros(len(flat), int(block[-1]) + 1)
    total, expected = zeros.index_add(1, block, flat.square()), zeros.index_add(1, block, usual)
    return (total <= EXCESS * expected)[:, block].view_as(deviation)
