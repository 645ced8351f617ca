"""Fed-CDP's utility bound, the noise that is really added, and exact statements (chapter 05)."""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.func import grad, vmap

from fl_privacy_lib.accounting.accountants import spend
from fl_privacy_lib.defenses import Holding, fed_cdp, fed_cdp_decay, non_private
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.federated import Tap, simulate
from fl_privacy_lib.models import Parameters, call, parameters_of
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments.training import (
    CODE_RATE,
    ENGINE,
    Scene,
    Training,
    scene,
)
from fl_privacy_lib.reproduction.experiments.watching import norm_of
from fl_privacy_lib.reproduction.records import Values, numbers
from fl_privacy_lib.sampling import Plan

CHUNK = 50  # examples whose gradients stand in memory together


def margins(
    model: nn.Module, weights: Parameters, x: torch.Tensor, y: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return every example's margin s = g_y - max over j ≠ y of g_j, and its gradient's norm.

    Parameters
    ----------
    model, weights : the network, and the weights by which s is differentiated
    x, y : examples [n, …] and labels [n]

    Returns
    -------
    s [n], ‖∇s‖₂ [n]; s is in logits, and above 0 where the example is classified rightly

    Notes
    -----
    Source: Fed-CDP, section VI, which calls g_j "the loss function on class j" and uses it as a
    score of the class.
    """

    def margin(w: Parameters, example: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        scores = call(model, w, example[None])[0]
        right = torch.arange(len(scores), device=scores.device) == label
        best_wrong = scores.masked_fill(right, -torch.inf).amax()
        return scores.masked_fill(~right, -torch.inf).amax() - best_wrong

    values, norms = [], []
    for start in range(0, len(y), CHUNK):
        part = x[start : start + CHUNK], y[start : start + CHUNK]
        values.append(vmap(margin, (None, 0, 0))(weights, *part))
        gradients = vmap(grad(margin), (None, 0, 0))(weights, *part)
        norms.append(
            torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        )
    return torch.cat(values).cpu().numpy(), torch.cat(norms).cpu().numpy()


def utility_bounds(s: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return Proposition 2's bound on ‖ξ‖₂ of every rightly classified example, s / max ‖∇s‖.

    Parameters
    ----------
    s, norms : margins and their gradients' norms, both [n], from `margins`

    Examples
    --------
    >>> utility_bounds(np.array([1.0, -0.5, 3.0]), np.array([2.0, 9.0, 4.0]))
    array([0.25, 0.75])
    """
    right = s > 0
    return s[right] / norms[right].max(initial=0.0)


@dataclass(frozen=True)
class Utility:
    """One round under a defence, beside the same round without its noise.

    Parameters
    ----------
    arm : the defence's point; its rounds are not used
    at_round : rounds of non-private training before
    examples : validation examples whose margins are taken
    """

    arm: Training
    at_round: int = 0
    examples: int = 200


@functools.lru_cache(maxsize=4)
def warm_up(point: Training, rounds: int, device: torch.device) -> tuple[Scene, Parameters]:
    """Return a scene, and the global weights after some rounds of training in it.

    Parameters
    ----------
    point : without a defence
    rounds : 0 for the first weights
    """
    start = scene(point, point.seed, device)
    if not rounds:
        return start, parameters_of(start.model)
    plan = point.plan(point.seed, rounds)
    run = simulate(start.model, start.train, start.partition, plan, non_private(), engine=ENGINE)
    return start, run.weights


def measure_utility(point: Utility, device: torch.device) -> dict[str, np.ndarray]:
    """Return the signal and the noise of one round, tensor by tensor, and Proposition 2's bounds.

    Returns
    -------
    signal, noise, predicted_noise : [M], norms of the round's change of the global weights: without
        noise, the difference that the noise makes, and η z (C/B) √(L d / K_t)
    bounds : [right examples]
    gradient_noise, step_noise : expected norm of the noise on one batch mean, and of the change
        that it makes at once
    flipped : share of the right examples whose class one such change alters
    """
    arm = point.arm
    warmed = replace(arm, method="non_private", setting="not_applicable", local_lr=CODE_RATE)
    start, weights = warm_up(warmed, point.at_round, device)
    model = start.model
    before = parameters_of(model)
    try:
        model.load_state_dict(weights)
        plan = arm.plan(arm.seed + 1, 1)  # clients and batches of its own
        runs = [simulate(model, start.train, start.partition, plan, d, engine=ENGINE).weights
                for d in (arm.defense.noiseless(), arm.defense)]  # fmt: skip
    finally:
        model.load_state_dict(before)
    std = arm.multiplier * arm.clip_norm / arm.batch_size
    x, y = (part[: point.examples] for part in start.evaluation)
    s, norms = margins(model, weights, x, y)
    generator = keyed_generator(device, arm.seed, "step")
    noised = {n: w + arm.local_lr * std * torch.randn(w.shape, generator=generator, device=device)
              for n, w in weights.items()}  # fmt: skip
    with torch.no_grad():
        classes = [call(model, w, x).argmax(1).cpu().numpy() for w in (weights, noised)]
    sizes = np.array([w.numel() for w in weights.values()])
    walk = arm.local_lr * std * math.sqrt(arm.local_iterations / arm.participants)
    return {
        "signal": np.array([norm_of({n: runs[0][n] - weights[n]}) for n in weights]),
        "noise": np.array([norm_of({n: runs[1][n] - runs[0][n]}) for n in weights]),
        "predicted_noise": walk * np.sqrt(sizes),
        "bounds": utility_bounds(s, norms),
        "gradient_noise": np.array(std * math.sqrt(sizes.sum())),
        "step_noise": np.array(arm.local_lr * std * math.sqrt(sizes.sum())),
        "flipped": (classes[0] != classes[1])[s > 0],
    }


def utility_values(result: Result) -> Values:
    """Return a round's signal and noise, by tensor and together, and the bound beside the noise.

    Parameters
    ----------
    result : of `measure_utility`
    """
    bound = np.median(result["bounds"]) if result["bounds"].size else 0.0
    values = {"bound": numbers(result["bounds"])} if result["bounds"].size else {}
    for name in ("signal", "noise", "predicted_noise"):
        norms = result[name]  # [M]
        values |= {f"{name}_{m}": numbers([v]) for m, v in enumerate(norms, 1)}
        values[name] = numbers([np.sqrt((norms**2).sum())])
    ratio = values["signal"]["mean"] / values["noise"]["mean"] if result["noise"].any() else np.inf
    over = {
        f"{name}_over_bound": float(result[name]) / bound
        for name in ("gradient_noise", "step_noise")
        if bound
    }
    for name, value in (over | {"signal_to_noise": ratio}).items():
        values[name] = numbers([value])
    return values | {"flipped": numbers(result["flipped"])} if result["flipped"].size else values


def statements() -> dict[str, dict[str, float]]:
    """Return claim → metrics of every statement of the paper that exact values decide."""
    return {
        "fedsgd_is_fedaveraging": _averaging(),
        "proposition_2": _proposition_2(),
        "decay_costs_no_privacy": _decay(),
    }


def _averaging() -> dict[str, float]:
    """Compare FedAveraging's mean of models with FedSGD's model plus the mean of updates."""
    point = Training(
        "digits", "non_private", clients=20, participants=5, rounds=1, local_iterations=5
    )
    start, plan = scene(point, 0, torch.device("cpu")), point.plan(0)
    taps = [Tap("update", int(c), 0) for c in plan.participants_of(0)]
    run = simulate(start.model, start.train, start.partition, plan, non_private(), taps=taps)
    before = parameters_of(start.model)
    models = [
        {n: before[n].double() + u.double() for n, u in run.observations[t].values.items()}
        for t in taps
    ]

    def apart(divisor: float) -> float:
        mean = {n: torch.stack([m[n] for m in models]).sum(0) / divisor for n in before}
        return norm_of({n: mean[n] - run.weights[n] for n in before}) / norm_of(before)

    return {"difference": apart(5), "difference_of_the_code": apart(4)}


def _proposition_2() -> dict[str, float]:
    """Return how two saturated units change their class well within the printed bound.

    Two classes have a weight each, and class j the score 1/(1 + e^(−w_j)).
    """
    weights = torch.tensor([8.0, -8.0], dtype=torch.float64)
    change = torch.tensor([-9.0, 9.0], dtype=torch.float64)

    def margin(weights: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(weights)
        return scores[0] - scores[1]

    bound = float(margin(weights) / torch.func.grad(margin)(weights).norm())
    after = float(margin(weights + change))
    return {"margin": after, "excess": -after, "bound": bound, "change": float(change.norm())}


def _decay() -> dict[str, float]:
    """Return ε of a decaying bound less that of a fixed one: same plan, same accountant."""
    plan = Plan(1000, 100, 100, 100, 5, "poisson", local_lr=CODE_RATE)
    spent = [
        spend(
            defense.events(plan, Holding(50_000, 500, 3, holders=10)), "moments_accountant", 1e-5
        ).epsilon
        for defense in (fed_cdp_decay("batch"), fed_cdp("batch"))
    ]
    return {"excess": spent[0] - spent[1], "epsilon": spent[1]}
