"""Data sets: the real files against published facts, and files that are missing or damaged."""

import builtins
import errno
import gzip
import hashlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_scenes import MNIST_FILES, check_form, flip

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import available, fetch, first_available, load, splits, verify

EMBEDDED = ("cancer", "digits", "syn_l", "syn_h")
NO_FILES = Path("/nowhere")


@pytest.fixture
def mnist_copy(data_root, tmp_path):
    """A data folder of one's own with MNIST's four files."""
    for path in MNIST_FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data_root / path, tmp_path / path)
    return tmp_path


# -- the real files
# ---------------------------------------------------------------------------------


def test_mnist(real, data_root):
    data = real("mnist")
    check_form(data)
    assert [len(y) for y in (data.train_y, data.validation_y, data.test_y)] == [
        50_000,
        10_000,
        10_000,
    ]
    assert data.example_shape == (1, 28, 28) and data.classes == tuple("0123456789")
    counts = [
        np.bincount(y).tolist() for y in (np.r_[data.train_y, data.validation_y], data.test_y)
    ]
    assert counts[0] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts[1] == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    both = np.concatenate([data.train_x, data.validation_x])
    assert both.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert both.std(dtype=np.float64) == pytest.approx(0.3081, abs=5e-5)
    raw = gzip.decompress((data_root / MNIST_FILES[0]).read_bytes())[16:]
    assert np.rint(both * 255).astype(np.uint8).tobytes() == raw


