"""Reconstruction by gradient matching, for many victims in one call. Taught in notebook 01."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fl_privacy_lib._checks import InputError, one_of, positive
from fl_privacy_lib.attacks.labels import infer_labels
from fl_privacy_lib.attacks.objective import as_gradient, matching_objective, replay
from fl_privacy_lib.attacks.optimisers import OPTIMISERS
from fl_privacy_lib.attacks.starts import STARTS, start
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated.participation import Observation


@dataclass(frozen=True)
class Attack:
    """The settings of a reconstruction.

    Parameters
    ----------
    start : {'patterned', 'uniform', 'normal'}
    optimiser : {'lbfgs', 'adam'}
    learning_rate : float, > 0; the papers use 1 for L-BFGS
    max_iterations : int, attack iterations; each is 20 optimiser steps, as in the published code
    clip_aware : bool, whether the dummy gradient passes the defence's own clipping, see `objective.replay`
    stop_loss : float, > 0; a victim whose objective falls below it is done
    stall : (int, float); stop a victim whose objective fell by less than this fraction in so many iterations
    restarts : int, fresh starts a victim gets when its iterate diverges
    seed : int
    """

    start: str = "patterned"
    optimiser: str = "lbfgs"
    learning_rate: float = 1.0
    max_iterations: int = 300
    clip_aware: bool = False
    stop_loss: float = 1e-6
    stall: tuple[int, float] = (10, 0.01)
    restarts: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(STARTS, start=self.start)
        one_of(OPTIMISERS, optimiser=self.optimiser)
        positive(learning_rate=self.learning_rate, max_iterations=self.max_iterations, stop_loss=self.stop_loss)


@dataclass
class Reconstruction:
    """The outcome for V victims of batches of B images.

    Attributes
    ----------
    images : [V, B, C, H, W] in [0, 1], each victim's iterate with the least objective; the truth had no say
    labels : [V, B], the labels the attack used
    loss : [V], that least objective
    iterations : [V], attack iterations until the victim stopped
    status : 'converged', 'stalled', 'diverged' or 'budget' (still moving at max_iterations), per victim
    snapshots : iteration → [V, B, C, H, W], the best iterate so far
    """

    images: torch.Tensor
    labels: torch.Tensor
    loss: torch.Tensor
    iterations: torch.Tensor
    status: list[str]
    snapshots: dict[int, torch.Tensor] = field(default_factory=dict)


class _Progress:
    """The book-keeping of one call: best iterates, and which rows are still running."""

    def __init__(self, x: torch.Tensor, attack: Attack) -> None:
        rows = len(x)
        self.attack = attack
        self.best_x, self.best = x.clone(), torch.full((rows,), torch.inf, device=x.device)
        self.iterations = torch.zeros(rows, dtype=torch.long, device=x.device)
        self.status = ["budget"] * rows
        self.restarts = torch.zeros(rows, dtype=torch.long, device=x.device)
        self.trace: list[torch.Tensor] = []  # best objective of all rows, one entry an iteration
        self.since = torch.zeros(rows, dtype=torch.long, device=x.device)  # iteration of the row's last start

    def update(self, rows: torch.Tensor, loss: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one iteration and return masks over `rows`: which are finished, which need a new start."""
        iteration = len(self.trace) + 1
        finite = torch.isfinite(loss) & torch.isfinite(x).all(1)
        better = finite & (loss < self.best[rows])
        self.best[rows[better]], self.best_x[rows[better]] = loss[better], x[better]
        self.iterations[rows] = iteration
        self.trace.append(self.best.clone())
        window, fraction = self.attack.stall
        converged = self.best[rows] < self.attack.stop_loss
        # only so far may an iterate leave [0, 1] before the sigmoid is flat and no gradient leads back
        lost = ~finite | (x.abs().amax(1) > 1e3)
        spent = self.restarts[rows] >= self.attack.restarts
        old_enough = iteration - self.since[rows] > window
        before = self.trace[max(0, iteration - 1 - window)][rows]
        stalled = old_enough & ~(self.best[rows] < (1 - fraction) * before) & ~lost
        reasons = (("converged", converged), ("diverged", lost & spent & ~converged), ("stalled", stalled & ~converged))
        for word, mask in reasons:
            for row in rows[mask].tolist():
                self.status[row] = word
        done = converged | (lost & spent) | stalled
        again = lost & ~done
        self.restarts[rows[again]] += 1
        self.since[rows[again]] = iteration
        return done, again


