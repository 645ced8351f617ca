"""The papers' set-ups: who holds which examples, in which batches, on which network."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fl_privacy_lib.accounting.conventions import ROUNDS
from fl_privacy_lib.data import Dataset, Partition, full_copies, iid, some_classes, two_shards

Split = Callable[[Dataset, int, np.random.Generator], Partition]


class Setup(NamedTuple):
    """A column of Fed-CDP's Table I. L is 100 throughout.

    Parameters
    ----------
    batch_size, rounds : B, T
    examples, shape, classes : of the training data: N, an example's shape, number of classes
    split : data set, K, generator → who holds which training examples
    clients : K where it is not varied
    """

    batch_size: int
    rounds: int
    examples: int
    shape: tuple[int, ...]
    classes: int
    split: Split
    clients: int = 1000


SETUPS = {
    "mnist": Setup(5, ROUNDS["mnist"], 50_000, (1, 28, 28), 10,
                   lambda d, k, rng: two_shards(d.train_y, k, 500, rng)),
    "cifar10": Setup(4, ROUNDS["cifar10"], 40_000, (3, 32, 32), 10,
                     lambda d, k, rng: two_shards(d.train_y, k, 400, rng)),
    "lfw": Setup(3, ROUNDS["lfw"], 2_267, (3, 32, 32), 62,
                 lambda d, k, rng: some_classes(d.train_y, k, 300, 15, rng)),
    "adult": Setup(3, ROUNDS["adult"], 36_631, (105,), 2,
                   lambda d, k, rng: iid(len(d.train_y), k, 300, rng)),
    "cancer": Setup(4, ROUNDS["cancer"], 426, (30,), 2,
                    lambda d, k, rng: full_copies(len(d.train_y), k)),
}  # fmt: skip
"""The papers' data sets, in the order of their tables."""
PAPER = tuple(SETUPS)
SETUPS |= {"fashion_mnist": SETUPS["mnist"], "cifar10_scattering": SETUPS["cifar10"]}
SETUPS |= {f"{name}_z": SETUPS[name] for name in ("adult", "cancer")}
SETUPS["digits"] = Setup(5, 100, 1_347, (1, 28, 28), 10,
                         lambda d, k, rng: two_shards(d.train_y, k, 100, rng), 100)  # fmt: skip
OF_OWN_DATA = Setup(5, 100, 0, (1, 28, 28), 10,
                    lambda d, k, rng: iid(len(d.train_y), k, min(50, len(d.train_y)), rng),
                    100)  # fmt: skip


def setup_of(dataset: str) -> Setup:
    """Return a data set's set-up; a reader's own data are trained as MNIST is, split at random.

    Digits are no data of the papers: they stand in for MNIST where its files are not there.
    """
    return SETUPS.get(dataset, OF_OWN_DATA)


def clients_of(data: Dataset) -> int:
    """Return how many clients K a data set is split among: 1,000, or fewer for small data."""
    return setup_of(data.name).clients
