"""One round: who trains where, in which order updates are added, and the server's step.

Updates are added in float64, first within blocks of consecutive participants, then along a tree
over the blocks. Both depend on the participants alone, so the sum has the same bits for any chunk
size and any number of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.stage import ClientContext, Context
from fl_privacy_lib.federated.compiled.network import Network
from fl_privacy_lib.federated.compiled.participation import CompiledEngine
from fl_privacy_lib.federated.gradients import Loss, cross_entropy
from fl_privacy_lib.federated.participation import Engine, Examples, GenericEngine, Tap, Taps
from fl_privacy_lib.federated.reduction import Block
from fl_privacy_lib.federated.stacked import Stack
from fl_privacy_lib.federated.stacked_participation import StackedEngine
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan

Reports = dict[str, torch.Tensor]

BLOCKS = (
    64  # more would cost a pass over the parameters each, fewer would share badly among workers
)


@dataclass(frozen=True)
class Job:
    """What stays the same over all rounds of a simulation, and what every worker has to know.

    Attributes
    ----------
    form : the model in the form of the compiled or the stacked engine, or None for the generic path
    chunk : clients that the stacked engine takes together
    loss : what the clients minimise
    """

    model: nn.Module
    train: Examples
    partition: Partition
    plan: Plan
    defense: Defense
    form: Network | Stack | None
    chunk: int
    loss: Loss = cross_entropy

    def positions(self, client: int, round: int) -> list[np.ndarray]:
        """Return the positions in `train` of every local batch of a client."""
        own = self.partition.indices[client]
        return [own[batch] for batch in self.plan.batches(client, len(own), round)]

    def client_weights(self, round: int) -> dict[int, float]:
        """Return what each participant's update counts for in the aggregate, by client."""
        ids = [int(client) for client in self.plan.participants_of(round)]
        return self.plan.client_weights(ids, self.partition.sizes.tolist())


