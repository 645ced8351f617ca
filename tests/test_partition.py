"""Partitions among clients: counts by naive loops, distributions, and the published reuse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import Partition, full_copies, iid, some_classes, two_shards

labels_of_any_kind = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(np.array)
seeds = st.integers(0, 2**32 - 1)


def holders(split: Partition) -> np.ndarray:
    """How many clients hold each example, [examples]."""
    held = np.concatenate([np.unique(positions) for positions in split.indices])
    return np.bincount(held, minlength=split.examples)


def times_given(split: Partition) -> np.ndarray:
    """How often each example occurs at all clients together."""
    return np.bincount(np.concatenate(split.indices), minlength=split.examples)


def classes_per_client(split: Partition, labels: np.ndarray) -> np.ndarray:
    """How many different labels each client has, [clients]."""
    return np.array([len(np.unique(labels[held])) for held in split.indices])


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_counts_agree_with_naive_loops(data):
    n = data.draw(st.integers(1, 12))
    held = data.draw(
        st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=8), min_size=1, max_size=6)
    )
    split = Partition("any", tuple(np.array(h) for h in held), n)
    assert split.clients == len(held)
    assert split.sizes.tolist() == [len(h) for h in held]
    counts = ([h.count(example) for h in held] for example in set().union(*held))
    assert split.kinds() == {tuple(sorted(filter(None, c), reverse=True)) for c in counts}


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ((), "no client"),
        (([0], []), "Client 1"),
        (([0], [3]), "outside 0 to 2"),
        (([-1],), "outside 0 to 2"),
    ],
)
def test_impossible_partitions_are_refused(indices, says):
    with pytest.raises(InputError, match=says):
        Partition("by hand", tuple(np.array(held, int) for held in indices), 3)


@given(labels_of_any_kind, st.integers(1, 12), st.integers(1, 10), seeds)
@settings(max_examples=150, deadline=None)
def test_two_shards_laws(labels, clients, half, seed):
    size = 2 * half
    split = two_shards(labels, clients, size, np.random.default_rng(seed))
    copies = -(-clients * size // len(labels))
    assert split.sizes.tolist() == [size] * clients
    assert times_given(split).max() <= copies
    assert holders(split).max() <= min(copies, clients)
    duplicates = sum(size - len(set(held.tolist())) for held in split.indices)
    assert holders(split).sum() == clients * size - duplicates
    again = two_shards(labels, clients, size, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(split.indices, again.indices, strict=True))


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 4), seeds)
@settings(max_examples=60, deadline=None)
def test_two_shards_gives_whole_shards_of_one_class(n_classes, half, per_class, seed):
    """With class blocks that are multiples of a shard, each client has two groups of one class."""
    labels = np.random.default_rng(seed).permutation(
        np.repeat(np.arange(n_classes), half * per_class)
    )
    split = two_shards(
        labels, max(1, n_classes * per_class // 2), 2 * half, np.random.default_rng(seed)
    )
    for held in split.indices:
        assert sorted(np.bincount(labels[held], minlength=n_classes))[-2:] in (
            [half, half],
            [0, 2 * half],
        )


@pytest.mark.parametrize(("clients", "copies"), [(100, 1), (1000, 10), (10000, 100)])
def test_two_shards_reuse_is_that_of_the_public_code(clients, copies):
    """500 of 50,000 examples for 100, 1,000, 10,000 clients: each is given out 1, 10, 100 times."""
    labels = np.repeat(np.arange(10), 5000)
    split = two_shards(labels, clients, 500, np.random.default_rng(1))
    assert (times_given(split) == copies).all()
    assert holders(split).max() <= copies
    assert set(classes_per_client(split, labels)) == {1, 2}
    # Two shards of one class: 1 pair in about 10. Binomial sd at K clients, 6 of them either way.
    share = (classes_per_client(split, labels) == 1).mean()
    assert abs(share - 0.1) < 6 * (0.09 / clients) ** 0.5 + 0.02
    if copies == 1:
        assert (holders(split) == 1).all()


def test_two_shards_favours_no_class_when_copies_are_left_over():
    """20 shards, 10 places: class 9 gets half of its 10 examples on average (sd 0.17)."""
    labels = np.repeat(np.arange(10), 10)
    got = np.array(
        [
            np.bincount(
                labels[np.concatenate(two_shards(labels, 5, 10, np.random.default_rng(s)).indices)],
                minlength=10,
            )
            for s in range(400)
        ]
    )
    assert np.abs(got.mean(axis=0) - 5).max() < 6 * 0.172


def test_two_shards_leaves_out_no_end_for_certain():
    """7 examples, shards of 3: the one that is left out is of the first class or of the last."""
    labels = np.array([0, 0, 0, 0, 1, 1, 1])
    splits = [two_shards(labels, 1, 6, np.random.default_rng(s)) for s in range(60)]
    left_out = np.array([int(np.flatnonzero(times_given(split) == 0)[0]) for split in splits])
    assert set(left_out) == set(range(7))
    assert 10 < labels[left_out].sum() < 50  # binomial(60, 1/2): outside with probability 2e-7


def test_two_shards_shuffles_inside_a_client():
    labels = np.repeat([0, 1], 50)
    split = two_shards(labels, 1, 100, np.random.default_rng(0))
    first_half = labels[split.indices[0]][:50].mean()
    assert 0.2 < first_half < 0.8  # two unshuffled shards would give 0 or 1


@given(labels_of_any_kind, st.integers(1, 6), st.data(), seeds)
@settings(max_examples=150, deadline=None)
def test_some_classes_laws(labels, clients, data, seed):
    size = data.draw(st.integers(1, len(labels)))
    classes = data.draw(st.integers(1, len(np.unique(labels))))
    split = some_classes(labels, clients, size, classes, np.random.default_rng(seed))
    assert split.sizes.tolist() == [size] * clients
    assert {kind[0] for kind in split.kinds()} == {1}
    assert holders(split).sum() == clients * size
    # A further class is drawn only while the ones before it are too few: at worst the smallest come
    # first.
    needed = (
        int(np.searchsorted(np.cumsum(np.sort(np.bincount(labels)[np.unique(labels)])), size)) + 1
    )
    assert classes_per_client(split, labels).max() <= max(classes, needed)


def test_some_classes_adds_classes_until_the_pool_suffices():
    labels = np.repeat(np.arange(8), 20)
    split = some_classes(labels, 30, 100, 2, np.random.default_rng(0))
    assert (classes_per_client(split, labels) == 5).all()
    assert len({tuple(np.unique(labels[held])) for held in split.indices}) > 10


def test_full_copies():
    split = full_copies(4, 3)
    assert [held.tolist() for held in split.indices] == [[0, 1, 2, 3]] * 3
    assert (holders(split) == 3).all() and split.kinds() == {(1, 1, 1)}


@given(st.integers(1, 50), st.integers(1, 20), st.data(), seeds)
@settings(max_examples=150, deadline=None)
def test_iid_laws(examples, clients, data, seed):
    size = data.draw(st.integers(1, examples))
    split = iid(examples, clients, size, np.random.default_rng(seed))
    portions = examples // size
    assert split.sizes.tolist() == [size] * clients
    assert {kind[0] for kind in split.kinds()} == {1}
    assert holders(split).sum() == clients * size
    assert holders(split).max() <= -(-clients // portions)
    if clients <= portions:
        assert holders(split).max() == 1


def test_iid_draws_each_example_equally_often():
    """Chi-square over 600 partitions of 1 client with 3 of 10 examples; wrong alarm 1e-6."""
    count = sum(times_given(iid(10, 1, 3, np.random.default_rng(s))) for s in range(600))
    # Sampling without replacement shrinks the statistic, so the chi-square distribution is on the
    # safe side.
    assert stats.chisquare(count).pvalue > 1e-6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r: two_shards(np.zeros(10, int), 2, 5, r), "odd"),
        (lambda r: two_shards(np.zeros(10, int), 0, 4, r), "clients = 0"),
        (lambda r: two_shards(np.zeros(10, int), 2.5, 4, r), "clients = 2.5"),  # type: ignore[arg-type]
        (
            lambda r: some_classes(np.zeros(10, int), 2, 11, 1, r),
            "examples_per_client = 11 must lie between 1 and 10",
        ),
        (lambda r: some_classes(np.zeros(10, int), 2, 5, 2, r), "classes = 2"),
        (lambda r: iid(10, 2, 11, r), "examples_per_client = 11 must lie between 1 and 10"),
        (lambda r: iid(10, True, 1, r), "clients = True"),
        (lambda r: full_copies(0, 2), "examples = 0"),
    ],
)
def test_impossible_wishes_are_refused(call, says):
    with pytest.raises(InputError, match=says):
        call(np.random.default_rng(0))
