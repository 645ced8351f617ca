"""Per-example gradients, formed only where that pays: norms first, the weighted sum after.

A contraction is the gradients of one tensor for every example, before anybody has asked for single
ones.
"""

import torch


class Outer:
    """The gradients of a dense layer: left[b] ⊗ right[b], never formed.

    The norm of an outer product is the product of the norms ("ghost norm"), and the weighted sum is
    one product.

    Parameters
    ----------
    left : [k, B, m]
    right : [k, B, n]
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def norms(self) -> torch.Tensor:
        """Return ‖left‖ ‖right‖, [k, B]."""
        return torch.linalg.vector_norm(self.left, dim=-1) * torch.linalg.vector_norm(
            self.right, dim=-1
        )

    def add_to(self, out: torch.Tensor, factors: torch.Tensor | None) -> None:
        """Add the weighted sum to out [k, m·n]."""
        left = self.left if factors is None else self.left * factors[..., None]
        out.view(-1, left.shape[-1], self.right.shape[-1]).baddbmm_(
            left.transpose(1, 2), self.right
        )


class Formed:
    """Gradients that are formed, measured and summed while they still lie in the cache.

    A convolution has T positions, an output pixel each: forming costs T·m·n multiplications, the
    ghost norm T²(m + n), which is more for every network here.

    Parameters
    ----------
    gradients : [k, B, size], or [k, 1, size] of what is summed already
    """

    def __init__(self, gradients: torch.Tensor) -> None:
        self.gradients = gradients

    def norms(self) -> torch.Tensor:
        """Return the norms, [k, B]."""
        return torch.linalg.vector_norm(self.gradients, dim=-1)

    def add_to(self, out: torch.Tensor, factors: torch.Tensor | None) -> None:
        """Add the weighted sum to out [k, size]."""
        if factors is None:
            out += self.gradients.sum(1)
        else:
            out[:, None].baddbmm_(factors[:, None], self.gradients)


Contraction = Outer | Formed
Contractions = dict[str, Contraction]
