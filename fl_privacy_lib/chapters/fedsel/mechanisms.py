"""FedSel's mechanisms without training: noise and selection time (chapter 08)."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_privacy_lib.chapters.fedsel.training import Training, selection
from fl_privacy_lib.chapters.fedsel.training import top as top_of
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.perturbation import Compressed, Piecewise
from fl_privacy_lib.defenses.route import Context, Stage
from fl_privacy_lib.defenses.selection import PerturbedEncoding, RandomChoice
from fl_privacy_lib.defenses.two_stage import Perturbed, TwoStage

TOP_SHARE, RATIO = 0.1, 0.1
SOLUTIONS = ("flat", "flat_unscaled", "compressed", "two_stage")
SERIES: dict[str, tuple[float, ...]] = {
    "dimensions": (10, 30, 100, 300),
    "clients": (1000, 3000, 10_000, 30_000),
    "epsilon": (0.5, 0.7, 1.0, 1.4, 2.0),
}
"""What is varied, while the rest stays at d = 100, n = 3,000 and ε = 1 for the value.

All stay within the batch sizes of Table 1.
"""
# β of Theorem 4.1: the bound that half of the draws keep, since their mean is compared
FAILURE = 0.5


@dataclass(frozen=True)
class Noise:
    """One point of Theorem 4.1: max_j |X_j − Z_j| over repeated draws.

    X is the mean of what n clients send, Z the same without perturbation: for the flat solution the
    mean of the clients' vectors, for the compressed one what is recovered from their clipped
    projections, for the sparse ones the mean of the sparse vectors.
    """

    solution: str
    varied: str
    value: float
    draws: int = 100
    seed: int = 0

    @property
    def setting(self) -> tuple[int, int, float]:
        """d, n and the value's ε."""
        sizes = {"dimensions": 100, "clients": 3000, "epsilon": 1.0} | {self.varied: self.value}
        return int(sizes["dimensions"]), int(sizes["clients"]), float(sizes["epsilon"])

    @property
    def bound(self) -> float:
        """Table 1's bound without its constant; the compressed solution has q = d/10 for d.

        The two-stage one is Theorem 4.1's √ln(d/β)/(ε√(nd)): a coordinate hears of one client in d.
        The flat one has d times that, and without its factor d as much.
        """
        d, n, epsilon = self.setting
        width = {"flat": d, "compressed": max(1, round(d / 10))}.get(self.solution, 1 / d)
        return math.sqrt(width * math.log(max(2, d) / FAILURE) / n) / epsilon


def vectors(clients: int, dimensions: int, spread: float, seed: int) -> torch.Tensor:
    """Return vectors [n, d] whose first tenth of coordinates is 1/2 ± spread, the rest 0 ± spread.

    Parameters
    ----------
    clients, dimensions : n, d
    spread : in (0, 1/2], so that all coordinates stay in [-1, 1]
    """
    generator = keyed_generator(torch.device("cpu"), seed, "vectors")
    mean = torch.zeros(dimensions, dtype=torch.float64)
    mean[: top_of(TOP_SHARE, dimensions)] = 0.5
    return mean + spread * (
        2 * torch.rand(clients, dimensions, generator=generator, dtype=torch.float64) - 1
    )


def means(stage: Stage, x: torch.Tensor, draws: int, seed: int) -> torch.Tensor:
    """Return the mean of what clients send, [draws, d].

    Parameters
    ----------
    stage : what a client does with its vector
    x : the clients' vectors, [n, d]
    draws, seed : repetitions with other randomness
    """
    generators = (keyed_generator(x.device, seed, draw) for draw in range(draws))
    contexts = (Context(0, range(len(x)), [generator]) for generator in generators)
    return torch.stack([stage({"w": x}, ctx)["w"].mean(0) for ctx in contexts])


