"""Which attacks of a stack have stopped and why, and the best that each has reached."""

import torch

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
    """

    def __init__(self, x: torch.Tensor, attack: Attack, pixels: int) -> None:
        self.attack, self.pixels = attack, pixels
        self.best_x = x.clone()
        self.least = torch.full((len(x),), torch.inf, device=x.device)  # objective so far
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
        better = finite & (loss < self.least[rows])
        self.least[rows[better]] = loss[better].to(self.least)
        self.best_x[rows[better]] = x[better].to(self.best_x)
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
        victims = rows // self.attack.tries
        # a row is done as well when another try of its victim has converged
        done = diverged | stalled | torch.isin(victims, victims[converged])
        again = lost & ~done
        self.restarts[rows[again]] += 1
        self.since[rows[again]] = iteration
        return done, again
