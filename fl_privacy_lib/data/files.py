"""Files in the data folder: which are there, whether they are whole; a cache of decoded ones."""

import gzip
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file

Arrays = dict[str, np.ndarray]

# What a decoder of images that are cut already returns.
FOUR = ("train_images", "train_labels", "test_images", "test_labels")

# Part of every fingerprint: raise it when a decoder changes, so that older cache files are left
# alone.
CACHE_FORMAT = 1


Form = tuple[str, str]
"""An accepted form of a file: its path below the data folder, and its checksum.

The checksum is ``"sha256:<hex>"`` or ``"md5:<hex>"``; empty if none is known.
"""


@dataclass(frozen=True)
class Layout:
    """One way in which a data set can lie in the data folder.

    Parameters
    ----------
    files : tuple of tuple of Form
        For each file its accepted forms, in the order in which they are looked for. No files at all
        means that the data come with a library.
    decode : callable
        Turns the paths, one per entry of ``files``, into named arrays.
    note : str
        What a reader must know about this form of the data.
    """

    files: tuple[tuple[Form, ...], ...]
    decode: Callable[[Sequence[Path]], Arrays]
    note: str = ""


LocatedFile = tuple[Path, str]
"""A file that is there, and its checksum; empty if none is known."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any failure to read `path` inside the block into an `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}): give this user the right to "
            "read it, or set FL_PRIVACY_DATA to a folder that can be read."
        ) from error


def is_file(path: Path) -> bool:
    """Return whether `path` is a file; a folder that may not be searched raises `InputError`."""
    with reading(path):
        return path.is_file()


def _search(layout: Layout, root: Path) -> list[LocatedFile | None]:
    """Return for each file of `layout` the first of its forms that is in `root`, or None."""
    return [
        next(((root / path, digest) for path, digest in forms if is_file(root / path)), None)
        for forms in layout.files
    ]


def find(layouts: Sequence[Layout], root: Path) -> tuple[Layout, list[LocatedFile]] | None:
    """Return the first layout of which every file is in `root`, and the files, without reading any.

    Returns
    -------
    (Layout, list of (Path, checksum)) or None
        None if no layout is complete, or the folder does not exist.

    Raises
    ------
    InputError
        If `root` is a file, or may not be searched.
    """
    with reading(root):
        if root.exists() and not root.is_dir():
            raise InputError(f"The data folder {root} is a file: set FL_PRIVACY_DATA to a folder.")
    for layout in layouts:
        files = list(filter(None, _search(layout, root)))
        if len(files) == len(layout.files):
            return layout, files
    return None


def missing(layouts: Sequence[Layout], root: Path) -> str:
    """Return the first file that the most nearly complete layout lacks, and how many more."""
    lacking = [
        [
            forms[0][0]
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
    first, *others = min(begun or lacking[:1], key=len)
    return f"{first} (and {len(others)} more)" if others else first


def check(files: Sequence[LocatedFile]) -> str:
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
    for path, checksum in files:
        algorithm, _, expected = (checksum or "sha256:").partition(":")
        with reading(path), open(path, "rb") as stream:
            # MD5 stands only where it is the sole checksum ever published for a file.
            new_hash = partial(hashlib.new, algorithm, usedforsecurity=False)
            digest = hashlib.file_digest(stream, new_hash).hexdigest()
        if expected and digest != expected:
            label = {"sha256": "SHA-256", "md5": "MD5"}[algorithm]
            raise InputError(
                f"{path} is damaged: its {label} is {digest} where {expected} is expected; "
                "delete it and get it again."
            )
        digests.append(digest)
    return hashlib.sha256(" ".join([str(CACHE_FORMAT), *digests]).encode()).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is a gzip file.

    Raises
    ------
    InputError
        If the file cannot be read. A damaged one is found by its checksum before.
    """
    with reading(path):
        content = path.read_bytes()
    return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content


def cached(folder: Path | None, key: str, build: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of ``folder/key.npz``, or build them and try to keep them there.

    Parameters
    ----------
    folder : Path or None
        Where the cache is; None: do not cache.
    key : str
        Name and fingerprint of the source, so that another source is another cache file.
    build : callable
        Makes them.

    Returns
    -------
    dict of str to ndarray

    Notes
    -----
    A damaged cache file is built again. A folder that is full or cannot be written is no error: the
    arrays are then built each time.
    """
    if folder is None:
        return build()
    path = folder / f"{key}.npz"
    # A cut or altered file can raise anything that zipfile, zlib or numpy's header parser knows;
    # the answer is always the same: decode the source again.
    with suppress(Exception), np.load(path, allow_pickle=False) as archive:
        return dict(archive)
    arrays = build()
    with suppress(InputError), atomic_file(path) as stream:
        np.savez(stream, **arrays)
    return arrays
