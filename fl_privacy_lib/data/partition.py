"""Who holds which example: partitions of a training set among clients.

The privacy of an example depends on how many clients hold it, since each of them uses it. A
partition therefore reports how often each of its holders has an example (`Partition.kinds`).
"""

from dataclasses import dataclass

import numpy as np

from fl_privacy_lib._checks import in_range, refuse, whole_number


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of each client.

    Parameters
    ----------
    name : str
        How it was made.
    indices : tuple of ndarray of int64
        For each client the positions of its examples in the training set, in its own order.
    examples : int
        Size of the training set.

    Raises
    ------
    InputError
        If a client has no example, or a position outside the training set.

    Examples
    --------
    >>> two = Partition("by hand", (np.array([0, 1, 1]), np.array([1, 2])), 4)
    >>> two.kinds()
    {(1,), (2, 1)}
    """

    name: str
    indices: tuple[np.ndarray, ...]
    examples: int

    def __post_init__(self) -> None:
        refuse({f"The partition {self.name!r} has no client: give it at least one.":
                not self.indices})  # fmt: skip
        for client, positions in enumerate(self.indices):
            whose = f"Client {client} of the partition {self.name!r}"
            least, most = positions.min(initial=0), positions.max(initial=0)
            refuse(
                {
                    f"{whose} has no example: give it one.": len(positions) == 0,
                    f"{whose} names an example outside 0 to {self.examples - 1}: use positions in "
                    "the training set.": least < 0 or most >= self.examples,
                }
            )

    @property
    def clients(self) -> int:
        """Number of clients K."""
        return len(self.indices)

    @property
    def sizes(self) -> np.ndarray:
        """Number of examples of each client, repeats counted, [clients]."""
        return np.array([len(positions) for positions in self.indices])

    def kinds(self) -> set[tuple[int, ...]]:
        """Return how often the holders of an example have it, most first, of every kind of example.

        A pass over a client's examples uses an example as often as the client has it.
        """
        pairs = (np.concatenate(self.indices).astype(np.int64) * self.clients
                 + np.repeat(np.arange(self.clients), self.sizes))  # fmt: skip
        pairs, times = np.unique(pairs, return_counts=True)  # sorted by example, then by holder
        by_example = np.split(times, np.flatnonzero(np.diff(pairs // self.clients)) + 1)
        return {tuple(sorted(t.tolist(), reverse=True)) for t in by_example}


def two_shards(
    labels: np.ndarray, clients: int, examples_per_client: int, rng: np.random.Generator
) -> Partition:
    """Give each client two shards of a training set that is sorted by class.

    Each class' examples are permuted ``copies = ceil(clients * examples_per_client / N)`` times;
    the permutations stand end to end, class after class; the row is cut into shards of half a
    client's size; each client gets two shards, drawn at random without replacement. Its examples
    are then shuffled once.

    Parameters
    ----------
    labels : ndarray of int, [N]
    clients : int
        K.
    examples_per_client : int
        An even number.
    rng : numpy.random.Generator

    Returns
    -------
    Partition
        Most clients have two classes; one or three or four occur, since shards cross from class to
        class and both may lie in one class.

    Raises
    ------
    InputError
        If a number is not a positive integer, or examples_per_client is odd.

    Notes
    -----
    An example is held by up to ``copies`` clients: 1, 10 and 100 for 100, 1,000 and 10,000 clients
    with 500 of 50,000 examples each. It is held by fewer where one client got it twice, as happens
    when its two shards come from two permutations of one class. If the row has more shards than are
    needed, the shards are drawn from all of it, so no class is favoured; some copies then go to
    nobody. If its length is no multiple of a shard, less than one shard is left out, split at
    random between its two ends.

    Source: the public code of Fed-CDP (client data of the MNIST script).

    Examples
    --------
    >>> labels = np.repeat([0, 1], 50)
    >>> split = two_shards(labels, 20, 10, np.random.default_rng(0))
    >>> split.sizes.tolist() == [10] * 20, {sum(kind) for kind in split.kinds()}
    (True, {2})
    """
    whole_number(1, clients=clients, examples_per_client=examples_per_client)
    refuse({f"examples_per_client = {examples_per_client} is odd: two equal shards need an even "
            "number.": examples_per_client % 2 == 1})  # fmt: skip
    labels = np.asarray(labels)
    shard = examples_per_client // 2
    copies = -(-clients * examples_per_client // len(labels))
    blocks = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    # [copies * N]
    row = np.concatenate([rng.permutation(block) for block in blocks for _ in range(copies)])
    shards = len(row) // shard
    start = rng.integers(len(row) - shards * shard + 1)
    cut = row[start : start + shards * shard].reshape(shards, shard)
    drawn = rng.permutation(shards)[: 2 * clients].reshape(clients, 2)
    owned = cut[drawn].reshape(clients, examples_per_client)
    return Partition("two shards", tuple(rng.permuted(owned, axis=1)), len(labels))


def some_classes(
    labels: np.ndarray,
    clients: int,
    examples_per_client: int,
    classes: int,
    rng: np.random.Generator,
) -> Partition:
    """Give each client examples of a few classes, drawn at random.

    A client draws its classes without replacement, then its examples without replacement among all
    examples of these classes. While the classes have too few examples, it draws one class more.

    Parameters
    ----------
    labels : ndarray of int, [N]
    clients : int
        K.
    examples_per_client : int
        At most N.
    classes : int
        Classes drawn for each client, about 15 for LFW; at most the number of classes.
    rng : numpy.random.Generator

    Returns
    -------
    Partition
        Clients draw independently: an example of class c is held by a random number of clients,
        about ``clients * examples_per_client / N`` on average, and no client holds an example
        twice.

    Raises
    ------
    InputError
        If a number is not a positive integer, or too large.
    """
    whole_number(1, clients=clients, examples_per_client=examples_per_client, classes=classes)
    labels = np.asarray(labels)
    in_range(1, len(labels), examples_per_client=examples_per_client)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    in_range(1, len(members), classes=classes)
    size = np.array([len(positions) for positions in members])
    indices = []
    for _ in range(clients):
        order = rng.permutation(len(members))
        enough = int(np.searchsorted(np.cumsum(size[order]), examples_per_client)) + 1
        pool = np.concatenate([members[c] for c in order[: max(classes, enough)]])
        indices.append(rng.choice(pool, examples_per_client, replace=False))
    return Partition("some classes", tuple(indices), len(labels))


def full_copies(examples: int, clients: int) -> Partition:
    """Give every client the whole training set, in the same order.

    Parameters
    ----------
    examples : int
        N.
    clients : int
        K: each example has as many holders.

    Returns
    -------
    Partition

    Raises
    ------
    InputError
        If a number is not a positive integer.
    """
    whole_number(1, examples=examples, clients=clients)
    return Partition("full copies", (np.arange(examples),) * clients, examples)


def iid(
    examples: int, clients: int, examples_per_client: int, rng: np.random.Generator
) -> Partition:
    """Give each client examples drawn at random, without regard to class.

    A permutation of the training set serves as many clients as it has full portions; then a new one
    begins.

    Parameters
    ----------
    examples : int
        N.
    clients : int
        K.
    examples_per_client : int
        At most N.
    rng : numpy.random.Generator

    Returns
    -------
    Partition
        Disjoint if ``clients <= N // examples_per_client``. Otherwise an example has at most
        ``ceil(clients / (N // examples_per_client))`` holders. No client holds an example twice.

    Raises
    ------
    InputError
        If a number is not a positive integer, or examples_per_client is more than N.

    Examples
    --------
    >>> iid(10, 6, 3, np.random.default_rng(0)).kinds() >= {(1, 1)}
    True
    """
    whole_number(1, examples=examples, clients=clients, examples_per_client=examples_per_client)
    in_range(1, examples, examples_per_client=examples_per_client)
    portions = examples // examples_per_client
    indices: list[np.ndarray] = []
    while len(indices) < clients:
        served = rng.permutation(examples)[: portions * examples_per_client]
        indices.extend(served.reshape(portions, examples_per_client))
    return Partition("iid", tuple(indices[:clients]), examples)
