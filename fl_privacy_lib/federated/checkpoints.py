"""Checkpoints: after every round, all that the rest of the run depends on, written whole or not at all.

All draws are keyed by (seed, round, client), so a generator has no position to save. In a group of
processes only the first one reads and writes files; the others are sent the bytes.
"""

import io
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file
from fl_privacy_lib.federated.fingerprint import Fingerprint, differing_parts
from fl_privacy_lib.federated.participation import Observation, Tap, Taps
from fl_privacy_lib.federated.rounds import Job
from fl_privacy_lib.models import Parameters

Start = tuple[
    Parameters, dict[str, Any], list[tuple]
]  # weights, the defence's state, finished rounds
CONTENTS = {"fingerprint", "weights", "state", "history", "observations"}


def save(path: Path, parts: Fingerprint, state: Start, taps: Taps) -> None:
    """Write a checkpoint so that it is there whole or not at all.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    weights, memory, history = state
    observations = [
        (astuple(tap), o.values, o.weights, taps.truth.get(tap))
        for tap, o in taps.observations.items()
    ]
    record = {"fingerprint": parts, "weights": weights, "state": memory, "history": history,
              "observations": observations}  # fmt: skip
    with atomic_file(path) as stream:
        torch.save(record, stream)


def read(path: Path) -> bytes | None:
    """Return a checkpoint's bytes, or None where there is none.

    Raises
    ------
    InputError
        If the path is a folder, or may not be read.
    """
    check_path(path)
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise InputError(
            f"{path} could not be read ({error.strerror}): give yourself the right, or name another "
            "checkpoint."
        ) from None


def check_path(path: Path) -> None:
    """Raise `InputError` if a checkpoint cannot be a file of this name."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, and a checkpoint is a file: name a file in it.")


def restore(content: bytes, path: Path, parts: Fingerprint, job: Job, taps: Taps) -> Start:
    """Return where a checkpoint goes on, on the job's device, and fill `taps`.

    Raises
    ------
    InputError
        If the checkpoint is damaged or belongs to another run.
    """
    record = _opened(content, path, job.train[0].device)
    if differing := differing_parts(parts, record["fingerprint"]):
        raise InputError(
            f"{path} belongs to a run with other settings ({', '.join(differing)}): delete it, or name another "
            "checkpoint."
        )
    plan = job.plan
    for place, values, weights, truth in record["observations"]:
        tap = Tap(*place)
        taps.observations[tap] = Observation(
            tap,
            values,
            weights,
            plan.local_lr,
            plan.local_iterations,
            plan.batch_size,
            job.defense.public(),
        )
        if truth is not None:
            taps.truth[tap] = truth
    return record["weights"], record["state"], record["history"]


def _opened(content: bytes, path: Path, device: torch.device) -> dict[str, Any]:
    """Return what a checkpoint holds: tensors and plain values only, never code."""
    try:
        record = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception:  # torch raises errors of many kinds for bytes that it did not write
        record = None
    if not isinstance(record, dict) or set(record) != CONTENTS:
        raise InputError(
            f"{path} is damaged or not a checkpoint of this version: delete it, or name another one."
        )
    return record
