"""Central training on the same route: one client that holds all data and never leaves.

A round has one local iteration, so iterations are the rounds of the route (chapters 06 and 10).
"""

from dataclasses import dataclass, replace

import numpy as np

from fl_privacy_lib.data import Dataset, Partition, full_copies
from fl_privacy_lib.reproduction.experiments.training import Training
from fl_privacy_lib.sampling import Plan


@dataclass(frozen=True)
class CentralTraining(Training):
    """A training of one client; a batch holds every example by itself with probability B/N."""

    setting: str = "batch"
    clients: int = 1
    participants: int = 1
    local_iterations: int = 1

    def plan(self, seed: int, rounds: int | None = None) -> Plan:
        """Return the plan of one seed's training; every example is drawn by itself."""
        return replace(super().plan(seed, rounds), batch_sampling="poisson")

    def data(self) -> Dataset:
        """Return all of the training data, measured on the test data where there are any."""
        data = super().data()
        return replace(
            data,
            train_x=np.concatenate([data.train_x, data.validation_x]),
            train_y=np.concatenate([data.train_y, data.validation_y]),
            validation_x=data.test_x, validation_y=data.test_y,
            test_x=data.test_x[:0], test_y=data.test_y[:0],
        ) if len(data.test_y) else data  # fmt: skip

    def split(self, data: Dataset, rng: np.random.Generator) -> Partition:
        """Give everything to the one client."""
        return full_copies(len(data.train_y), 1)
