"""Downloads: verified, used, and every way in which they can fail."""

import shutil
import socket
import threading
import types
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from data_scenes import MNIST_FILES, check_form

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import DATASETS, fetch, load, splits
from fl_privacy_lib.data import download as download_module


def fails(error):
    def attempt(*args, **kwargs):
        assert socket.getdefaulttimeout() == download_module.TIMEOUT
        raise error

    return attempt


@pytest.mark.parametrize(
    "error",
    [
        URLError("Name or service not known"),
        TimeoutError("timed out"),
        RuntimeError("File\nnot found"),
        EOFError(),
    ],
)
@pytest.mark.parametrize(
    ("name", "where", "wanted"),
    [
        ("mnist", "torchvision.datasets.mnist.download_and_extract_archive", "MNIST/raw"),
        (
            "cifar10",
            "torchvision.datasets.cifar.download_and_extract_archive",
            "cifar-10-batches-py",
        ),
        ("lfw", "sklearn.datasets.fetch_lfw_people", "LFW/lfw20_32x32.npz"),
        ("adult", "urllib.request.urlopen", "Adult/adult.data (and 1 more)"),
        ("bank", "urllib.request.urlopen", "BankMarketing/bank-full.csv"),
        ("kdd99", "urllib.request.urlopen", "KDDCup99/kddcup.data_10_percent.gz"),
    ],
)
@pytest.mark.parametrize("call", [fetch, load])
def test_a_failed_download_names_file_folder_and_remedy(
    call, name, where, wanted, error, tmp_path, monkeypatch
):
    monkeypatch.setattr(where, fails(error))
    with pytest.raises(InputError) as caught:
        call(name, tmp_path / "data")
    sentence = str(caught.value)
    for part in (
        DATASETS[name].title,
        "could not be downloaded",
        wanted,
        str(tmp_path / "data"),
        "FL_PRIVACY_DATA",
    ):
        assert part in sentence
    assert "\n" not in sentence and sentence.endswith(".")
    assert socket.getdefaulttimeout() is None
    assert not [p for p in (tmp_path / "data").rglob("*") if p.is_file()]


def test_a_server_that_never_answers_is_given_up(tmp_path, monkeypatch):
    from torchvision.datasets import MNIST

    monkeypatch.setattr(download_module, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, sends nothing
        rescue = threading.Timer(20, server.close)
        rescue.start()
        monkeypatch.setattr(MNIST, "mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"])
        with pytest.raises(InputError, match="timed out"):
            fetch("mnist", tmp_path)
        rescue.cancel()


def test_a_folder_that_cannot_be_made_is_part_of_the_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"could not be downloaded \(.*Not a directory"):
        fetch("mnist", tmp_path / "file" / "data")


def test_a_download_is_verified_and_then_used(data_root, real, tmp_path, monkeypatch):
    def deliver(self):
        (tmp_path / "MNIST/raw").mkdir(parents=True)
        for path in MNIST_FILES:
            shutil.copyfile(data_root / path, tmp_path / path)

    from torchvision.datasets import MNIST

    monkeypatch.setattr(MNIST, "download", deliver)
    monkeypatch.setattr(MNIST, "_load_data", lambda self: (None, None))
    monkeypatch.setattr(MNIST, "_check_exists", lambda self: True)
    assert np.array_equal(load("mnist", tmp_path).validation_x, real("mnist").validation_x)
    monkeypatch.setattr(MNIST, "download", fails(AssertionError("a second download")))
    fetch("mnist", tmp_path)


def test_a_download_that_brings_nothing_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.MNIST", lambda *args, **kwargs: None)
    with pytest.raises(
        InputError, match=r"needs MNIST/raw/train-images-idx3-ubyte.gz \(and 3 more\)"
    ):
        load("mnist", tmp_path)


def test_faces_from_scikit_learn_are_kept_in_the_order_of_the_file(tmp_path, monkeypatch):
    """Each made-up picture has one colour, which resizing keeps: it tells which picture it is."""
    people, each = 20, 4
    colour = np.arange(people * each, dtype=np.uint8)
    pictures = np.broadcast_to((colour / np.float32(255))[:, None, None, None], (80, 125, 94, 3))
    labels, order = np.repeat(np.arange(people), each), np.arange(80)
    np.random.RandomState(42).shuffle(order)

    def deliver(data_home, min_faces_per_person, color, resize):
        assert (min_faces_per_person, color, resize) == (20, True, None)
        (Path(data_home) / "lfw_home").mkdir()
        names = np.array([f"person {k}" for k in range(people)])
        return types.SimpleNamespace(
            images=pictures[order], target=labels[order], target_names=names
        )

    monkeypatch.setattr("sklearn.datasets.fetch_lfw_people", deliver)
    data = load("lfw", tmp_path)
    check_form(data)
    assert "The funneled (aligned) pictures" in data.note
    shuffled = np.random.default_rng(splits.SPLIT_SEED).permutation(80)
    x, y = np.concatenate([data.train_x, data.validation_x]), np.r_[data.train_y, data.validation_y]
    assert (
        np.array_equal(x[:, 0, 0, 0] * 255, colour[shuffled])
        and np.ptp(x, axis=(1, 2, 3)).max() == 0
    )
    assert np.array_equal(y, labels[shuffled])
    assert [p.name for p in tmp_path.iterdir()] == ["LFW"]  # scikit-learn's own folder is gone
