"""One round: who trains where, in which order updates are added, and the server's step.

Updates are added in float64, first within blocks of consecutive participants, then along a tree
over the blocks. Both depend on the participants alone, so the sum has the same bits for any chunk
size and any number of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from types import NoneType

import numpy as np
import torch
from torch import nn

from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses import (
    ClientContext,
    Context,
    Defense,
    Gradient,
    keyed_generator,
    layer_norms,
)
from fl_privacy_lib.federated.compiled.engine import CompiledEngine
from fl_privacy_lib.federated.compiled.network import Network
from fl_privacy_lib.federated.gradients import Loss, cross_entropy, example_gradients
from fl_privacy_lib.federated.groups import Block
from fl_privacy_lib.federated.local_steps import local_steps
from fl_privacy_lib.federated.participation import Examples, Tap, Taps
from fl_privacy_lib.federated.stacked import Stack, StackedEngine
from fl_privacy_lib.models import Parameters
from fl_privacy_lib.sampling import Plan

# more would cost a pass over the parameters each, fewer would share badly among workers
BLOCKS = 64


@dataclass(frozen=True)
class Job:
    """What stays the same in all rounds of a simulation, and what every worker has to know.

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

    @property
    def engine(self) -> str:
        """Name of the engine that takes the clients in whose iterations nobody reads."""
        return {Network: "compiled", Stack: "stacked", NoneType: "generic"}[type(self.form)]

    def positions(self, client: int, round: int) -> list[np.ndarray]:
        """Return the positions in `train` of every local batch of a client."""
        held = self.partition.indices[client]
        return [held[batch] for batch in self.plan.batches(client, len(held), round)]


@dataclass(frozen=True)
class GenericEngine:
    """Gradients by automatic differentiation, client by client: any model, any rule, every tap.

    It is the oracle of the faster engines. An engine computes the local iterations of some clients;
    the rest of a round is done here.

    Parameters
    ----------
    weights : the global model, without a client axis
    """

    job: Job
    weights: Parameters
    taps: Taps

    def train(
        self, batches: Sequence[Sequence[np.ndarray]], contexts: Sequence[ClientContext]
    ) -> list[Gradient]:
        """Return each client's weights after its last iteration minus those before its first.

        Parameters
        ----------
        batches : for each client, L arrays of positions in the training examples
        contexts : one for each client, alone: what a stage sees does not depend on who is computed
            beside it

        Returns
        -------
        one update a client, tensors [1, …], before the stage per_client
        """
        return list(map(self._client, batches, contexts))

    def _client(self, batches: Sequence[np.ndarray], ctx: ClientContext) -> Gradient:
        job, (inputs, labels) = self.job, self.job.train
        # accumulated apart from the weights: subtracting these at the end would lose low-order bits
        update = {name: torch.zeros_like(w)[None] for name, w in self.weights.items()}  # [1, …]
        step = local_steps(job.plan, update)
        for iteration, positions in enumerate(batches):
            ctx.iteration = iteration
            index = torch.as_tensor(positions, device=inputs.device)
            x, y = inputs[index], labels[index]
            local = {name: w + update[name] for name, w in self.weights.items()}  # [1, …]
            gradients = example_gradients(job.model, local, x[None], y[None], job.loss)
            ctx.examples, ctx.norms = (x[None], y[None]), layer_norms(gradients, leading=2)
            example, batch = job.defense.local_step(gradients, ctx)
            before = {name: w[0] for name, w in local.items()}
            for stage, values in (("example", example), ("batch", batch)):
                tap = Tap(stage, ctx.clients[0], ctx.round, iteration)
                self.taps.keep(tap, {n: v[0] for n, v in values.items()}, before, (x, y))
            step(batch)
        return update


