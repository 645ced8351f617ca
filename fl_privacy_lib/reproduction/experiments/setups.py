"""The papers' set-ups: who holds which examples, in which batches, on which network."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_privacy_lib.data import Dataset, Partition, full_copies, iid, some_classes, two_shards

PARTITIONS: dict[str, Callable[[Dataset, int, np.random.Generator], Partition]] = {
    "mnist": lambda d, k, rng: two_shards(d.train_y, k, 500, rng),
    "cifar10": lambda d, k, rng: two_shards(d.train_y, k, 400, rng),
    "lfw": lambda d, k, rng: some_classes(d.train_y, k, 300, 15, rng),
}
"""The papers' split of each image data set; any other is split at random, 50 examples a client."""


def split_among(data: Dataset, clients: int, rng: np.random.Generator) -> Partition:
    """Split a data set's training examples among clients, as the papers do or at random."""
    if data.name in PARTITIONS:
        return PARTITIONS[data.name](data, clients, rng)
    return iid(len(data.train_y), clients, min(50, len(data.train_y)), rng)


def clients_of(data: Dataset) -> int:
    """Return the number of clients K that a data set is split among: the papers' 1,000, fewer for small data."""
    return 1000 if data.name in PARTITIONS else 100


@dataclass(frozen=True)
class Setup:
    """A column of Fed-CDP's Table I: local batch B, rounds T, the network, and who holds what."""

    batch_size: int
    rounds: int
    model: str
    split: Callable[[Dataset, int, np.random.Generator], Partition]


SETUPS = {
    "mnist": Setup(5, 100, "training_cnn", PARTITIONS["mnist"]),
    "cifar10": Setup(4, 100, "training_cnn", PARTITIONS["cifar10"]),
    "lfw": Setup(3, 60, "training_cnn", PARTITIONS["lfw"]),
    "adult": Setup(3, 10, "mlp", lambda d, k, rng: iid(len(d.train_y), k, 300, rng)),
    "cancer": Setup(4, 3, "mlp", lambda d, k, rng: full_copies(len(d.train_y), k)),
    "digits": Setup(5, 100, "training_cnn", lambda d, k, rng: two_shards(d.train_y, k, 100, rng)),
}
"""Digits are no data of the paper: they stand in for MNIST where its files are not there. L is 100 throughout."""
