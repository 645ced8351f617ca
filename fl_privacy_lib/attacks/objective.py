"""What an attack minimises: the distance between the observed gradient and a replayed one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fl_privacy_lib.attacks.optimisers import Evaluate
from fl_privacy_lib.defenses import ClientContext, Defense, Gradient
from fl_privacy_lib.federated import Observation, example_gradients
from fl_privacy_lib.models import Parameters

Replay = Callable[[Gradient], Gradient]
"""Dummies' example gradients [rows, batch, …] → what would be seen of them [rows, …]"""


def as_gradient(observation: Observation, example: int = 0) -> Gradient:
    """Return what was observed as a gradient, tensors […].

    At ``example`` that is one example's gradient; an update is divided by −η·L, which is exact for
    one local iteration (L = 1) and for more takes the sum of L different gradients for one.
    """
    if observation.tap.stage == "example":
        return {name: v[example] for name, v in observation.values.items()}
    if observation.tap.stage == "batch":
        return observation.values
    step = -observation.local_lr * observation.local_iterations
    return {name: v / step for name, v in observation.values.items()}


def replay(observation: Observation, aware: bool) -> Replay:
    """Return what the attacker does to its dummy gradients before it compares them.

    Parameters
    ----------
    observation : tells the tap, the plan and the public defence
    aware : bool
        False, the published attack: average the dummies' gradients. True: pass them through the
        same stages, without their noise, so that a clipped gradient is compared with a clipped one.

    Returns
    -------
    function of example gradients [rows, batch, …], giving tensors [rows, …] on the scale of
    `as_gradient`; a row takes the place of a client
    """
    defense = Defense(**observation.defense).noiseless() if aware else Defense("non_private")
    tap, step = observation.tap, -observation.local_lr * observation.local_iterations

    def replayed(gradients: Gradient) -> Gradient:
        batch_size = next(iter(gradients.values())).shape[1]
        ctx = ClientContext(tap.round, (tap.client,), (), batch_size=batch_size)
        values = defense.reach(tap.stage, gradients, ctx, step)
        if tap.stage == "example":
            return {name: g.mean(1) for name, g in values.items()}
        return values if tap.stage == "batch" else {name: u / step for name, u in values.items()}

    return replayed


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, …] as [rows, size]; [rows] has size 1."""
    return tensor[..., None].flatten(1)


def _dot(one: Gradient, other: Gradient) -> torch.Tensor:
    """Return the inner product of each tensor, row by row: [tensors, rows]."""
    return torch.stack([(rows_of(one[name]) * rows_of(o)).sum(1) for name, o in other.items()])


def _squared(seen: Gradient, target: Gradient) -> torch.Tensor:
    parts = [rows_of(seen[name] - t).square().sum(1) for name, t in target.items()]
    return torch.stack(parts).sum(0)


def _cosine(seen: Gradient, target: Gradient) -> torch.Tensor:
    inner = _dot(seen, target).sum(0)
    squares = _dot(seen, seen).sum(0) * _dot(target, target).sum(0)
    return 1 - inner / squares.clamp_min(1e-30).sqrt()


def _layer_cosine(seen: Gradient, target: Gradient) -> torch.Tensor:
    size = _dot(target, target)  # [tensors, rows]
    cosine = _dot(seen, target) / (_dot(seen, seen) * size).clamp_min(1e-30).sqrt()
    known = size > 0  # a tensor of which nothing is seen has no direction
    return torch.where(known, 1 - cosine, 0.0).sum(0) / known.sum(0)


DISTANCES: dict[str, Callable[[Gradient, Gradient], torch.Tensor]] = {
    "squared": _squared,
    "relative": lambda seen, target: _squared(seen, target) / _dot(target, target).sum(0),
    "cosine": _cosine,
    "layer_cosine": _layer_cosine,
}
"""Distances of gradients [rows, …] from their targets [rows, …], each giving [rows].

squared : the sum over all tensors of the squared difference (DLG, iDLG, CPL)
relative : that divided by the target's square, so that 1 is the distance of no gradient at all,
    whatever the batch size
