"""Checkpoints: after every round, all that the rest of the run depends on.

All draws are keyed by (seed, round, client), so a generator has no position to save. In a group of
processes only the first one reads and writes files; the others are sent the bytes.
"""

import io
from pathlib import Path
from typing import Any

import torch

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file
from fl_privacy_lib.federated.fingerprint import Fingerprint, differing_parts
from fl_privacy_lib.federated.participation import Taps
from fl_privacy_lib.federated.rounds import Job
from fl_privacy_lib.models import Parameters

# weights, the defence's state, and the finished rounds as (round, participants, accuracy)
Start = tuple[Parameters, dict[str, Any], list[tuple]]
CONTENTS = ("fingerprint", "weights", "state", "history", "observations")


def save(path: Path, parts: Fingerprint, state: Start, taps: Taps) -> None:
    """Write a checkpoint so that it is there whole or not at all.

    Raises
    ------
    InputError
        If the folder cannot be written.
    """
    record = dict(zip(CONTENTS, (parts, *state, taps.records()), strict=True))
    with atomic_file(path) as stream:
        torch.save(record, stream)


def read(path: Path, resume: bool) -> bytes | None:
    """Return a checkpoint's bytes, or None where there is none or none is asked for.

    Raises
    ------
    InputError
        If the path is a folder, or may not be read.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder, and a checkpoint is a file: name a file in it.")
    try:
        return path.read_bytes() if resume and path.exists() else None
    except OSError as error:
        raise InputError(
            f"{path} could not be read ({error.strerror}): give yourself the right, or name "
            "another checkpoint."
        ) from None


def restore(content: bytes, path: Path, parts: Fingerprint, job: Job, taps: Taps) -> Start:
    """Return where a checkpoint goes on, on the job's device, and fill `taps`.

    Raises
    ------
    InputError
        If the checkpoint is damaged or belongs to another run.
    """
    try:  # tensors and plain values only, never code
        record = torch.load(io.BytesIO(content), job.train[0].device, weights_only=True)
    except Exception:  # torch raises errors of many kinds for bytes that it did not write
        record = None
    if not isinstance(record, dict) or set(record) != set(CONTENTS):
        raise InputError(
            f"{path} is damaged or not a checkpoint of this version: delete it, or name another "
            "one."
        )
    if differing := differing_parts(parts, record["fingerprint"]):
        raise InputError(
            f"{path} belongs to a run with other settings ({', '.join(differing)}): delete it, or "
            "name another checkpoint."
        )
    taps.restore(record["observations"])
    return record["weights"], record["state"], record["history"]
