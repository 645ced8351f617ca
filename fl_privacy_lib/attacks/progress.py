"""Which attacks of a stack have stopped and why, and the best that each has reached."""

import torch
from scipy.optimize import linear_sum_assignment

from fl_privacy_lib.attacks.settings import Attack

FAR = (
    1e3  # only so far may a pixel leave [0, 1] before a sigmoid is flat and no gradient leads back
)


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
        rows, device = len(x), x.device
        self.attack, self.pixels, self.truth = attack, pixels, truth
        self.best_x = x.clone()
        self.score = torch.full(
            (rows,), torch.inf, device=device
        )  # what chooses the best: objective, or distance
        self.least = torch.full((rows,), torch.inf, device=device)  # least objective so far
        self.trace: list[torch.Tensor] = []  # that, one entry an iteration
        self.iterations = torch.zeros(rows, dtype=torch.long, device=device)
        self.status = ["budget"] * rows
        self.restarts = torch.zeros(rows, dtype=torch.long, device=device)
        self.since = torch.zeros(
            rows, dtype=torch.long, device=device
        )  # iteration of the row's last start

    def update(
        self, rows: torch.Tensor, loss: torch.Tensor, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one iteration and return masks over `rows`: which are finished, which need a new start."""
        iteration = len(self.trace) + 1
        finite = torch.isfinite(loss) & torch.isfinite(x).all(1)
        score = loss if self.truth is None else self._distance(rows, x)
        better = finite & (score < self.score[rows])
        self.score[rows[better]], self.best_x[rows[better]] = (
            score[better].to(self.score),
            x[better].to(self.best_x),
        )
        self.least[rows] = torch.where(
            finite & (loss < self.least[rows]), loss.to(self.least), self.least[rows]
        )
        self.iterations[rows] = iteration
        self.trace.append(self.least.clone())
        window, fraction = self.attack.stall
        converged = self.least[rows] < self.attack.stop_loss
        lost = ~finite | (x[:, : self.pixels].abs().amax(1) > FAR)
        spent = self.restarts[rows] >= self.attack.restarts
        old_enough = iteration - self.since[rows] > window
        before = self.trace[max(0, iteration - 1 - window)][rows]
        stalled = old_enough & ~(self.least[rows] < (1 - fraction) * before) & ~lost
        reasons = (
            ("converged", converged),
            ("diverged", lost & spent & ~converged),
            ("stalled", stalled & ~converged),
        )
        for word, mask in reasons:
            for row in rows[mask].tolist():
                self.status[row] = word
        done = converged | (lost & spent) | stalled | self._decided(rows, converged)
        again = lost & ~done
        self.restarts[rows[again]] += 1
        self.since[rows[again]] = iteration
        return done, again

    def _decided(self, rows: torch.Tensor, converged: torch.Tensor) -> torch.Tensor:
        """Return which rows need not go on, because another try of the same victim has converged."""
        if self.truth is not None:  # an oracle may still like one of them better
            return converged
        victims = rows // self.attack.tries
        return torch.isin(victims, victims[converged])

    def _distance(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of each row's images from the truth, in the order that fits best."""
        assert self.truth is not None
        truth = self.truth.flatten(2).to(x)[rows // self.attack.tries]  # [rows, B, n]
        images = x[:, : self.pixels].reshape(truth.shape).nan_to_num(0.0).clamp(0, 1)
        cost = (images[:, :, None] - truth[:, None]).square().sum(-1).cpu().numpy()  # [rows, B, B]
        return torch.tensor(
            [c[linear_sum_assignment(c)].sum() for c in cost], device=x.device, dtype=x.dtype
        )
