"""Federated training, simulated: gradients, one participation, rounds."""

from fl_privacy_lib.federated.gradients import MarginLoss, example_gradients
from fl_privacy_lib.federated.groups import WorkerError
from fl_privacy_lib.federated.participation import Observation, Tap
from fl_privacy_lib.federated.reports import simulate_reports
from fl_privacy_lib.federated.simulation import Run, accuracy, simulate

__all__ = [
    "MarginLoss",
    "Observation",
    "Run",
    "Tap",
    "WorkerError",
    "accuracy",
    "example_gradients",
    "simulate",
    "simulate_reports",
]
