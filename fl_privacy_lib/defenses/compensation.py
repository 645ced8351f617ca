"""Compensation: the server removes from the aggregate what looks like noise in its spectrum.

The aggregate is folded to a matrix C of v rows and w columns. If C were independent noise of
variance s², the eigenvalues of CᵀC/v would lie between the edges of the Marchenko–Pastur law.
Directions whose eigenvalue lies there are taken for noise and left out. Taught in notebook 09.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import InputError, in_range, one_of, positive
from fl_privacy_lib.data import Dataset
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.methods import non_private, pruned, random_noise
from fl_privacy_lib.defenses.representation import soteria
from fl_privacy_lib.defenses.risk import root_set, sensitivity_slices
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.slices import SlicePerturbation, Slices, flat, unflat
from fl_privacy_lib.defenses.stage import Transformation


def law_edges(variance: float, ratio: float) -> tuple[float, float]:
    """Return λ₋ and λ₊, the edges of the Marchenko–Pastur law.

    Parameters
    ----------
    variance : float, > 0, of an entry of the matrix
    ratio : float, > 0, Q = v/w, rows by column

    Notes
    -----
    Source: Marchenko and Pastur (1967); Wang et al. (2022), equation 4.

    Examples
    --------
    >>> law_edges(1.0, 4.0)
    (0.25, 2.25)
    """
    positive(variance=variance, ratio=ratio)
    return variance * (1 - ratio**-0.5) ** 2, variance * (1 + ratio**-0.5) ** 2


def law_share(values: np.ndarray, variance: float, ratio: float) -> np.ndarray:
    """Return the law's share of eigenvalues up to each value: its distribution function.

    Parameters
    ----------
    values : array of eigenvalues
    variance : as in `law_edges`
    ratio : float, ≥ 1; with more columns than rows some eigenvalues are 0, and no density has them

    Examples
    --------
    >>> law_share(np.array([0.2, 2.3]), 1.0, 4.0).tolist()
    [0.0, 1.0]
    """
    in_range(1, math.inf, ratio=ratio)
    low, high = law_edges(variance, ratio)
    x, y = np.clip(values, low, high), 1 / ratio
    root = np.sqrt((high - x) * (x - low))
    one = (1 + y) * np.arctan2(low + high - 2 * x, 2 * root)
    other = np.arctan2(low * (high - x) - high * (x - low), 2 * variance * (1 - y) * root)
    return 0.5 + (root / variance - one + (1 - y) * other) / (2 * math.pi * y)


def law_distance(eigenvalues: np.ndarray, variance: float, ratio: float) -> float:
    """Return the largest difference of the eigenvalues' distribution from the law's.

    Parameters
    ----------
    eigenvalues : array [w]
    variance, ratio : as in `law_edges`
    """
    ordered = np.sort(eigenvalues)
    law = law_share(ordered, variance, ratio)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def folded_shape(size: int, ratio: float, fold: str = "padded") -> tuple[int, int]:
    """Return v and w for a gradient of d coordinates and a wanted Q = v/w.

    Parameters
    ----------
    size : int, d
    ratio : float, > 0, Q
    fold : {'padded', 'divisor'}
        'padded': w = √(d/Q) and as many rows as that needs; zeros fill the last row, so that every
        Q is met. 'divisor', as in the released code: v is the smallest divisor of d from √(Qd) on.

    Examples
    --------
    >>> folded_shape(17038, 6.0), folded_shape(17038, 6.0, "divisor")
    ((322, 53), (1217, 14))
    """
    positive(size=size, ratio=ratio)
    one_of(["padded", "divisor"], fold=fold)
    if fold == "divisor":
        least = math.ceil(math.sqrt(ratio * size))
        rows = next((v for v in range(least, size) if size % v == 0), size)
        return rows, size // rows
    columns = min(size, max(1, round(math.sqrt(size / ratio))))
    return -(-size // columns), columns


def spectrum(matrix: torch.Tensor, centred: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues, ascending, and eigenvectors of a matrix's second moment.

    Parameters
    ----------
    matrix : [v, w]
    centred : bool, whether each column's mean is taken off and v − 1 divides, as a covariance does

    Returns
    -------
    [w] and [w, w], of CᵀC/v
    """
    rows = matrix - matrix.mean(0) if centred else matrix
    eigenvalues, vectors = torch.linalg.eigh(rows.T @ rows / (len(rows) - centred))
    return eigenvalues, vectors


