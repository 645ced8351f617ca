"""Data sets: the real files against published facts, and every way in which files can be wrong."""

import builtins
import dataclasses
import errno
import gzip
import hashlib
import io
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import (
    DATASETS,
    Spec,
    available,
    decoders,
    fetch,
    first_available,
    load,
    own,
    splits,
    verify,
)
from fl_privacy_lib.data import download as download_module
from fl_privacy_lib.data.files import Form, Layout, save_npz

MNIST_FILES = [forms[0].path for forms in DATASETS["mnist"].layouts[0].files]
EMBEDDED = ("cancer", "digits", "syn_l", "syn_h")
NO_FILES = Path("/nowhere")


@pytest.fixture
def mnist_copy(data_root, tmp_path):
    """A data folder of one's own with MNIST's four files."""
    for path in MNIST_FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data_root / path, tmp_path / path)
    return tmp_path


def check_form(data):
    """What holds for every data set."""
    pairs = [(data.train_x, data.train_y), (data.validation_x, data.validation_y), (data.test_x, data.test_y)]
    for x, y in pairs:
        assert x.dtype == np.float32 and y.dtype == np.int64
        assert len(x) == len(y) and x.shape[1:] == data.example_shape
        assert len(x) == 0 or (0 <= x.min() and x.max() <= 1)
        assert x.flags.c_contiguous
    assert set(np.unique(data.train_y)) == set(range(data.n_classes))
    assert data.kind == {1: "tabular", 3: "image"}[len(data.example_shape)]
    assert data.title and data.licence and data.source and data.note


# -- the real files ---------------------------------------------------------------------------------


def test_mnist(real, data_root):
    data = real("mnist")
    check_form(data)
    assert [len(y) for y in (data.train_y, data.validation_y, data.test_y)] == [50_000, 10_000, 10_000]
    assert data.example_shape == (1, 28, 28) and data.classes == tuple("0123456789")
    counts = [np.bincount(y).tolist() for y in (np.r_[data.train_y, data.validation_y], data.test_y)]
    assert counts[0] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert counts[1] == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    both = np.concatenate([data.train_x, data.validation_x])
    assert both.mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert both.std(dtype=np.float64) == pytest.approx(0.3081, abs=5e-5)
    raw = gzip.decompress((data_root / MNIST_FILES[0]).read_bytes())[16:]
    assert np.rint(both * 255).astype(np.uint8).tobytes() == raw


def test_cifar10(real):
    data = real("cifar10")
    check_form(data)
    assert [len(y) for y in (data.train_y, data.validation_y)] == [40_000, 10_000]
    assert len(data.test_y) in (1_017, 10_000) and data.example_shape == (3, 32, 32)
    assert np.bincount(np.r_[data.train_y, data.validation_y]).tolist() == [5000] * 10
    assert data.train_y[:5].tolist() == [6, 9, 9, 4, 1]  # frog, two trucks, deer, automobile
    both = np.concatenate([data.train_x, data.validation_x])
    assert both.mean(axis=(0, 2, 3), dtype=np.float64) == pytest.approx([0.49140, 0.48216, 0.44653], abs=1e-5)
    assert both.std(axis=(0, 2, 3), dtype=np.float64) == pytest.approx([0.24703, 0.24349, 0.26159], abs=1e-5)
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
    pairs = zip(np.rint(loaded * 255).astype(np.uint8), np.r_[data.train_y, data.validation_y], strict=True)
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


def test_checksums_are_those_of_the_folder_and_of_torchvision(data_root):
    from torchvision.datasets import CIFAR10, MNIST

    listed = dict(reversed(line.split()) for line in (data_root / "SHA256SUMS").read_text().splitlines())
    forms = [f for spec in DATASETS.values() for layout in spec.layouts for fs in layout.files for f in fs]
    for form in forms:
        if form.path in listed and not form.path.endswith(".parquet"):  # of these the decoder compares the pixels
            assert form.digest == f"sha256:{listed[form.path]}"
    assert sum(path in listed for path in {form.path for form in forms}) == 11
    md5_of = {
        Path(path).name: hashlib.md5((data_root / path).read_bytes()).hexdigest() for path in MNIST_FILES
    }
    assert md5_of == dict(MNIST.resources)
    pickles = {form.path.split("/")[1]: form.digest for form in forms if form.path.startswith("cifar-10")}
    published = {**dict(CIFAR10.train_list + CIFAR10.test_list), "batches.meta": CIFAR10.meta["md5"]}
    assert pickles == {name: f"md5:{md5}" for name, md5 in published.items()}


