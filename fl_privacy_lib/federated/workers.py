"""Workers: the processes of a run, started here or joined where somebody else started them (``torchrun``, Slurm).

Every worker runs the same simulation. It trains its share of the round's blocks, all workers
exchange a few partial sums, and each takes the server's step for itself: the sums and their order
are the same everywhere, so the weights are.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.federated.groups import (
    ConnectionLost,
    Group,
    SingleProcess,
    WorkerError,
    describe,
    named_loss,
)

PATIENCE = timedelta(
    hours=1
)  # for a process that lives and does not come; one that has ended is noticed at once
STARTED = "started"


def current_group() -> SingleProcess | Group:
    """Return the group that this process belongs to, joining it if a launcher such as ``torchrun`` made one.

    Raises
    ------
    InputError
        If the environment speaks of several processes that cannot be joined.
    """
    if not dist.is_available():
        return SingleProcess()
    if not dist.is_initialized():
        _join_launched_group()
    return Group() if dist.is_initialized() else SingleProcess()


def _join_launched_group() -> None:
    """Join the processes that ``RANK`` and ``WORLD_SIZE`` speak of, until this process ends."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1" or "RANK" not in os.environ or multiprocessing.parent_process() is not None:
        return  # a child inherits these variables, but it is its parent that was launched
    try:
        dist.init_process_group("gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"WORLD_SIZE = {size} says that this is one of several processes, but they cannot be joined ({error}): "
            "start them with torchrun, or unset WORLD_SIZE."
        ) from None
    atexit.register(
        _leave_group
    )  # not sooner: a second group could not be told from the first in the same store


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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
        try:
            for rank in range(1, workers):
                receive, send = context.Pipe(duplex=False)
                task = (rank, workers, folder, send, run, arguments)
                helper = context.Process(target=run_worker, args=task, daemon=True)
                helper.start()
                send.close()
                helpers.append(helper)
                pipes.append(receive)
            torch.set_num_threads(1)
            _wait_until_started(pipes)
            _join(0, workers, folder)
            yield Group()
            for helper in helpers:
                helper.join()
        except ConnectionLost as error:
            if message := cause_of_failure(helpers, pipes):
                raise WorkerError(message) from error
            raise
        finally:
            torch.set_num_threads(before)
            for helper in helpers:
                if helper.is_alive():
                    helper.terminate()
                helper.join()
            _leave_group()


def _join(rank: int, size: int, folder: str) -> None:
    """Join the group over a file, since a port could be taken."""
    store = dist.FileStore(os.path.join(folder, "store"), size)
    with named_loss():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _wait_until_started(pipes: Sequence[Connection]) -> None:
    """Return when every worker has said that it runs; raise `ConnectionLost` if one ends before."""
    for pipe in pipes:
        try:
            if pipe.recv() == STARTED:
                continue
        except EOFError:
            pass
        raise ConnectionLost(
            "a worker ended before it began, its own output says why: a script that uses workers keeps what it runs "
            "under `if __name__ == '__main__':`, since every worker imports it."
        )


def run_worker(
    rank: int, size: int, folder: str, send: Connection, run: Callable[..., Any], arguments: tuple
) -> None:
    """Be one worker: join, run, and on an error say why."""
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C ends a worker at once; the first process raises
    try:
        torch.set_num_threads(1)
        send.send(STARTED)
        _join(rank, size, folder)
        run(*arguments)
        dist.destroy_process_group()
    except BaseException as error:
        send.send(
            (isinstance(error, ConnectionLost), f"worker {rank} ended with {describe(error)}")
        )
        os._exit(1)


def cause_of_failure(helpers: list[Any], pipes: list[Connection]) -> str:
    """Return what the worker that ended first said, or how it was killed; empty if nothing is known.

    A worker that only lost the connection is not the cause, unless there is no other.
    """
    ended = wait([helper.sentinel for helper in helpers], timeout=30)
    for helper in helpers:
        if helper.sentinel in ended:
            helper.join(
                timeout=30
            )  # a process closes its files, and so is seen to end, before its exit code is there
    codes = {rank: helper.exitcode or 0 for rank, helper in enumerate(helpers, 1)}
    silent = [
        f"worker {rank} was killed by signal {-code}" for rank, code in codes.items() if code < 0
    ]
    messages = []
    for pipe in pipes:
        try:
            while pipe.poll():
                messages.append(pipe.recv())
        except EOFError:
            continue
    messages = [message for message in messages if message != STARTED]
    causes = [text for lost_connection, text in messages if not lost_connection]
    return "; ".join(silent or causes or [text for _, text in messages])
