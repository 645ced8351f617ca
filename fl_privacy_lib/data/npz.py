"""A user's own images: ``npz:PATH`` names a NumPy archive with four arrays."""

import os
from pathlib import Path

import numpy as np

from fl_privacy_lib._checks import InputError, refuse
from fl_privacy_lib.data.files import FOUR, is_file, reading
from fl_privacy_lib.data.splits import unit_range

PREFIX = "npz:"


def path_of(name: str, root: Path) -> Path:
    """Return the file that ``npz:PATH`` names; a relative PATH is meant from the data folder."""
    return root / os.path.expanduser(name.removeprefix(PREFIX))


def _open(path: Path) -> np.lib.npyio.NpzFile:
    """Open an archive and see that the four arrays are listed in it; nothing is decoded."""
    refuse({f"There is no file {path}: give npz:PATH an absolute path, or one in the data folder.":
            not is_file(path)})  # fmt: skip
    with reading(path), open(path, "rb"):
        pass  # so that only the content can be at fault below
    try:
        archive = np.load(path, allow_pickle=False)
    except Exception as error:
        # A damaged archive can raise whatever zipfile or numpy's header parser raises.
        raise InputError(f"{path} is not a NumPy archive; write it with numpy.savez.") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise InputError(
            f"{path} holds a single array; write it with numpy.savez, with {', '.join(FOUR)}."
        )
    lacking = [key for key in FOUR if key not in archive.files]
    if lacking:
        raise InputError(
            f"{path} lacks the array {lacking[0]}: it holds {', '.join(archive.files) or 'nothing'}"
            f", and needs {', '.join(FOUR)}."
        )
    return archive


def read(path: Path) -> dict[str, np.ndarray]:
    """Return the checked arrays of an archive.

    Returns
    -------
    dict
        Images as float32 [N, C, H, W] in [0, 1], labels as int64 [N], under the archive's names.

    Raises
    ------
    InputError
        For anything that is missing, of another shape or type, or out of range; see `images_of` and
        `labels_of`.
    """
    arrays = {}
    with _open(path) as archive:
        for key in FOUR:
            try:
                arrays[key] = archive[key]
            except Exception as error:
                # As above; numpy refuses arrays of Python objects, since they would be pickles.
                raise InputError(
                    f"The array {key} of {path} cannot be read ({str(error).rstrip('.')}): "
                    "write it again with numpy.savez, as numbers."
                ) from error
    for part in ("train", "test"):
        images, labels = f"{part}_images", f"{part}_labels"
        arrays[images] = images_of(f"{images} of {path}", arrays[images])
        arrays[labels] = labels_of(f"{labels} of {path}", arrays[labels], len(arrays[images]))
    if arrays["train_images"].shape[1:] != arrays["test_images"].shape[1:]:
        shapes = [arrays[f"{part}_images"].shape[1:] for part in ("train", "test")]
        raise InputError(
            f"The images of {path} differ: an image for training is {shapes[0]} and one for the "
            f"test is {shapes[1]}, as channels, height and width; make them alike."
        )
    _check_classes(path, arrays["train_labels"], arrays["test_labels"])
    return arrays


def images_of(what: str, array: np.ndarray) -> np.ndarray:
    """Return images as float32 [N, C, H, W] in [0, 1].

    Parameters
    ----------
    what : str
        How to name the array in an error.
    array : ndarray
        uint8 in 0..255, or floating point in [0, 1]. Three axes are [N, H, W]. Of four axes, the
        one of length 1 or 3 is the channels: the last one ([N, H, W, C]) or the second one
        ([N, C, H, W]).

    Raises
    ------
    InputError
        For another type or number of axes; for four axes of which neither or both could be the
        channels; for values that are not finite or not in [0, 1].
    """
    if array.ndim not in (3, 4) or 0 in array.shape[1:]:
        raise InputError(
            f"{what} has the shape {array.shape}: images need [N, H, W], [N, H, W, C] or "
            "[N, C, H, W], and at least one pixel."
        )
    if array.ndim == 3:
        array = array[:, None]  # [N, 1, H, W]
    else:
        second, last = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
        if second == last:
            raise InputError(
                f"{what} has the shape {array.shape}: of the second and the last axis "
                f"{'both' if second else 'neither'} can be the channels (1 or 3); write [N, H, W] "
                "for one channel."
            )
        if last:
            array = array.transpose(0, 3, 1, 2)  # [N, C, H, W]
    if array.dtype == np.uint8:
        return unit_range(array)
    refuse({f"{what} is of type {array.dtype}: images are uint8, or floating point in [0, 1].":
            array.dtype.kind != "f"})  # fmt: skip
    if array.size and not (array.min() >= 0 and array.max() <= 1):  # NaN fails both
        raise InputError(
            f"{what} holds values from {array.min():g} to {array.max():g}: floating-point images "
            "lie in [0, 1], without NaN (divide by 255, or write uint8)."
        )
    return np.ascontiguousarray(array, np.float32)


def labels_of(what: str, array: np.ndarray, images: int) -> np.ndarray:
    """Return labels as int64 [N]; `InputError` unless integers >= 0, one for each image."""
    integers = array.dtype.kind in "iu"
    low, high = (array.min(), array.max()) if integers and array.size else (0, 0)
    refuse(
        {
            f"{what} has the shape {array.shape}: it needs one label for each of {images} "
            "images.": array.shape != (images,),
            f"{what} is of type {array.dtype}: labels are integers from 0 to n - 1.": not integers,
            f"{what} runs from {low} to {high}: labels are integers from 0 to n - 1.": (
                bool(low < 0 or high > 10**6)
            ),
        }
    )
    return array.astype(np.int64)


def _check_classes(path: Path, train: np.ndarray, test: np.ndarray) -> None:
    """Raise `InputError` unless the labels are 0..n-1, n >= 2, and training has each of them."""
    n_classes = int(max(train.max(initial=0), test.max(initial=0))) + 1
    refuse(
        {
            f"{path} has {len(train)} training images: at least 5 are needed, since one fifth "
            "validates.": len(train) < 5,
            f"{path} has only the label 0: at least two classes are needed.": n_classes < 2,
        }
    )
    absent = np.setdiff1d(np.arange(n_classes), train[: len(train) - len(train) // 5])
    if absent.size:
        raise InputError(
            f"None of the first four fifths of the training images of {path} has the label "
            f"{absent[0]}: the last fifth validates, and labels up to {n_classes - 1} are used; "
            "shuffle the training images before you save them, or renumber the labels."
        )
