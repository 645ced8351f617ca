"""What a run consists of, part by part, as digests: for processes that train together, and for checkpoints.

Equal digests mean equal content: tensors and arrays count with all their values, a stage with its
fields, a function with its code and what it closes over. Addresses in memory and the names of files
do not count.
"""

import functools
import hashlib
import platform
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import fl_privacy_lib
from fl_privacy_lib.federated.participation import Tap
from fl_privacy_lib.federated.rounds import Job

Fingerprint = dict[str, str]


def fingerprint(job: Job, taps: Iterable[Tap]) -> Fingerprint:
    """Return part → digest for all that the result of a run depends on, up to rounding."""
    flags = [module.training for module in job.model.modules()]
    trained = [(name, p.requires_grad) for name, p in job.model.named_parameters()]
    parts = {
        "plan": job.plan,
        "defence": job.defense,
        "loss": job.loss,
        "training data": job.train,
        "partition": job.partition.indices,
        "model": (str(job.model), flags, trained, dict(job.model.named_buffers())),
        "initial weights": dict(job.model.named_parameters()),
        "taps": sorted(map(astuple, taps)),
        "engine": job.engine,
    }
    return {name: digest(part) for name, part in parts.items()}


def surroundings(job: Job) -> Fingerprint:
    """Return what changes the last bits of a result: kind of device, versions, on a GPU the clients per chunk."""
    device = job.train[0].device.type
    torch_version = torch.__version__.partition("+")[0]
    versions = f"Python {platform.python_version()}, torch {torch_version}, library {fl_privacy_lib.__version__}"
    return {
        "device": device,
        "versions": versions,
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
    clauses = []
    for rank, parts in enumerate(fingerprints):
        if names := differing_parts(fingerprints[0], parts):
            clauses.append(f"process {rank} differs from process 0 in its {', '.join(names)}")
    return "; ".join(clauses)


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
    elif isinstance(value, (set, frozenset)):
        yield "".join(sorted(digest(element) for element in value)).encode()
    else:
        text, parts = _content(value)
        yield text.encode()
        yield str(len(parts)).encode()
        for part in parts:
            yield from _tokens(part, (*parents, id(value)))


def _content(value: Any) -> tuple[str, Sequence[Any]]:
    """Return what a value says in words, and the values that it consists of."""
    if isinstance(value, np.ndarray):
        return str(value.shape), value.ravel().tolist()
    if isinstance(value, (list, tuple)):
        return "", value
    if isinstance(value, Mapping):
        return "", [part for item in value.items() for part in item]
    if isinstance(value, nn.Module):
        return str(value), [module.training for module in value.modules()] + [
            dict(value.state_dict())
        ]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}", ()
    if isinstance(value, types.ModuleType):
        return value.__name__, ()
    if is_dataclass(value):
        return "", [part for f in fields(value) for part in (f.name, getattr(value, f.name))]
    if isinstance(value, functools.partial):
        return "", (value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return "", (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{value.__module__}.{value.__qualname__}", (
            value.__code__, value.__defaults__, value.__kwdefaults__, closed,
        )  # fmt: skip
    if isinstance(value, types.CodeType):
        return value.co_code.hex(), (value.co_consts, value.co_names)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return text, [part for item in getattr(value, "__dict__", {}).items() for part in item]
