"""What an attack minimises: the distance between the observed gradient and a replayed one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.federated.participation import Observation
from fl_privacy_lib.models import Parameters

Replay = Callable[[Gradient], Gradient]
"""Dummies' example gradients [rows, batch, …] → what would be seen of them [rows, …]"""
Evaluate = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [rows, n] → objective [rows], gradient [rows, n]"""


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
    known: dict[str, Any] = observation.defense
    defense = Defense(**known).noiseless() if aware else Defense("non_private")
    stage = observation.tap.stage
    if stage == "aggregate":
        raise InputError(
            "an aggregate mixes clients; a reconstruction reads example, batch, update or received."
        )
    step = -observation.local_lr * observation.local_iterations

    def view(gradients: Gradient) -> Gradient:
        batch_size = next(iter(gradients.values())).shape[1]
        ctx = ClientContext(
            observation.tap.round, (observation.tap.client,), (), batch_size=batch_size
        )
        values = defense.reach(stage, gradients, ctx, step)
        if stage == "example":
            return {name: g.mean(1) for name, g in values.items()}
        return values if stage == "batch" else {name: u / step for name, u in values.items()}

    return view


def _dots(seen: Gradient, target: Gradient) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ⟨seen, target⟩, ⟨seen, seen⟩ and ⟨target, target⟩ of each tensor, row by row: [tensors, rows]."""
    pairs = [
        (seen[name][..., None].flatten(1), t[..., None].flatten(1)) for name, t in target.items()
    ]
    products = [(s * t, s * s, t * t) for s, t in pairs]
    inner, own, its = (
        torch.stack([p.sum(1) for p in part]) for part in zip(*products, strict=True)
    )
    return inner, own, its


def _squared(seen: Gradient, target: Gradient) -> torch.Tensor:
    parts = [(seen[name] - t)[..., None].flatten(1).square().sum(1) for name, t in target.items()]
    return torch.stack(parts).sum(0)


def _relative(seen: Gradient, target: Gradient) -> torch.Tensor:
    return _squared(seen, target) / _dots(target, target)[0].sum(0)


def _cosine(seen: Gradient, target: Gradient) -> torch.Tensor:
    inner, own, its = (part.sum(0) for part in _dots(seen, target))
    return 1 - inner / (own * its).clamp_min(1e-30).sqrt()


def _layer_cosine(seen: Gradient, target: Gradient) -> torch.Tensor:
    inner, own, its = _dots(seen, target)  # [tensors, rows]
    known = its > 0  # a tensor of which nothing is seen has no direction
    return (torch.where(known, 1 - inner / (own * its).clamp_min(1e-30).sqrt(), 0.0)).sum(
        0
    ) / known.sum(0)


DISTANCES: dict[str, Callable[[Gradient, Gradient], torch.Tensor]] = {
    "squared": _squared,
    "relative": _relative,
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
    """Return the mean absolute difference of neighbours down plus that of neighbours across, by row.

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
    weights : tensors […] shared by all rows, or [rows, …]
    shared : which of both
    targets : tensors [rows, …], what was seen, as gradients
    view : what is done to the dummies' gradients, see `replay`
    trusted : tensors [rows, …] of bool, the coordinates that count; None for all
    """

    weights: Parameters
    shared: bool
    targets: Gradient
    view: Replay
    trusted: Gradient | None = None

    def of(self, rows: torch.Tensor) -> "Evidence":
        """Return the evidence of these rows, a row as often as it is named."""
        weights = (
            self.weights if self.shared else {name: w[rows] for name, w in self.weights.items()}
        )
        targets = {name: t[rows] for name, t in self.targets.items()}
        trusted = (
            None if self.trusted is None else {name: t[rows] for name, t in self.trusted.items()}
        )
        if trusted is not None:
            targets = {name: t * trusted[name] for name, t in targets.items()}
        return replace(self, weights=weights, targets=targets, trusted=trusted)

    def seen(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Gradient:
        """Return what would be seen of dummies [rows, B, …] with labels [rows, B] or [rows, B, classes].

        With weights of their own the rows are clients. With shared ones all images are examples of
        one client, which leaves the network's forward pass a single call: several times faster.
        """
        if not self.shared:
            dummies = example_gradients(model, self.weights, images, labels)
        else:
            own = {name: w[None] for name, w in self.weights.items()}
            flat = example_gradients(
                model, own, images.flatten(0, 1)[None], labels.flatten(0, 1)[None]
            )
            dummies = {name: g[0].unflatten(0, images.shape[:2]) for name, g in flat.items()}
        seen = self.view(dummies)
        return (
            seen
            if self.trusted is None
            else {name: g * self.trusted[name] for name, g in seen.items()}
        )


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
    """Return the objective of an attack: distances summed over all observations, plus a prior on images.

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
    measure, pixels = DISTANCES[distance], batch_size * int(torch.tensor(shape).prod())

    def bind(rows: torch.Tensor) -> Evaluate:
        chosen = [e.of(rows) for e in evidence]
        known = None if labels is None else labels[rows]

        def evaluate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.detach().requires_grad_(True)
            images = x[:, :pixels].reshape(len(x), batch_size, *shape)
            y = known
            if y is None:
                y = torch.softmax(x[:, pixels:].reshape(len(x), batch_size, -1), -1)
            value = torch.stack([measure(e.seen(model, images, y), e.targets) for e in chosen]).sum(
                0
            )
            if tv:
                value = value + tv * total_variation(images)
            # rows share no operation, so the slope of their sum is the slope of each
            (gradient,) = torch.autograd.grad(value.sum(), x, materialize_grads=True)
            return value.detach(), gradient

        return evaluate

    return bind