def blocks_of(ids: Sequence[int]) -> list[Sequence[int]]:
    """Return the participants in at most `BLOCKS` blocks of equal width (the last may be shorter).

    >>> blocks_of((3, 5, 8))
    [(3,), (5,), (8,)]
    """
    return _pieces(ids, -(-len(ids) // BLOCKS) or 1)


def _pieces(ids: Sequence[int], width: int) -> list[Sequence[int]]:
    return [ids[i : i + width] for i in range(0, len(ids), width)]


def block_sums(
    job: Job,
    weights: Parameters,
    round: int,
    blocks: Sequence[Sequence[int]],
    state: dict,
    taps: Taps,
) -> Iterator[Block]:
    """Yield each block's weighted sum of received updates, in float64, and its clients' reports."""
    ids = list(chain.from_iterable(blocks))
    participations = _participations(job, weights, round, ids, state, taps)
    for block in blocks:
        total, reports = _zeros(weights), []
        for update, ctx in islice(participations, len(block)):
            received = _arrive(job, update, ctx, weights, taps)
            for name, u in received.items():
                # the product, too, in float64
                total[name].add_(u[0], alpha=1 / job.plan.participants)
            reports.append(ctx.reports)
        yield total, reports


def _zeros(weights: Parameters) -> Gradient:
    return {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}


def _participations(
    job: Job,
    weights: Parameters,
    round: int,
    ids: Sequence[int],
    state: dict,
    taps: Taps,
) -> Iterator[tuple[Gradient, ClientContext]]:
    """Yield every client's update as it leaves the client, in the order of ids, and its context."""
    common = (weights, job.train, job.plan, job.defense)
    generic = GenericEngine(job, weights, taps)
    fast: GenericEngine | CompiledEngine | StackedEngine = generic
    together = 1
    if isinstance(job.form, Network):
        fast = CompiledEngine(job.form, *common)
    elif job.form is not None:
        fast = StackedEngine(job.form, *common)
        # only batches of equal sizes can be stacked
        together = 1 if job.plan.batch_sampling == "poisson" else job.chunk
    # where somebody reads inside a client's iterations, its gradients have to be formed
    inside = {t.client for t in taps.wanted if t.round == round and t.stage in ("example", "batch")}
    for watched, clients in groupby(ids, key=inside.__contains__):
        engine, width = (generic, 1) if watched else (fast, together)
        for chunk in _pieces(tuple(clients), width):
            contexts = [_begin(job, client, round, state) for client in chunk]
            batches = [job.positions(client, round) for client in chunk]
            for update, ctx in zip(engine.train(batches, contexts), contexts, strict=True):
                leaving = job.defense.apply("per_client", update, ctx)
                _keep_update(job, leaving, ctx, weights, taps)
                yield leaving, ctx


def _begin(job: Job, client: int, round: int, state: dict) -> ClientContext:
    """Return the context of one participation: its generator, weight and reports.

    What the defence draws for the whole participation is drawn here.
    """
    device = job.train[0].device
    ctx = ClientContext(
        round,
        clients=(client,),
        generators=[keyed_generator(device, job.plan.seed, round, client)],
        weights=torch.tensor([1 / job.plan.participants], device=device),
        state=state,
        batch_size=job.plan.batch_size,
        model=job.model,
    )
    if job.defense.begin_client:
        job.defense.begin_client(ctx)
    return ctx


def _keep_update(
    job: Job, update: Gradient, ctx: ClientContext, weights: Parameters, taps: Taps
) -> None:
    """Keep what stands at the taps 'update' and 'received', and the examples behind it."""
    (client,) = ctx.clients
    # the server replaces the second by what its own stage turns it into
    for tap in (Tap("update", client, ctx.round), Tap("received", client, ctx.round)):
        if tap in taps.wanted:
            held = job.partition.indices[client]
            batches = job.plan.batches(client, len(held), ctx.round)
            index = torch.as_tensor(held[np.unique(np.concatenate(batches))])
            x, y = (part[index.to(part.device)] for part in job.train)
            taps.keep(tap, {name: u[0] for name, u in update.items()}, weights, (x, y))


def _arrive(
    job: Job, update: Gradient, ctx: ClientContext, weights: Parameters, taps: Taps
) -> Gradient:
    """Pass one client's update through the server's on_arrival stage and its tap.

    What the stage reports is added to the client's reports.
    """
    if job.defense.on_arrival is None:
        return update
    (client,) = ctx.clients
    device = next(iter(update.values())).device
    generator = keyed_generator(device, job.plan.seed, ctx.round, client, "arrival")
    at_server = Context(ctx.round, ctx.clients, [generator], ctx.weights, ctx.state, ctx.reports)
    received = job.defense.apply("on_arrival", update, at_server)
    tap = Tap("received", client, ctx.round)
    taps.keep(tap, {name: u[0] for name, u in received.items()}, weights)
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
    generator = keyed_generator(job.train[0].device, job.plan.seed, round, "server")
    server = Context(
        round,
        ids,
        [generator],
        torch.full((len(ids),), 1 / job.plan.participants),
        state,
        batch_size=job.plan.participants,
    )
    added, reports = total or (_zeros(weights), [])
    for client_reports in reports:
        for name, value in client_reports.items():
            server.report(name, value)
    mean = {name: t[None].to(weights[name].dtype) for name, t in added.items()}  # [1, …]
    aggregate = {name: m[0] for name, m in job.defense.apply("on_aggregate", mean, server).items()}
    taps.keep(Tap("aggregate", round=round), aggregate, weights)
    factor, rate = job.plan.weight_factor, job.plan.server_lr
    return {name: factor * (w + rate * aggregate[name]) for name, w in weights.items()}
