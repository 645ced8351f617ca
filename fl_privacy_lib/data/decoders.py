"""From files, or a library's own tables, to arrays as they are stored: nothing is scaled or cut."""

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data.files import FOUR, Arrays, read_bytes

# How many of CIFAR-10's images are known here, in the published order, and the SHA-256 of their
# pixels and labels.
CIFAR_CONTENT = {
    "train": (
        50_000,
        (
            "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        ),
    ),
    "test": (
        1_017,
        (
            "48bde46fb9080c13770d6a8c4163dc24cff90c2802470aa26c4d6c392faf50f3",
            "c5cc3963df7952a390249eaf62a93a87c0fd0f0f2c0a4172c3f19c0a634b6e68",
        ),
    ),
}


def decode_idx(path: Path) -> np.ndarray:
    """Return the array of bytes in an idx file (MNIST's format), plain or gzip-compressed.

    The file begins with two zero bytes, the type (8: unsigned byte) and the number of axes; then
    each axis' length as a big-endian 32-bit integer; then the values, last axis fastest.

    Returns
    -------
    ndarray of uint8
        In the file's own shape.

    Notes
    -----
    Every idx file has a checksum, which is compared before it is decoded.
    """
    content = read_bytes(path)
    shape = [int(n) for n in np.frombuffer(content, ">u4", count=content[3], offset=4)]
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def decode_parquet(
    path: Path, image_column: str, label_column: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of a Parquet file in the Hugging Face layout.

    Returns
    -------
    images : ndarray of uint8, [N, H, W, 3]
    labels : ndarray of int64, [N]

    Raises
    ------
    InputError
        If pyarrow does not import beside the installed numpy, or the file is no such file.
    """
    from PIL import Image

    try:
        import pyarrow.parquet
    except ImportError as error:
        # pyarrow does not state the numpy it was built for: an installer cannot see the conflict.
        raise InputError(
            f"Reading {path.name} needs pyarrow, which does not import here "
            f"({str(error).splitlines()[0]}): install a pyarrow that was built for numpy "
            f"{np.__version__}."
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
        labels = np.array(table.column(label_column).to_pylist(), np.int64)
        files = [io.BytesIO(cell["bytes"]) for cell in table.column(image_column).to_pylist()]
        images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    except Exception as error:  # the file has no published checksum, so anything can be in it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{path} cannot be decoded ({reason}); delete it and get it again."
        ) from error
    return images, labels


def decode_mnist(paths: Sequence[Path]) -> Arrays:
    """Return the four arrays of MNIST, images uint8 [N, 28, 28] and labels uint8 [N]."""
    return {name: decode_idx(path) for name, path in zip(FOUR, paths, strict=True)}


def decode_cifar_parquet(paths: Sequence[Path]) -> Arrays:
    """Return the four arrays of CIFAR-10 from two Parquet files, images uint8 [N, 32, 32, 3].

    Raises
    ------
    InputError
        If a file cannot be decoded, or its pixels or labels are not CIFAR-10's.
    """
    arrays: Arrays = {}
    for part, path in zip(("train", "test"), paths, strict=True):
        images, labels = decode_parquet(path, "img", "label")
        known, digests = CIFAR_CONTENT[part]
        for what, array, expected in zip(
            ("pixels", "labels"), (images, labels), digests, strict=True
        ):
            digest = hashlib.sha256(array[:known].astype(np.uint8).tobytes()).hexdigest()
            if digest != expected:
                raise InputError(
                    f"{path} does not hold CIFAR-10 as published: the SHA-256 of the {what} of its "
                    f"first {known:,} images is {digest} where {expected} is expected; get a copy "
                    "that keeps order and pixels."
                )
        arrays |= {f"{part}_images": images, f"{part}_labels": labels}
    return arrays


def decode_cifar_pickles(paths: Sequence[Path]) -> Arrays:
    """Return the four arrays of CIFAR-10 from its pickles; torchvision compares their MD5 again."""
    from torchvision.datasets import CIFAR10

    folder = paths[0].parent.parent
    arrays: Arrays = {}
    for part in ("train", "test"):
        data = CIFAR10(folder, train=part == "train", download=False)
        arrays[f"{part}_images"] = np.asarray(data.data, np.uint8)  # [N, 32, 32, 3]
        arrays[f"{part}_labels"] = np.asarray(data.targets, np.int64)
    return arrays


def decode_features(paths: Sequence[Path], images: Callable[[Sequence[Path]], Arrays]) -> Arrays:
    """Return what `images` decodes, with scattering features [N, F] in place of the images."""
    from fl_privacy_lib.data.scattering import features  # brings torch, which takes seconds

    arrays = images(paths)
    return arrays | {n: features(arrays[n]) for n in ("train_images", "test_images")}


def decode_lfw(paths: Sequence[Path]) -> Arrays:
    """Return LFW's images uint8 [N, 32, 32, 3], labels [N] and names.

    Raises
    ------
    InputError
        If the file cannot be decoded, or the arrays do not fit one another.
    """
    try:
        with np.load(paths[0], allow_pickle=False) as archive:
            images, labels, names = (archive[key] for key in ("images", "labels", "names"))
    except Exception as error:  # the downloaded form has no published checksum
        raise InputError(f"{paths[0]} is damaged ({error}); delete it and get it again.") from error
    if (
        images.dtype != np.uint8
        or images.shape != (len(labels), 32, 32, 3)
        or not np.array_equal(np.unique(labels), np.arange(len(names)))
    ):
        raise InputError(
            f"{paths[0]} does not hold 32 x 32 faces and their names; delete it and get it again."
        )
    return {"images": images, "labels": labels, "names": names}


def decode_bundled(paths: Sequence[Path], name: str) -> Arrays:
    """Return a table that comes with scikit-learn; no file is read.

    ``breast_cancer``: x float64 [569, 30]. ``digits``: x float64 [1797, 8, 8], values 0..16.
    """
    from sklearn import datasets

    table = getattr(datasets, f"load_{name}")()
    x, classes = table.get("images", table.data), np.asarray(table.target_names, np.str_)
    return {"x": x, "y": table.target, "classes": classes}
