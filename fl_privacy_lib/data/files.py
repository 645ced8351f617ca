"""Files in the data folder: which are there, whether they are whole, what they say, and a cache of it."""

import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fl_privacy_lib._checks import InputError

Arrays = dict[str, np.ndarray]

# Part of every fingerprint: raise it when a decoder changes, so that older cache files are left
# alone.
CACHE_FORMAT = 1


@dataclass(frozen=True)
class Form:
    """One accepted form of one file.

    Parameters
    ----------
    path : str
        Where it lies, below the data folder.
    digest : str
        ``"sha256:<hex>"`` or ``"md5:<hex>"``; empty if no checksum is known.
    """

    path: str
    digest: str = ""


@dataclass(frozen=True)
class Layout:
    """One way in which a data set can lie in the data folder.

    Parameters
    ----------
    files : tuple of tuple of Form
        For each file its accepted forms, in the order in which they are looked for. No files at all
        means that the data come with a library.
    decode : callable
        Turns the paths, one per entry of ``files``, into arrays.
    arrays : tuple of str
        The names of these arrays.
    note : str
        What a reader must know about this form of the data.
    """

    files: tuple[tuple[Form, ...], ...]
    decode: Callable[[Sequence[Path]], Arrays]
    arrays: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Found:
    """A complete layout in a data folder: the layout, and the path and form of each of its files."""

    layout: Layout
    files: tuple[tuple[Path, Form], ...]


def unreadable(path: Path, error: Exception) -> InputError:
    """Return the error for a file or folder that is there but cannot be read."""
    reason = getattr(error, "strerror", None) or error
    return InputError(
        f"{path} cannot be read ({reason}): give this user the right to read it, "
        "or set FL_PRIVACY_DATA to a folder that can be read."
    )


def is_file(path: Path) -> bool:
    """Return whether path is a file; a folder that may not be searched raises `InputError`."""
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def check_root(root: Path) -> None:
    """Raise `InputError` if the data folder is something else than a folder; it may be absent."""
    try:
        wrong = root.exists() and not root.is_dir()
    except OSError as error:
        raise unreadable(root, error) from error
    if wrong:
        raise InputError(f"The data folder {root} is a file: set FL_PRIVACY_DATA to a folder.")


def _search(layout: Layout, root: Path) -> list[tuple[Path, Form] | None]:
    """Return for each file of layout the first of its forms that is in root, or None."""
    found: list[tuple[Path, Form] | None] = []
    for forms in layout.files:
        there = ((root / form.path, form) for form in forms)
        found.append(next((pair for pair in there if is_file(pair[0])), None))
    return found


def find(layouts: Sequence[Layout], root: Path) -> Found | None:
    """Return the first layout of which every file is in root, without reading any; None if there is none."""
    check_root(root)
    for layout in layouts:
        files = _search(layout, root)
        if all(pair is not None for pair in files):
            return Found(layout, tuple(pair for pair in files if pair is not None))
    return None


def missing(layouts: Sequence[Layout], root: Path) -> list[str]:
    """Return the files, by their first form, that the most nearly complete layout lacks in root."""
    lacking = [
        [
            forms[0].path
            for forms, pair in zip(layout.files, _search(layout, root), strict=True)
            if pair is None
        ]
        for layout in layouts
    ]
    # The first layout wins unless another one has been begun: then its gap is what the user wants
    # to know.
    begun = [
        paths
        for paths, layout in zip(lacking, layouts, strict=True)
        if len(paths) < len(layout.files)
    ]
    return min(begun, key=len) if begun else lacking[0]


def digest_of(path: Path, algorithm: str = "sha256") -> str:
    """Return the checksum of a file in hexadecimal; `InputError` if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            # MD5 stands only where it is the sole checksum ever published for a file.
            return hashlib.file_digest(
                stream, lambda: hashlib.new(algorithm, usedforsecurity=False)
            ).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def check(found: Found) -> str:
    """Compare every file with its checksum and return the fingerprint of them all.

    Returns
    -------
    str
        SHA-256, in hexadecimal, of the files' checksums; it names the cache.

    Raises
    ------
    InputError
        If a file cannot be read, or its checksum is another one.
    """
    digests = []
    for path, form in found.files:
        algorithm, _, expected = form.digest.partition(":")
        digest = digest_of(path, algorithm or "sha256")
        if expected and digest != expected:
            label = {"sha256": "SHA-256", "md5": "MD5"}[algorithm]
            raise InputError(
                f"{path} is damaged: its {label} is {digest} where {expected} is expected; "
                "delete it and get it again."
            )
        digests.append(digest)
    return hashlib.sha256(" ".join([str(CACHE_FORMAT), *digests]).encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is a gzip file; `InputError` if that fails."""
    try:
        with open(path, "rb") as stream:
            content = stream.read()
    except OSError as error:
        raise unreadable(path, error) from error
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{path} is damaged: it cannot be decompressed ({error}); delete it and get it again."
        ) from error


def save(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Make the file path with write(stream), so that it is never seen half-written; may raise `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as stream:
            write(stream)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def save_npz(path: Path, arrays: Arrays) -> None:
    """Write arrays to path, uncompressed; may raise `OSError`."""
    save(path, lambda stream: np.savez(stream, **arrays))


def _from_cache(path: Path, names: Sequence[str]) -> Arrays | None:
    """Return the named arrays of a cache file, or None if it is absent, damaged or of another kind."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except Exception:
        # A cut or altered file can raise anything that zipfile, zlib or numpy's header parser
        # knows, and the answer is the same each time: decode the source again.
        return None


def cached(
    folder: Path | None, key: str, names: Sequence[str], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays of ``folder/key.npz``, or build them and try to keep them there.

    Parameters
    ----------
    folder : Path or None
        Where the cache is; None: do not cache.
    key : str
        Name and fingerprint of the source, so that another source is another cache file.
    names : sequence of str
        The arrays that must be there.
    build : callable
        Makes them.

    Notes
    -----
    A damaged cache file is built again. A folder that is full or cannot be written is no error: the
    arrays are then built each time.
    """
    if folder is None:
        return build()
    path = Path(folder) / f"{key}.npz"
    arrays = _from_cache(path, names)
    if arrays is None:
        arrays = build()
        try:
            save_npz(path, arrays)
        except OSError:
            pass
    return arrays
