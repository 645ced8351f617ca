"""The simulation: rounds of participations, arrival, aggregation and evaluation."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from fl_privacy_lib._checks import InputError, one_of, positive
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.federated import checkpoints
from fl_privacy_lib.federated.compiled import compiled_form, compiled_hits
from fl_privacy_lib.federated.compiled.network import Network
from fl_privacy_lib.federated.gradients import Loss, cross_entropy
from fl_privacy_lib.federated.participation import Observation, Tap, Taps
from fl_privacy_lib.federated.rounds import Examples, Job, block_sums, blocks_of, serve
from fl_privacy_lib.federated.stacked import Stack, stack
from fl_privacy_lib.federated.stacked_participation import fusible
from fl_privacy_lib.federated.workers import Alone, Group, group_of_now, launched
from fl_privacy_lib.models import Parameters, check_per_example, parameters_of
from fl_privacy_lib.sampling import Plan

ENGINES = ("compiled", "stacked", "generic")  # the fastest first
CPU_CHUNK = 4  # measured: fewer pay Python more often, more leave the cache


@dataclass(frozen=True)
class RoundReport:
    """One finished round: its number (from 0), who took part, and the accuracy if it was evaluated."""

    round: int
    participants: tuple[int, ...]
    accuracy: float | None


@dataclass(frozen=True)
class Run:
    """The outcome of a simulation.

    Attributes
    ----------
    weights : the global model after the last round
    history : one `RoundReport` a round
    observations : what each tap that was asked for holds
    truth : the examples behind each client-side tap, for scoring only; no attack may read it
    engine : the one that was taken, 'compiled', 'stacked' or 'generic'
    """

    weights: Parameters
    history: tuple[RoundReport, ...]
    observations: dict[Tap, Observation]
    truth: dict[Tap, Examples]
    engine: str = "generic"


def accuracy(model: nn.Module, weights: Parameters, examples: Examples, chunk: int = 2000) -> float:
    """Return the fraction of examples whose largest logit is their label."""
    x, y = examples
    if len(y) == 0:
        raise InputError("accuracy needs at least one example; this evaluation set is empty.")
    with torch.no_grad():
        hits = [
            (functional_call(model, weights, (x[i : i + chunk],)).argmax(-1) == y[i : i + chunk]).sum()
            for i in range(0, len(y), chunk)
        ]
    return float(torch.stack(hits).sum()) / len(y)


def simulate(
    model: nn.Module,
    train: Examples,
    partition: Partition,
    plan: Plan,
    defense: Defense,
    *,
    loss: Loss = cross_entropy,
    taps: Iterable[Tap] = (),
    evaluation: Examples | None = None,
    evaluate_every: int = 1,
    on_round: Callable[[RoundReport], None] | None = None,
    engine: str | Sequence[str] = "generic",
    clients_per_chunk: int | None = None,
    workers: int = 1,
    checkpoint: Path | None = None,
    resume: bool = False,
) -> Run:
    """Train a model federatedly under a defence and keep what stands at the taps asked for.

    Parameters
    ----------
    model : its present parameters are round 0's; they are not changed
    train : examples [N, …] in float, labels [N]; on the device where everything shall run
    partition : who holds which examples
    plan : who takes part, in which batches, for how long
    defense : what fills the five stages
    loss : what the clients minimise; another one than the cross-entropy takes the generic path
    taps : (stage, client, round, iteration) to keep; nothing else is
    evaluation : examples to measure the accuracy on, every `evaluate_every` rounds and after the last
    on_round : called with each round's report, e.g. a progress bar's update
    engine : {'auto', 'compiled', 'stacked', 'generic'}, or several of the last three in order of preference
        'generic' takes every example's gradient by automatic differentiation, one client at a time: any model.
        'stacked' is faster for the layers that `federated.layers` knows and for defences whose local
        stages are data. 'compiled' is the fastest, for the papers' CNN and MLP, on a CPU with numba installed, and
        knows the rules that follow norms, too. 'auto' takes the fastest that can do the work; it is no default, since
        a tap on `example` then changes draws. All give equal gradients up to rounding and noise of the same
        distribution, but not the same draws. A client whose `example` or `batch` tap is asked for takes the
        generic path in that round.
    clients_per_chunk : int or None
        Clients stacked together; None: four on a CPU, where the cache is what counts, all on a GPU. On a CPU it
        changes no bit of the result.
    workers : int, processes with one thread each that share every round's participants; on a CPU they change no
        bit of the result. Under ``torchrun``, with torch.distributed initialised, its processes are the workers;
        the first one's `Run` is complete, the others' have no accuracies.
    checkpoint : Path or None, where to keep the state after every round
    resume : bool, continue bit-identically from the checkpoint, if there is one

    Raises
    ------
    InputError
        If the model mixes the examples of a batch, the partition has another number of clients than the plan,
        a tap lies outside the plan, or noise per example meets Poisson batches (the noise on the batch would
        depend on the batch's secret size).
    """
    check_per_example(model)
    if plan.batch_sampling == "poisson" and defense.per_example and defense.per_example.noise_scale:
        raise InputError(
            f"{defense.name} noises each example, but under batch_sampling = 'poisson' the number of examples varies "
            "and an empty batch would carry no noise at all: put the noise on the batch, fed_cdp(\"batch\")."
        )
    positive(workers=workers, clients_per_chunk=clients_per_chunk or 1)
    fast = _engine(model, train, plan, defense, engine, clients_per_chunk, loss)
    job = Job(model, train, partition, plan, defense, *fast, loss)
    kept = Taps.at(taps)
    _check(job, kept, workers)
    start = checkpoints.load(checkpoint, job, kept) if resume and checkpoint else None
    if start is None:
        weights = {name: w.to(train[0].device) for name, w in parameters_of(model).items()}
        start = weights, defense.initial_state() if defense.initial_state else {}, []
    watch = _Watch(evaluation, evaluate_every, on_round, checkpoint)
    if workers == 1 or dist.is_initialized():
        return _run(job, start, kept, watch, group_of_now())
    with launched(workers, _help, job, start, kept) as group:
        return _run(job, start, kept, watch, group)


@dataclass(frozen=True)
class _Watch:
    """What only the first process does: evaluate, report, keep."""

    evaluation: Examples | None = None
    every: int = 1
    on_round: Callable[[RoundReport], None] | None = None
    checkpoint: Path | None = None


Start = tuple[Parameters, dict, list[tuple]]


def _help(job: Job, start: Start, kept: Taps) -> None:
    """Be one of the other processes."""
    _run(job, start, kept, _Watch(), Group())


def _run(job: Job, start: Start, kept: Taps, watch: _Watch, group: Alone | Group) -> Run:
    """Run the rounds that are left, as one process of the group."""
    (weights, state, past), plan = start, job.plan
    history = [RoundReport(round, tuple(ids), score) for round, ids, score in past]
    for round in range(len(history), plan.rounds):
        ids = tuple(int(c) for c in plan.participants_of(round))
        blocks = blocks_of(ids)
        mine = block_sums(job, weights, round, group.share(blocks), state, kept)
        weights = serve(job, weights, round, ids, group.sum(mine, len(blocks), weights, kept), state, kept)
        first = group.rank == 0
        due = first and watch.evaluation is not None and ((round + 1) % watch.every == 0 or round + 1 == plan.rounds)
        score = _score(job, weights, watch.evaluation) if due and watch.evaluation else None
        history.append(RoundReport(round, ids, score))
        if first and watch.checkpoint:
            past = [(r.round, r.participants, r.accuracy) for r in history]
            checkpoints.save(watch.checkpoint, job, weights, state, past, kept)
        if first and watch.on_round:
            watch.on_round(history[-1])
    engine = "compiled" if isinstance(job.form, Network) else "stacked" if job.form else "generic"
    return Run(weights, tuple(history), kept.observations, kept.truth, engine)


def _score(job: Job, weights: Parameters, evaluation: Examples) -> float:
    """Return the accuracy, through the kernel where it takes these examples as well."""
    form = compiled_form(job.model, evaluation) if isinstance(job.form, Network) and len(evaluation[1]) else None
    return compiled_hits(form, weights, evaluation) / len(evaluation[1]) if isinstance(form, Network) else accuracy(
        job.model, weights, evaluation
    )


def _engine(
    model: nn.Module, train: Examples, plan: Plan, defense: Defense, engine: str | Sequence[str], chunk: int | None,
    loss: Loss,
) -> tuple[Network | Stack | None, int]:
    """Return the model in the form of the first engine that can do the work, and the clients per chunk.

    The form is None for the generic path.
    """
    names = ENGINES if engine == "auto" else (engine,) if isinstance(engine, str) else tuple(engine)
    for name in names:
        one_of(("auto", *ENGINES) if isinstance(engine, str) else ENGINES, engine=name)
    clients = chunk or (CPU_CHUNK if train[0].device.type == "cpu" else plan.participants)
    reason = ""
    for name in names:
        form: Network | Stack | str | None = None
        if name != "generic":
            build = compiled_form if name == "compiled" else _stacked_form
            form = build(model, train, defense) if loss is cross_entropy else f"the clients minimise {loss}, a loss"
        if not isinstance(form, str):
            return form, clients
        reason = reason or form
    raise InputError(f"engine = {engine!r} is not possible, since {reason} that it does not know: use 'auto'.")


def _stacked_form(model: nn.Module, train: Examples, defense: Defense) -> Stack | str:
    """Return the model in the stacked engine's form, or what that engine does not know."""
    if not fusible(defense):
        return f"the defence {defense.name!r} has a local rule"
    return stack(model, tuple(train[0].shape[1:])) or "the model has a layer"


def _check(job: Job, kept: Taps, workers: int) -> None:
    """Raise `InputError` unless partition, taps and workers fit the plan and the defence."""
    plan, defense = job.plan, job.defense
    if job.partition.clients != plan.clients:
        raise InputError(
            f"the partition has {job.partition.clients} clients, the plan {plan.clients}: make them equal."
        )
    for tap in kept.wanted:
        if tap.round >= plan.rounds or tap.client >= plan.clients or tap.iteration >= plan.local_iterations:
            raise InputError(
                f"{tap} lies outside the plan ({plan.rounds} rounds, {plan.clients} clients, "
                f"{plan.local_iterations} local iterations, all counted from 0)."
            )
    at_clients = (defense.begin_client, defense.per_batch, defense.per_client, defense.on_arrival)
    if workers > 1 and defense.initial_state and any(at_clients):
        raise InputError(
            f"the defence {defense.name!r} keeps a state that its clients may change, which workers would not "
            f"share: use workers = 1 (now {workers})."
        )
