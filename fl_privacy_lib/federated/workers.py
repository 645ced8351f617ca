"""Workers: the participants of a round shared among processes, with one exchange a round.

Every worker runs the same simulation. It trains its share of the round's blocks, all workers exchange a few partial
sums, and each takes the server's step for itself: the sums and their order are the same everywhere, so the weights are.
The same code runs where somebody else started the processes (``torchrun``) and initialised ``torch.distributed``.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Taps
from fl_privacy_lib.federated.reduction import Block, Node, joined, nodes_within, tree_sum


class WorkerError(RuntimeError):
    """A worker ended before the run did; the message is the worker's own."""


class Alone:
    """One process: every block is its own."""

    rank, size = 0, 1

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        return blocks

    def sum(self, mine: Iterator[Block], count: int, like: Gradient, kept: Taps) -> Block | None:
        """Return the sum of all blocks, None if there are none."""
        return tree_sum(mine, (0, count)) if count else None


class Group:
    """The processes of an initialised ``torch.distributed`` group, each with a run of consecutive blocks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def _run(self, rank: int, count: int) -> tuple[int, int]:
        return count * rank // self.size, count * (rank + 1) // self.size

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        return blocks[slice(*self._run(self.rank, len(blocks)))]

    def sum(self, mine: Iterator[Block], count: int, like: Gradient, kept: Taps) -> Block | None:
        """Return the sum of all workers' blocks; `kept` is filled with what the others' taps hold.

        One gathering of numbers. Side values and observations follow as objects, in rounds where a worker has any.

        Parameters
        ----------
        mine : this worker's blocks, computed as they are asked for
        count : number of blocks of all workers
        like : the model's parameters, for names and shapes
        """
        if count == 0:
            return None
        nodes = [nodes_within(*self._run(rank, count), (0, count)) for rank in range(self.size)]
        own = [tree_sum(mine, node) for node in nodes[self.rank]]
        here = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        size = sum(w.numel() for w in like.values())
        # the last column says that objects follow
        rows = torch.zeros(max(map(len, nodes)), size + 1, dtype=torch.float64, device=here)
        for row, (total, reports) in zip(rows, own, strict=False):
            row[:-1] = torch.cat([total[name].flatten() for name in like])
            row[-1] = any(reports) or bool(kept.observations)
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(gathered, rows)
        extras: list[Any] = [([[]] * len(found), None) for found in nodes]
        if any(bool(rows[:, -1].any()) for rows in gathered):
            dist.all_gather_object(extras, ([reports for _, reports in own], (kept.observations, kept.truth)))
        sums: dict[Node, Block] = {}
        for found, numbers, (reports, held) in zip(nodes, gathered, extras, strict=True):
            for node, row, told in zip(found, numbers, reports, strict=False):
                parts = torch.split(row[:-1], [w.numel() for w in like.values()])
                total = {n: p.view(w.shape).to(w.device) for p, (n, w) in zip(parts, like.items(), strict=True)}
                sums[node] = (total, told)
            if held:
                kept.observations.update(held[0])
                kept.truth.update(held[1])
        return joined(sums, (0, count))


def group_of_now() -> Alone | Group:
    """Return the group this process belongs to: its own, unless torch.distributed has been initialised."""
    return Group() if dist.is_available() and dist.is_initialized() else Alone()


@contextmanager
def launched(workers: int, run: Callable[..., Any], *arguments: Any) -> Iterator[Group]:
    """Start workers − 1 processes that call ``run(*arguments)`` in a group with this one, and end them afterwards.

    Raises
    ------
    InputError
        If the arguments cannot be sent to another process.
    WorkerError
        If a worker ends with an error or is killed; the message is its own.
    """
    try:
        pickle.dumps([a for a in arguments if not torch.is_tensor(a)])
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"with workers = {workers} the model and the defence must be importable by another process ({error}): "
            "define their functions at the top of a module, or use workers = 1."
        ) from None
    context = mp.get_context("spawn")
    helpers, pipes = [], []
    before = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="fl-privacy-") as folder:
        for rank in range(1, workers):
            receive, send = context.Pipe(duplex=False)
            helper = context.Process(target=_work, args=(rank, workers, folder, send, run, arguments), daemon=True)
            helper.start()
            send.close()
            helpers.append(helper)
            pipes.append(receive)
        try:
            torch.set_num_threads(1)
            _join(0, workers, folder)
            yield Group()
            for helper in helpers:
                helper.join()
        except RuntimeError as error:
            if message := _last_words(helpers, pipes):
                raise WorkerError(message) from error
            raise
        finally:
            torch.set_num_threads(before)
            for helper in helpers:
                if helper.is_alive():
                    helper.terminate()
                helper.join()
            if dist.is_initialized():
                dist.destroy_process_group()


def _join(rank: int, size: int, folder: str) -> None:
    """Join the group over a file, since a port could be taken."""
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(hours=24))


def _work(rank: int, size: int, folder: str, send: Connection, run: Callable[..., Any], arguments: tuple) -> None:
    """Be one worker: join, run, and on an error say why."""
    try:
        torch.set_num_threads(1)
        _join(rank, size, folder)
        run(*arguments)
        dist.destroy_process_group()
    except BaseException as error:
        last = "".join(traceback.format_exception_only(error)).strip()
        send.send(f"worker {rank} ended with {last}")
        os._exit(1)


def _last_words(helpers: list[Any], pipes: list[Connection]) -> str:
    """Return what the worker that ended first said, or how it was killed; empty if all are well."""
    ended = wait([helper.sentinel for helper in helpers], timeout=30)
    for helper in helpers:
        if helper.sentinel in ended:
            helper.join(timeout=30)  # a process closes its files, and so is seen to end, before its exit code is there
    codes = {rank: helper.exitcode or 0 for rank, helper in enumerate(helpers, 1)}
    silent = [f"worker {rank} was killed by signal {-code}" for rank, code in codes.items() if code < 0]
    said = []
    for pipe in pipes:
        try:
            said += [pipe.recv()] if pipe.poll() else []
        except EOFError:
            continue
    causes = [message for message in said if "gloo" not in message]  # who only lost the connection is not the cause
    return "; ".join(silent or causes or said)
