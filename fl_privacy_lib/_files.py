"""The one way in which the library writes a file: whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fl_privacy_lib._checks import InputError


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file that takes the place of `path` when the block ends without an error.

    Parameters
    ----------
    path : Path
        The file; its folder is made if it does not exist.

    Yields
    ------
    binary stream
        To write to. A block that fails, or is interrupted, leaves the old file and nothing else.

    Raises
    ------
    InputError
        If the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a rename is atomic only within one file system.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would lock other readers of a shared folder out
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"{path} could not be written ({error.strerror or error}): "
            "free some space, or give this user the right to write there."
        ) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` by `atomic_file`."""
    with atomic_file(path) as stream:
        stream.write(data)
