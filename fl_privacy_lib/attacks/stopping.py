"""Which attacks of a stack have stopped and why, and the best that each has reached."""

import torch
from scipy.optimize import linear_sum_assignment

from fl_privacy_lib.attacks.attack import Attack

# Only so far may a pixel leave [0, 1] before a sigmoid is flat and no gradient leads back.
FAR = 1e3


class Progress:
    """The book-keeping of one call: best iterates, and which rows are still running.

    Parameters
    ----------
    x : [rows, n], the starts; rows come as victims × tries
    attack : its stopping rules
    pixels : the first coordinates of a row that are images
    truth : [V, B, C, H, W] or None; given, the iterate nearest to it is kept (an oracle, see
        `Attack.select`)
    """

    def __init__(
        self, x: torch.Tensor, attack: Attack, pixels: int, truth: torch.Tensor | None = None
    ) -> None:
        self.attack, self.pixels, self.truth = attack, pixels, truth
        self.best_x = x.clone()
        self.score = torch.full((len(x),), torch.inf, device=x.device)  # objective, or distance
        self.least = self.score.clone()  # least objective so far
        self.trace: list[torch.Tensor] = []  # that, one entry an iteration
        self.iterations = torch.zeros(len(x), dtype=torch.long, device=x.device)
        self.restarts = torch.zeros_like(self.iterations)
        self.since = torch.zeros_like(self.iterations)  # iteration of the row's last start
        self.status = ["budget"] * len(x)

    def update(
        self, rows: torch.Tensor, loss: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one iteration of `rows`.

        Parameters
        ----------
        rows : [n], positions of the rows that are still running
        loss, x : [n], [n, coordinates], their objectives and points

        Returns
        -------
        masks over `rows`: which are finished, which need a new start
        """
        iteration = len(self.trace) + 1
        finite = torch.isfinite(loss) & torch.isfinite(x).all(1)
        score = loss if self.truth is None else self._distance(rows, x)
        better = finite & (score < self.score[rows])
        self.score[rows[better]] = score[better].to(self.score)
        self.best_x[rows[better]] = x[better].to(self.best_x)
        least = torch.where(finite, loss, torch.inf).to(self.least)
        self.least[rows] = torch.minimum(self.least[rows], least)
        self.iterations[rows] = iteration
        self.trace.append(self.least.clone())
        window, fraction = self.attack.stall
        before = self.trace[max(0, iteration - 1 - window)][rows]
        converged = self.least[rows] < self.attack.stop_loss
        lost = ~finite | (x[:, : self.pixels].abs().amax(1) > FAR)
        diverged = lost & (self.restarts[rows] >= self.attack.restarts)
        stalled = ~lost & (iteration - self.since[rows] > window)
        stalled &= ~(self.least[rows] < (1 - fraction) * before)
        # the last word counts
        for word, mask in (("stalled", stalled), ("diverged", diverged), ("converged", converged)):
            for row in rows[mask].tolist():
                self.status[row] = word
        done = converged | diverged | stalled
        if (
            self.truth is None
        ):  # another try of the victim has converged; an oracle may like it less
            victims = rows // self.attack.tries
            done |= torch.isin(victims, victims[converged])
        again = lost & ~done
        self.restarts[rows[again]] += 1
        self.since[rows[again]] = iteration
        return done, again

    def _distance(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each row's images from the truth, in the best order."""
        assert self.truth is not None
        truth = self.truth.flatten(2).to(x)[rows // self.attack.tries]  # [rows, B, n]
        images = x[:, : self.pixels].reshape(truth.shape).nan_to_num(0.0).clamp(0, 1)
        cost = (images[:, :, None] - truth[:, None]).square().sum(-1).cpu().numpy()  # [rows, B, B]
        return torch.tensor(
            [c[linear_sum_assignment(c)].sum() for c in cost], device=x.device, dtype=x.dtype
        )
