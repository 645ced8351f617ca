"""Scoring reconstructions, and guesses that need no gradient, against the images behind them."""

from collections.abc import Callable

import numpy as np
import torch

from fl_privacy_lib import metrics
from fl_privacy_lib.data import Dataset

Score = Callable[[int, torch.Tensor, torch.Tensor], None]


def first_successes(truth: np.ndarray, limit: int) -> tuple[np.ndarray, Score]:
    """Return an array of iterations until success, and the callback that fills it.

    Scoring looks at the truth, the attack does not. An image that never succeeds counts as `limit`,
    as in the papers' tables.

    Parameters
    ----------
    truth : images [V, B, C, H, W]
    limit : the attack's iterations

    Returns
    -------
    iterations [V, B], and a function of iteration, rows and images for `reconstruct`
    """
    reached = np.full(truth.shape[:2], limit)

    def score(iteration: int, rows: torch.Tensor, images: torch.Tensor) -> None:
        for row in rows.tolist():
            if (reached[row] < limit).all():
                continue
            match = metrics.matched(images[row].cpu().numpy(), truth[row])
            close = metrics.mse(match, truth[row]) < metrics.MSE_SUCCESS
            for image in np.flatnonzero(close & (reached[row] == limit)):
                if metrics.success(match[image], truth[row][image]):
                    reached[row, image] = min(iteration, limit)

    return reached, score


def in_order(images: torch.Tensor, truth: np.ndarray) -> np.ndarray:
    """Return reconstructed batches [V, B, C, H, W], each in the order that fits its truth best."""
    return np.stack(
        [metrics.matched(i, t) for i, t in zip(images.cpu().numpy(), truth, strict=True)]
    )


def trivial_guesses(truth: np.ndarray, labels: np.ndarray, data: Dataset) -> dict[str, np.ndarray]:
    """Return the scores [V, B] of two guesses: a grey image, and the mean of the true class.

    Parameters
    ----------
    truth : images [V, B, C, H, W]
    labels : their classes, [V, B]
    data : whose training images make the classes' means

    Returns
    -------
    grey_mse, grey_success, mean_mse, mean_success
    """
    means = np.stack(
        [
            data.train_x[data.train_y == c].mean(0)
            if (data.train_y == c).any()
            else np.full(data.example_shape, 0.5)
            for c in range(data.n_classes)
        ]
    )
    guesses = {"grey": np.full_like(truth, 0.5), "mean": means[labels].astype(np.float32)}
    return {
        f"{name}_{score}": function(guess, truth)
        for name, guess in guesses.items()
        for score, function in (("mse", metrics.mse), ("success", metrics.success))
    }


def summary(result: dict[str, np.ndarray], seeds: int) -> dict[str, dict[str, float]]:
    """Return metric → {mean, std, n}; the mean is over all images, std over the seeds' means.

    The published "rmse" is a mean of squares by its formula, so `mse` stands beside it.
    """
    columns = {
        "attack_success_rate": result["success"],
        "mse": result["mse"],
        "psnr": metrics.psnr(result["mse"]),
        "ssim": result["ssim"],
        "attack_iterations": result["iterations"],
        "success_by_50": result["success"] & (result["iterations"] <= 50),
        "label_accuracy": result["label_right"],
        "stopped_iterations": result["attack_iterations"],
        "stalled_fraction": result["status"] == "stalled",
        "diverged_fraction": result["status"] == "diverged",
        "grey_mse": result["grey_mse"],
        "class_mean_mse": result["mean_mse"],
        "class_mean_success_rate": result["mean_success"],
    }
    table = {}
    for name, values in columns.items():
        values = np.asarray(values, dtype=float)
        per_seed = [part.mean() for part in np.split(values, seeds)]
        table[name] = {
            "mean": float(values.mean()),
            "std": float(np.std(per_seed)),
            "n": values.size,
        }
    return table
