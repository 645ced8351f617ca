"""Groups: the processes of a run, their shares of a round, and what they exchange.

All sums are added along one tree, in an order that does not depend on who adds what; what fails in
one process is known to all of them before they meet again, so that none waits for another in vain.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.federated.participation import Observation, Taps
from fl_privacy_lib.federated.reduction import Block, Node, joined, nodes_within, tree_sum

LONGEST_MESSAGE = 4000  # characters; a pipe holds 64 KiB, and nobody reads it before the end


class WorkerError(RuntimeError):
    """A worker ended before the run did; the message is the worker's own."""


class ConnectionLost(WorkerError):
    """Another process ended without a word, or did not answer."""


class SingleProcess:
    """One process: all blocks are its share."""

    rank, size = 0, 1

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        return blocks

    def sum(
        self, mine: Iterator[Block], count: int, like: Gradient, taps: Taps, public: dict[str, Any]
    ) -> Block | None:
        """Return the sum of all blocks, None if there are none."""
        return tree_sum(mine, (0, count)) if count else None

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value."""
        return [value]

    def together(self) -> AbstractContextManager[None]:
        """Do a piece of work; there is nobody else to tell if it fails."""
        return nullcontext()


class Group:
    """The processes of an initialised ``torch.distributed`` group, each with a run of consecutive blocks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def _run(self, rank: int, count: int) -> tuple[int, int]:
        return count * rank // self.size, count * (rank + 1) // self.size

    def share(self, blocks: Sequence[Any]) -> Sequence[Any]:
        """Return this worker's part of the blocks."""
        return blocks[slice(*self._run(self.rank, len(blocks)))]

    def sum(
        self, mine: Iterator[Block], count: int, like: Gradient, taps: Taps, public: dict[str, Any]
    ) -> Block | None:
        """Return the sum of all workers' blocks; `taps` is filled with what the others' taps hold.

        One gathering of numbers. Side values and observations follow as objects, in rounds where a
        worker has any.

        Parameters
        ----------
        mine : this worker's blocks, computed as they are asked for
        count : number of blocks of all workers
        like : the model's parameters, for names and shapes
        public : ``Defense.public()``, which observations carry; it is the same everywhere and stays
            here
        """
        if count == 0:
            return None
        nodes = [nodes_within(*self._run(rank, count), (0, count)) for rank in range(self.size)]
        before = set(taps.observations)
        with self.together():
            partial = [tree_sum(mine, node) for node in nodes[self.rank]]
        new = set(taps.observations) - before
        widths = [w.numel() for w in like.values()]
        # the last column says that objects follow
        rows = torch.zeros(
            max(map(len, nodes)), sum(widths) + 1, dtype=torch.float64, device=self._device
        )
        for row, (total, _) in zip(rows, partial, strict=False):
            row[:-1] = torch.cat([total[name].flatten() for name in like])
        rows[:, -1] = bool(new) or any(any(reports) for _, reports in partial)
        gathered = self._gather_rows(rows)
        extras: list[Any] = [([[]] * len(of_rank), [], []) for of_rank in nodes]
        home = next(iter(like.values())).device
        if any(bool(values[0, -1]) for values in gathered):
            observed = [replace(taps.observations[tap], defense={}) for tap in new]
            behind = [(tap, taps.truth[tap]) for tap in new if tap in taps.truth]
            extras = self.gather(
                _moved(([r for _, r in partial], observed, behind), torch.device("cpu"))
            )
        sums: dict[Node, Block] = {}
        for of_rank, values, (reports, observed, behind) in zip(
            nodes, gathered, extras, strict=True
        ):
            for node, row, sides in zip(of_rank, values, reports, strict=False):
                parts = torch.split(row[:-1], widths)
                total = {
                    n: p.view(w.shape).to(w.device)
                    for p, (n, w) in zip(parts, like.items(), strict=True)
                }
                sums[node] = (total, _moved(sides, home))
            taps.observations.update(
                {o.tap: replace(_moved(o, home), defense=public) for o in observed}
            )
            taps.truth.update(_moved(dict(behind), home))
        return joined(sums, (0, count))

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of ranks; values are pickled."""
        values: list[Any] = [None] * self.size
        with named_loss():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do a piece of work that has no exchange in it; if it fails in one process, all of them raise.

        Raises
        ------
        InputError
            What another process raised, if that was an input that the user can mend.
        WorkerError
            If another process raised anything else; the message has its rank and its error.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failed = torch.full(
            (1, 1), float(failure is not None), dtype=torch.float64, device=self._device
        )
        if any(bool(flag) for flag in self._gather_rows(failed)):
            mendable = isinstance(failure, InputError)
            message = (
                str(failure)
                if mendable
                else failure and f"worker {self.rank} ended with {describe(failure)}"
            )
            others = self.gather((mendable, message))
            if failure:
                raise failure
            mendable, message = next(answer for answer in others if answer[1])
            raise InputError(message) if mendable else WorkerError(message)

    def _gather_rows(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return every process's rows, which have one shape."""
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        with named_loss():
            dist.all_gather(gathered, rows)
        return gathered


@contextmanager
def named_loss() -> Iterator[None]:
    """Turn what torch says when a process is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionLost(
            "another process of this run has ended or does not answer: its own output says why."
        ) from error


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in it on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(part, device) for part in value)
    if isinstance(value, Observation):
        return replace(
            value, values=_moved(value.values, device), weights=_moved(value.weights, device)
        )
    return value


def describe(error: BaseException) -> str:
    """Return an error's kind and message in one line or a few, of a length that a pipe holds."""
    return "".join(traceback.format_exception_only(error)).strip()[:LONGEST_MESSAGE]