def test_uncompressed_idx_files_serve_as_well(real, mnist_copy):
    for path in MNIST_FILES[:3]:  # three plain, one compressed: each file by itself
        packed = mnist_copy / path
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    plain = load("mnist", mnist_copy)
    assert np.array_equal(plain.train_x, real("mnist").train_x)
    assert np.array_equal(plain.test_y, real("mnist").test_y)


# -- files that are missing, damaged or unreadable --------------------------------------------------


def truncate(content: bytes) -> bytes:
    return content[:-1]


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [truncate, flip, lambda content: b"", lambda content: content + b"\0"])
@pytest.mark.parametrize("check", [verify, load])
def test_a_damaged_file_is_named_with_both_checksums(damage, check, mnist_copy):
    path = mnist_copy / MNIST_FILES[1]
    wrong = damage(path.read_bytes())
    path.write_bytes(wrong)
    with pytest.raises(InputError) as caught:
        check("mnist", mnist_copy)
    for part in (str(path), "is damaged", hashlib.sha256(wrong).hexdigest(), "3552534a", "delete it"):
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
    with pytest.raises(InputError, match=r"data folder .* is a file: set FL_PRIVACY_DATA to a folder"):
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
        "heavy = {'torch', 'torchvision', 'sklearn', 'pandas', 'pyarrow', 'PIL'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- idx, Parquet and pickles -----------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


any_bytes = st_numpy.arrays(np.uint8, st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))


