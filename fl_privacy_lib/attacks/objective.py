"""What an attack minimises: the distance between the observed gradient and a replayed one."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import grad_and_value, vmap

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.route import ClientContext, Defense
from fl_privacy_lib.federated.gradients import example_gradients
from fl_privacy_lib.federated.participation import Observation
from fl_privacy_lib.models import Parameters

Replay = Callable[[Gradient], Gradient]


def as_gradient(observation: Observation, example: int = 0) -> Gradient:
    """Return what was observed as a gradient, tensors […].

    At ``example`` that is one example's gradient; an update is divided by −η·L, which is exact for one local
    iteration (L = 1) and for more takes the sum of L different gradients for one.
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
        False, the published attack: average the dummies' gradients. True: pass them through the same stages,
        without their noise, so that a clipped gradient is compared with a clipped one.

    Returns
    -------
    function of example gradients [1, batch, …], giving tensors […] on the scale of `as_gradient`
    """
    public = observation.defense if aware else {"name": "non_private"}
    defense = Defense(**public).noiseless()
    stage = observation.tap.stage
    if stage == "aggregate":
        raise InputError("an aggregate mixes clients; a reconstruction reads example, batch, update or received.")
    step = -observation.local_lr * observation.local_iterations

    def view(gradients: Gradient) -> Gradient:
        batch_size = next(iter(gradients.values())).shape[1]
        ctx = ClientContext(observation.tap.round, (observation.tap.client,), (), batch_size=batch_size)
        if defense.per_example:
            gradients = defense.per_example(gradients, ctx)
        values = {name: g.mean(1) for name, g in gradients.items()}  # [1, …]
        if stage in ("batch", "update", "received") and defense.per_batch:
            values = defense.per_batch(values, ctx)
        reached = {"update": [defense.per_client], "received": [defense.per_client, defense.on_arrival]}.get(stage, [])
        for transform in reached:
            if transform:
                update = transform({name: step * v for name, v in values.items()}, ctx)
                values = {name: u / step for name, u in update.items()}
        return {name: v[0] for name, v in values.items()}

    return view


def matching_objective(
    model: nn.Module,
    weights: Parameters,
    targets: Gradient,
    labels: torch.Tensor,
    view: Replay,
    shape: tuple[int, ...],
    weights_shared: bool,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return the squared ℓ2 distance of gradients and its gradient in the dummy images, for chosen rows.

    Parameters
    ----------
    weights : tensors […] shared by all rows, or [rows, …]
    targets : tensors [rows, …]
    labels : [rows, batch]
    view : what is done to the dummies' gradients, see `replay`
    shape : of one image

    Returns
    -------
    ``evaluate(x [rows', batch·pixels], rows [rows'])`` → objective [rows'], gradient [rows', batch·pixels]

    Notes
    -----
    Source: DLG, iDLG, CPL: the sum over all tensors of the squared difference.
    """

    def distance(x: torch.Tensor, y: torch.Tensor, target: Gradient, w: Parameters) -> torch.Tensor:
        images = x.reshape(1, len(y), *shape)
        dummies = example_gradients(model, {name: p[None] for name, p in w.items()}, images, y[None])
        seen = view(dummies)
        return torch.stack([(seen[name] - target[name]).square().sum() for name in target]).sum()

    batched = vmap(grad_and_value(distance), in_dims=(0, 0, 0, None if weights_shared else 0))

    def evaluate(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = {name: t[rows] for name, t in targets.items()}
        w = weights if weights_shared else {name: p[rows] for name, p in weights.items()}
        gradient, value = batched(x, labels[rows], own, w)
        return value, gradient

    return evaluate
