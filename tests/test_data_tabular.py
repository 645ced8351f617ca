"""Adult, Bank, KDD and the synthetic sets: against other readings, and a published encoding."""

import gzip
import hashlib
import io
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from sklearn.preprocessing import MinMaxScaler

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import (
    DATASETS,
    available,
    download,
    fetch,
    load,
    tabular,
    verify,
)
from fl_privacy_lib.data.splits import SPLIT_SEED

NO_FILES = Path("/nowhere")
TABLES = ("adult", "adult_123", "bank", "kdd99")
ADULT = [
    ("age", None),
    ("workclass", 8),
    ("fnlwgt", None),
    ("education", 16),
    ("education-num", None),
    ("marital-status", 7),
    ("occupation", 14),
    ("relationship", 6),
    ("race", 5),
    ("sex", 2),
    ("capital-gain", None),
    ("capital-loss", None),
    ("hours-per-week", None),
    ("native-country", 41),
]
BINS = {
    "age": 5,
    "fnlwgt": 5,
    "education-num": 5,
    "capital-gain": 2,
    "capital-loss": 2,
    "hours-per-week": 5,
}

# Rows of LIBSVM's a9a, as several public repositories hold it: position in adult.data, label,
# columns counted from 0. Most lie at an edge of a bin: ages 25, 26, 40, 41, 50; weights up to 1,000
# from a quintile; 35, 41 and 47 hours.
A9A = """
0 -1 2 10 13 18 38 41 54 63 66 72 74 75 79 82
1 -1 4 6 13 18 38 39 50 62 66 72 73 75 77 82
4 -1 1 5 17 18 38 39 51 60 70 71 73 75 79 94
14 1 2 5 14 24 37 39 47 62 67 72 73 75 79
27 1 4 15 19 36 39 62 67 72 73 75 81 92
38 1 1 5 13 19 36 39 49 62 66 72 73 75 78
104 -1 1 5 13 21 35 41 47 63 66 72 73 75 79 82
119 -1 0 5 13 21 35 41 47 63 66 72 73 75 80 82
121 -1 2 5 14 18 38 39 50 62 66 72 73 75 81 82
124 -1 0 5 17 19 36 41 48 61 70 72 73 75 78 82
143 1 3 5 16 24 37 41 51 63 66 71 73 76 79 82
161 -1 0 5 16 21 35 41 48 65 66 71 73 75 79 82
186 -1 3 6 14 18 38 40 50 63 66 71 73 75 79 82
191 -1 0 5 15 19 36 39 53 62 66 72 73 75 79 82
200 -1 1 5 17 28 38 41 51 63 66 71 73 76 79 82
535 -1 2 9 16 27 34 39 46 62 66 72 73 75 81 82
548 -1 0 5 16 21 35 41 52 61 66 72 73 75 78 82
574 -1 1 5 14 31 38 41 51 63 66 71 73 75 81 82
580 1 4 15 19 36 39 62 66 72 73 75 77 82
588 1 4 5 13 30 34 39 47 62 66 72 73 76 80 82
617 -1 4 6 14 21 35 39 50 62 66 72 73 75 77 82
624 -1 3 5 16 25 34 44 52 65 66 72 73 75 79 118
648 -1 4 14 21 35 39 62 66 72 73 75 81 82
657 -1 2 5 14 21 35 39 47 62 66 72 73 75 80 82
661 -1 2 5 17 28 38 41 49 63 66 72 73 75 81 82
"""


@pytest.fixture(scope="module")
def adult(data_root):
    """Adult's records, cut at the commas, training file first."""
    lines = [
        line
        for name in ("adult.data", "adult.test")
        for line in (data_root / "Adult" / name).read_text().splitlines()
        if line.count(",") == 14
    ]
    frame = pd.DataFrame(
        [line.split(", ") for line in lines], columns=[name for name, _ in ADULT] + ["label"]
    ).replace("?", None)
    return frame.astype({name: float for name, size in ADULT if size is None})


