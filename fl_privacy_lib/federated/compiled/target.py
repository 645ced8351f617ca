"""What is compiled for, the CPU's vector width, and the folder that keeps the machine code.

numba's own cache looks at the file of the compiled function alone and would miss an edit in a
module that it calls. The folder's name is therefore a hash of all sources here, and of the CPU.
"""

import hashlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core import config

REGISTERS = {"avx512f": 16, "avx2": 8}  # CPU feature → float32 numbers in one register
WIDTH = next(
    (w for feature, w in REGISTERS.items() if llvm.get_host_cpu_features().get(feature)), 4
)
"""Numbers in one vector, W. Set it before `vectors` is imported to compile for a narrower CPU."""


@cache
def folder() -> Path:
    """Return the folder of this machine's compiled code, made if need be."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    cpu = (
        numba.__version__,
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        WIDTH,
    )
    name = hashlib.blake2b(sources + repr(cpu).encode(), digest_size=10).hexdigest()
    for base in (Path.home() / ".cache", Path(tempfile.gettempdir())):
        path = base / "fl-privacy-lib" / name
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            (path / ".writable").touch()
            return path
    return Path(tempfile.mkdtemp())


def inner(function: Callable[..., Any]) -> Any:
    """Return a function for kernels to call; it is compiled with them."""
    return numba.njit(error_model="numpy", nogil=True)(function)


def entry(function: Callable[..., Any]) -> Any:
    """Return a kernel for Python to call: compiled at its first call, then read from `folder`."""
    before = config.CACHE_DIR  # type: ignore[attr-defined]
    config.CACHE_DIR = str(folder())  # type: ignore[attr-defined]
    kernel = numba.njit(error_model="numpy", nogil=True, cache=True)(function)
    config.CACHE_DIR = before  # type: ignore[attr-defined]

    def call(*arguments: Any) -> Any:
        if not kernel.signatures and not any(folder().rglob("*.nbc")):
            sys.stderr.write("· compiling the training for this CPU (once, 10 to 30 s)\n")
        return kernel(*arguments)

    return call