def rank_one(rows: int, columns: int, dice: torch.Generator, common: bool) -> torch.Tensor:
    """Return a matrix of rank one, flat, [v·w], of normal factors; its rows may be all equal."""
    left = torch.randn(rows, 1, generator=dice, dtype=torch.float64)
    right = torch.randn(1, columns, generator=dice, dtype=torch.float64)
    return ((torch.ones_like(left) if common else left) @ right).flatten()


@dataclass(frozen=True)
class Compensation(Transformation):
    """Project the aggregate on the directions that the law does not take for noise.

    Parameters
    ----------
    std : float, ≥ 0, σ of the noise on a chosen slice of one update
    share : float, in (0, 1], of the slices that got noise
    ratio : float, > 0, Q
    variance : {'mean', 'sum'}
        Of the noise on a coordinate of the aggregate. 'mean': γσ²Σw_k², that of a weighted mean of
        updates. 'sum': mγσ²Σw_k, as printed and in the released code, m² times too large for m
        equal weights.
    centred : bool, whether the second moment is centred, as in the released code
    keep : {'outside', 'above'}: everything that is not between the edges, as printed, or only what
        is above them
    fold : {'padded', 'divisor'}, see `folded_shape`

    Notes
    -----
    Source: Wang et al. (2022), section V-B; its released code.
    """

    std: float
    share: float
    ratio: float = 6.0
    variance: str = "mean"
    centred: bool = False
    keep: str = "outside"
    fold: str = "padded"

    def __post_init__(self) -> None:
        in_range(0, math.inf, std=self.std)
        in_range(0, 1, share=self.share)
        positive(ratio=self.ratio)
        one_of(["mean", "sum"], variance=self.variance)
        one_of(["outside", "above"], keep=self.keep)
        one_of(["padded", "divisor"], fold=self.fold)

    def noise_variance(self, weights: torch.Tensor) -> float:
        """Return the variance of the noise on a coordinate, for the weights of m updates, [m]."""
        one = self.share * self.std**2
        if self.variance == "sum":
            return float(len(weights) * one * weights.sum())
        return float(one * weights.square().sum())

    def folded(self, row: torch.Tensor) -> torch.Tensor:
        """Return a gradient [d] as a matrix [v, w], with zeros at its end."""
        rows, columns = folded_shape(len(row), self.ratio, self.fold)
        return torch.nn.functional.pad(row, (0, rows * columns - len(row))).reshape(rows, columns)

    def repaired(self, row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return a gradient [d] without its noise directions, for the weights of its updates."""
        variance = self.noise_variance(weights)
        if not variance:
            return row
        matrix = self.folded(row.double())
        eigenvalues, vectors = spectrum(matrix, self.centred)
        low, high = law_edges(variance, len(matrix) / matrix.shape[1])
        data = eigenvalues >= high
        if self.keep == "outside":
            data |= eigenvalues <= low
        basis = vectors[:, data]  # [w, kept]
        return (matrix @ basis @ basis.T).flatten()[: len(row)].to(row)

    def distance(self, noise: torch.Tensor, weights: torch.Tensor) -> float:
        """Return how far the spectrum of noise [v, w] is from the law that is told."""
        ratio = len(noise) / noise.shape[1]
        return law_distance(spectrum(noise)[0].numpy(), self.noise_variance(weights), ratio)

    def errors(
        self, signal: torch.Tensor, noise: torch.Tensor, weights: torch.Tensor
    ) -> dict[str, float]:
        """Return how much of a noise on a known signal the repair leaves.

        Parameters
        ----------
        signal, noise : [d]
        weights : of the updates, [m]

        Returns
        -------
        error_ratio : distance from the signal over that of the noise; below 1 where it helps
        improved : whether it does, by more than rounding
        zero_ratio : the same ratio of an answer of zeros
        kept : share of the directions that are left
        """
        repaired = self.repaired(signal + noise, weights)
        ratio, zero = (float((v - signal).norm() / noise.norm()) for v in (repaired, 0 * signal))
        matrix = self.folded(repaired)
        return {"error_ratio": ratio, "improved": ratio < 1 - 1e-9, "zero_ratio": zero,
                "kept": float(torch.linalg.matrix_rank(matrix)) / matrix.shape[1]}  # fmt: skip

    def __call__(self, values: Gradient, ctx: Any) -> Gradient:
        """Return the aggregate, tensors [1, …], without what looks like noise."""
        if ctx.weights is None:
            raise InputError("compensation needs the weights of the updates in the aggregate.")
        return unflat(self.repaired(flat(values)[0], ctx.weights)[None], values)


def risk_compensated(
    slices: Slices | int = 10,
    *,
    share: float = 0.2,
    std: float = 0.1,
    clip_norm: float | None = None,
    compensated: bool = True,
    **compensation: Any,
) -> Defense:
    """Return noise on random slices of each update, and compensation at the server.

    Parameters
    ----------
    slices, share, std, clip_norm : see `SlicePerturbation`; the paper's σ² is 0.01, on gradients
    compensated : bool, whether the server compensates
    compensation : ratio, variance, centred, keep, fold of `Compensation`

    Notes
    -----
    Guarantee: none. Two updates that differ in every slice are told apart for certain by a slice
    without noise, so ε = ∞ for every δ < 1, whatever σ is. Source: Wang et al. (2022).
    """
    noise = SlicePerturbation(slices, share, std, clip_norm)
    repair = Compensation(noise.noise_std, noise.noisy / noise.count, **compensation)
    return Defense("risk_compensation", per_client=noise, begin_client=noise.begin,
                   on_aggregate=repair if compensated else None)  # fmt: skip


LEVELS = {"dga": {"risk_compensation": 0.2, "gc": 0.8, "pld": 0.6},
          "gia": {"risk_compensation": 0.3, "gc": 0.9, "pld": 0.8}}  # fmt: skip
"""Attack → method → γ, or the share that is pruned: the paper's section VI-B."""
SLICINGS = {"gradient_sensitivity": "hutchinson", "layer_size": "size", "all_ones": "all_ones"}
"""What is balanced over the slices → its estimator."""
CLIP = 1.0  # B of the local clipping; the paper prints none


@dataclass(frozen=True)
class Compared:
    """One of the defences that the paper compares, against one of its attacks.

    Parameters
    ----------
    attack : one of `LEVELS`, which set how strong the defence is
    method : {'non_private', 'risk_compensation', 'gc', 'dp_gaussian', 'dp_laplace', 'pld'}
    level : γ, or the share that is pruned; 0: the paper's
    noise : σ, on a gradient
    slicing : what is balanced over the slices, one of `SLICINGS`
    root_dataset_bias : probability of class 0 in the root set; a tenth is no bias for ten classes
    """

    dataset: str
    attack: str
    method: str
    level: float = 0.0
    noise: float = 0.1
    slices: int = 10
    slicing: str = "gradient_sensitivity"
    root_dataset_size: int = 100
    root_dataset_bias: float = 0.1
    local_clipping: bool = False
    compensation_q: float = 6.0
    seeds: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        one_of(SLICINGS, slicing=self.slicing)
        one_of(LEVELS, attack=self.attack)

    @property
    def strength(self) -> float:
        """The level, or the paper's."""
        return self.level or LEVELS[self.attack].get(self.method, 0.0)

    def defense(
        self, model: nn.Module, root: tuple[torch.Tensor, torch.Tensor], unit: float = 1.0,
        **repair: Any,
    ) -> Defense:  # fmt: skip
        """Return what the client does to its update, and the server to the aggregate.

        Parameters
        ----------
        model, root : that the slices are cut by
        unit : of the noise, in that of an update
        repair : options of `risk_compensated`, for the slices
        """
        std = unit * self.noise
        if self.method == "risk_compensation":
            cut = sensitivity_slices(model, root, self.slices, SLICINGS[self.slicing])
            bound = CLIP if self.local_clipping else None
            return risk_compensated(cut, share=self.strength, std=std, clip_norm=bound,
                                    ratio=self.compensation_q, **repair)  # fmt: skip
        return {
            "non_private": non_private(),
            "gc": pruned(self.strength, scope="layer"),
            "dp_gaussian": random_noise(std),
            "dp_laplace": random_noise(std, "laplace"),
            "pld": soteria(self.strength),
        }[self.method]

    def cut(
        self, model: nn.Module, data: Dataset, pool: np.ndarray, rng: np.random.Generator,
        **options: Any,
    ) -> Defense:  # fmt: skip
        """Return the defence with slices cut on a root set, drawn from a pool of positions."""
        root = root_set(data.train_y, pool, self.root_dataset_size, self.root_dataset_bias, rng)
        device = next(model.parameters()).device
        x, y = (torch.as_tensor(p[root]).to(device) for p in (data.train_x, data.train_y))
        return self.defense(model, (x, y), **options)