def in_file_order(data):
    """All records of a data set, back in the order of its file."""
    x = np.concatenate([data.train_x, data.validation_x, data.test_x])
    y = np.concatenate([data.train_y, data.validation_y, data.test_y])
    back = np.argsort(np.random.default_rng(SPLIT_SEED).permutation(len(y)))
    return x[back], y[back]


def scaled(x, train):
    """Columns scaled by scikit-learn, by their range over the records that the loader trains on."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(x))
    return MinMaxScaler(clip=True).fit(x[order[:train]]).transform(x)


# -- what is in each set
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts", "columns", "counts", "rows"),
    [
        ("adult", (36_631, 12_211), 105, (37_155, 11_687), "5ce76cf805fae11c"),
        ("adult_123", (36_631, 12_211), 123, (37_155, 11_687), "3c6bb06dd799e916"),
        ("bank", (33_908, 11_303), 32, (39_922, 5_289), "20001a47b8fa1776"),
        ("kdd99", (52_500, 17_500), 113, None, "1a55fb5715f230bd"),
        ("syn_l", (45_000, 15_000), 100, None, "9c24c1e732e914a4"),
        ("syn_h", (75_000, 25_000), 300, None, "4bfd4c31baa50136"),
    ],
)
def test_sizes_classes_and_rows(name, parts, columns, counts, rows, real):
    data = real(name)
    assert (
        data.kind == "tabular"
        and data.n_classes == 2
        and data.title
        and data.licence
        and data.source
    )
    assert (len(data.train_y), len(data.validation_y), len(data.test_y)) == (*parts, 0)
    for x, y in [
        (data.train_x, data.train_y),
        (data.validation_x, data.validation_y),
        (data.test_x, data.test_y),
    ]:
        assert x.dtype == np.float32 and y.dtype == np.int64 and x.flags.c_contiguous
        assert len(x) == len(y) and x.shape[1:] == data.example_shape == (columns,)
        assert np.isfinite(x).all()
        assert name.startswith("syn") or len(x) == 0 or (x.min() == 0 and x.max() == 1)
    if counts:
        assert tuple(np.bincount(np.r_[data.train_y, data.validation_y])) == counts
    for number in parts:
        assert f"{number:,}" in data.note
    # The first three records stay the same, so that a recording can be told from one of another
    # version.
    assert hashlib.sha256(data.train_x[:3].tobytes()).hexdigest()[:16] == rows


def test_sizes_are_those_of_the_papers(real):
    assert real("adult").train_x.shape == (36_631, 105)  # Fed-CDP, Table I
    assert len(real("adult").validation_y) == 12_211
    for name, records, columns in [  # FedSel, section 5.1
        ("bank", 45_211, 32),
        ("adult_123", 48_842, 123),
        ("kdd99", 70_000, None),
        ("syn_l", 60_000, 100),
        ("syn_h", 100_000, 300),
    ]:
        data = real(name)
        assert len(data.train_y) + len(data.validation_y) == records
        assert columns in (None, data.example_shape[0])


# -- Adult
# ------------------------------------------------------------------------------------------


def test_adult_against_pandas(real, adult):
    x, y = in_file_order(real("adult"))
    kinds = dict(ADULT)
    numbers = [name for name in kinds if kinds[name] is None]
    dummies = pd.get_dummies(adult[[name for name in kinds if kinds[name]]])
    expected = scaled(np.hstack([adult[numbers].to_numpy(float), dummies.to_numpy(float)]), 36_631)
    assert np.allclose(x, expected, atol=1e-6)
    assert np.array_equal(y, adult["label"].str.startswith(">50K"))
    assert int(y[:32_561].sum()) == 7_841 and int(y[32_561:].sum()) == 3_846
    missing = 8 - x[:, 6:].sum(axis=1)  # attributes without any column set
    assert np.array_equal(missing, adult.isna().sum(axis=1)) and int((missing > 0).sum()) == 3_620


def test_adult_edges_are_quintiles_with_ties_moved_apart(adult):
    train = adult[:32_561]
    for name, edges in zip(BINS, tabular.ADULT_EDGES, strict=True):
        expected = [1]
        if name not in ("capital-gain", "capital-loss"):
            expected = []
            for quintile in np.quantile(train[name], [0.2, 0.4, 0.6, 0.8]):
                expected.append(max(int(quintile), expected[-1] + 1 if expected else 0))
        assert list(edges) == expected


def test_adult_123_against_pandas(real, adult):
    x, y = in_file_order(real("adult_123"))
    edges = dict(zip(BINS, tabular.ADULT_EDGES, strict=True))
    bins = [
        pd.get_dummies(pd.cut(adult[name], [-np.inf, *edges[name], np.inf], right=False)).to_numpy()
        for name in BINS
    ]
    dummies = pd.get_dummies(adult[[name for name, size in ADULT if size]])
    assert np.array_equal(x, np.hstack([*bins, dummies.to_numpy()]).astype(np.float32))
    assert [b.shape[1] for b in bins] == list(BINS.values()) and all(
        b.any(axis=0).all() for b in bins
    )
    assert np.array_equal(y, in_file_order(real("adult"))[1])
    assert int(x[:32_561].sum()) == 451_592  # the non-zero entries of a9a


def a9a_columns(data_root):
    """For each column of a9a its place here: a9a keeps the order of adult.names."""
    listed = {}
    for line in (data_root / "Adult/adult.names").read_text().splitlines():
        if match := re.fullmatch(r"([a-z-]+): (.*)\.", line):
            listed[match[1]] = match[2].split(", ")
    bins_at, categories_at, places = 0, sum(BINS.values()), []
    for name, size in ADULT:
        if size is None:
            places += range(bins_at, bins_at + BINS[name])
            bins_at += BINS[name]
        else:
            assert len(listed[name]) == size
            places += [
                categories_at + sorted(listed[name]).index(category) for category in listed[name]
            ]
            categories_at += size
    return np.array(places)


def test_adult_123_gives_the_published_rows_of_a9a(real, data_root):
    x, y = in_file_order(real("adult_123"))
    ours = x[:, a9a_columns(data_root)]
    lines = [[int(word) for word in line.split()] for line in A9A.strip().splitlines()]
    assert len(lines) == 25
    for row, label, *columns in lines:
        assert np.flatnonzero(ours[row]).tolist() == columns
        assert 2 * y[row] - 1 == label
    bins = {*range(5), *range(13, 18), *range(34, 39), *range(73, 82)}
    assert bins <= {column for _, _, *columns in lines for column in columns}
    # As text ("-1 3:1 11:1 ... \n"), a9a and its test part are 3,494,503 characters together.
    assert (
        ours @ [len(f" {column}:1") for column in range(1, 124)] @ np.ones(48_842) + 48_842 * 4
        == 3_494_503
    )


# -- Bank
# -------------------------------------------------------------------------------------------


def test_bank_against_pandas(real, data_root):
    x, y = in_file_order(real("bank"))
    text = (data_root / "BankMarketing/bank-full.csv").read_text().replace('"', "")
    header, *rows = (line.split(";") for line in text.splitlines())
    frame = pd.DataFrame(rows, columns=header)
    labels = frame.pop("y")
    numeric = ["age", "balance", "day", "duration", "campaign", "pdays", "previous"]
    frame[numeric] = frame[numeric].astype(float)
    frame["month"] = pd.to_datetime(frame["month"], format="%b").dt.month
    numbers = frame.select_dtypes("number")
    assert list(numbers) == [
        "age",
        "balance",
        "day",
        "month",
        "duration",
        "campaign",
        "pdays",
        "previous",
    ]
    dummies = pd.get_dummies(frame.drop(columns=list(numbers)), drop_first=True)
    assert dummies.shape[1] == 24 and "default_yes" in dummies and "job_admin." not in dummies
    expected = scaled(np.hstack([numbers.to_numpy(float), dummies.to_numpy(float)]), 33_908)
    assert np.allclose(x, expected, atol=1e-6)
    assert np.array_equal(y, labels == "yes")


# -- KDD Cup 99
# -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kdd_lines(data_root):
    with gzip.open(data_root / "KDDCup99/kddcup.data_10_percent.gz", "rt") as stream:
        return stream.read().splitlines()


def test_kdd99_against_pandas(real, kdd_lines):
    assert len(kdd_lines) == 494_021
    x, y = in_file_order(real("kdd99"))
    drawn = sorted(np.random.default_rng(SPLIT_SEED).choice(494_021, 70_000, replace=False))
    frame = pd.DataFrame([kdd_lines[i].split(",") for i in drawn])
    assert np.array_equal(y, frame.pop(41) != "normal.")
    categories = pd.get_dummies(frame[[1, 2, 3]].astype(str))
    expected = scaled(
        np.hstack(
            [frame.drop(columns=[1, 2, 3]).astype(float).to_numpy(), categories.to_numpy(float)]
        ),
        52_500,
    )
    assert np.allclose(x, expected, atol=1e-6)
    # The note's "most records are copies of others".
    assert (
        len({kdd_lines[i] for i in drawn}) < 35_000
        and "Most records are copies" in real("kdd99").note
    )


def test_kdd99_columns_depend_on_the_draw(kdd_lines):
    """118 columns in all; 70,000 records miss some of the rarest: FedSel's 114 is ordinary."""
    columns = list(zip(*(line.split(",", 4)[1:4] for line in kdd_lines), strict=True))
    assert 38 + sum(len(set(column)) for column in columns) == 118
    codes = [np.unique(column, return_inverse=True)[1] for column in columns]
    sizes = Counter()
    for seed in range(40):
        drawn = np.random.default_rng(seed).choice(494_021, 70_000, replace=False)
        sizes[38 + sum(int((np.bincount(code[drawn]) > 0).sum()) for code in codes)] += 1
    assert min(sizes) >= 111 and max(sizes) <= 117 and sizes[114] >= 4


