"""Files into arrays: idx, parquet, pickles and faces, and what is refused unread."""

import gzip
import hashlib
import io
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from data_scenes import MNIST_FILES, Bomb, idx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import DATASETS, decoders, load


def test_checksums_are_those_of_the_folder_and_of_torchvision(data_root):
    from torchvision.datasets import CIFAR10, MNIST

    listed = dict(
        reversed(line.split()) for line in (data_root / "SHA256SUMS").read_text().splitlines()
    )
    forms = [
        f
        for spec in DATASETS.values()
        for layout in spec.layouts
        for fs in layout.files
        for f in fs
    ]
    for path, digest in forms:
        # of Parquet files the decoder compares the pixels
        if path in listed and not path.endswith(".parquet"):
            assert digest == f"sha256:{listed[path]}"
    assert sum(path in listed for path in {path for path, _ in forms}) == 15
    md5_of = {
        Path(path).name: hashlib.md5((data_root / path).read_bytes()).hexdigest()
        for path in MNIST_FILES
    }
    assert md5_of == dict(MNIST.resources)
    pickles = {path.split("/")[1]: digest for path, digest in forms if path.startswith("cifar-10")}
    published = {
        **dict(CIFAR10.train_list + CIFAR10.test_list),
        "batches.meta": CIFAR10.meta["md5"],
    }
    assert pickles == {name: f"md5:{md5}" for name, md5 in published.items()}


any_bytes = st_numpy.arrays(
    np.uint8, st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
)


@given(array=any_bytes, packed=st.booleans())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_idx_files_round_trip(array, packed, tmp_path):
    path = tmp_path / "some-idx"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    assert np.array_equal(decoders.decode_idx(path), array)


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_parquet_columns_become_images_and_labels(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    cells = [{"bytes": png(p), "path": None} for p in pixels]
    pyarrow.parquet.write_table(
        pyarrow.table({"img": cells, "label": [3, 1, 2, 0]}), tmp_path / "x.parquet"
    )
    images, labels = decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")
    assert np.array_equal(images, pixels) and labels.tolist() == [3, 1, 2, 0]


def test_parquet_cells_without_pyarrow(tmp_path, monkeypatch):
    """The same with the table given, so that the images are checked where pyarrow is absent."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    columns = {"img": [{"bytes": png(p), "path": None} for p in pixels], "label": [3, 1, 2, 0]}
    column = lambda name: types.SimpleNamespace(to_pylist=lambda: columns[name])  # noqa: E731
    parquet = types.SimpleNamespace(read_table=lambda path: types.SimpleNamespace(column=column))
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=parquet))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    images, labels = decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")
    assert np.array_equal(images, pixels) and labels.tolist() == [3, 1, 2, 0]
    columns.update(img=[], label=[])
    with pytest.raises(InputError, match=r"cannot be decoded \(need at least one array"):
        decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")


def test_a_pyarrow_that_does_not_import_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow, .* built for numpy"):
        decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")


@pytest.fixture
def pickles(tmp_path, monkeypatch):
    """A data folder with small pickles in CIFAR-10's layout; their MD5 count as published."""
    from torchvision.datasets import CIFAR10

    rng, folder, md5 = np.random.default_rng(0), tmp_path / "cifar-10-batches-py", {}
    folder.mkdir()
    for form in (forms[0] for forms in DATASETS["cifar10"].layouts[0].files):
        name = form[0].split("/")[1]
        content = {
            "data": rng.integers(0, 256, (2, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, 2).tolist(),
        }
        (folder / name).write_bytes(
            pickle.dumps({"label_names": ["a"]} if "meta" in name else content)
        )
        md5[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(
        CIFAR10, "train_list", [[n, d] for n, d in md5.items() if n.startswith("data")]
    )
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return tmp_path


def test_pickles_are_read_by_torchvision(pickles):
    paths = [pickles / forms[0][0] for forms in DATASETS["cifar10"].layouts[0].files]
    arrays = decoders.decode_cifar_pickles(paths)
    batches = [pickle.loads(path.read_bytes()) for path in paths[:6]]
    rows = np.concatenate([batch["data"] for batch in batches[:5]])
    assert np.array_equal(arrays["train_images"].transpose(0, 3, 1, 2).reshape(10, -1), rows)
    assert arrays["train_labels"].tolist() == [y for batch in batches[:5] for y in batch["labels"]]
    assert arrays["test_labels"].tolist() == batches[5]["labels"]
    assert set(arrays) == set(decoders.FOUR)


def test_no_pickle_is_opened_without_its_checksum(pickles):
    paths = [pickles / forms[0][0] for forms in DATASETS["cifar10"].layouts[0].files]
    paths[2].write_bytes(pickle.dumps(Bomb(pickles / "exploded")))
    with pytest.raises(InputError, match="is damaged: its MD5 is"):
        load("cifar10", pickles)
    with pytest.raises(RuntimeError, match="corrupted"):  # torchvision compares them once more
        decoders.decode_cifar_pickles(paths)
    assert not (pickles / "exploded").exists()
    pickle.loads(paths[2].read_bytes())
    assert (pickles / "exploded").exists()  # the bomb is live


def test_another_lfw_file_must_hold_faces(tmp_path):
    path, faces = tmp_path / "x.npz", np.zeros((2, 32, 32, 3), np.uint8)
    for arrays, says in [
        ({"images": faces, "labels": np.array([0, 1])}, "is damaged"),
        (
            {"images": faces, "labels": np.array([0, 2]), "names": np.array(["a", "b"])},
            "does not hold",
        ),
        (
            {"images": faces[:, :31], "labels": np.array([0, 1]), "names": np.array(["a", "b"])},
            "does not hold",
        ),
        (
            {"images": faces[:1], "labels": np.array([0, 1]), "names": np.array(["a", "b"])},
            "does not hold",
        ),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=says):
            decoders.decode_lfw([path])
