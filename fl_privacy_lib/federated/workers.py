"""Workers: the participants of a round shared among processes, with one exchange a round.

Every worker runs the same simulation. It trains its share of the round's blocks, all workers exchange the blocks' sums,
and each takes the server's step for itself: the sums and their order are the same everywhere, so the weights are too.
The same code runs where somebody else started the processes (``torchrun``) and initialised ``torch.distributed``.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Taps

Block = tuple[Gradient, list[dict[str, torch.Tensor]]]


class WorkerError(RuntimeError):
    """A worker ended before the run did; the message is the worker's own."""


class Alone:
    """One process: every block is its own."""

    rank, size = 0, 1

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        return blocks

    def exchange(self, mine: Iterator[Block], count: int, kept: Taps) -> Iterator[Block]:
        """Return all blocks in order."""
        return mine


class Group:
    """The processes of an initialised ``torch.distributed`` group, each with a run of consecutive blocks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def _bounds(self, count: int) -> list[int]:
        return [count * r // self.size for r in range(self.size + 1)]

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        bounds = self._bounds(len(blocks))
        return blocks[bounds[self.rank] : bounds[self.rank + 1]]

    def exchange(self, mine: Iterator[Block], count: int, kept: Taps) -> Iterator[Block]:
        """Return all blocks of all workers in order; `kept` is filled with what the others' taps hold.

        One gathering of tensors of one shape. Side values and observations, where a worker has any, follow as objects.
        """
        own = list(mine)
        if count == 0:  # a round without participants
            return iter(())
        bounds = self._bounds(count)
        widest = max(b - a for a, b in pairwise(bounds))
        extras: list[Any] = [None] * self.size
        names = [(name, t.shape, t.device) for name, t in own[0][0].items()] if own else None
        dist.all_gather_object(extras, (names, [reports for _, reports in own], (kept.observations, kept.truth)))
        shapes = next(entry[0] for entry in extras if entry[0])
        here = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        rows = torch.zeros(widest, sum(shape.numel() for _, shape, _ in shapes), dtype=torch.float64, device=here)
        for row, (block, _) in zip(rows, own, strict=False):
            row.copy_(torch.cat([t.flatten() for t in block.values()]))
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(gathered, rows)
        for _, _, (observations, truth) in extras:
            kept.observations.update(observations)
            kept.truth.update(truth)
        return self._in_order(gathered, extras, shapes)

    def _in_order(self, gathered: list[torch.Tensor], extras: list[Any], shapes: list[Any]) -> Iterator[Block]:
        for rows, (_, reports, _) in zip(gathered, extras, strict=True):
            for row, own in zip(rows, reports, strict=False):
                parts = torch.split(row, [shape.numel() for _, shape, _ in shapes])
                yield {n: p.view(s).to(d) for p, (n, s, d) in zip(parts, shapes, strict=True)}, own


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
    wait([helper.sentinel for helper in helpers], timeout=5)
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