@given(array=any_bytes, packed=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_idx_files_round_trip(array, packed, tmp_path):
    path = tmp_path / "some-idx"
    path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    assert np.array_equal(decoders.decode_idx(path), array)


@given(array=any_bytes, data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cut_or_lengthened_idx_file_is_refused(array, data, tmp_path):
    content, path = idx(array), tmp_path / "some-idx"
    cut = data.draw(st.integers(0, len(content) - 1))
    for wrong in (content[:cut], content + b"\0", gzip.compress(content)[:-5], b"\x01" + content[1:]):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match="delete it and get it again"):
            decoders.decode_idx(path)


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
    pyarrow.parquet.write_table(pyarrow.table({"img": cells, "label": [3, 1, 2, 0]}), tmp_path / "x.parquet")
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
    with pytest.raises(InputError, match="holds no image"):
        decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")


def test_a_pyarrow_that_does_not_import_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow, .* built for numpy"):
        decoders.decode_parquet(tmp_path / "x.parquet", "img", "label")


@pytest.fixture
def pickles(tmp_path, monkeypatch):
    """A data folder with small pickles in CIFAR-10's layout, whose MD5 count as the published ones."""
    from torchvision.datasets import CIFAR10

    rng, folder, md5 = np.random.default_rng(0), tmp_path / "cifar-10-batches-py", {}
    folder.mkdir()
    for form in (forms[0] for forms in DATASETS["cifar10"].layouts[0].files):
        name = form.path.split("/")[1]
        content = {
            "data": rng.integers(0, 256, (2, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, 2).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps({"label_names": ["a"]} if "meta" in name else content))
        md5[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR10, "train_list", [[n, d] for n, d in md5.items() if n.startswith("data")])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return tmp_path


def test_pickles_are_read_by_torchvision(pickles):
    found = [pickles / forms[0].path for forms in DATASETS["cifar10"].layouts[0].files]
    arrays = decoders.decode_cifar_pickles(found)
    batches = [pickle.loads(path.read_bytes()) for path in found[:6]]
    rows = np.concatenate([batch["data"] for batch in batches[:5]])
    assert np.array_equal(arrays["train_images"].transpose(0, 3, 1, 2).reshape(10, -1), rows)
    assert arrays["train_labels"].tolist() == [y for batch in batches[:5] for y in batch["labels"]]
    assert arrays["test_labels"].tolist() == batches[5]["labels"]
    assert set(arrays) == set(DATASETS["cifar10"].layouts[0].arrays)


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def test_no_pickle_is_opened_without_its_checksum(pickles):
    found = [pickles / forms[0].path for forms in DATASETS["cifar10"].layouts[0].files]
    found[2].write_bytes(pickle.dumps(Bomb(pickles / "exploded")))
    with pytest.raises(InputError, match="is damaged: its MD5 is"):
        load("cifar10", pickles)
    with pytest.raises(InputError, match="is damaged"):
        decoders.decode_cifar_pickles(found)
    assert not (pickles / "exploded").exists()
    pickle.loads(found[2].read_bytes())
    assert (pickles / "exploded").exists()  # the bomb is live


def test_another_lfw_file_must_hold_faces(tmp_path):
    path, faces = tmp_path / "x.npz", np.zeros((2, 32, 32, 3), np.uint8)
    for arrays, says in [
        ({"images": faces, "labels": np.array([0, 1])}, "is damaged"),
        ({"images": faces, "labels": np.array([0, 2]), "names": np.array(["a", "b"])}, "does not hold"),
        (
            {"images": faces[:, :31], "labels": np.array([0, 1]), "names": np.array(["a", "b"])},
            "does not hold",
        ),
        ({"images": faces[:1], "labels": np.array([0, 1]), "names": np.array(["a", "b"])}, "does not hold"),
    ]:
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=says):
            decoders.decode_lfw([path])


# -- the cache, on a small data set added as any other would be -------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A registered data set of one small idx file; returns the data folder and a counter of decodings."""
    root, calls = tmp_path / "data", []
    root.mkdir()
    content = idx(np.arange(32, dtype=np.uint8).reshape(8, 2, 2))
    (root / "tiny-idx").write_bytes(content)

    def decode(paths):
        calls.append(1)
        return {"images": decoders.decode_idx(paths[0]), "labels": np.arange(8) % 2}

    def build(arrays):
        return splits.cut_three_to_one(
            splits.channels_first(arrays["images"]), arrays["labels"], ["even", "odd"]
        )

    form = Form("tiny-idx", f"sha256:{hashlib.sha256(content).hexdigest()}")
    layout = Layout(((form,),), decode, ("images", "labels"), "Made up.")
    monkeypatch.setitem(
        DATASETS, "tiny", Spec("Tiny", "image", (layout,), build, "none", "nobody", "Six and two.")
    )
    return root, calls


def same(a, b):
    return all(
        np.array_equal(getattr(a, f), getattr(b, f))
        for f in ("train_x", "train_y", "validation_x", "classes")
    )


def test_a_data_set_is_added_by_one_entry(tiny):
    data = load("tiny", tiny[0])
    check_form(data)
    assert (data.title, data.note, len(data.train_y)) == ("Tiny", "Six and two. Made up.", 6)


def test_the_cache_is_used_and_named_by_its_source(tiny, tmp_path):
    root, calls = tiny
    first, second = load("tiny", root, tmp_path / "cache"), load("tiny", root, tmp_path / "cache")
    assert len(calls) == 1 and same(first, second)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.name.startswith("tiny-") and len(file.stem) == len("tiny-") + 16
    # Another source is another file.
    layout = DATASETS["tiny"].layouts[0]
    (root / "tiny-idx").write_bytes(idx(np.ones((8, 2, 2), np.uint8)))
    loose = dataclasses.replace(layout, files=((Form("tiny-idx"),),))
    DATASETS["tiny"] = dataclasses.replace(DATASETS["tiny"], layouts=(loose,))
    assert not same(load("tiny", root, tmp_path / "cache"), first)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_without_a_cache_nothing_is_written(tiny, tmp_path):
    root, calls = tiny
    load("tiny", root)
    load("tiny", root)
    assert len(calls) == 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["data", "tiny-idx"]


def test_a_damaged_source_is_not_hidden_by_the_cache(tiny, tmp_path):
    root, _ = tiny
    load("tiny", root, tmp_path / "cache")
    (root / "tiny-idx").write_bytes(flip((root / "tiny-idx").read_bytes()))
    with pytest.raises(InputError, match="is damaged"):
        load("tiny", root, tmp_path / "cache")


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_cache_is_rebuilt(tiny, tmp_path, data):
    root, cache = tiny[0], tmp_path / "cache"
    shutil.rmtree(cache, ignore_errors=True)  # the folder is shared by all tried examples
    first = load("tiny", root, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(
        data.draw(st.sampled_from([whole[:at], whole[:at] + b"\xff\xfe" + whole[at + 2 :], b"no zip"]))
    )
    assert same(load("tiny", root, cache), first)
    assert same(load("tiny", root, cache), first)


def test_a_cache_with_other_arrays_or_a_pickle_is_rebuilt(tiny, tmp_path):
    root, calls = tiny
    first = load("tiny", root, tmp_path)
    (file,) = tmp_path.glob("tiny-*.npz")
    np.savez(file, other=np.zeros(3))
    assert same(load("tiny", root, tmp_path), first) and len(calls) == 2
    np.savez(file, images=np.array([Bomb(tmp_path / "exploded")], object), labels=np.zeros(1))
    assert same(load("tiny", root, tmp_path), first) and len(calls) == 3
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_or_a_file_in_place_of_the_cache_does_not_stop_loading(tiny, tmp_path, monkeypatch):
    root, _ = tiny
    (tmp_path / "file").touch()
    first = load("tiny", root, tmp_path / "file")

    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert same(load("tiny", root, tmp_path / "cache"), first)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    save_npz(tmp_path / "x.npz", {"a": np.zeros(3)})
    before = (tmp_path / "x.npz").read_bytes()

    def interrupted(stream, **arrays):
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_npz(tmp_path / "x.npz", {"a": np.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
    assert (tmp_path / "x.npz").read_bytes() == before


# -- one's own data ---------------------------------------------------------------------------------


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
        got = own.images_of("x", form)
        assert got.dtype == np.float32 and got.flags.c_contiguous
        assert np.allclose(got, want, atol=1e-6)
    grey = nhwc[..., :1]
    for form in (grey, grey[..., 0], grey.transpose(0, 3, 1, 2)):
        assert np.allclose(own.images_of("x", form), want[:, :1], atol=1e-6)


LABELS = archive()["train_labels"]
FLOATS = np.full((10, 5, 6), 0.5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_labels": None}, "lacks the array train_labels: it holds train_images, test_images"),
        ({"train_labels": LABELS[:9]}, r"train_labels of .* has the shape \(9,\).*each of 10 images"),
        ({"train_labels": LABELS[:, None]}, "has the shape"),
        ({"train_labels": LABELS.astype(float)}, "is of type float64: labels are integers"),
        ({"train_labels": LABELS - 1}, "runs from -1 to 1"),
        ({"train_labels": LABELS + 1}, "No training image .* has the label 0"),
        ({"train_labels": LABELS * 2}, "has the label 1: labels up to 4"),
        ({"train_labels": LABELS + 2**40}, "runs from"),
        ({"train_labels": LABELS * 0, "test_labels": np.zeros(4, int)}, "only the label 0"),
        ({"test_labels": np.array([0, 1, 2, 3])}, "No training image .* has the label 3"),
        ({"train_labels": np.array([0] * 4 + [1] * 4 + [2] * 2)}, "label 2 occurs only in the last fifth"),
        (
            {"test_images": archive()["test_images"][:, :4]},
            r"\(3, 5, 6\) and one for the test is \(3, 4, 6\)",
        ),
        ({"train_images": np.zeros((10, 30))}, "has 2 axes"),
        ({"train_images": np.zeros((10, 3, 5, 3))}, "both could be the channels"),
        ({"train_images": np.zeros((10, 5, 6, 4))}, "neither can be the channels"),
        ({"train_images": np.zeros((10, 0, 6))}, "at least one pixel"),
        ({"train_images": FLOATS.astype(int)}, "is of type int64: images are uint8"),
        ({"train_images": np.where(np.arange(6) == 2, np.nan, FLOATS)}, "NaN or infinity"),
        ({"train_images": np.where(np.arange(6) == 2, np.inf, FLOATS)}, "NaN or infinity"),
        ({"train_images": FLOATS * 255}, "from 127.5 to 127.5: floating-point images lie in"),
        ({"train_images": FLOATS - 1}, "from -0.5"),
        ({"train_images": np.full((10, 5, 6), "a")}, "is of type <U1"),
        ({"train_images": FLOATS[:4], "train_labels": LABELS[:4]}, "has 4 training images: at least 5"),
        ({"train_images": FLOATS[:0], "train_labels": LABELS[:0]}, "has 0 training images"),
        ({"test_images": np.full((4, 5, 6, 3), None)}, "array test_images of .* cannot be read .*as numbers"),
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
    with pytest.raises(InputError, match="names no file"):
        call("npz:", tmp_path)
    with pytest.raises(InputError, match=f"There is no file {tmp_path}/mine.npz"):
        call("npz:mine.npz", tmp_path)
    assert not available("npz:mine.npz", tmp_path)


def test_own_files_of_another_kind(tmp_path):
    path = tmp_path / "mine.npz"
    for write, says in [
        (lambda: path.write_bytes(b""), "is not a NumPy archive"),
        (lambda: path.write_bytes(b"some text"), "is not a NumPy archive"),
        (lambda: path.write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"))), "is not a NumPy archive"),
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

    monkeypatch.setattr(np, "load", refuse)
    with pytest.raises(InputError, match="cannot be read"):
        load("npz:mine.npz", tmp_path)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# -- downloads --------------------------------------------------------------------------------------


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
        ("cifar10", "torchvision.datasets.cifar.download_and_extract_archive", "cifar-10-batches-py"),
        ("lfw", "sklearn.datasets.fetch_lfw_people", "LFW/lfw20_32x32.npz"),
        ("adult", "urllib.request.urlopen", "Adult/adult.data and Adult/adult.test"),
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
    with pytest.raises(InputError, match=r"needs MNIST/raw/train-images-idx3-ubyte.gz \(and 3 more\)"):
        load("mnist", tmp_path)


def test_faces_from_scikit_learn_are_kept_in_the_order_of_the_file(tmp_path, monkeypatch):
    """Each made-up picture is of one colour, which resizing keeps: the colour tells which picture it is."""
    people, each = 20, 4
    colour = np.arange(people * each, dtype=np.uint8)
    pictures = np.broadcast_to((colour / np.float32(255))[:, None, None, None], (80, 125, 94, 3))
    labels, order = np.repeat(np.arange(people), each), np.arange(80)
    np.random.RandomState(42).shuffle(order)

    def deliver(data_home, min_faces_per_person, color, resize):
        assert (min_faces_per_person, color, resize) == (20, True, None)
        (Path(data_home) / "lfw_home").mkdir()
        names = np.array([f"person {k}" for k in range(people)])
        return types.SimpleNamespace(images=pictures[order], target=labels[order], target_names=names)

    monkeypatch.setattr("sklearn.datasets.fetch_lfw_people", deliver)
    data = load("lfw", tmp_path)
    check_form(data)
    assert "The funneled (aligned) pictures" in data.note
    shuffled = np.random.default_rng(splits.SPLIT_SEED).permutation(80)
    x, y = np.concatenate([data.train_x, data.validation_x]), np.r_[data.train_y, data.validation_y]
    assert np.array_equal(x[:, 0, 0, 0] * 255, colour[shuffled]) and np.ptp(x, axis=(1, 2, 3)).max() == 0
    assert np.array_equal(y, labels[shuffled])
    assert [p.name for p in tmp_path.iterdir()] == ["LFW"]  # scikit-learn's own folder is gone
    # If a release shuffles otherwise, the faces are at least sorted by person.
    assert np.array_equal(labels[::-1][download_module._before_shuffle(labels[::-1])], labels)
