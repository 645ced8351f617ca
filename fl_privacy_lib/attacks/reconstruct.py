"""Reconstruction by gradient matching, for many victims and tries in one call."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fl_privacy_lib.attacks.attack import Attack, start
from fl_privacy_lib.attacks.evidence import (
    Seen,
    check_observations,
    classes_of,
    gather,
    knowledge_of,
    labels_of,
    plausible_rows,
)
from fl_privacy_lib.attacks.objective import Evaluate, matching_objective
from fl_privacy_lib.attacks.optimisers import OPTIMISERS
from fl_privacy_lib.defenses import keyed_generator
from fl_privacy_lib.federated.participation import Observation

# Only so far may a pixel leave [0, 1] before a sigmoid is flat and no gradient leads back.
FAR = 1e3


@dataclass
class Reconstruction:
    """The outcome for V victims of batches of B images.

    Attributes
    ----------
    images : [V, B, C, H, W] in [0, 1], each victim's iterate with the least objective; the truth
        had no say
    labels : [V, B], the labels the attack used or found; −1 where the gradient betrays none
    loss : [V], that least objective
    iterations : [V], attack iterations until the victim's best try stopped
    status : per victim 'converged', 'stalled', 'diverged', 'budget' (still moving at
        max_iterations), or 'hopeless': no finite, non-zero gradient or no label was there to begin
        with, and nothing was tried
    knowledge : what the attacker was given, see `evidence.knowledge_of`
    snapshots : iteration → [V, B, C, H, W], the best iterate so far
    """

    images: torch.Tensor
    labels: torch.Tensor
    loss: torch.Tensor
    iterations: torch.Tensor
    status: list[str]
    knowledge: dict[str, str]
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)


def reconstruct(
    model: nn.Module,
    observations: Sequence[Observation] | Seen,
    shape: tuple[int, ...],
    attack: Attack,
    *,
    batch_size: int = 1,
    labels: torch.Tensor | None = None,
    snapshots: Sequence[int] = (),
    on_iteration: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> Reconstruction:
    """Reconstruct the images behind observed gradients, all victims at once.

    Parameters
    ----------
    model : the architecture; the weights come with each observation
    observations : one for each of V victims, or R for each; all from the same kind of tap under the
        same defence, the r-th of every victim at the same weights
    shape : (channels, height, width) of an image
    attack : the settings
    batch_size : int, B, how many images to look for behind each gradient; 1 at the tap ``example``,
        where the first example of the observed batch is looked for
    labels : [V, B], for ``label_rule="given"``; giving them sets that rule
    snapshots : attack iterations whose best iterates are kept
    on_iteration : called with (iteration, victims still running, best images [V, B, C, H, W] so
        far), e.g. to score or show progress; what it returns is not used

    Raises
    ------
    InputError
        If the observations, the labels and the attack's settings do not fit one another.

    Notes
    -----
    The best iterate, and the best of several tries, is chosen by the attacker's own objective. An
    iterate that leaves the finite numbers is restarted from a fresh point, `attack.restarts` times.
    Source: DLG (Zhu et al. 2019), iDLG (Zhao et al. 2020), CPL (Wei et al. 2020), Geiping et al.
    (2020).
    """
    seen = [[o] if isinstance(o, Observation) else list(o) for o in observations]
    check_observations(seen, model, batch_size)
    classes = classes_of(model, seen[0][0], shape)
    known = labels_of(seen, classes, batch_size, attack, labels)
    evidence = [gather(column, attack) for column in zip(*seen, strict=True)]
    objective = matching_objective(
        model,
        evidence,
        None if known is None else known.clamp_min(0),
        shape,
        batch_size=batch_size,
        distance=attack.objective,
        tv=attack.tv,
    )
    soft = classes if known is None else 0
    run = _Run(attack, shape, batch_size, soft, plausible_rows(evidence, known))
    images_at = run.minimise(objective, snapshots, on_iteration)
    best, progress = run.best(), run.progress
    return Reconstruction(
        run.images(),
        run.labels() if known is None else known,
        progress.least[best],
        progress.iterations[best],
        [progress.status[row] for row in best.tolist()],
        knowledge_of(attack, seen, batch_size, labels is not None),
        images_at,
    )


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


class _Run:
    """The rows of one call, V victims × tries, until each has stopped.

    Parameters
    ----------
    attack, shape, batch : the settings, the shape of an image, B
    classes : classes of the soft labels that are optimised with the images; 0 for none
    good : [V] of bool, victims that are worth a try
    """

    def __init__(
        self,
        attack: Attack,
        shape: tuple[int, ...],
        batch: int,
        classes: int,
        good: torch.Tensor,
    ) -> None:
        self.attack, self.shape, self.batch, self.classes = attack, shape, batch, classes
        self.victims, self.device = len(good), good.device
        self.pixels = batch * math.prod(shape)
        # a generator for each row: its k-th start does not depend on how often others began anew
        self.generators = [
            keyed_generator(self.device, attack.seed, "start", victim, *([k] if k else []))
            for victim in range(self.victims)
            for k in range(attack.tries)
        ]
        self.rows = torch.arange(len(self.generators), device=self.device)
        self.progress = Progress(self.fresh(self.rows), attack, self.pixels)
        self.worth_trying = good.repeat_interleave(attack.tries)  # [rows]

    def fresh(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a new start for each of these rows, [rows, n]."""
        starts = []
        for generator in (self.generators[row] for row in rows.tolist()):
            images = start(self.attack.start, self.batch, self.shape, generator).flatten()
            labels = torch.randn(self.batch * self.classes, generator=generator, device=self.device)
            starts.append(torch.cat([images, labels]))
        return torch.stack(starts)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Return x with its images in [0, 1], if the attack keeps them there."""
        if not self.attack.box:
            return x
        return torch.cat([x[:, : self.pixels].clamp(0, 1), x[:, self.pixels :]], 1)

    def minimise(
        self,
        objective: Callable[[torch.Tensor], Evaluate],
        snapshots: Sequence[int],
        on_iteration: Callable[[int, torch.Tensor, torch.Tensor], None] | None,
    ) -> dict[int, torch.Tensor]:
        """Run until every row has stopped; return the images at each of the snapshots."""
        attack, progress, images_at = self.attack, self.progress, dict[int, torch.Tensor]()
        for row in self.rows[~self.worth_trying].tolist():
            progress.status[row] = "hopeless"
        rows = self.rows[self.worth_trying]
        optimiser = OPTIMISERS[attack.optimiser](
            progress.best_x[rows], attack.learning_rate, attack.steps, self.project
        )
        evaluate = objective(rows // attack.tries)
        for iteration in range(1, attack.max_iterations + 1):
            if len(rows) == 0:
                break
            optimiser.learning_rate = attack.rate(iteration)
            loss, x = optimiser.advance(evaluate)
            done, again = progress.update(rows, loss, x)
            if again.any():
                x = x.clone()
                x[again] = self.fresh(rows[again])
                optimiser.restart(again, x)
            if iteration in snapshots:
                images_at[iteration] = self.images()
            if on_iteration:
                on_iteration(iteration, torch.unique(rows // attack.tries), self.images())
            if done.any():
                rows = rows[~done]
                optimiser.select(~done)
                evaluate = objective(rows // attack.tries)
        # a victim that has stopped stays as it is
        return {iteration: images_at.get(iteration, self.images()) for iteration in snapshots}

    def best(self) -> torch.Tensor:
        """Return each victim's best row, [V]."""
        least = self.progress.least.view(self.victims, -1)
        return self.rows.view(self.victims, -1)[:, 0] + least.argmin(1)

    def images(self) -> torch.Tensor:
        """Return each victim's best images so far, [V, B, C, H, W] in [0, 1]."""
        flat = self.progress.best_x[self.best()][:, : self.pixels]
        return flat.reshape(self.victims, self.batch, *self.shape).clamp(0, 1)

    def labels(self) -> torch.Tensor:
        """Return the most likely of each victim's soft labels, [V, B]."""
        soft = self.progress.best_x[self.best()][:, self.pixels :]
        return soft.view(self.victims, self.batch, self.classes).argmax(-1)
