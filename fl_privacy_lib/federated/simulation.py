"""The simulation: rounds of participations, arrival, aggregation and evaluation."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch
from torch import nn

from fl_privacy_lib._checks import InputError, one_of, refuse, whole_number
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses.limits import noisy
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.federated import checkpoints
from fl_privacy_lib.federated.compiled import compiled_form, compiled_hits
from fl_privacy_lib.federated.compiled.network import Network
from fl_privacy_lib.federated.gradients import Loss, cross_entropy
from fl_privacy_lib.federated.groups import Group, current_group, launch
from fl_privacy_lib.federated.participation import Observation, Tap, Taps
from fl_privacy_lib.federated.rounds import Examples, Job, block_sums, blocks_of, serve
from fl_privacy_lib.federated.stacked import Stack, stacked_form
from fl_privacy_lib.models import Parameters, call, check_per_example, parameters_of
from fl_privacy_lib.sampling import Plan

ENGINES = ("compiled", "stacked", "generic")  # the fastest first
CPU_CHUNK = 4  # measured: fewer pay Python more often, more leave the cache


@dataclass(frozen=True)
class RoundReport:
    """One finished round: its number from 0, who took part, the accuracy if it was evaluated."""

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
    observations : by tap, for the taps that were asked for
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
    refuse({"accuracy needs at least one example; this evaluation set is empty.": len(y) == 0})
    with torch.no_grad():
        hits = [
            (call(model, weights, x[i : i + chunk]).argmax(-1) == y[i : i + chunk]).sum()
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
    engine: str = "generic",
    clients_per_chunk: int | None = None,
    workers: int = 1,
    checkpoint: Path | str | None = None,
    save_every: int = 1,
    resume: bool = False,
) -> Run:
    """Train a model federatedly under a defence, and keep what stands at the taps.

    Parameters
    ----------
    model : its present parameters are round 0's; they are not changed
    train : examples [N, …] in float, labels [N]; on the device where everything shall run
    partition : who holds which examples
    plan : who takes part, in which batches, for how long
    defense : what fills the five stages
    loss : what the clients minimise; another one than the cross-entropy takes the generic path
    taps : (stage, client, round, iteration) to keep; nothing else is
    evaluation : examples to measure the accuracy on, every `evaluate_every` rounds and after the
        last
    on_round : called with each round's report, e.g. a progress bar's update
    engine : {'auto', 'compiled', 'stacked', 'generic'}
        'generic' takes every example's gradient by automatic differentiation, one client at a time:
        any model. 'stacked' is faster for the layers that `federated.layers` knows and for defences
        whose local stages are data. 'compiled' is the fastest, for the papers' CNN and MLP, on a
        CPU with numba installed, and knows the rules that follow norms, too. 'auto' takes the
        fastest that can do the work; it is no default, since a tap on `example` then changes draws.
        All give equal gradients up to rounding and noise of the same distribution, but not the same
        draws. A client whose `example` or `batch` tap is asked for takes the generic path in that
        round.
    clients_per_chunk : int or None
        Clients stacked together; None: four on a CPU, where the cache is what counts, all on a GPU.
        On a CPU it changes no bit of the result.
    workers : int, processes with one thread each that share every round's participants; on a CPU
        they change no bit of the result. Under ``torchrun`` its processes are the workers: this
        function joins them (with Gloo, unless torch.distributed is initialised already) and makes
        sure that all were given the same run. Only the first one evaluates, reports and saves; the
        others' `Run` has no accuracies of the rounds they trained.
    checkpoint : Path, str or None, where to save the state, every `save_every` rounds and after the
        last; a file of the first process
    resume : bool, continue bit-identically from the checkpoint, if there is one; the first process
        reads it and sends it to the others

    Raises
    ------
    InputError
        If the model mixes the examples of a batch, the partition has another number of clients than
        the plan, a tap lies outside the plan, or noise per example meets Poisson batches (the noise
        on the batch would depend on the batch's secret size); if the processes of a group were not
        given the same run; if a checkpoint is damaged or belongs to another run.
    WorkerError
        If another process of the run fails.
    """
    group = current_group()
    monitor = Monitor(
        evaluation, evaluate_every, on_round, Path(checkpoint) if checkpoint else None, save_every
    )
    collected = Taps(frozenset(taps), plan, defense)
    with group.together():  # what is wrong in one process, all have to know
        refuse({
            f"examples or labels are a {type(part).__name__}: make them a tensor, "
            "torch.from_numpy(…).": not torch.is_tensor(part)
            for part in (*train, *(evaluation or ()))
        } | {f"{len(x)} examples have {len(y)} labels: give each example one.": len(x) != len(y)
             for x, y in (train, evaluation or train)
        } | {"this evaluation set is empty: leave it out.": bool(evaluation)
             and not len((evaluation or train)[1])})  # fmt: skip
        check_per_example(model)
        whole_number(1, workers=workers, evaluate_every=evaluate_every, save_every=save_every,
                     clients_per_chunk=1 if (c := clients_per_chunk) is None else c)  # fmt: skip
        form = _form(model, train, plan, defense, engine, loss)
        chunk = CPU_CHUNK if train[0].device.type == "cpu" else plan.participants
        job = Job(model, train, partition, plan, defense, form, clients_per_chunk or chunk, loss)
        _check(job, collected, group, workers)
        if checkpoint or group.size > 1:
            monitor.parts = checkpoints.fingerprint(job, collected.wanted)
    if differing := checkpoints.disagreement(
        group.gather(monitor.parts | checkpoints.surroundings(job))
    ):
        raise InputError(
            f"the {group.size} processes were not given the same run ({differing}): start all of "
            "them with one script, the same settings, seeds, data and versions."
        )
    start = _start(job, collected, monitor, resume, group)
    if workers == 1 or group.joined:
        return _run(group, job, start, collected, monitor)
    # more would have no client to train
    with launch(min(workers, plan.participants), _run, job, start, collected) as started:
        return _run(started, job, start, collected, monitor)


def evaluate(model: nn.Module, weights: Parameters, examples: Examples, compiled: bool) -> float:
    """Return the accuracy, by the compiled engine's kernel if it may serve and takes the examples.

    Otherwise an evaluation costs as much as rounds do.
    """
    form = compiled_form(model, examples) if compiled and len(examples[1]) else None
    if isinstance(form, Network):
        return compiled_hits(form, weights, examples) / len(examples[1])
    return accuracy(model, weights, examples)


@dataclass
class Monitor:
    """What only the first process does: evaluate, report, save."""

    evaluation: Examples | None = None
    every: int = 1
    on_round: Callable[[RoundReport], None] | None = None
    checkpoint: Path | None = None
    save_every: int = 1
    parts: checkpoints.Fingerprint = field(default_factory=dict)

    def accuracy_after(self, job: Job, weights: Parameters, round: int) -> float | None:
        """Return the accuracy if this round is one to evaluate."""
        if self.evaluation is None or not is_due(self.every, job.plan, round):
            return None
        return evaluate(job.model, weights, self.evaluation, isinstance(job.form, Network))

    def note(
        self, job: Job, weights: Parameters, state: dict, history: list[RoundReport], taps: Taps
    ) -> None:
        """Save the state after the last round if it is one to save, and report it."""
        if self.checkpoint and is_due(self.save_every, job.plan, history[-1].round):
            start = (weights, state, [astuple(report) for report in history])
            checkpoints.save(self.checkpoint, self.parts, start, taps)
        if self.on_round:
            self.on_round(history[-1])


def is_due(every: int, plan: Plan, round: int) -> bool:
    """Return whether a round is one of every so many, or the last."""
    return (round + 1) % every == 0 or round + 1 == plan.rounds


def _start(job: Job, taps: Taps, monitor: Monitor, resume: bool, group: Group) -> checkpoints.Start:
    """Return where the run begins: at the first process's checkpoint, or at round 0."""
    path, content = monitor.checkpoint, None
    with group.together():
        if path and group.rank == 0:
            content = checkpoints.read(path, resume)
    content, path = group.gather((content, path))[0]
    with group.together():
        if content is not None and path:
            return checkpoints.restore(content, path, monitor.parts, job, taps)
    weights = {name: w.to(job.train[0].device) for name, w in parameters_of(job.model).items()}
    return weights, job.defense.initial_state() if job.defense.initial_state else {}, []


def _run(
    group: Group, job: Job, start: checkpoints.Start, taps: Taps, monitor: Monitor | None = None
) -> Run:
    """Run the rounds that are left, as one process of the group.

    Parameters
    ----------
    monitor : what the first process does besides; the others leave it alone, or have none
    """
    (weights, state, past), plan = start, job.plan
    monitor = monitor if monitor and group.rank == 0 else Monitor()
    history = [RoundReport(*report) for report in past]
    for round in range(len(history), plan.rounds):
        ids = tuple(int(c) for c in plan.participants_of(round))
        blocks = blocks_of(ids)
        sums = block_sums(job, weights, round, group.share(blocks), state, taps)
        total = group.sum(sums, len(blocks), taps, job.train[0].device) if blocks else None
        with group.together():
            weights = serve(job, weights, round, ids, total, state, taps)
            history.append(RoundReport(round, ids, monitor.accuracy_after(job, weights, round)))
            monitor.note(job, weights, state, history, taps)
    return Run(weights, tuple(history), taps.observations, taps.truth, job.engine)


def _form(
    model: nn.Module,
    train: Examples,
    plan: Plan,
    defense: Defense,
    engine: str,
    loss: Loss,
) -> Network | Stack | None:
    """Return the model in the form of the first engine that can do the work, None for 'generic'."""
    one_of(("auto", *ENGINES), engine=engine)
    for name in ENGINES if engine == "auto" else (engine,):
        if name == "generic":
            return None
        form: Network | Stack | str = f"the clients minimise {loss}, a loss"
        if plan.local_optimizer != "sgd" and name == "stacked":
            form = f"local_optimizer = {plan.local_optimizer!r} is one"
        elif loss is cross_entropy:
            form = (compiled_form if name == "compiled" else stacked_form)(model, train, defense)
        if not isinstance(form, str):
            return form
    raise InputError(
        f"engine = {engine!r} is not possible, since {form} that it does not know: use 'auto'."
    )


def _check(job: Job, taps: Taps, group: Group, workers: int) -> None:
    """Raise `InputError` unless plan, defence, partition, taps and processes fit together."""
    plan, defense, processes = job.plan, job.defense, max(workers, group.size)
    at_clients = (defense.begin_client, defense.per_batch, defense.per_client, defense.on_arrival)
    smallest = min((int(job.partition.sizes[plan.participants_of(t)].min(initial=plan.batch_size))
                    for t in range(plan.rounds if job.partition.clients == plan.clients
                                   and job.partition.sizes.min() < plan.batch_size else 0)),
                   default=plan.batch_size)  # fmt: skip
    refuse(
        {
            f"workers = {workers}, but {group.size} processes have been started from outside: use "
            "workers = 1.": group.joined and workers not in (1, group.size),
            f"{defense.name} noises each example, but under batch_sampling = 'poisson' the number "
            "of examples varies and an empty batch would carry no noise at all: put the noise on "
            'the batch, fed_cdp("batch").': (
                plan.batch_sampling == "poisson" and bool(noisy(defense, "example"))
            ),
            f"the partition has {job.partition.clients} clients, the plan {plan.clients}: make "
            "them equal.": job.partition.clients != plan.clients,
            f"the partition is one of {job.partition.examples} examples, and there are "
            f"{len(job.train[0])}: cut it for these.": job.partition.examples != len(job.train[0]),
            f"batch_size = {plan.batch_size} is more than the {smallest} examples of a client that "
            "takes part: choose a smaller one.": smallest < plan.batch_size,
            "some examples hold values that are not finite, which no clipping bounds: mend "
            "them.": not job.train[0].isfinite().all(),
            f"the labels are {job.train[1].dtype}, or below 0: the cross-entropy takes classes "
            "from 0 as torch.int64.": job.loss is cross_entropy
            and (job.train[1].dtype != torch.int64 or bool((job.train[1] < 0).any())),
            f"the defence {defense.name!r} keeps a state that its clients may change, which "
            f"processes would not share: use one process (now {processes}), which is workers = 1 "
            "without torchrun.": (
                processes > 1 and bool(defense.initial_state) and any(at_clients)
            ),
        }
    )
    for tap in taps.wanted:
        inside = (
            tap.round < plan.rounds
            and tap.client < plan.clients
            and tap.iteration < plan.local_iterations
        )
        refuse(
            {
                f"{tap} lies outside the plan ({plan.rounds} rounds, {plan.clients} clients, "
                f"{plan.local_iterations} local iterations, all counted from 0).": not inside,
                f"{tap} would stay empty, since client {tap.client} takes no part in that round: "
                f"choose one of plan.participants_of({tap.round}).": (
                    inside
                    and tap.stage != "aggregate"
                    and tap.client not in plan.participants_of(tap.round)
                ),
            }
        )
