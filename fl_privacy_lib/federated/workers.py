"""Workers: the processes of a run, started here or joined where a launcher (``torchrun``) did it.

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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.federated.groups import ConnectionLost, Group, WorkerError, name_lost_connection

STARTED = "started"  # the number of workers that run, in the store
PATIENCE = timedelta(hours=1)  # with a silent process; one that has ended is noticed at once


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


def _join(store: dist.Store, rank: int, size: int) -> None:
    with name_lost_connection():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)


def _name_killed(helpers: list[Any]) -> str:
    """Return which workers were killed, and how; empty if they ended by themselves."""
    for helper in helpers:
        helper.join(timeout=30)  # without it, an exit code may come later than the end is seen
    killed = [(rank, -(helper.exitcode or 0)) for rank, helper in enumerate(helpers, 1)]
    return "; ".join(f"worker {rank} was killed by signal {n}" for rank, n in killed if n > 0)
