"""Groups: the processes of a run, how they meet, their shares of a round, and what they exchange.

Processes are started here (`launch`), or joined where a launcher such as ``torchrun`` has done it.
Every one of them runs the same simulation. It trains its share of the round's blocks, all exchange
a few partial sums, and each takes the server's step for itself: the sums and their order are the
same everywhere, so the weights are.

All sums are added along one binary tree, so that their bits do not depend on who adds what. It
stands over the blocks 0 … n − 1 of a round's participants and halves its range at every node. A
process sums the nodes that lie wholly in its own run of blocks, and sends these few instead of all
its blocks. What fails in one process is known to all of them before they meet again, so that none
waits for another in vain.
"""

import atexit
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Taps

STARTED = "started"  # the number of workers that run, in the store
PATIENCE = timedelta(hours=1)  # with a silent process; one that has ended is noticed at once

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


def current_group() -> Group:
    """Return the group of this process; join it if a launcher such as ``torchrun`` made one.

    Raises
    ------
    InputError
        If the environment speaks of several processes that cannot be joined.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    # a child inherits these variables, but it is its parent that was launched
    was_launched = "RANK" in os.environ and multiprocessing.parent_process() is None
    if size != "1" and was_launched and not dist.is_initialized():
        try:
            dist.init_process_group("gloo", timeout=PATIENCE)
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"WORLD_SIZE = {size} says that this is one of several processes, but they cannot "
                f"be joined ({error}): start them with torchrun, or unset WORLD_SIZE."
            ) from None
        # not sooner: in the same store a second group could not be told from the first
        atexit.register(_leave_group)
    return Group()


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def launch(workers: int, run: Callable[..., Any], *arguments: Any) -> Iterator[Group]:
    """Start workers − 1 processes in a group with this one, and end them afterwards.

    Parameters
    ----------
    workers : number of processes, this one included
    run : what the others do, ``run(group, *arguments)``

    Raises
    ------
    InputError
        If the arguments cannot be sent to another process.
    WorkerError
        If a worker ends before this process does.
    """
    helpers: list[Any] = []
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="fl-privacy-") as folder:
        # the workers find each other by a file, since a port could be taken
        path = os.path.join(folder, "store")
        try:
            for rank in range(1, workers):
                helpers.append(_start(rank, workers, path, run, arguments))
            torch.set_num_threads(1)
            store = dist.FileStore(path, workers)
            while store.add(STARTED, 0) < len(helpers):
                if wait([helper.sentinel for helper in helpers], timeout=0.05):
                    raise ConnectionLost(
                        "a worker ended before it began, its own output says why: a script that "
                        "uses workers keeps what it runs under `if __name__ == '__main__':`, since "
                        "every worker imports it."
                    )
            _join(store, 0, workers)
            yield Group()
            for helper in helpers:
                helper.join()
        except ConnectionLost as error:
            if killed := _name_killed(helpers):
                raise WorkerError(killed) from error
            raise
        finally:
            torch.set_num_threads(threads)
            for helper in helpers:
                helper.terminate()
                helper.join()
            _leave_group()


def _start(rank: int, size: int, path: str, run: Callable[..., Any], arguments: tuple) -> Any:
    """Return a new process that is at work as a worker."""
    helper = mp.get_context("spawn").Process(
        target=_run_worker, args=(rank, size, path, run, arguments), daemon=True
    )
    try:
        helper.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"with workers = {size} the model and the defence must be importable by another "
            f"process ({error}): define their functions at the top of a module, or use workers = 1."
        ) from None
    return helper


def _run_worker(rank: int, size: int, path: str, run: Callable[..., Any], arguments: tuple) -> None:
    """Join the group and run; on an error, print it unless all processes know it, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the first process raises, others end
    try:
        end_with(os.getppid())
        torch.set_num_threads(1)
        store = dist.FileStore(path, size)
        store.add(STARTED, 1)
        _join(store, rank, size)
        run(Group(), *arguments)
        _leave_group()
    except BaseException as error:
        if not isinstance(error, InputError | WorkerError):
            traceback.print_exc()
        os._exit(1)  # an ordinary exit could wait for the group


def end_with(parent: int) -> None:
    """End this process soon after its parent has ended, in whatever way.

    Parameters
    ----------
    parent : the parent's process number
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _join(store: dist.Store, rank: int, size: int) -> None:
    with name_lost_connection():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _name_killed(helpers: list[Any]) -> str:
    """Return which workers were killed, and how; empty if they ended by themselves."""
    for helper in helpers:
        helper.join(timeout=30)  # without it, an exit code may come later than the end is seen
    killed = [(rank, -(helper.exitcode or 0)) for rank, helper in enumerate(helpers, 1)]
    return "; ".join(f"worker {rank} was killed by signal {n}" for rank, n in killed if n > 0)
