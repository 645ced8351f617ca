"""Gradient descent under compensation on the simplest loss, beside what its proof promises.

The loss is f(x) = ½‖x‖², whose gradient is x. Taught in notebook 09.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from fl_privacy_lib.defenses.compensation import Compensation, law_edges
from fl_privacy_lib.defenses.slices import sliced_noise


@dataclass(frozen=True)
class Descent:
    """A descent in which ten clients send x in every round, with noise on a share of its slices.

    It begins where every eigenvalue of the folded gradient is the variance that the server is told:
    within the interval that compensation leaves out.

    Parameters
    ----------
    repair : {'none', 'mean', 'sum'}
        No compensation, or the `variance` of the one that is done, see `Compensation`.
    feedback : bool
        Whether what a round leaves out is added to the next aggregate, as in the proof's update.
    rounds : int, T
    columns : int, w; x has d = Qw² coordinates
    ratio, share, noise_std : see `Compensation`
    draws : int, repetitions
    """

    repair: str
    feedback: bool
    rounds: int
    columns: int = 50
    ratio: float = 6.0
    share: float = 0.2
    noise_std: float = 0.1
    draws: int = 3
    seed: int = 0

    def run(self) -> dict[str, Any]:
        """Return the mean squared gradient over the rounds, and the proof's bound on it, [draws].

        Returns
        -------
        mean_squared_gradient, bound : as multiples of the first squared gradient
        over_bound : the first over the second

        Notes
        -----
        The bound is equation 8 of Wang et al. (2022), summed over the rounds and solved for the
        mean squared gradient, at the step size that follows it. Its constants here: L = 1 of
        Lipschitz; φ² = γσ²d of a client's noise; ψ/2 = √(dλ₊), which is the most that compensation
        can leave out, as no direction of it has an eigenvalue above λ₊.
        """
        weights = torch.full((10,), 0.1, dtype=torch.float64)
        repairs, rows = self.repair != "none", round(self.ratio * self.columns)
        stage = Compensation(self.noise_std, self.share, self.ratio,
                             self.repair if repairs else "mean")  # fmt: skip
        told, size = stage.noise_variance(weights), rows * self.columns
        phi, psi = (self.noise_std * math.sqrt(self.share * size),
                    2 * math.sqrt(size * law_edges(told, self.ratio)[1]) * repairs)  # fmt: skip
        step = 1 / (2 + phi * math.sqrt(self.rounds / 10) + (psi**2 * self.rounds) ** (1 / 3))
        start = size * told  # the first squared gradient
        bound = (start / (step * self.rounds) + 4 * (step * psi) ** 2
                 + step * phi**2 / 10) / (1 - step) / start  # fmt: skip
        squares = torch.empty(self.draws, self.rounds, dtype=torch.float64)
        for draw in range(self.draws):
            dice = torch.Generator().manual_seed(self.seed + draw)
            axes = torch.randn(rows, self.columns, generator=dice, dtype=torch.float64)
            x, carried = (math.sqrt(told * rows) * torch.linalg.qr(axes).Q).flatten(), 0.0
            for t in range(self.rounds):
                squares[draw, t] = x.square().sum()
                noisy = sliced_noise(size, self.share, self.noise_std, weights, dice) + x + carried
                sent = stage.repaired(noisy, weights) if repairs else noisy
                carried = self.feedback * (noisy - sent)
                x = x - step * sent
        means = squares.mean(1).numpy() / start
        return {"mean_squared_gradient": means, "bound": 0 * means + bound,
                "over_bound": means / bound}  # fmt: skip
