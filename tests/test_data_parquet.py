"""Parquet files of images: which pixels are taken, and what is refused."""

import hashlib
import io
import re

import numpy as np
import pytest

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import (
    DATASETS,
    decoders,
    load,
    verify,
)


def parquet(path, images, labels, level, compression="snappy"):
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    cells = []
    for pixels in images:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG", compress_level=level)
        cells.append({"bytes": stream.getvalue(), "path": None})
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table({"img": cells, "label": labels}), path, compression=compression
    )


def test_the_pixels_asked_for_are_the_published_ones(data_root):
    (published,) = re.findall(r"sha256 of the decoded training pixels.*\n\s+([0-9a-f]{64})", (
        data_root / "README.md"
    ).read_text())  # fmt: skip
    assert (
        decoders.CIFAR_CONTENT["train"][:1] == (50_000,)
        and decoders.CIFAR_CONTENT["train"][1][0] == published
    )


def test_other_parquet_files_serve_if_their_content_is_the_same(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 32, 32, 3), np.uint8), rng.integers(0, 10, 6)
    digests = tuple(
        hashlib.sha256(a[:4].astype(np.uint8).tobytes()).hexdigest() for a in (images, labels)
    )
    monkeypatch.setattr(decoders, "CIFAR_CONTENT", {"train": (4, digests), "test": (4, digests)})
    paths = [tmp_path / forms[0][0] for forms in DATASETS["cifar10"].layouts[1].files]
    files = set()
    for level, compression in [(0, "none"), (9, "snappy"), (6, "gzip")]:
        parquet(paths[0], images[:4], labels[:4], level, compression)
        parquet(paths[1], images, labels, level, compression)  # more test images than are known
        files.add(paths[0].read_bytes())
        verify("cifar10", tmp_path)
        arrays = decoders.decode_cifar_parquet(paths)
        assert np.array_equal(arrays["train_images"], images[:4]) and np.array_equal(
            arrays["test_images"], images
        )
        assert np.array_equal(arrays["test_labels"], labels)
    assert len(files) == 3
    changed = images.copy()
    changed[3, 0, 0, 0] ^= 1
    for wrong, what in [
        ((changed, labels), "pixels"),
        ((images, (labels + 1) % 10), "labels"),
        ((images[::-1], labels), "pixels"),
        ((images[:3], labels[:3]), "pixels"),
    ]:
        parquet(paths[1], *wrong, 6)
        with pytest.raises(
            InputError, match=f"test-00000.* the SHA-256 of the {what} .*get a copy"
        ) as caught:
            load("cifar10", tmp_path)
        assert "\n" not in str(caught.value) and digests[what == "labels"] in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1 but no more", b"PAR1" * 100])
def test_a_damaged_parquet_file_is_refused_in_one_sentence(content, tmp_path):
    for forms in DATASETS["cifar10"].layouts[1].files:
        (tmp_path / forms[0][0]).parent.mkdir(exist_ok=True)
        (tmp_path / forms[0][0]).write_bytes(content)
    with pytest.raises(
        InputError, match=r"train-00000.* cannot be decoded .*delete it and get it again\.$"
    ) as caught:
        load("cifar10", tmp_path)
    assert "\n" not in str(caught.value)
