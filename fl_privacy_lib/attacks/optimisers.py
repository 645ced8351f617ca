"""Optimisers for many attacks at once: every row is a problem of its own.

An attack is small: what costs time is starting thousands of tiny operations. Stacking victims in
rows shares that cost. No row sees another: curvature, step and stopping are all per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Evaluate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [rows, n] → objective [rows], gradient [rows, n]"""
Project = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, n] → the nearest point that is allowed"""


class Optimiser(ABC):
    """What all optimisers share; each adds `step`, `remember`, and its state: `begin`, `forget`.

    Parameters
    ----------
    x : [rows, n], the starting points
    learning_rate : float, > 0, the length of a step
    steps : int, inner steps an attack iteration
    project : where a step would leave what is allowed, it ends at the nearest allowed point; None
        where every point is allowed
    """

    def __init__(
        self,
        x: torch.Tensor,
        learning_rate: float = 1.0,
        steps: int = 20,
        project: Project | None = None,
    ) -> None:
        self.x, self.learning_rate, self.steps = x.clone(), learning_rate, steps
        self.project = project or (lambda point: point)
        self.loss: torch.Tensor | None = None  # [rows] at x; None: not evaluated there
        self.gradient = torch.zeros_like(x)  # at x
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Set up the state of every row."""

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Return the step from x, [rows, n]."""

    def remember(self, s: torch.Tensor, y: torch.Tensor) -> None:  # noqa: B027 (optional)
        """Take in the last step and the change of the gradient, both [rows, n]."""

    @abstractmethod
    def forget(self, rows: torch.Tensor) -> None:
        """Forget what these rows (a mask) knew."""

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows; the others are finished."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value[rows])

    def restart(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Put these rows (a mask) at new points and forget what they knew."""
        self.x = torch.where(rows[:, None], x, self.x)
        self.forget(rows)
        self.loss = None

    def advance(self, evaluate: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one attack iteration.

        Returns
        -------
        objective [rows], and the points [rows, n] at which it was taken
        """
        if self.loss is None:
            self.loss, self.gradient = evaluate(self.x)
        for _ in range(self.steps):
            x = self.project(self.x + self.step())
            loss, gradient = evaluate(x)
            self.remember(x - self.x, gradient - self.gradient)
            self.x, self.loss, self.gradient = x, loss, gradient
        return self.loss, self.x


class LBFGS(Optimiser):
    """Limited-memory BFGS without line search, one two-loop recursion a row.

    It takes the steps of ``torch.optim.LBFGS(lr=learning_rate)``, which the published attacks use:
    one attack iteration is 20 steps, the very first of which has length min(1, 1/‖g‖₁). Two guards
    are added. A curvature pair with y·s ≤ 1e-10 is left out, as there, but until a first pair is
    found every step keeps the short length (torch goes on with a whole, unscaled gradient). And a
    direction that does not descend restarts the row's history.

    The last `history` pairs are kept (torch keeps 100). For the parameters see `Optimiser`.
    """

    history = 50

    def begin(self) -> None:
        """Set up the state of every row."""
        # of each step s, y [rows, n] and 1/(y·s) [rows]; 0 where the row has no pair
        self.pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.is_fresh = torch.ones(len(self.x), dtype=torch.bool, device=self.x.device)  # no pair
        self.scale = torch.ones_like(self.x[:, 0])  # of the initial Hessian

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows; the others are finished."""
        super().select(rows)
        self.pairs = [(s[rows], y[rows], r[rows]) for s, y, r in self.pairs]

    def forget(self, rows: torch.Tensor) -> None:
        """Forget the curvature of these rows (a mask)."""
        self.is_fresh = self.is_fresh | rows
        self.scale = torch.where(rows, 1.0, self.scale)
        keep = (~rows)[:, None]
        # where, not multiplication: a diverged row may hold inf, and 0·inf is NaN
        self.pairs = [
            (torch.where(keep, s, 0.0), torch.where(keep, y, 0.0), torch.where(rows, 0.0, r))
            for s, y, r in self.pairs
        ]

    def _direction(self) -> torch.Tensor:
        """Return −H·g by the two-loop recursion; a row without a pair skips it, since r = 0."""
        q = -self.gradient
        alphas = []
        for s, y, r in reversed(self.pairs):
            alpha = r * torch.linalg.vecdot(s, q)
            alphas.append(alpha)
            q.addcmul_(alpha[:, None], y, value=-1)
        q *= self.scale[:, None]
        for (s, y, r), alpha in zip(self.pairs, reversed(alphas), strict=True):
            q.addcmul_((alpha - r * torch.linalg.vecdot(y, q))[:, None], s)
        return q

    def step(self) -> torch.Tensor:
        """Return the step from x, [rows, n]."""
        direction = self._direction()
        uphill = (direction * self.gradient).sum(1) >= 0
        if uphill.any():
            self.forget(uphill)
            direction = torch.where(uphill[:, None], -self.gradient, direction)
        short = (1 / self.gradient.abs().sum(1)).clamp_max(1.0)
        return torch.where(self.is_fresh, short, 1.0)[:, None] * self.learning_rate * direction

    def remember(self, s: torch.Tensor, y: torch.Tensor) -> None:
        """Keep the curvature pair of every row in which it is positive."""
        curvature = (y * s).sum(1)
        good = (curvature > 1e-10) & torch.isfinite(curvature)
        mask = good[:, None]
        rho = torch.where(good, 1 / curvature, 0.0)
        self.pairs.append((torch.where(mask, s, 0.0), torch.where(mask, y, 0.0), rho))
        self.pairs = self.pairs[-self.history :]
        self.scale = torch.where(good, curvature / (y * y).sum(1), self.scale)
        self.is_fresh = self.is_fresh & ~good


class Adam(Optimiser):
    """Adam, one moment estimate a row; see `Optimiser` for the parameters."""

    signed = False  # whether the moments are taken of the gradient's signs

    def begin(self) -> None:
        """Set up the state of every row."""
        self.mean, self.square = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.count = torch.zeros_like(self.x[:, :1])

    def forget(self, rows: torch.Tensor) -> None:
        """Forget the moments of these rows (a mask)."""
        states = (self.mean, self.square, self.count)
        self.mean, self.square, self.count = (torch.where(rows[:, None], 0.0, s) for s in states)

    def step(self) -> torch.Tensor:
        """Return the step from x, [rows, n]."""
        slope = self.gradient.sign() if self.signed else self.gradient
        self.count = self.count + 1
        self.mean = 0.9 * self.mean + 0.1 * slope
        self.square = 0.999 * self.square + 0.001 * slope**2
        mean = self.mean / (1 - 0.9**self.count)
        root = (self.square / (1 - 0.999**self.count)).sqrt()
        return -self.learning_rate * mean / (root + 1e-8)


class SignedAdam(Adam):
    """Adam on the gradient's signs (Geiping et al. 2020): every coordinate counts alike."""

    signed = True


OPTIMISERS: dict[str, type[Optimiser]] = {
    "lbfgs": LBFGS,
    "adam": Adam,
    "signed_adam": SignedAdam,
}