def reconstruct(
    model: nn.Module,
    observations: Sequence[Observation],
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
    observations : V of them, all from the same kind of tap under the same defence
    shape : (channels, height, width) of an image
    attack : the settings
    batch_size : int, B, how many images to look for behind each gradient; 1 at the tap ``example``
    labels : [V, B] or None
        None: inferred from the gradient. Given: the attacker is assumed to know them (say so).
    snapshots : attack iterations whose best iterates are kept
    on_iteration : called with (iteration, rows still running, best images [V, B, C, H, W] so far), e.g. to
        score or show progress; what it returns is not used

    Notes
    -----
    The best iterate is chosen by the attacker's own objective, never by the distance to the truth. An iterate
    that leaves the finite numbers is restarted from a fresh point, `attack.restarts` times.
    Source: DLG (Zhu et al. 2019), iDLG (Zhao et al. 2020), CPL (Wei et al. 2020).
    """
    if not observations:
        raise InputError("no observation was given: there is nothing to reconstruct.")
    stage = observations[0].tap.stage
    if any(o.tap.stage != stage or o.defense != observations[0].defense for o in observations):
        raise InputError("observations of one call must come from one kind of tap under one defence; split the call.")
    plans = {(o.tap.round, o.local_lr, o.local_iterations) for o in observations}
    if len(plans) > 1:
        raise InputError("observations of one call must share round, learning rate and iterations; split the call.")
    if labels is not None and tuple(labels.shape) != (len(observations), batch_size):
        raise InputError(
            f"labels have shape {tuple(labels.shape)}, not ({len(observations)}, {batch_size}): one row a victim, "
            "one label an image."
        )
    if stage == "example" and batch_size != 1:
        raise InputError(f"batch_size = {batch_size} at the tap 'example', which holds one example's gradient: use 1.")
    gradients = [as_gradient(o) for o in observations]
    targets = {name: torch.stack([g[name] for g in gradients]) for name in gradients[0]}  # [V, …]
    if labels is None:
        labels = infer_labels(targets, batch_size)
    shared = all(w is observations[0].weights[n] or torch.equal(w, observations[0].weights[n])
                 for o in observations for n, w in o.weights.items())  # fmt: skip
    weights = observations[0].weights if shared else {
        name: torch.stack([o.weights[name] for o in observations]) for name in observations[0].weights
    }  # fmt: skip
    view = replay(observations[0], attack.clip_aware)
    evaluate = matching_objective(model, weights, targets, labels, view, shape, shared)
    device = labels.device
    starts = [keyed_generator(device, attack.seed, "start", row) for row in range(len(observations))]

    def fresh(rows: torch.Tensor) -> torch.Tensor:
        # a generator for each victim: its k-th start does not depend on how often others began anew
        return torch.stack([start(attack.start, batch_size, shape, starts[r]).flatten() for r in rows.tolist()])

    return _minimise(evaluate, fresh, labels, shape, attack, snapshots, on_iteration)


def _minimise(evaluate, fresh, labels, shape, attack, snapshots, on_iteration) -> Reconstruction:
    """Run the optimiser until every row has stopped."""
    victims, batch = labels.shape
    x = fresh(torch.arange(victims))  # [V, n]
    progress = _Progress(x, attack)
    optimiser = OPTIMISERS[attack.optimiser](x, attack.learning_rate)
    rows = torch.arange(victims, device=x.device)
    kept = {}

    def images() -> torch.Tensor:
        return progress.best_x.reshape(victims, batch, *shape).clamp(0, 1)

    for iteration in range(1, attack.max_iterations + 1):
        loss, at = optimiser.advance(lambda x, rows=rows: evaluate(x, rows))
        done, again = progress.update(rows, loss, at)
        if again.any():
            x = optimiser.x.clone()
            x[again] = fresh(rows[again])
            optimiser.restart(again, x)
        if iteration in snapshots:
            kept[iteration] = images()
        if on_iteration:
            on_iteration(iteration, rows, images())
        if done.any():
            rows = rows[~done]
            optimiser.select(~done)
        if len(rows) == 0:
            break
    for iteration in snapshots:  # a victim that has stopped stays as it is
        kept.setdefault(iteration, images())
    return Reconstruction(images(), labels, progress.best, progress.iterations, progress.status, kept)