# -- the pieces
# -------------------------------------------------------------------------------------


@given(
    st_numpy.arrays(
        np.int16, st.tuples(st.integers(1, 8), st.integers(1, 4)), elements=st.integers(-1, 4)
    ),
    st.sampled_from([0, 1]),
)
def test_one_hot_sets_one_column_for_each_known_code(codes, first):
    columns = tabular.one_hot(codes, first)
    naive = [
        [
            codes[i, q] == code
            for q in range(codes.shape[1])
            for code in range(first, codes[:, q].max() + 1)
        ]
        for i in range(len(codes))
    ]
    assert columns.tolist() == naive
    assert np.array_equal(columns.sum(axis=1), (codes >= first).sum(axis=1))


words = st.sampled_from([None, "a", "b", "c"])


@given(
    st.lists(
        st.tuples(words, st.integers(-5, 5), words, st.sampled_from(["no", "yes"])),
        min_size=1,
        max_size=9,
    )
)
def test_encoding_keeps_every_value(records):
    frame = pd.DataFrame(records).astype({0: object, 2: object})
    arrays = tabular.encode(frame, ["yes"])
    assert arrays["numbers"].ravel().tolist() == [record[1] for record in records]
    assert arrays["y"].tolist() == [int(record[3] == "yes") for record in records]
    for q, j in enumerate((0, 2)):
        names = sorted({record[j] for record in records} - {None})
        decoded = [None if code < 0 else names[code] for code in arrays["codes"][:, q]]
        assert decoded == [record[j] for record in records]