cosine : one minus the cosine of the angle between the whole gradients (Geiping et al. 2020); no
    scale matters
layer_cosine : the mean over tensors of one minus their own cosine; no tensor's scale matters, so
    clipping each tensor changes nothing, whatever C
"""


def total_variation(images: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of neighbours down plus that across, by row.

    Parameters
    ----------
    images : [rows, B, C, H, W]

    Returns
    -------
    tensor [rows], ≥ 0

    Notes
    -----
    Source: the released code of Geiping et al. (2020).

    Examples
    --------
    >>> total_variation(torch.tensor([[[[[0.0, 1.0], [0.0, 1.0]]]]]))
    tensor([1.])
    """
    down = (images[..., 1:, :] - images[..., :-1, :]).abs().flatten(1)
    across = (images[..., 1:] - images[..., :-1]).abs().flatten(1)
    # a single row of pixels has no neighbours down
    return down.sum(1) / max(1, down.shape[1]) + across.sum(1) / max(1, across.shape[1])


@dataclass(frozen=True)
class Evidence:
    """One observation of every victim.

    Attributes
    ----------
    weights : tensors […], the same for all rows
    targets : tensors [rows, …], what was seen, as gradients
    replay : what is done to the dummies' gradients, see the function `replay`
    skip_zeros : whether coordinates that are exactly zero in the targets are left out
    """

    weights: Parameters
    targets: Gradient
    replay: Replay
    skip_zeros: bool = False

    def of(self, rows: torch.Tensor) -> "Evidence":
        """Return the evidence of these rows, a row as often as it is named."""
        return replace(self, targets={name: t[rows] for name, t in self.targets.items()})

    def seen(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Gradient:
        """Return what would be seen of dummies [rows, B, …].

        Their labels are [rows, B] or, soft, [rows, B, classes].

        All images are examples of one client, which leaves the network's forward pass a single
        call: several times faster than rows that are clients.
        """
        weights = {name: w[None] for name, w in self.weights.items()}
        x, y = images.flatten(0, 1)[None], labels.flatten(0, 1)[None]
        gradients = example_gradients(model, weights, x, y)
        dummies = {name: g[0].unflatten(0, images.shape[:2]) for name, g in gradients.items()}
        seen = self.replay(dummies)
        if not self.skip_zeros:
            return seen
        return {name: g * (self.targets[name] != 0) for name, g in seen.items()}


def matching_objective(
    model: nn.Module,
    evidence: Sequence[Evidence],
    labels: torch.Tensor | None,
    shape: tuple[int, ...],
    *,
    batch_size: int = 1,
    distance: str = "squared",
    tv: float = 0.0,
) -> Callable[[torch.Tensor], Evaluate]:
    """Return an attack's objective: distances summed over observations, plus a prior on images.

    Parameters
    ----------
    evidence : one for each observation of the same images
    labels : [rows, B]; None: soft labels, the softmax of the last B·classes coordinates of x
    shape : of one image
    batch_size : int, B
    distance : one of DISTANCES
    tv : float, ≥ 0, weight of `total_variation`

    Returns
    -------
    ``bind(rows)`` → ``evaluate(x [rows, B·pixels (+ B·classes)])`` → objective [rows], gradient
    [rows, n]
    """
    distance_of, pixels = DISTANCES[distance], batch_size * math.prod(shape)

    def bind(rows: torch.Tensor) -> Evaluate:
        chosen = [e.of(rows) for e in evidence]
        known = None if labels is None else labels[rows]

        def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.detach().requires_grad_(True)
            images = x[:, :pixels].reshape(len(x), batch_size, *shape)
            soft = x[:, pixels:].reshape(len(x), batch_size, -1)
            y = torch.softmax(soft, -1) if known is None else known
            distances = [distance_of(e.seen(model, images, y), e.targets) for e in chosen]
            value = torch.stack(distances).sum(0)
            if tv:
                value = value + tv * total_variation(images)
            # rows share no operation, so the slope of their sum is the slope of each
            (gradient,) = torch.autograd.grad(value.sum(), x, materialize_grads=True)
            return value.detach(), gradient

        return evaluate

    return bind