@pytest.mark.long
def test_cifar10(real):
    data = real("cifar10")
    check_form(data)
    assert [len(y) for y in (data.train_y, data.validation_y)] == [40_000, 10_000]
    assert len(data.test_y) in (1_017, 10_000) and data.example_shape == (3, 32, 32)
    assert np.bincount(np.r_[data.train_y, data.validation_y]).tolist() == [5000] * 10
    assert data.train_y[:5].tolist() == [6, 9, 9, 4, 1]  # frog, two trucks, deer, automobile
    both = np.concatenate([data.train_x, data.validation_x])
    assert both.mean(axis=(0, 2, 3), dtype=np.float64) == pytest.approx(
        [0.49140, 0.48216, 0.44653], abs=1e-5
    )
    assert both.std(axis=(0, 2, 3), dtype=np.float64) == pytest.approx(
        [0.24703, 0.24349, 0.26159], abs=1e-5
    )
    pixels = np.rint(both * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    digest = hashlib.sha256(pixels.tobytes()).hexdigest()
    assert digest == "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"


def test_lfw(real, data_root):
    data = real("lfw")
    check_form(data)
    assert [len(y) for y in (data.train_y, data.validation_y, data.test_y)] == [2_267, 756, 0]
    assert data.example_shape == (3, 32, 32) and data.n_classes == 62
    counts = np.bincount(np.r_[data.train_y, data.validation_y])
    assert counts.min() == 20 and counts.max() == 530
    assert data.classes[int(counts.argmax())] == "George W Bush"
    with np.load(data_root / "LFW/lfw20_32x32.npz") as archive:
        stored, labels = archive["images"], archive["labels"]
    # Shuffling keeps every picture with its label: the same pairs as in the file.
    loaded = np.concatenate([data.train_x, data.validation_x]).transpose(0, 2, 3, 1)
    pairs = zip(
        np.rint(loaded * 255).astype(np.uint8), np.r_[data.train_y, data.validation_y], strict=True
    )
    assert sorted((p.tobytes(), int(y)) for p, y in pairs) == sorted(
        (p.tobytes(), int(y)) for p, y in zip(stored, labels, strict=True)
    )
    assert len(np.unique(data.validation_y)) > 50  # shuffled, not cut by person
    assert "not the funneled" in data.note


def test_cancer_against_scikit_learn():
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import MinMaxScaler

    data = load("cancer", NO_FILES)
    check_form(data)
    assert data.train_x.shape == (426, 30) and data.validation_x.shape == (143, 30)
    assert data.test_x.shape == (0, 30)
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(splits.SPLIT_SEED).permutation(569)
    scaler = MinMaxScaler(clip=True).fit(x[order[:426]])
    assert np.allclose(data.train_x, scaler.transform(x[order[:426]]), atol=1e-6)
    assert np.allclose(data.validation_x, scaler.transform(x[order[426:]]), atol=1e-6)
    assert np.array_equal(np.r_[data.train_y, data.validation_y], y[order])


def test_digits_against_scikit_learn_and_torch():
    from sklearn.datasets import load_digits

    data = load("digits", NO_FILES)
    check_form(data)
    assert data.train_x.shape == (1347, 1, 28, 28) and data.validation_x.shape == (450, 1, 28, 28)
    small = torch.tensor(load_digits().images / 16)[:, None]
    large = torch.nn.functional.interpolate(
        small, size=(28, 28), mode="bilinear", align_corners=False
    ).numpy()
    order = np.random.default_rng(splits.SPLIT_SEED).permutation(1797)
    assert np.allclose(np.concatenate([data.train_x, data.validation_x]), large[order], atol=1e-6)
    assert np.array_equal(np.r_[data.train_y, data.validation_y], load_digits().target[order])


@pytest.mark.parametrize("name", ["mnist", "cifar10", "lfw"])
def test_real_files_verify(name, data_root):
    assert available(name, data_root)
    verify(name, data_root)


def test_uncompressed_idx_files_serve_as_well(real, mnist_copy):
    for path in MNIST_FILES[:3]:  # three plain, one compressed: each file by itself
        packed = mnist_copy / path
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    plain = load("mnist", mnist_copy)
    assert np.array_equal(plain.train_x, real("mnist").train_x)
    assert np.array_equal(plain.test_y, real("mnist").test_y)


# -- files that are missing, damaged or unreadable
# --------------------------------------------------


def truncate(content: bytes) -> bytes:
    return content[:-1]


@pytest.mark.parametrize(
    "damage", [truncate, flip, lambda content: b"", lambda content: content + b"\0"]
)
@pytest.mark.parametrize("check", [verify, load])
def test_a_damaged_file_is_named_with_both_checksums(damage, check, mnist_copy):
    path = mnist_copy / MNIST_FILES[1]
    wrong = damage(path.read_bytes())
    path.write_bytes(wrong)
    with pytest.raises(InputError) as caught:
        check("mnist", mnist_copy)
    for part in (
        str(path),
        "is damaged",
        hashlib.sha256(wrong).hexdigest(),
        "3552534a",
        "delete it",
    ):
        assert part in str(caught.value)


def test_a_missing_file_is_named_with_folder_and_remedy(mnist_copy):
    (mnist_copy / MNIST_FILES[2]).unlink()
    assert not available("mnist", mnist_copy)
    with pytest.raises(InputError) as caught:
        verify("mnist", mnist_copy)
    for part in (f"needs {MNIST_FILES[2]},", str(mnist_copy), "FL_PRIVACY_DATA", 'fetch("mnist"'):
        assert part in str(caught.value)


def test_the_layout_that_was_begun_says_what_is_missing(tmp_path):
    (tmp_path / "CIFAR10").mkdir()
    (tmp_path / "CIFAR10/train-00000-of-00001.parquet").touch()
    with pytest.raises(InputError, match=r"needs CIFAR10/test-00000-of-00001\.parquet, not found"):
        verify("cifar10", tmp_path)
    with pytest.raises(
        InputError, match=r"needs cifar-10-batches-py/data_batch_1 \(and 6 more\).*does not exist"
    ):
        verify("cifar10", NO_FILES)


@pytest.mark.parametrize("call", [available, verify, fetch, load])
@pytest.mark.parametrize(
    ("name", "says"), [("mnits", "did you mean mnist"), ("", "is not one of"), ("npz", "npz:PATH")]
)
def test_an_unknown_name_gets_the_nearest_known_one(call, name, says, tmp_path):
    with pytest.raises(InputError, match=says):
        call(name, tmp_path)


def test_a_file_that_may_not_be_read(mnist_copy, monkeypatch):
    usual = builtins.open

    def refuse(path, *args, **kwargs):
        if str(path).endswith(MNIST_FILES[0]):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(
        InputError, match=rf"{MNIST_FILES[0]} cannot be read \(Permission denied\).*right to read"
    ):
        verify("mnist", mnist_copy)


def test_a_folder_that_may_not_be_searched(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(InputError, match="cannot be read"):
        available("mnist", tmp_path)


@pytest.mark.parametrize("call", [available, verify, fetch, load])
def test_a_data_folder_that_is_a_file(call, tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(
        InputError, match=r"data folder .* is a file: set FL_PRIVACY_DATA to a folder"
    ):
        call("mnist", tmp_path / "data")


def test_available_reads_nothing(mnist_copy, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    assert available("mnist", mnist_copy)
    assert not available("lfw", mnist_copy)


def test_embedded_data_sets_need_no_folder():
    for name in EMBEDDED:
        assert available(name, NO_FILES)
        verify(name, NO_FILES)
        fetch(name, NO_FILES)


def test_first_available(mnist_copy):
    assert first_available(["lfw", "mnist", "digits"], mnist_copy) == "mnist"
    assert first_available(["lfw", "digits"], NO_FILES) == "digits"
    with pytest.raises(InputError, match="None of lfw, cifar10 is in the data folder"):
        first_available(["lfw", "cifar10"], NO_FILES)
    with pytest.raises(InputError, match="did you mean digits"):
        first_available(["digit"], NO_FILES)


def test_nothing_heavy_is_imported_before_it_is_needed():
    """A wrong parameter is refused before torch and the like are loaded."""
    program = (
        "import sys; from pathlib import Path; from fl_privacy_lib import data\n"
        "data.available('mnist', Path('/nowhere')); data.verify('cancer', Path('/nowhere'))\n"
        "names = {'torch', 'torchvision', 'sklearn', 'pandas', 'pyarrow', 'PIL'}\n"
        "heavy = names & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_data_folder_may_be_written_as_text():
    np.testing.assert_array_equal(load("digits", "data").train_x, load("digits", NO_FILES).train_x)
