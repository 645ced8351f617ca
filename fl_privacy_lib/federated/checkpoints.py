"""Checkpoints, and fingerprints of what a run consists of: two processes compare these, too.

A checkpoint holds, after every round, all that the rest of the run depends on. All draws are keyed
by (seed, round, client), so a generator has no position to save. In a group of processes only the
first one reads and writes files; the others are sent the bytes.

A fingerprint has a digest for each part of a run. Equal digests mean equal content: tensors and
arrays count with all their values, a stage with its fields, a function with its code and what it
closes over. Addresses in memory and the names of files do not count.
"""

import functools
import hashlib
import io
import platform
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fl_privacy_lib
from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file
from fl_privacy_lib.federated.participation import Tap, Taps
from fl_privacy_lib.federated.rounds import Job
from fl_privacy_lib.models import Parameters

Fingerprint = dict[str, str]
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


def fingerprint(job: Job, taps: Iterable[Tap]) -> Fingerprint:
    """Return part → digest for all that the result of a run depends on, up to rounding."""
    parts = {
        "plan": job.plan,
        "defence": job.defense,
        "loss": job.loss,
        "training data": job.train,
        "partition": job.partition.indices,
        "model": (
            str(job.model),
            [module.training for module in job.model.modules()],
            [(name, p.requires_grad) for name, p in job.model.named_parameters()],
            dict(job.model.named_buffers()),
        ),
        "initial weights": dict(job.model.named_parameters()),
        "taps": sorted(map(astuple, taps)),
        "engine": job.engine,
    }
    return {name: digest(part) for name, part in parts.items()}


def surroundings(job: Job) -> Fingerprint:
    """Return what changes the last bits of a result: kind of device, versions, chunks on a GPU."""
    device = job.train[0].device.type
    versions = (platform.python_version(), torch.__version__.partition("+")[0])
    return {
        "device": device,
        "versions": " ".join((*versions, fl_privacy_lib.__version__)),
        "clients_per_chunk": "" if device == "cpu" else str(job.chunk),
    }


def differing_parts(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Return the names of the parts that are not equal, in the order of the first."""
    return [name for name in one | other if one.get(name) != other.get(name)]


def disagreement(fingerprints: Sequence[Fingerprint]) -> str:
    """Return which processes differ from process 0, and in what; empty where all are equal.

    >>> disagreement([{"plan": "a"}, {"plan": "a"}, {"plan": "b"}])
    'process 2 differs from process 0 in its plan'
    """
    differing = [differing_parts(fingerprints[0], parts) for parts in fingerprints]
    return "; ".join(
        f"process {rank} differs from process 0 in its {', '.join(names)}"
        for rank, names in enumerate(differing)
        if names
    )


def digest(value: Any) -> str:
    """Return a digest of a value's content, equal in every process.

    >>> digest({"a": [1, 2.0]}) == digest({"a": [1, 2.0]}), digest([1, 2]) == digest([12])
    (True, False)
    """
    hasher = hashlib.blake2b(digest_size=16)
    for token in _tokens(value, ()):
        hasher.update(len(token).to_bytes(8, "little"))
        hasher.update(token)
    return hasher.hexdigest()


def _tokens(value: Any, parents: tuple[int, ...]) -> Iterator[Any]:
    """Yield the value's kind and content as bytes; a value inside itself is named, not followed."""
    if id(value) in parents:
        yield b"a value above this one"
        return
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    else:
        text, parts = _content(value)
        yield text.encode()
        yield str(len(parts)).encode()
        for part in parts:
            yield from _tokens(part, (*parents, id(value)))


def _content(value: Any) -> tuple[str, Sequence[Any]]:
    """Return what a value says in words, and the values that it consists of."""
    for kinds, content in _CONTENTS:
        if isinstance(value, kinds):
            return content(value)
    if is_dataclass(value):
        return "", [part for f in fields(value) for part in (f.name, getattr(value, f.name))]
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text, _flat(getattr(value, "__dict__", {}))


def _flat(items: Mapping[Any, Any]) -> list[Any]:
    return [part for item in items.items() for part in item]


_CONTENTS: tuple[tuple[Any, Callable[[Any], tuple[str, Sequence[Any]]]], ...] = (
    ((list, tuple), lambda values: ("", values)),
    ((set, frozenset), lambda values: ("".join(sorted(map(digest, values))), ())),
    (Mapping, lambda items: ("", _flat(items))),
    (nn.Module, lambda m: (str(m), [*(part.training for part in m.modules()), m.state_dict()])),
    ((type, types.ModuleType), lambda t: (f"{getattr(t, '__module__', '')}.{t.__name__}", ())),
    (functools.partial, lambda p: ("", (p.func, p.args, p.keywords))),
    (types.MethodType, lambda m: ("", (m.__func__, m.__self__))),
    (types.FunctionType, lambda f: (
        f"{f.__module__}.{f.__qualname__}",
        (f.__code__, f.__defaults__, f.__kwdefaults__,
         [cell.cell_contents for cell in f.__closure__ or ()]),
    )),
    (types.CodeType, lambda code: (code.co_code.hex(), (code.co_consts, code.co_names))),
)  # fmt: skip
