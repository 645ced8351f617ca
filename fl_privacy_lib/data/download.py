"""Downloads by the well-known libraries or from UCI; any failure becomes one sentence.

They run inside `network`. The checksum of a downloaded file is compared when it is loaded, as that
of any other file.
"""

import io
import socket
import tempfile
import textwrap
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file, write_atomically

# Seconds without an answer after which a server counts as absent.
TIMEOUT = 20.0

LFW_FUNNELED = "LFW/lfw20_funneled_32x32.npz"
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


@contextmanager
def network(title: str, wanted: str, root: Path) -> Iterator[None]:
    """Bound the wait for a server inside the block; turn any failure into an `InputError`.

    Parameters
    ----------
    title : str
        The data set's title.
    wanted : str
        The files that would have made the download needless.
    root : Path
        The data folder.

    Notes
    -----
    The time limit is the process-wide default of sockets and is put back afterwards.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except Exception as error:
        # The libraries raise what their transport raises: URLError, timeouts, RuntimeError, a full
        # disk.
        reason = textwrap.shorten(str(error).partition("\n")[0], 300, placeholder=" …").rstrip(".:")
        raise InputError(
            f"{title} is not in the data folder {root} and could not be downloaded "
            f"({reason or type(error).__name__}): put {wanted} there, or set FL_PRIVACY_DATA to a "
            "folder that holds it."
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def from_torchvision(root: Path, name: str) -> None:
    """Download MNIST, FashionMNIST or CIFAR10 with torchvision, which checks the MD5."""
    from torchvision import datasets

    getattr(datasets, name)(root, download=True)


def lfw(root: Path) -> None:
    """Download LFW with scikit-learn, which checks its SHA-256, and keep it as a small array file.

    The pictures are the funneled (aligned) ones, in scikit-learn's default crop of 125 x 94,
    brought to 32 x 32 with Pillow's bicubic filter. scikit-learn's own folder is removed
    afterwards: it is large, and it keeps pickles, which this library does not read.
    """
    from sklearn.datasets import fetch_lfw_people

    with tempfile.TemporaryDirectory(dir=root, prefix="lfw-download-") as folder:
        people = fetch_lfw_people(
            data_home=folder, min_faces_per_person=20, color=True, resize=None
        )
    labels = np.asarray(people.target, np.int64)  # [N]
    # The order of person and file name: scikit-learn has shuffled it so.
    order = np.argsort(np.random.RandomState(42).permutation(len(labels)))
    images = np.stack([_to_32x32(people.images[i]) for i in order])  # [N, 32, 32, 3]
    names = np.asarray(people.target_names, np.str_)
    with atomic_file(root / LFW_FUNNELED) as stream:
        np.savez(stream, images=images, labels=labels[order], names=names)


def _to_32x32(picture: np.ndarray) -> np.ndarray:
    """Return a picture, float [H, W, 3] in [0, 1], as uint8 [32, 32, 3]."""
    from PIL import Image

    whole = Image.fromarray(np.rint(picture * 255).astype(np.uint8))
    return np.asarray(whole.resize((32, 32), Image.Resampling.BICUBIC))


def _from_uci(path: str) -> bytes:
    """Return a file of the UCI repository; may raise what the transport raises."""
    with urllib.request.urlopen(UCI + path) as reply:
        return reply.read()


def adult(root: Path) -> None:
    """Download the two files of Adult that hold records into ``root/Adult``."""
    for name in ("adult.data", "adult.test"):
        write_atomically(root / "Adult" / name, _from_uci(f"adult/{name}"))


def bank(root: Path) -> None:
    """Download Bank Marketing and keep ``root/BankMarketing/bank-full.csv`` of it."""
    archive = zipfile.ZipFile(io.BytesIO(_from_uci("00222/bank.zip")))
    write_atomically(root / "BankMarketing/bank-full.csv", archive.read("bank-full.csv"))


def kdd99(root: Path) -> None:
    """Download the 10-percent file of KDD Cup 99 into ``root/KDDCup99``."""
    write_atomically(
        root / "KDDCup99/kddcup.data_10_percent.gz",
        _from_uci("kddcup99-mld/kddcup.data_10_percent.gz"),
    )
