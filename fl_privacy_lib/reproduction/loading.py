"""Data sets for points and pages: read once a process, and only the part that is needed."""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import replace

from fl_privacy_lib.data import Dataset, available, load, npz
from fl_privacy_lib.reproduction.paths import data_root, decoded_cache
from fl_privacy_lib.reproduction.progress import report_progress


@functools.cache
def load_cached(name: str, train_only: bool = True) -> Dataset:
    """Return a data set; with `train_only` its training part, since each worker holds a copy."""
    data = load(name, data_root(), decoded_cache())
    if not train_only:
        return data
    return replace(data, validation_x=data.validation_x[:0].copy(), test_x=data.test_x[:0].copy())


def content_of(dataset: str) -> dict[str, object]:
    """Return a digest of a reader's own file, {'content': …}; nothing for a known data set."""
    if not dataset.startswith(npz.PREFIX):
        return {}
    return {"content": hashlib.sha256(
        npz.path_of(dataset, data_root()).read_bytes()).hexdigest()}  # fmt: skip


def only_available(names: Iterable[str]) -> tuple[str, ...]:
    """Return the data sets whose files are there; the others are named in a line of progress.

    Raises
    ------
    InputError
        If there is no such data set.
    """
    names, root = list(names), data_root()
    there = [n for n in names if available(n, root)]
    if missing := [name for name in names if name not in there]:
        report_progress(f"not recorded, their files are not in {root}: {', '.join(missing)}")
    return tuple(there)
