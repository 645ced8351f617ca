"""The cache of decoded data: used, rebuilt, and never in the way."""

import dataclasses
import errno
import hashlib
import shutil

import numpy as np
import pytest
from data_scenes import Bomb, check_form, flip, idx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import DATASETS, Spec, decoders, load, splits
from fl_privacy_lib.data.files import Layout


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A registered data set of one small idx file; returns the data folder and decodings."""
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

    form = ("tiny-idx", f"sha256:{hashlib.sha256(content).hexdigest()}")
    layout = Layout(((form,),), decode, "Made up.")
    monkeypatch.setitem(
        DATASETS,
        "tiny",
        Spec(
            title="Tiny",
            kind="image",
            layouts=(layout,),
            build=build,
            licence="none",
            source="nobody",
            note="Six and two.",
        ),
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
    loose = dataclasses.replace(layout, files=((("tiny-idx", ""),),))
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
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_cache_is_rebuilt(tiny, tmp_path, data):
    root, cache = tiny[0], tmp_path / "cache"
    shutil.rmtree(cache, ignore_errors=True)  # the folder is shared by all tried examples
    first = load("tiny", root, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(
        data.draw(
            st.sampled_from([whole[:at], whole[:at] + b"\xff\xfe" + whole[at + 2 :], b"no zip"])
        )
    )
    assert same(load("tiny", root, cache), first)
    assert same(load("tiny", root, cache), first)


def test_a_cache_with_a_pickle_is_rebuilt(tiny, tmp_path):
    root, calls = tiny
    first = load("tiny", root, tmp_path)
    (file,) = tmp_path.glob("tiny-*.npz")
    np.savez(file, images=np.array([Bomb(tmp_path / "exploded")], object), labels=np.zeros(1))
    assert same(load("tiny", root, tmp_path), first) and len(calls) == 2
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_or_a_file_in_place_of_the_cache_does_not_stop_loading(
    tiny, tmp_path, monkeypatch
):
    root, _ = tiny
    (tmp_path / "file").touch()
    first = load("tiny", root, tmp_path / "file")

    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert same(load("tiny", root, tmp_path / "cache"), first)
    assert list((tmp_path / "cache").iterdir()) == []
