"""How close a reconstruction comes, and how sure a rate is."""

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import norm
from skimage.metrics import structural_similarity

from fl_privacy_lib._checks import InputError, in_range

MSE_SUCCESS = 1e-2  # a reconstruction succeeds below this mean squared error ...
SSIM_SUCCESS = 0.6  # ... and above this structural similarity, both at once


def mse(image: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the mean squared error of each pair of images.

    The papers call this quantity "root mean square deviation", but their formula has no root.

    Parameters
    ----------
    image, other : arrays [..., C, H, W] in [0, 1]

    Returns
    -------
    array [...]

    Examples
    --------
    >>> float(mse(np.zeros((1, 2, 2)), np.full((1, 2, 2), 0.5)))
    0.25
    """
    return np.square(np.asarray(image, dtype=np.float64) - other).mean(axis=(-3, -2, -1))


def psnr(error: np.ndarray) -> np.ndarray:
    """Return the peak signal-to-noise ratio in dB, 10 log10(1/MSE), of mean squared errors.

    Parameters
    ----------
    error : array of `mse` values, of images in [0, 1]; 0 gives infinity

    Examples
    --------
    >>> psnr(np.array([1.0, 0.01])).tolist()
    [-0.0, 20.0]
    """
    return -10 * np.log10(error)


def ssim(image: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the structural similarity of each pair of images, 1 for equal ones.

    Parameters
    ----------
    image, other : arrays [..., C, H, W] in [0, 1], H and W at least 7

    Returns
    -------
    array [...] in [−1, 1]

    Notes
    -----
    scikit-image's index of Wang et al. (2004), with a 7×7 uniform window and a data range of 1.
    """
    image, other = np.broadcast_arrays(
        np.asarray(image, dtype=np.float64), np.asarray(other, dtype=np.float64)
    )
    pairs = zip(
        image.reshape(-1, *image.shape[-3:]), other.reshape(-1, *image.shape[-3:]), strict=True
    )
    scores = [structural_similarity(a, b, data_range=1.0, channel_axis=0) for a, b in pairs]
    return np.array(scores).reshape(image.shape[:-3])


def success(image: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return whether each reconstruction succeeds: MSE < 0.01 and SSIM > 0.6.

    Both, because each alone is easily met: a grey image has an MSE of about 0.1 on MNIST, and the
    papers count distances above that as success.
    """
    return (mse(image, other) < MSE_SUCCESS) & (ssim(image, other) > SSIM_SUCCESS)


def matched(reconstruction: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Reorder a reconstructed batch so that its total error against the truth is least.

    The order of a batch does not change its gradient, so no attacker can know it.

    Parameters
    ----------
    reconstruction, truth : arrays [B, C, H, W]

    Returns
    -------
    array [B, C, H, W], the reconstruction in the order of the truth
    """
    cost = mse(reconstruction[:, None], truth[None])  # [B, B]
    row, column = linear_sum_assignment(cost)
    return reconstruction[row[np.argsort(column)]]


def wilson_interval(
    successes: float, trials: float, confidence: float = 0.95
) -> tuple[float, float]:
    """Return Wilson's score interval of a success rate.

    Parameters
    ----------
    successes, trials : float, 0 ≤ successes ≤ trials, trials ≥ 1
        Whole numbers, or effective ones.
    confidence : float in (0, 1)

    Raises
    ------
    InputError
        If the numbers are no rate, or the confidence is not inside (0, 1).

    Notes
    -----
    Source: Wilson (1927). Unlike the normal interval it stays in [0, 1], and keeps a positive width
    at 0 and at n successes.

    Examples
    --------
    >>> [round(bound, 4) for bound in wilson_interval(16, 16)]
    [0.8064, 1.0]
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise InputError(
            f"{successes} successes in {trials} trials are no rate: give 0 ≤ successes ≤ trials "
            "and trials ≥ 1."
        )
    in_range(1e-9, 1 - 1e-9, confidence=confidence)
    z = float(norm.ppf((1 + confidence) / 2))
    rate, weight = successes / trials, z**2 / trials
    centre = rate + weight / 2
    half = z * (rate * (1 - rate) / trials + weight / (4 * trials)) ** 0.5
    # rounding must not put a bound on the wrong side of the rate
    low, high = (centre - half) / (1 + weight), (centre + half) / (1 + weight)
    return min(max(low, 0.0), rate), max(min(high, 1.0), rate)
