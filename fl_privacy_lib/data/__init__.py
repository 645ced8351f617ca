"""Data sets, loaded by name and checked, and their partition among clients.

Importing this package imports numpy and nothing heavier, so that names and files can be checked
first.
"""

from fl_privacy_lib.data.datasets import Dataset, available, fetch, first_available, load, verify
from fl_privacy_lib.data.partition import (
    Partition,
    full_copies,
    iid,
    some_classes,
    two_shards,
)
from fl_privacy_lib.data.specs import DATASETS, Spec

__all__ = [
    "DATASETS",
    "Dataset",
    "Partition",
    "Spec",
    "available",
    "fetch",
    "first_available",
    "full_copies",
    "iid",
    "load",
    "some_classes",
    "two_shards",
    "verify",
]
