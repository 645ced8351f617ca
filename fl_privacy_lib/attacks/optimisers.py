"""Optimisers for many attacks at once: every row is a problem of its own.

An attack is small: what costs time is starting thousands of tiny operations. Stacking victims in
rows shares that cost. No row sees another: curvature, step and stopping are all per row.
"""

from collections.abc import Callable

import torch

Evaluate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [rows, n] → objective [rows], gradient [rows, n]"""
Project = Callable[[torch.Tensor], torch.Tensor]
"""x [rows, n] → the nearest point that is allowed"""


def unconstrained(x: torch.Tensor) -> torch.Tensor:
    """Return x: every point is allowed."""
    return x


class LBFGS:
    """Limited-memory BFGS without line search, one two-loop recursion a row.

    It takes the steps of ``torch.optim.LBFGS(lr=learning_rate)``, which the published attacks use:
    one attack iteration is 20 steps, the very first of which has length min(1, 1/‖g‖₁). Two guards
    are added. A curvature pair with y·s ≤ 1e-10 is left out, as there, but until a first pair is
    found every step keeps the short length (torch goes on with a whole, unscaled gradient). And a
    direction that does not descend restarts the row's history.

    Parameters
    ----------
    x : [rows, n], the starting points
    learning_rate : float, > 0, the step length after the first
    steps : int, inner steps an attack iteration
    project : where a step would leave what is allowed, it ends at the nearest allowed point
    history : int, curvature pairs kept (torch keeps 100)
    """

    def __init__(
        self,
        x: torch.Tensor,
        learning_rate: float = 1.0,
        steps: int = 20,
        project: Project = unconstrained,
        history: int = 50,
    ) -> None:
        rows = len(x)
        self.x, self.learning_rate, self.steps = x.clone(), learning_rate, steps
        self.project, self.history = project, history
        self.loss: torch.Tensor | None = None  # [rows]
        self.gradient = torch.zeros_like(x)
        self.fresh = torch.ones(rows, dtype=torch.bool, device=x.device)  # no curvature known yet
        self.pairs: list[
            tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        ] = []  # s, y [rows, n], 1/(y·s) [rows]
        self.scale = torch.ones(rows, device=x.device, dtype=x.dtype)  # of the initial Hessian

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows; the others are finished."""
        self.x, self.gradient, self.fresh, self.scale = (
            t[rows] for t in (self.x, self.gradient, self.fresh, self.scale)
        )
        self.loss = self.loss[rows] if self.loss is not None else None
        self.pairs = [(s[rows], y[rows], r[rows]) for s, y, r in self.pairs]

    def restart(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Put these rows (a mask) at new points and forget what they knew."""
        self.x = torch.where(rows[:, None], x, self.x)
        self._forget(rows)
        self.loss = None

    def _forget(self, rows: torch.Tensor) -> None:
        self.fresh = self.fresh | rows
        self.scale = torch.where(rows, 1.0, self.scale)
        keep = (~rows)[:, None]
        # where, not multiplication: a diverged row may hold inf, and 0·inf is NaN
        self.pairs = [
            (torch.where(keep, s, 0.0), torch.where(keep, y, 0.0), torch.where(rows, 0.0, r))
            for s, y, r in self.pairs
        ]

    def _direction(self) -> torch.Tensor:
        """Return −H·g by the two-loop recursion; rows without a pair have 1/(y·s) = 0 there and skip it."""
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

    def advance(self, evaluate: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one attack iteration and return the objective [rows] and the points [rows, n] it was taken at."""
        if self.loss is None:
            self.loss, self.gradient = evaluate(self.x)
        for _ in range(self.steps):
            direction = self._direction()
            uphill = (direction * self.gradient).sum(1) >= 0
            if uphill.any():
                self._forget(uphill)
                direction = torch.where(uphill[:, None], -self.gradient, direction)
            first = (1 / self.gradient.abs().sum(1)).clamp_max(1.0)
            step = torch.where(self.fresh, first, 1.0) * self.learning_rate
            x = self.project(self.x + step[:, None] * direction)
            s = x - self.x
            loss, gradient = evaluate(x)
            self._remember(s, gradient - self.gradient)
            self.x, self.loss, self.gradient = x, loss, gradient
        return self.loss, self.x

    def _remember(self, s: torch.Tensor, y: torch.Tensor) -> None:
        curvature = (y * s).sum(1)
        good = (curvature > 1e-10) & torch.isfinite(curvature)
        mask = good[:, None]
        rho = torch.where(good, 1 / curvature, 0.0)
        self.pairs.append((torch.where(mask, s, 0.0), torch.where(mask, y, 0.0), rho))
        self.pairs = self.pairs[-self.history :]
        self.scale = torch.where(good, curvature / (y * y).sum(1), self.scale)
        self.fresh = self.fresh & ~good


class Adam:
    """Adam, one moment estimate a row; one attack iteration is `steps` steps.

    Parameters
    ----------
    x : [rows, n]
    learning_rate : float, > 0
    steps : int, inner steps an attack iteration
    project : applied after every step
    """

    def __init__(
        self,
        x: torch.Tensor,
        learning_rate: float = 0.1,
        steps: int = 20,
        project: Project = unconstrained,
    ) -> None:
        self.x, self.learning_rate, self.steps, self.project = (
            x.clone(),
            learning_rate,
            steps,
            project,
        )
        self.mean, self.square = torch.zeros_like(x), torch.zeros_like(x)
        self.count = torch.zeros(len(x), device=x.device, dtype=x.dtype)
        self.gradient: torch.Tensor | None = None  # at x

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows."""
        self.x, self.mean, self.square, self.count = (
            t[rows] for t in (self.x, self.mean, self.square, self.count)
        )
        self.gradient = self.gradient[rows] if self.gradient is not None else None

    def restart(self, rows: torch.Tensor, x: torch.Tensor) -> None:
        """Put these rows (a mask) at new points and forget what they knew."""
        self.x = torch.where(rows[:, None], x, self.x)
        self.mean = torch.where(rows[:, None], 0.0, self.mean)
        self.square = torch.where(rows[:, None], 0.0, self.square)
        self.count = torch.where(rows, 0.0, self.count)
        self.gradient = None

    def slope(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return what the moments are taken of."""
        return gradient

    def advance(self, evaluate: Evaluate) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one attack iteration and return the objective [rows] and the points [rows, n] it was taken at."""
        gradient = evaluate(self.x)[1] if self.gradient is None else self.gradient
        for _ in range(self.steps):
            slope = self.slope(gradient)
            self.count = self.count + 1
            self.mean = 0.9 * self.mean + 0.1 * slope
            self.square = 0.999 * self.square + 0.001 * slope**2
            mean = self.mean / (1 - 0.9**self.count)[:, None]
            root = (self.square / (1 - 0.999**self.count)[:, None]).sqrt()
            self.x = self.project(self.x - self.learning_rate * mean / (root + 1e-8))
            loss, gradient = evaluate(self.x)
        self.gradient = gradient
        return loss, self.x


class SignedAdam(Adam):
    """Adam on the signs of the gradient, as Geiping et al. (2020) use it: every coordinate counts alike."""

    def slope(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the signs."""
        return gradient.sign()


OPTIMISERS = {"lbfgs": LBFGS, "adam": Adam, "signed_adam": SignedAdam}