def _stages(point: Noise) -> tuple[Stage, Stage]:
    """Return a solution and the same without perturbation: equal draws select equally."""
    d, _, epsilon = point.setting
    if point.solution in ("flat", "compressed"):
        whole = Training("", send=point.solution, epsilon=epsilon).whole(d, point.seed)

        def unperturbed(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            if isinstance(whole, Compressed):
                return whole.recover((x @ whole.projection.T).clamp(-1, 1))
            return x

        return Perturbed(whole), Perturbed(unperturbed)
    private = selection("ps", RATIO * epsilon, top_of(TOP_SHARE, d))
    select = RandomChoice() if point.solution == "flat_unscaled" else private
    return TwoStage(select, Piecewise(epsilon)), TwoStage(select)


def measure_noise(point: Noise) -> dict[str, Any]:
    """Return a point's error, and what it is compared with.

    Returns
    -------
    error : [draws], max_j |X_j − Z_j|
    signal : the largest |Z_j| of the mean over draws
    recovery : how far Z is from the vectors' mean; it says nothing of a sparse solution, whose Z is
        a fraction of the mean
    """
    d, n, _ = point.setting
    x = vectors(n, d, 0.5, point.seed)
    noisy, bare = _stages(point)
    z = means(bare, x, point.draws, point.seed)
    error = (means(noisy, x, point.draws, point.seed) - z).abs().amax(1)
    recovery = (z.mean(0) - x.mean(0)).abs().max()
    return {
        "error": error.numpy(),
        "signal": z.mean(0).abs().max().numpy(),
        "recovery": recovery.numpy(),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of ln y against ln x: a power law's exponent.

    Examples
    --------
    >>> round(slope([1, 10, 100], [2, 200, 20_000]), 3)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


@dataclass(frozen=True)
class Time:
    """Time of one client's selection among d coordinates.

    Parameters
    ----------
    engine : 'as_written' follows the paper step by step; 'ours' is the library's
    """

    method: str
    engine: str
    dimensions: int
    draws: int = 100
    epsilon: float = 1.0
    seed: int = 0


def as_written(
    method: str, epsilon: float, top: int, dimensions: int
) -> Callable[[np.ndarray, Any], np.ndarray]:
    """Return a selection that takes the steps of FedSel's section 4.1 one by one.

    What needs no data is computed beforehand.

    Parameters
    ----------
    method : 'exp', 'pe' or 'ps'
    epsilon, top, dimensions : budget of the selection, k, d

    Returns
    -------
    function of scores [n, d] and a generator → selected positions [n]; PE gives -1 for none
    """
    weights = np.exp(epsilon * np.arange(1, dimensions + 1) / (dimensions - 1))
    weights /= weights.sum()
    keep = PerturbedEncoding(epsilon, top, "e_eps").keep_probability(dimensions)
    of_top = math.exp(epsilon) * top / (dimensions - top + math.exp(epsilon) * top)

    def exp(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        chance = np.empty(order.shape)
        # each coordinate gets its rank's probability
        np.put_along_axis(chance, order, weights[None], 1)
        return (chance.cumsum(1) < rng.random((len(order), 1))).sum(1)

    def pe(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        status = np.zeros(order.shape, bool)
        np.put_along_axis(status, order[:, -top:], True, 1)
        status ^= rng.random(order.shape) >= keep
        count = status.cumsum(1)
        place = np.floor(rng.random(len(order)) * count[:, -1]) + 1
        return np.where(count[:, -1] == 0, -1, (count < place[:, None]).sum(1))

    def ps(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        among = rng.random(len(order)) < of_top
        place = np.where(among, dimensions - top + rng.random(len(order)) * top,
                         rng.random(len(order)) * (dimensions - top))  # fmt: skip
        return order[np.arange(len(order)), place.astype(int)]

    steps = {"exp": exp, "pe": pe, "ps": ps}[method]
    return lambda scores, rng: steps(np.argsort(scores, axis=1), rng)


def measure_time(point: Time) -> dict[str, Any]:
    """Return one client's time in microseconds: [draws / 2], the faster half.

    Many clients select at once, so that Python costs nothing. What another process takes makes a
    draw longer, never shorter.
    """
    rng, top = np.random.default_rng(point.seed), top_of(TOP_SHARE, point.dimensions)
    scores = rng.random((max(4, 100_000 // point.dimensions), point.dimensions), dtype=np.float32)
    written = as_written(point.method, point.epsilon, top, point.dimensions)
    ours = partial(selection(point.method, point.epsilon, top), torch.tensor(scores))
    run: Callable[[], Any] = partial(written, scores, rng)
    if point.engine == "ours":
        run = partial(ours, torch.Generator())
    run()
    seconds = []
    for _ in range(point.draws):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return {"microseconds": 1e6 * np.sort(seconds)[: -(-point.draws // 2)] / len(scores)}


def measure(point: Noise | Time) -> dict[str, Any]:
    """Return a point's arrays."""
    return measure_noise(point) if isinstance(point, Noise) else measure_time(point)