# -- synthetic
# --------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_synthetic_records_against_the_recipe_in_loops(n, d):
    x, y = tabular.decode_synthetic((), n, d).values()
    rng = np.random.default_rng(SPLIT_SEED)
    dense, direction = rng.standard_normal((n, d)), rng.standard_normal(d)
    magnitude = rng.uniform(size=d)
    for i in range(n):
        assert y[i] == (sum(dense[i, j] * direction[j] for j in range(d)) > 0)
        for j in range(d):
            m = magnitude[j]
            m = 0.01 * m if m <= 0.9 else m
            assert x[i, j] == pytest.approx(dense[i, j] * m, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("name", ["syn_l", "syn_h"])
def test_the_synthetic_sets_follow_their_law(name, real):
    """Fixed draws; a draw in 1,000 or fewer would break one of the bounds."""
    data = real(name)
    x = np.concatenate([data.train_x, data.validation_x])
    y = np.concatenate([data.train_y, data.validation_y])
    deviation = x.std(axis=0, dtype=np.float64)
    large, d = deviation > 0.5, x.shape[1]
    assert np.all((deviation[~large] <= 0.0095) & (np.abs(x[:, ~large]).max(axis=0) < 0.009 * 7))
    assert np.all((deviation[large] >= 0.88) & (deviation[large] <= 1.02))
    assert abs(large.sum() - 0.1 * d) < 4 * np.sqrt(0.09 * d)  # P(magnitude > 0.9) = 0.1
    assert abs(y.mean() - 0.5) < 4 / (2 * np.sqrt(len(y)))
    shape = x[:, large] / deviation[large]
    assert abs((np.abs(shape) < 1).mean() - 0.6827) < 4 * 0.4655 / np.sqrt(shape.size)
    assert np.abs(x).max() > 1 and "not scaled" in data.note


def test_shared_magnitudes_keep_the_classes_separable():
    """A direction with 1/magnitude on each column splits them."""
    x, y = tabular.decode_synthetic((), 4000, 20).values()
    separated = np.linalg.lstsq(x / x.std(axis=0), 2.0 * y - 1, rcond=None)[0]
    assert (((x / x.std(axis=0)) @ separated > 0) == y).mean() > 0.97


def test_synthetic_sets_need_no_files_and_come_out_the_same(real):
    assert available("syn_l", NO_FILES) and available("syn_h", NO_FILES)
    again = load("syn_l", NO_FILES)
    assert np.array_equal(again.train_x, real("syn_l").train_x)
    assert np.array_equal(again.validation_y, real("syn_l").validation_y)


# -- files, downloads, cache
# ------------------------------------------------------------------------


def copy_of(name, data_root, folder):
    paths = [forms[0][0] for forms in DATASETS[name].layouts[0].files]
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(data_root / path, folder / path)
    return paths


@pytest.mark.parametrize("name", TABLES)
def test_missing_and_damaged_files_are_named(name, data_root, tmp_path):
    paths = copy_of(name, data_root, tmp_path)
    verify(name, tmp_path)
    content = (tmp_path / paths[-1]).read_bytes()
    (tmp_path / paths[-1]).write_bytes(content[:-1])
    with pytest.raises(
        InputError, match=rf"{re.escape(paths[-1])} is damaged: its SHA-256 is .* delete it"
    ):
        load(name, tmp_path)
    (tmp_path / paths[-1]).unlink()
    assert not available(name, tmp_path)
    with pytest.raises(
        InputError, match=rf"needs {re.escape(paths[-1])}, not found in .*FL_PRIVACY_DATA.*fetch"
    ):
        verify(name, tmp_path)


@pytest.mark.parametrize("name", TABLES)
def test_a_second_load_decodes_nothing(name, real, data_root, tmp_path, monkeypatch):
    first = real(name)
    load(name, data_root, tmp_path)
    monkeypatch.setattr(tabular, "encode", lambda *a: pytest.fail("decoded again"))
    again = load(name, data_root, tmp_path)
    assert np.array_equal(first.train_x, again.train_x) and np.array_equal(
        first.validation_y, again.validation_y
    )


@pytest.mark.parametrize("name", ["adult", "bank", "kdd99"])
def test_a_download_ends_as_the_same_files(name, data_root, tmp_path, monkeypatch):
    asked = []

    def deliver(url):
        asked.append(url)
        assert url.startswith("https://")
        file = url.rsplit("/", 1)[1]
        if file != "bank.zip":
            (path,) = data_root.glob(f"*/{file}")
            return io.BytesIO(path.read_bytes())
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.write(data_root / "BankMarketing/bank-full.csv", "bank-full.csv")
        return io.BytesIO(packed.getvalue())

    monkeypatch.setattr(download.urllib.request, "urlopen", deliver)
    fetch(name, tmp_path)
    verify(name, tmp_path)
    assert len(asked) == (2 if name == "adult" else 1)
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == {
        forms[0][0] for forms in DATASETS[name].layouts[0].files
    }


# -- CIFAR-10 in other Parquet files
