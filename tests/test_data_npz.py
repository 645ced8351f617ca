"""Data of one's own: what is taken, and what is refused in one sentence."""

import builtins
import errno
import gzip
import io
import pickle

import numpy as np
import pytest
from data_scenes import Bomb, archive, check_form
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import available, fetch, load, npz, verify


def test_own_images(tmp_path):
    np.savez(tmp_path / "mine.npz", **archive())
    for name in ("npz:mine.npz", f"npz:{tmp_path}/mine.npz"):
        assert available(name, tmp_path)
        verify(name, tmp_path)
        data = load(name, tmp_path)
    check_form(data)
    assert data.name == f"npz:{tmp_path}/mine.npz" and data.classes == ("0", "1", "2")
    assert [len(y) for y in (data.train_y, data.validation_y, data.test_y)] == [8, 2, 4]
    images = archive()["train_images"].transpose(0, 3, 1, 2)
    assert np.array_equal(np.rint(np.concatenate([data.train_x, data.validation_x]) * 255), images)
    assert data.validation_y.tolist() == [2, 0] and data.test_y.tolist() == [2, 1, 0, 0]


def test_own_images_in_each_order_of_axes_and_type():
    nhwc = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    want = (nhwc / 255).transpose(0, 3, 1, 2)
    for form in (
        nhwc,
        nhwc.transpose(0, 3, 1, 2),
        nhwc / 255,
        (nhwc / 255).astype(np.float32).transpose(0, 3, 1, 2),
    ):
        got = npz.images_of("x", form)
        assert got.dtype == np.float32 and got.flags.c_contiguous
        assert np.allclose(got, want, atol=1e-6)
    grey = nhwc[..., :1]
    for form in (grey, grey[..., 0], grey.transpose(0, 3, 1, 2)):
        assert np.allclose(npz.images_of("x", form), want[:, :1], atol=1e-6)


LABELS = archive()["train_labels"]
FLOATS = np.full((10, 5, 6), 0.5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train_labels": None},
            "lacks the array train_labels: it holds train_images, test_images",
        ),
        (
            {"train_labels": LABELS[:9]},
            r"train_labels of .* has the shape \(9,\).*each of 10 images",
        ),
        ({"train_labels": LABELS[:, None]}, "has the shape"),
        ({"train_labels": LABELS.astype(float)}, "is of type float64: labels are integers"),
        ({"train_labels": LABELS - 1}, "runs from -1 to 1"),
        ({"train_labels": LABELS + 1}, "None of the first .* has the label 0"),
        ({"train_labels": LABELS * 2}, "has the label 1: .* labels up to 4"),
        ({"train_labels": LABELS + 2**40}, "runs from"),
        ({"train_labels": LABELS * 0, "test_labels": np.zeros(4, int)}, "only the label 0"),
        ({"test_labels": np.array([0, 1, 2, 3])}, "None of the first .* has the label 3"),
        (
            {"train_labels": np.array([0] * 4 + [1] * 4 + [2] * 2)},
            "label 2: the last fifth validates.* shuffle",
        ),
        (
            {"test_images": archive()["test_images"][:, :4]},
            r"\(3, 5, 6\) and one for the test is \(3, 4, 6\)",
        ),
        ({"train_images": np.zeros((10, 30))}, r"shape \(10, 30\): images need \[N, H, W\]"),
        ({"train_images": np.zeros((10, 3, 5, 3))}, "both can be the channels"),
        ({"train_images": np.zeros((10, 5, 6, 4))}, "neither can be the channels"),
        ({"train_images": np.zeros((10, 0, 6))}, "at least one pixel"),
        ({"train_images": FLOATS.astype(int)}, "is of type int64: images are uint8"),
        ({"train_images": np.where(np.arange(6) == 2, np.nan, FLOATS)}, "without NaN"),
        ({"train_images": np.where(np.arange(6) == 2, np.inf, FLOATS)}, "from 0.5 to inf"),
        ({"train_images": FLOATS * 255}, "from 127.5 to 127.5: floating-point images lie in"),
        ({"train_images": FLOATS - 1}, "from -0.5"),
        ({"train_images": np.full((10, 5, 6), "a")}, "is of type <U1"),
        (
            {"train_images": FLOATS[:4], "train_labels": LABELS[:4]},
            "has 4 training images: at least 5",
        ),
        ({"train_images": FLOATS[:0], "train_labels": LABELS[:0]}, "has 0 training images"),
        (
            {"test_images": np.full((4, 5, 6, 3), None)},
            "array test_images of .* cannot be read .*as numbers",
        ),
    ],
)
def test_malformed_own_data_is_refused_in_one_sentence(changes, says, tmp_path):
    arrays = archive(**changes)
    if changes.get("train_images", np.zeros(1)).ndim == 3 and "test_images" not in changes:
        arrays["test_images"] = np.full((4, *changes["train_images"].shape[1:]), 0.5)
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(InputError, match=says) as caught:
        load("npz:mine.npz", tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_own_data_may_lack_test_images(tmp_path):
    empty = archive(test_images=np.zeros((0, 5, 6, 3)), test_labels=np.zeros(0, int))
    np.savez(tmp_path / "mine.npz", **empty)
    data = load("npz:mine.npz", tmp_path)
    assert data.test_x.shape == (0, 3, 5, 6)


@pytest.mark.parametrize("call", [verify, fetch, load])
def test_own_files_that_are_no_archives(call, tmp_path):
    with pytest.raises(InputError, match=f"There is no file {tmp_path}: give npz:PATH"):
        call("npz:", tmp_path)
    with pytest.raises(InputError, match=f"There is no file {tmp_path}/mine.npz"):
        call("npz:mine.npz", tmp_path)
    assert not available("npz:mine.npz", tmp_path)


def test_own_files_of_another_kind(tmp_path):
    path = tmp_path / "mine.npz"
    for write, says in [
        (lambda: path.write_bytes(b""), "is not a NumPy archive"),
        (lambda: path.write_bytes(b"some text"), "is not a NumPy archive"),
        (
            lambda: path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"))),
            "is not a NumPy archive",
        ),
        (lambda: path.write_bytes(gzip.compress(b"x")), "is not a NumPy archive"),
        (lambda: np.save(path.open("wb"), np.zeros(3)), "holds a single array"),
        (lambda: np.savez(path), "lacks the array train_images: it holds nothing"),
    ]:
        write()
        with pytest.raises(InputError, match=says):
            verify("npz:mine.npz", tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_own_file_that_may_not_be_read(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", **archive())

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(InputError, match="cannot be read"):
        load("npz:mine.npz", tmp_path)


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_own_data_with_any_bytes_changed_load_or_are_refused(tmp_path, data):
    path, stream = tmp_path / "mine.npz", io.BytesIO()
    np.savez(stream, **archive())
    content = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    try:
        check_form(load("npz:mine.npz", tmp_path))
    except InputError:
        pass
