"""What noise scaled with a batch's largest norm tells: two batches, told apart by it (chapter 06).

Two batches differ in one example, the one with the largest clipped norm. Who is shown one release
of either, and knows all other examples, guesses which of the two it was.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats

from fl_privacy_lib._checks import refuse
from fl_privacy_lib.accounting.composition import step_epsilon
from fl_privacy_lib.chapters.dynamic_parameters.training import Central
from fl_privacy_lib.defenses.clipping import Clip, Gradient, layer_norms
from fl_privacy_lib.federated import example_gradients, simulate
from fl_privacy_lib.metrics import wilson_interval
from fl_privacy_lib.models import parameters_of
from fl_privacy_lib.reproduction.experiment import Result
from fl_privacy_lib.reproduction.experiments.training import scene
from fl_privacy_lib.reproduction.records import Values, numbers


@dataclass(frozen=True)
class Game:
    """Batches of one training, and a game at the one whose S changes most.

    Parameters
    ----------
    at_round : after how many iterations of the private baseline with the paper's C = 4 and σ = 6
    batches : drawn there, S of each is read
    games : releases that have to be told apart
    """

    dataset: str
    method: str = "dp_dyns_l2max"
    at_round: int = 0
    local_lr: float = 0.05
    batch_size: int = 600
    clip_norm: float = 4.0
    noise_scale: float = 6.0
    batches: int = 40
    games: int = 2000
    seed: int = 0


def level_advantage(ratio: float, dimension: int) -> float:
    """Return the best advantage of who sees noise of one of two levels, and nothing else.

    Parameters
    ----------
    ratio : r ≥ 1, the larger standard deviation over the smaller
    dimension : d, coordinates of the noise

    Notes
    -----
    The noise's squared length over σ² is χ²_d or r² χ²_d. The two densities are equal where that is
    d ln(r²) / (1 − 1/r²), so the advantage is the difference of the distributions there.

    Examples
    --------
    >>> [round(level_advantage(r, 34_720), 3) for r in (1.0, 1.005, 1.02)]
    [0.0, 0.489, 0.991]
    """
    edge = dimension * math.log(ratio**2) / (1 - ratio**-2) if ratio > 1 else dimension
    return float(stats.chi2.cdf(edge, dimension) - stats.chi2.cdf(edge / ratio**2, dimension))


def allowed_advantage(epsilon: float, delta: float) -> float:
    """Return the most that an (ε, δ) guarantee leaves to who has to tell two neighbours apart.

    Examples
    --------
    >>> [round(allowed_advantage(e, 1e-5), 2) for e in (0.0, 0.8, 8.0)]
    [0.0, 0.38, 1.0]
    """
    return (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1)


def measure_game(point: Game, device: torch.device) -> Result:
    """Return S of every batch, and how the game went.

    Returns
    -------
    largest, without : [batches], the largest clipped norm of all examples and tensors, and that
        without the example that has it
    unclipped : [batches], the largest norm before clipping
    hits : [games], whether a release was told right; the first half were with the example
    dimension : d
    """
    arm = Central(
        point.dataset, "dp_baseline", rounds=max(1, point.at_round), batch_size=point.batch_size,
        local_lr=point.local_lr, seed=point.seed,
    )  # fmt: skip
    start = scene(arm, point.seed, device)
    weights, (x, y) = parameters_of(start.model), start.train
    if point.at_round:
        about = (start.model, start.train, start.partition, arm.plan(point.seed), arm.defense)
        weights = simulate(*about, engine="auto").weights
    one = {name: w[None] for name, w in weights.items()}

    def gradients(index: Any) -> Gradient:
        return example_gradients(start.model, one, x[index][None], y[index][None])

    found = []
    for round in range(point.batches):
        (batch,) = arm.plan(point.seed + 1, point.batches).batches(0, len(y), round)
        refuse({f"a batch of batch_size = {point.batch_size} on average came out with fewer than 2 "
                "examples: raise batch_size.": len(batch) < 2})  # fmt: skip
        norms = torch.cat([  # a hundred at a time: all gradients together would fill the memory
            torch.stack(list(layer_norms(gradients(part), 2).values())).amax((0, 1))
            for part in np.array_split(batch, -(-len(batch) // 100) or 1)
        ])  # [B]  # fmt: skip
        top = norms.clamp(max=point.clip_norm).topk(2)
        found.append((*top.values.tolist(), float(norms.max()), int(batch[int(top.indices[0])])))
    largest, without, unclipped, who = np.array(found).T  # [batches] each
    worst = int((largest / without).argmax())
    example = Clip(point.clip_norm)(gradients([int(who[worst])]), leading=2)
    shift = torch.cat([g.flatten() for g in example.values()]) / point.batch_size
    stds = [float(point.noise_scale * s[worst]) / point.batch_size for s in (largest, without)]
    return {
        "largest": largest,
        "without": without,
        "unclipped": unclipped,
        "hits": play(shift, stds[0], stds[1], point.games, point.seed),
        "dimension": np.array([shift.numel()]),
    }


def play(shift: torch.Tensor, with_it: float, without: float, games: int, seed: int) -> np.ndarray:
    """Return whether each release was told right, [games]; the first half hold the example.

    Parameters
    ----------
    shift : [d], what the example adds to the batch mean
    with_it, without : the noise's standard deviation with the example and without it
    """
    generator, hits = torch.Generator(shift.device).manual_seed(seed), []
    for holds in np.arange(games) < games // 2:
        noise = torch.randn(len(shift), generator=generator, device=shift.device)
        release = noise * with_it + shift if holds else noise * without
        # twice the log-likelihoods, but for a common constant
        here = -((release - shift) / with_it).square().sum() - 2 * len(shift) * math.log(with_it)
        away = -(release / without).square().sum() - 2 * len(shift) * math.log(without)
        hits.append(bool(here > away) == holds)
    return np.array(hits)


def game_values(point: Game, delta: float, result: Result) -> Values:
    """Return how often S is the bound, how much it falls, and the game's advantage.

    The claimed one is the most that a step's (ε, δ) allows.
    """
    hits, ratio = result["hits"], result["largest"] / result["without"]
    epsilon = float(step_epsilon(np.array([point.noise_scale]), delta)[0])
    values = {
        "at_bound": result["largest"] >= point.clip_norm * (1 - 1e-6),
        "largest": result["largest"],
        "unclipped": result["unclipped"],
        "silent": ratio == 1,
        "ratio": [ratio.max()],
        "advantage": [2 * hits.mean() - 1],
        "sure_advantage": [2 * wilson_interval(hits.sum(), len(hits))[0] - 1],
        "level_advantage": [level_advantage(float(ratio.max()), int(result["dimension"][0]))],
        "claimed_advantage": [allowed_advantage(epsilon, delta)],
    }
    return {name: numbers(value) for name, value in values.items()}
