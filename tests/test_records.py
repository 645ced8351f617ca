"""Records and finished points: whole or not at all, found again, never silently wrong."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from fl_privacy_lib._checks import InputError
from fl_privacy_lib._files import atomic_file, write_atomically
from fl_privacy_lib.reproduction.comparison import measured
from fl_privacy_lib.reproduction.paths import MEASURED
from fl_privacy_lib.reproduction.records import (
    add_point,
    finished_point,
    point_path,
    recorded_rows,
    rows_of,
)

KEYS = ["dataset", "clip_norm"]


def table(tmp_path):
    return tmp_path / "paper" / "table.csv"


def add(path, clip_norm, value=0.25):
    add_point(
        path,
        {"dataset": "mnist", "clip_norm": clip_norm},
        {"mse": {"mean": value, "std": 0.0, "n": 3}},
        seeds=1,
        profile="smoke",
        device="test",
        seconds=1.5,
    )


def test_a_point_is_found_again_by_its_settings(tmp_path):
    path = table(tmp_path)
    assert recorded_rows(path, KEYS).empty
    add(path, 4.0)
    add(path, 0.05)
    frame = recorded_rows(path, KEYS)
    assert len(rows_of(frame, {"dataset": "mnist", "clip_norm": 4.0})) == 1
    assert len(rows_of(frame, {"dataset": "mnist", "clip_norm": 4})) == 1
    assert rows_of(frame, {"dataset": "lfw", "clip_norm": 4.0}).empty
    row = rows_of(frame, {"clip_norm": 0.05}).iloc[0]
    assert (row["mean"], row["n"], row["seeds"]) == (0.25, "3", "1")


def test_rows_written_before_are_not_changed_by_later_ones(tmp_path):
    path = table(tmp_path)
    add(path, 4.0, value=1 / 3)
    first = path.read_bytes()
    for i in range(5):
        add(path, 10.0 + i)
    assert path.read_bytes().startswith(first)


@pytest.mark.parametrize("damage", ["dataset,clip_norm\nmnist", "", "\x00\x01", 'a,b\n"unclosed'])
def test_a_broken_record_gets_one_sentence(tmp_path, damage):
    path = table(tmp_path)
    add(path, 4.0)
    path.write_text(damage)
    with pytest.raises(InputError, match=r"record .*table\.csv is broken"):
        recorded_rows(path, KEYS)


@pytest.mark.parametrize(
    ("column", "value"),
    [("mean", "a quarter"), ("std", "-1"), ("n", "many"), ("n", "0"), ("seeds", "0")],
)
def test_a_number_that_cannot_be_is_a_broken_record(tmp_path, column, value):
    path = table(tmp_path)
    add(path, 4.0)
    pd.read_csv(path, dtype=str).assign(**{column: value}).to_csv(path, index=False)
    with pytest.raises(InputError, match="broken"):
        recorded_rows(path, KEYS)


@pytest.mark.parametrize("cut", [-1, -8, -30, -60])
def test_a_record_that_is_cut_off_in_a_row_supports_no_verdict(tmp_path, cut):
    path = table(tmp_path)
    add(path, 4.0)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=r"table\.csv is broken"):
        measured("paper/table", tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    write_atomically(tmp_path / "file", b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "file") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_gets_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="could not be written"):
        write_atomically(tmp_path / "file" / "below", b"x")


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path):
    path = tmp_path / "file"
    code = (
        "import sys; from pathlib import Path; from fl_privacy_lib._files import write_atomically\n"
        "path, n = Path(sys.argv[1]), 0\n"
        "while True: n += 1; write_atomically(path, str(n % 10).encode() * 400_000)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
        deadline = time.time() + 30
        while not path.exists() and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        content = path.read_bytes()
        assert len(content) == 400_000 and len(set(content)) == 1


def test_a_point_is_computed_once_and_found_by_every_setting(tmp_path):
    calls = []
    one, other = (point_path(tmp_path, {"a": a}) for a in (1, 2))

    def compute():
        calls.append(1)
        return {"x": np.arange(3), "status": np.array(["stalled"])}

    for _ in range(2):
        result = finished_point(one, compute)
        assert (
            list(result["x"]) == [0, 1, 2]
            and result["status"][0] == "stalled"
            and result["seconds"] >= 0
        )
    assert len(calls) == 1 and one.exists() and not other.exists()
    finished_point(other, compute)
    assert len(calls) == 2


def test_a_torn_point_is_computed_again(tmp_path):
    file = point_path(tmp_path, {"a": 1})
    finished_point(file, lambda: {"x": 1})
    file.write_bytes(file.read_bytes()[:50])
    assert finished_point(file, lambda: {"x": 2})["x"] == 2


def test_recorded_tables_parse_and_carry_their_columns():
    from fl_privacy_lib.reproduction.paths import MEASURED
    from fl_privacy_lib.reproduction.records import META

    tables = [p for p in MEASURED.rglob("*.csv") if p.parent != MEASURED]
    assert tables
    for path in tables:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        assert not [c for c in ["metric", *META] if c not in frame], path
        keys = [c for c in frame if c not in META] + ["seeds"]
        assert not frame.duplicated(keys).any(), path
        assert not (frame == "").any().any(), path


def test_every_recorded_row_still_stands():
    """A key column renamed or a setting changed by accident would have the rows recorded again."""
    from fl_privacy_lib.chapters import CHAPTERS, experiment
    from fl_privacy_lib.reproduction.experiment import is_recorded

    for number, kind in CHAPTERS.items():
        chapter = experiment(kind)
        for part in chapter.parts(kind.of_profile("full"), MEASURED):
            if part.long:
                continue
            rows = part.rows(part.datasets)
            frame = recorded_rows(MEASURED / f"{part.table}.csv", rows[0].key)
            missing = sum(not is_recorded(frame, row) for row in rows)
            assert not missing, (number, part.table, missing)
