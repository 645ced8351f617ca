"""Shared fixtures: the real data, which CI may not skip for want of, and double precision."""

import os
from pathlib import Path

import pytest
import torch

from fl_privacy_lib.data import load

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Return the folder of real data sets, or skip (in CI with a data folder named: fail)."""
    named = os.environ.get("FL_PRIVACY_DATA")
    if named and Path(named).is_dir():
        return Path(named).resolve()
    reason = f"real data sets: set FL_PRIVACY_DATA to a folder that holds them (now {named!r})"
    if os.environ.get("CI") and named:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def double():
    """Compute in float64: rounding over many steps then stays far below what a test asks for."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def real(data_root, tmp_path_factory):
    """Load a real data set once a module, through a cache in a temporary folder."""
    cache, held = tmp_path_factory.mktemp("cache"), {}

    def get(name):
        if name not in held:
            held[name] = load(name, data_root, cache)
        return held[name]

    yield get
    held.clear()
