"""Naive references for the tests: plain loops that share no code with the library."""

import copy
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
WRONG_ALARM = 1e-9
"""Probability with which a test of a distribution would fail although the distribution is right."""


def entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of one row of logits [classes] and a class index or soft label."""
    log_probabilities = logits - torch.logsumexp(logits, 0)
    if target.dim() == 0:
        return -log_probabilities[target]
    return -(target * log_probabilities).sum()


def gradient_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Tensors:
    """Return one example's gradient by one plain backward pass through the module itself."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(entropy(model(x[None])[0], y), parameters)
    return dict(zip(names, gradients, strict=True))


def clip(gradient: Tensors, clip_norm: float, scope: str) -> Tensors:
    """Return g / max(1, ‖g‖ / C), tensor by tensor or for all tensors at once."""
    norms = {name: math.sqrt(float((g.double() ** 2).sum())) for name, g in gradient.items()}
    if scope == "all":
        total = math.sqrt(sum(n * n for n in norms.values()))
        norms = dict.fromkeys(norms, total)
    return {name: g / max(1.0, norms[name] / clip_norm) for name, g in gradient.items()}


def client_update(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    batches: Sequence[np.ndarray],
    batch_size: int,
    local_lr: float,
    rule: tuple[float, str] | None,
) -> Tensors:
    """Return the update of weights by L steps of gradient descent on clipped batch means."""
    local = copy.deepcopy(model).double()
    before = {name: p.detach().clone() for name, p in local.named_parameters()}
    for positions in batches:
        total = {name: torch.zeros_like(p) for name, p in before.items()}
        for position in positions:
            target = y[position].double() if y.is_floating_point() else y[position]
            gradient = gradient_of(local, x[position].double(), target)
            gradient = gradient if rule is None else clip(gradient, *rule)
            total = {name: total[name] + gradient[name] for name in total}
        with torch.no_grad():
            for name, parameter in local.named_parameters():
                parameter.sub_(local_lr * total[name] / batch_size)
    return {name: p.detach() - before[name] for name, p in local.named_parameters()}


def aggregated_update(
    model: nn.Module,
    data: Sequence[tuple[torch.Tensor, torch.Tensor]],
    batches: Sequence[Sequence[np.ndarray]],
    weights: Sequence[float],
    batch_size: int,
    local_lr: float,
    rule: tuple[float, str] | None,
    update_rule: float | None = None,
) -> Tensors:
    """Return the weighted mean of the participants' updates, in float64.

    Parameters
    ----------
    data, batches, weights : one entry for each participant
    rule : (C, scope) for every example's gradient, or None
    update_rule : C for every tensor of every update, or None
    """
    mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for (x, y), own, weight in zip(data, batches, weights, strict=True):
        update = client_update(model, x, y, own, batch_size, local_lr, rule)
        update = update if update_rule is None else clip(update, update_rule, "layer")
        mean = {name: mean[name] + weight * update[name] for name in mean}
    return mean


def relative_distance(values: Tensors, reference: Tensors) -> float:
    """Return ‖values − reference‖ / ‖reference‖ over all tensors."""
    off = sum(float((values[name].double() - reference[name]).square().sum()) for name in reference)
    return math.sqrt(off / sum(float(reference[name].square().sum()) for name in reference))


def brute_force_match(cost: np.ndarray) -> float:
    """Return the least total cost of assigning rows to columns, by trying every permutation."""

    def least(row: int, free: frozenset[int]) -> float:
        if row == len(cost):
            return 0.0
        return min(cost[row, column] + least(row + 1, free - {column}) for column in free)

    return least(0, frozenset(range(len(cost))))


def invert_score_test(successes: int, trials: int, z: float) -> tuple[float, float]:
    """Return the rates at which |p̂ − p| = z·√(p(1 − p)/n), found by bisection."""
    observed = successes / trials

    def rejected(p: float) -> bool:
        return abs(observed - p) > z * math.sqrt(p * (1 - p) / trials)

    ends = []
    for far in (0.0, 1.0):
        outside, inside = far, observed
        for _ in range(200):
            middle = (outside + inside) / 2
            outside, inside = (middle, inside) if rejected(middle) else (outside, middle)
        ends.append(inside)
    return ends[0], ends[1]


def dlg_one_victim(
    model: nn.Module,
    target: Tensors,
    label: torch.Tensor,
    start: torch.Tensor,
    iterations: int,
    stop_loss: float,
) -> tuple[torch.Tensor, float, str]:
    """Attack one gradient as the published code does: torch.optim.LBFGS, plain double backward.

    Returns
    -------
    the iterate with the least objective [C, H, W], that objective, and 'converged', 'budget' or
    'diverged' (no number any more, or a pixel beyond 1,000, where a sigmoid network has no
    gradient)"""
    dummy = start.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS([dummy], lr=1.0, max_iter=20)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]

    def objective() -> torch.Tensor:
        loss = entropy(model(dummy[None])[0], label)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        pairs = zip(names, gradients, strict=True)
        return torch.stack([((g - target[n]) ** 2).sum() for n, g in pairs]).sum()

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = objective()
        (dummy.grad,) = torch.autograd.grad(value, [dummy])
        return value

    best, image = math.inf, start
    for _ in range(iterations):
        optimiser.step(closure)
        value = float(objective().detach())
        if not math.isfinite(value) or float(dummy.detach().abs().max()) > 1e3:
            return image, best, "diverged"
        if value < best:
            best, image = value, dummy.detach().clone()
        if best < stop_loss:
            return image, best, "converged"
    return image, best, "budget"
