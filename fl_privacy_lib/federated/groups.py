"""Groups: the processes of a run, their shares of a round, and what they exchange.

All sums are added along one binary tree, so that their bits do not depend on who adds what. It
stands over the blocks 0 … n − 1 of a round's participants and halves its range at every node. A
process sums the nodes that lie wholly in its own run of blocks, and sends these few instead of all
its blocks. What fails in one process is known to all of them before they meet again, so that none
waits for another in vain.
"""

import io
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Taps

# a weighted sum of updates, float64, and what each client reported
Block = tuple[Gradient, list[dict[str, torch.Tensor]]]
Node = tuple[int, int]  # the blocks from the first to before the second


class WorkerError(RuntimeError):
    """A worker ended before the run did; the message is the worker's own."""


class ConnectionLost(WorkerError):
    """Another process ended without a word, or did not answer."""


class Group:
    """The processes of ``torch.distributed``, or this one alone where none has been initialised.

    Attributes
    ----------
    joined : whether there is a group of ``torch.distributed``
    rank, size : the number of this process, and of all
    """

    def __init__(self) -> None:
        self.joined = dist.is_initialized()
        self.rank = dist.get_rank() if self.joined else 0
        self.size = dist.get_world_size() if self.joined else 1

    def _bounds(self, count: int) -> tuple[int, int]:
        """Return where this process's blocks begin and end among `count`."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this process's consecutive part of the blocks."""
        return blocks[slice(*self._bounds(len(blocks)))]

    def sum(self, share: Iterator[Block], count: int, taps: Taps, device: torch.device) -> Block:
        """Return the sum of all processes' blocks; `taps` gets what the others' taps hold.

        Parameters
        ----------
        share : this process's blocks, computed as they are asked for
        count : number of blocks of all processes, at least 1
        device : where the sum and the observations shall lie
        """
        before = set(taps.observations)
        with self.together():
            nodes = nodes_within(*self._bounds(count), (0, count))
            partial = {node: tree_sum(node, {}, share) for node in nodes}
        sums: dict[Node, Block] = {}
        for other_sums, records in self.gather((partial, taps.records(but=before)), device):
            sums |= other_sums
            taps.restore(records)
        return tree_sum((0, count), sums, iter(()))

    def gather(self, value: Any, device: torch.device | str = "cpu") -> list[Any]:
        """Return every process's value, in the order of ranks, with its tensors on a device."""
        if self.size == 1:
            return [value]
        buffer, contents = io.BytesIO(), [b""] * self.size
        torch.save(value, buffer)
        with name_lost_connection():
            dist.all_gather_object(contents, buffer.getvalue())
        return [torch.load(io.BytesIO(c), device, weights_only=False) for c in contents]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do a piece of work without an exchange in it; if it fails in one process, all raise.

        Raises
        ------
        InputError
            What another process raised, if that was an input that the user can mend.
        WorkerError
            If another process raised anything else; the message has its rank and its error.
        """
        failure, message = None, ""
        try:
            yield
        except Exception as error:
            failure, message = error, str(error)
        mendable = isinstance(failure, InputError)
        if failure and not mendable:
            reason = "".join(traceback.format_exception_only(failure)).strip()
            message = f"worker {self.rank} ended with {reason}"
        answers = self.gather((mendable, message))
        if failure:
            raise failure
        for mendable, message in answers:
            if message:
                raise InputError(message) if mendable else WorkerError(message)


@contextmanager
def name_lost_connection() -> Iterator[None]:
    """Turn what torch says when a process is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionLost(
            "another process of this run has ended or does not answer: its own output says why."
        ) from error


def tree_sum(node: Node, sums: Mapping[Node, Block], blocks: Iterator[Block]) -> Block:
    """Return the sum below a node of the tree; log₂ n sums are held at a time.

    Parameters
    ----------
    sums : what is known of nodes further down
    blocks : a stream of the blocks below the node, for what is not
    """
    first, last = node
    if node in sums:
        return sums[node]
    if last - first == 1:
        return next(blocks)
    middle = (first + last) // 2
    total, reports = tree_sum((first, middle), sums, blocks)
    right, right_reports = tree_sum((middle, last), sums, blocks)
    for name, value in right.items():
        total[name] += value
    return total, reports + right_reports


def nodes_within(low: int, high: int, node: Node) -> list[Node]:
    """Return the largest nodes below `node` that together make up the blocks low … high − 1.

    >>> nodes_within(0, 5, (0, 10)), nodes_within(5, 10, (0, 10)), nodes_within(3, 7, (0, 10))
    ([(0, 5)], [(5, 10)], [(3, 5), (5, 7)])
    """
    first, last = node
    if low <= first and last <= high:
        return [node]
    if last <= low or high <= first:
        return []
    middle = (first + last) // 2
    return nodes_within(low, high, (first, middle)) + nodes_within(low, high, (middle, last))
