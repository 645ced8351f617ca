"""Small files, right and wrong, for the tests of data."""

from pathlib import Path

import numpy as np

from fl_privacy_lib.data import DATASETS

MNIST_FILES = [forms[0][0] for forms in DATASETS["mnist"].layouts[0].files]


def check_form(data):
    """What holds for every data set."""
    pairs = [
        (data.train_x, data.train_y),
        (data.validation_x, data.validation_y),
        (data.test_x, data.test_y),
    ]
    for x, y in pairs:
        assert x.dtype == np.float32 and y.dtype == np.int64
        assert len(x) == len(y) and x.shape[1:] == data.example_shape
        assert len(x) == 0 or (0 <= x.min() and x.max() <= 1)
        assert x.flags.c_contiguous
    assert set(np.unique(data.train_y)) == set(range(data.n_classes))
    assert data.kind == {1: "tabular", 3: "image"}[len(data.example_shape)]
    assert data.title and data.licence and data.source and data.note


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def idx(array: np.ndarray) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def archive(**changes):
    """Ten training and four test images, 5 x 6 pixels of three colours, three classes."""
    rng = np.random.default_rng(0)
    arrays = {
        "train_images": rng.integers(0, 256, (10, 5, 6, 3), dtype=np.uint8),
        "train_labels": np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0]),
        "test_images": rng.integers(0, 256, (4, 5, 6, 3), dtype=np.uint8),
        "test_labels": np.array([2, 1, 0, 0], np.uint8),
    }
    return {key: value for key, value in {**arrays, **changes}.items() if value is not None}
