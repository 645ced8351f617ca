"""From stored arrays to the parts of a data set: scaled, and cut for training and validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.ndimage import zoom

from fl_privacy_lib.data.files import Arrays

# Cuts of data sets that have no order of their own are drawn once, from this seed, for every run.
SPLIT_SEED = 20210707
# Training images of MNIST, Fashion-MNIST and CIFAR-10 that validate.
HELD_OUT = 10_000

CIFAR_CLASSES = tuple("airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck".split(","))
DIGIT_CLASSES = tuple("0123456789")
CLOTHES_CLASSES = tuple(
    "T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(",")
)


@dataclass(frozen=True, eq=False)
class Parts:
    """The arrays of a data set, cut for training, validation and test.

    Attributes
    ----------
    train_x, validation_x, test_x : ndarray of float32
        Images [N, C, H, W] or records [N, F], with values in [0, 1] unless the note of the data set
        says otherwise. N may be 0 for the test.
    train_y, validation_y, test_y : ndarray of int64, [N]
        Class of each example, 0 to n_classes - 1; a margin's sign for class y of two is 2 y - 1.
    classes : tuple of str
        Names of the classes.
    """

    train_x: np.ndarray
    train_y: np.ndarray
    validation_x: np.ndarray
    validation_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class About:
    """What a reader must know of a data set.

    Attributes
    ----------
    title : str
        Its name in prose.
    kind : str
        ``"image"`` or ``"tabular"``.
    licence, source : str
        Terms of use as far as known, and whom to cite.
    note : str
        How it was cut, and anything else that a reader must know.
    """

    title: str
    kind: str
    licence: str
    source: str
    note: str


def unit_range(pixels: np.ndarray) -> np.ndarray:
    """Return uint8 values 0..255 as float32 in [0, 1], of the same shape, with a single copy."""
    return np.divide(pixels, np.float32(255), dtype=np.float32, order="C")


def channels_first(images: np.ndarray) -> np.ndarray:
    """Return uint8 images [N, H, W] or [N, H, W, C] as float32 [N, C, H, W] in [0, 1]."""
    return unit_range(images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2))


def cut_tail(
    arrays: Arrays,
    classes: tuple[str, ...],
    scaled: Callable[[np.ndarray], np.ndarray] = channels_first,
) -> Parts:
    """Return image parts, in the files' order; the last `HELD_OUT` training examples validate."""
    x, y = scaled(arrays["train_images"]), arrays["train_labels"].astype(np.int64)
    test_x, test_y = scaled(arrays["test_images"]), arrays["test_labels"].astype(np.int64)
    cut = len(y) - HELD_OUT
    return Parts(x[:cut], y[:cut], x[cut:], y[cut:], test_x, test_y, classes)


def cut_three_to_one(x: np.ndarray, y: np.ndarray, classes: Sequence[str]) -> Parts:
    """Return parts with three quarters for training, one for validation and none for the test.

    The order is that of ``numpy.random.default_rng(SPLIT_SEED).permutation``; it is not stratified.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(len(y))
    cut = 3 * len(y) // 4
    x, y = x[order], y[order].astype(np.int64)
    return Parts(x[:cut], y[:cut], x[cut:], y[cut:], x[:0], y[:0], tuple(classes))


def _scaled(parts: Parts, shift: np.ndarray, span: np.ndarray, low: float, high: float) -> Parts:
    """Return the parts with each column, less its shift, over its span; float32 in [low, high]."""
    scaled: dict[str, Any] = {
        name: np.clip((getattr(parts, name) - shift) / span, low, high).astype(np.float32)
        for name in ("train_x", "validation_x", "test_x")
    }
    return replace(parts, **scaled)


def scaled_by_training(parts: Parts) -> Parts:
    """Return tabular parts, float32, each column scaled by its range over the training examples.

    What lies outside that range in the other parts is clipped to [0, 1]; a constant column becomes
    0.
    """
    low, high = parts.train_x.min(axis=0), parts.train_x.max(axis=0)  # [F]
    return _scaled(parts, low, np.where(high > low, high - low, 1), 0, 1)


def standardised(parts: Parts) -> Parts:
    """Return tabular parts with each column at mean 0 and deviation 1 over the training examples.

    A constant column becomes 0.
    """
    mean, std = parts.train_x.mean(axis=0), parts.train_x.std(axis=0)  # [F]
    return _scaled(parts, mean, np.where(std > 0, std, 1), -np.inf, np.inf)


def build_digits(arrays: Arrays) -> Parts:
    """Return 1,347 / 450 / 0 digits [N, 1, 28, 28]."""
    # linear interpolation between pixel centres: values stay within the range of the images
    large = zoom(arrays["x"] / 16, (1, 3.5, 3.5), order=1, mode="nearest", grid_mode=True)
    return cut_three_to_one(large[:, None].astype(np.float32), arrays["y"], DIGIT_CLASSES)
