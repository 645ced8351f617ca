"""Synthetic records whose magnitudes differ by column: the data of FedSel's section 5.1."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fl_privacy_lib._checks import in_range, positive
from fl_privacy_lib.data.files import Arrays
from fl_privacy_lib.data.splits import SPLIT_SEED, Parts, cut_three_to_one


def sparse_normal(
    records: int,
    columns: int,
    rng: np.random.Generator,
    shrink: float = 0.01,
    threshold: float = 0.9,
    per_record: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw records of which most entries are small, and labels from what they were before.

    Dense records are standard normal; a random direction splits them into two classes. Each entry
    is then multiplied by a magnitude, uniform in [0, 1]; a magnitude up to the threshold is first
    multiplied by shrink.

    Parameters
    ----------
    records, columns : int
        N and d.
    rng : numpy.random.Generator
    shrink, threshold : float
        C1 and C2, each in [0, 1].
    per_record : bool
        Draw magnitudes for each record, instead of once for all of them.

    Returns
    -------
    x : ndarray of float32, [N, d]
        Not scaled: nearly all entries lie in [-5, 5].
    y : ndarray of uint8, [N]
        1 on the positive side of the direction, else 0.

    Raises
    ------
    InputError
        If a number is out of its range.

    Notes
    -----
    The recipe is that of Wangni, Wang, Liu and Zhang (2018), which FedSel cites for its data. With
    magnitudes shared by all records, a direction still separates the sparse records, if its weights
    on the small columns are larger in proportion; with magnitudes drawn for each record none does.

    Examples
    --------
    >>> x, y = sparse_normal(2000, 100, np.random.default_rng(0))
    >>> int((x.std(axis=0) > 0.5).sum()), int((x.std(axis=0) < 0.02).sum())
    (7, 93)
    """
    positive(records=records, columns=columns)
    in_range(0, 1, shrink=shrink, threshold=threshold)
    x = rng.standard_normal((records, columns))  # [N, d]
    y = x @ rng.standard_normal(columns) > 0
    magnitude = rng.uniform(size=x.shape if per_record else columns)
    x *= np.where(magnitude <= threshold, shrink * magnitude, magnitude)
    return x.astype(np.float32), y.astype(np.uint8)


def decode(paths: Sequence[Path], records: int, columns: int) -> Arrays:
    """Return x [records, columns] and y [records], drawn from `SPLIT_SEED`; no file is read."""
    x, y = sparse_normal(records, columns, np.random.default_rng(SPLIT_SEED))
    return {"x": x, "y": y}


def build(arrays: Arrays) -> Parts:
    """Return three quarters of the records for training, one to validate and none for the test."""
    return cut_three_to_one(arrays["x"], arrays["y"], ("negative", "positive"))
