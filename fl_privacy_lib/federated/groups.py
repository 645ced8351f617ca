"""Groups: the processes of a run, their shares of a round, and what they exchange.

All sums are added along one tree, in an order that does not depend on who adds what. What fails in
one process is known to all of them before they meet again, so that none waits for another in vain.
"""

import io
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.federated.participation import Taps
from fl_privacy_lib.federated.reduction import Block, Node, nodes_within, tree_sum


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
