"""How the data lie among the clients: what accounting has to know beside the plan."""

from dataclasses import dataclass

from fl_privacy_lib._checks import refuse, whole_number
from fl_privacy_lib.data.partition import Partition


@dataclass(frozen=True)
class Holding:
    """What a plan does not know: how the data lie among clients, and a gradient's tensors.

    Parameters
    ----------
    examples : int
        N, different examples of the training set.
    client_size : int
        n, examples of the smallest client, repeats counted.
    tensors : int
        M, tensors of the model that are clipped one by one.
    holders : int
        Clients that hold a given example, at most.
    repeats : int
        Times that one client holds a given example, at most.
    largest_client : int or None
        Examples of the largest client; None: all are equal. Only the client level under Poisson
        batches needs it.
    kinds : tuple of tuples
        How often each holder of an example has it, for every kind of example, see
        `Partition.kinds`; (): all `holders` have it `repeats` times.

    Examples
    --------
    >>> Holding(50_000, 500, 3).holders
    1
    """

    examples: int
    client_size: int
    tensors: int
    holders: int = 1
    repeats: int = 1
    largest_client: int | None = None
    kinds: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        counts = ("examples", "client_size", "tensors", "holders", "repeats")
        whole_number(1, **{name: getattr(self, name) for name in counts})
        largest = self.largest_client or self.client_size
        whole_number(self.client_size, largest_client=largest)
        refuse({f"repeats = {self.repeats} is more than the {largest} examples of the largest "
                "client: lower it.": self.repeats > largest})  # fmt: skip

    @classmethod
    def of(cls, partition: Partition, tensors: int) -> "Holding":
        """Return what a partition's examples and clients are at worst."""
        kinds = tuple(sorted(partition.kinds(), reverse=True))
        return cls(
            partition.examples,
            int(partition.sizes.min()),
            tensors,
            max(map(len, kinds)),
            kinds[0][0],
            int(partition.sizes.max()),
            kinds if kinds[0][0] > 1 else (),
        )
