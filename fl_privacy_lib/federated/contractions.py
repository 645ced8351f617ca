"""Per-example gradients that are not formed unless that pays: norms first, the weighted sum afterwards."""

import torch


class Contraction:
    """The gradients of one tensor for every example, as Σ_t left[t] ⊗ right[t], formed only where that pays.

    Parameters
    ----------
    left : [k, B, T, m]
    right : [k, B, T, n]
        T positions: 1 for a dense layer, the pixels of the output for a convolution.

    Notes
    -----
    With T = 1 the norm of an outer product is the product of the norms ("ghost norm"), and the gradient itself is
    never formed. A convolution has more positions than that pays for: forming costs T·m·n multiplications, the ghost
    norm T²(m + n); so it is formed, measured and summed while it still lies in the cache.
    """

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right
        self._formed: torch.Tensor | None = None

    def formed(self) -> torch.Tensor:
        """Return the gradients of all examples, [k, B, m·n]."""
        if self._formed is None:
            product = torch.bmm(self.left.flatten(0, 1).transpose(1, 2), self.right.flatten(0, 1))
            self._formed = product.view(*self.left.shape[:2], -1)
        return self._formed

    def norms(self) -> torch.Tensor:
        """Return the ℓ2 norm of every example's gradient, [k, B]."""
        if self.left.shape[2] == 1:
            left, right = torch.linalg.vector_norm(self.left, dim=-1), torch.linalg.vector_norm(self.right, dim=-1)
            return (left * right)[:, :, 0]
        return torch.linalg.vector_norm(self.formed(), dim=-1)

    def add_to(self, out: torch.Tensor, factors: torch.Tensor | None) -> None:
        """Add the sum over examples, each times its factor [k, B], to out [k, m·n]."""
        m, n = self.left.shape[3], self.right.shape[3]
        if self.left.shape[2] == 1:
            left = self.left[:, :, 0] if factors is None else self.left[:, :, 0] * factors[..., None]
            out.view(-1, m, n).baddbmm_(left.transpose(1, 2), self.right[:, :, 0])
        elif factors is not None:
            out.view(-1, 1, m * n).baddbmm_(factors[:, None], self.formed())
        elif self.left.is_contiguous():  # nobody asks for single examples: one product over all positions
            out.view(-1, m, n).baddbmm_(self.left.flatten(1, 2).transpose(1, 2), self.right.flatten(1, 2))
        else:
            out += self.formed().sum(1)


Contractions = dict[str, Contraction]


def of_bias(g: torch.Tensor) -> Contraction:
    """Return the contraction of a bias, whose gradient is g [k, B, outputs] itself."""
    return Contraction(g[:, :, None], g.new_ones(1, 1, 1, 1).expand(*g.shape[:2], 1, 1))