def blocks_of(ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the participants in at most `BLOCKS` blocks of equal width (the last may be shorter).

    >>> blocks_of([3, 5, 8])
    [(3,), (5,), (8,)]
    """
    width = -(-len(ids) // BLOCKS) or 1
    return [tuple(ids[i : i + width]) for i in range(0, len(ids), width)]


def block_sums(
    job: Job,
    weights: Parameters,
    round: int,
    blocks: Sequence[tuple[int, ...]],
    state: dict,
    taps: Taps,
) -> Iterator[Block]:
    """Yield each block's weighted sum of received updates, in float64, and what its clients reported."""
    ids = [client for block in blocks for client in block]
    ends = {block[-1] for block in blocks}
    total, reports = _zeros(weights), []
    shares = job.client_weights(round)
    for client, update, own in _updates(job, weights, round, ids, shares, state, taps):
        received = _arrive(job, update, client, shares[client], weights, round, state, taps, own)
        for name, u in received.items():
            total[name].add_(u[0], alpha=shares[client])  # the product, too, in float64
        reports.append(own)
        if client in ends:
            yield total, reports
            total, reports = _zeros(weights), []


def _zeros(weights: Parameters) -> Gradient:
    return {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}


def _updates(
    job: Job,
    weights: Parameters,
    round: int,
    ids: Sequence[int],
    shares: dict[int, float],
    state: dict,
    taps: Taps,
) -> Iterator[tuple[int, Gradient, Reports]]:
    """Yield every client's update as it leaves the client, in the order of ids: the one walk of a participation."""
    whole = (weights, job.train, job.plan, job.defense)
    generic = GenericEngine(job.model, *whole, job.loss, taps)
    engine: Engine = generic
    if isinstance(job.form, Network):
        engine = CompiledEngine(job.form, *whole)
    elif job.form is not None:
        engine = StackedEngine(job.form, *whole)
    for chunk in _chunks(job, round, ids, taps):
        contexts = [_context(job, client, shares[client], round, state) for client in chunk]
        if job.defense.begin_client:
            for ctx in contexts:
                job.defense.begin_client(ctx)
        batches = [job.positions(client, round) for client in chunk]
        updates = (generic if _watched(taps, chunk[0], round) else engine).train(batches, contexts)
        for client, update, ctx in zip(chunk, updates, contexts, strict=True):
            leaving = job.defense.apply("per_client", update, ctx)
            _keep_update(job, leaving, client, weights, round, taps)
            yield client, leaving, ctx.reports


def _keep_update(
    job: Job, update: Gradient, client: int, weights: Parameters, round: int, taps: Taps
) -> None:
    """Keep what stands at the taps 'update' and 'received', and the examples behind it."""
    for stage in (
        "update",
        "received",
    ):  # the server replaces the second by what its own stage makes of it
        tap = Tap(stage, client, round)
        if tap in taps.wanted:
            held = job.partition.indices[client]
            used = held[np.unique(np.concatenate(job.plan.batches(client, len(held), round)))]
            index = torch.as_tensor(used, device=job.train[0].device)
            truth = (job.train[0][index], job.train[1][index])
            taps.keep(
                tap,
                {name: u[0] for name, u in update.items()},
                weights,
                job.plan,
                job.defense,
                truth,
            )


def _watched(taps: Taps, client: int, round: int) -> bool:
    """Return whether somebody reads inside this client's iterations: then its gradients have to be formed."""
    return any(
        tap.stage in ("example", "batch") and (tap.client, tap.round) == (client, round)
        for tap in taps.wanted
    )


def _chunks(job: Job, round: int, ids: Sequence[int], taps: Taps) -> Iterator[list[int]]:
    """Yield the clients that are stacked together.

    On a CPU only clients whose batches have equal sizes are stacked: padding changes the shape of a
    product and with it the last bits. On a GPU, where the bits are not promised, padding costs less
    than standing alone.
    """
    on_cpu = job.train[0].device.type == "cpu"
    unequal = job.plan.batch_sampling == "poisson"
    width = 1 if not isinstance(job.form, Stack) or (on_cpu and unequal) else job.chunk
    chunk: list[int] = []
    for client in ids:
        if _watched(taps, client, round):
            if chunk:
                yield chunk
            yield [client]
            chunk = []
            continue
        chunk.append(client)
        if len(chunk) == width:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _context(job: Job, client: int, share: float, round: int, state: dict) -> ClientContext:
    """Return the context of one participation: its own generator, weight and reports."""
    device = job.train[0].device
    generators = [keyed_generator(device, job.plan.seed, round, client)]
    return ClientContext(
        round, (client,), generators, torch.tensor([share], device=device), state,
        batch_size=job.plan.batch_size, model=job.model,
    )  # fmt: skip


def _arrive(
    job: Job,
    update: Gradient,
    client: int,
    share: float,
    weights: Parameters,
    round: int,
    state: dict,
    taps: Taps,
    reports: Reports,
) -> Gradient:
    """Pass one client's update through the server's on_arrival stage and its tap; it adds to the client's reports."""
    if job.defense.on_arrival is None:
        return update
    device = next(iter(update.values())).device
    key = keyed_generator(device, job.plan.seed, round, client, "arrival")
    weight = torch.tensor([share], device=device)
    received = job.defense.apply(
        "on_arrival", update, Context(round, (client,), [key], weight, state, reports)
    )
    tap = Tap("received", client, round)
    taps.keep(tap, {name: u[0] for name, u in received.items()}, weights, job.plan, job.defense)
    return received


def serve(
    job: Job,
    weights: Parameters,
    round: int,
    ids: tuple[int, ...],
    total: Block | None,
    state: dict,
    taps: Taps,
) -> Parameters:
    """Pass the round's sum through on_aggregate and its tap, and take the server's step."""
    device = job.train[0].device
    server = Context(
        round, ids, [keyed_generator(device, job.plan.seed, round, "server")], state=state
    )
    added, reports = total or (_zeros(weights), [])
    for own in reports:
        for name, value in own.items():
            server.report(name, value)
    mean = {name: t[None].to(weights[name].dtype) for name, t in added.items()}  # [1, …]
    aggregate = {name: m[0] for name, m in job.defense.apply("on_aggregate", mean, server).items()}
    taps.keep(Tap("aggregate", round=round), aggregate, weights, job.plan, job.defense)
    return {name: w + job.plan.server_lr * aggregate[name] for name, w in weights.items()}
