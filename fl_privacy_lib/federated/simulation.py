"""The simulation: rounds of participations, arrival, aggregation and evaluation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses.clipping import Gradient
from fl_privacy_lib.defenses.noise import keyed_generator
from fl_privacy_lib.defenses.route import ClientContext, Context, Defense
from fl_privacy_lib.federated.participation import Observation, Tap, Taps, participate
from fl_privacy_lib.models import Parameters, check_per_example, parameters_of
from fl_privacy_lib.sampling import Plan

Examples = tuple[torch.Tensor, torch.Tensor]


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
    """

    weights: Parameters
    history: tuple[RoundReport, ...]
    observations: dict[Tap, Observation]
    truth: dict[Tap, Examples]


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


def run_round(
    model: nn.Module,
    weights: Parameters,
    train: Examples,
    partition: Partition,
    plan: Plan,
    defense: Defense,
    round: int,
    state: dict,
    taps: Taps,
) -> tuple[Parameters, tuple[int, ...]]:
    """Run one round and return the new global model and the participants.

    Updates are summed in float64 in the order of the client ids, so that the result does not depend on who
    finishes first.
    """
    ids = tuple(int(c) for c in plan.participants_of(round))
    device = train[0].device
    server = Context(round, ids, [keyed_generator(device, plan.seed, round, "server")], state=state)
    total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}
    weight = 1 / plan.participants  # the plan's K_t also when Poisson sampling drew more or fewer
    for client in ids:
        own = torch.as_tensor(partition.indices[client], device=device)
        generators = [keyed_generator(device, plan.seed, round, client)]
        shares = torch.tensor([weight], device=device)
        ctx = ClientContext(
            round, (client,), generators, shares, state, server.reports, batch_size=plan.batch_size, model=model
        )
        batches = plan.batches(client, len(own), round)
        update = participate(model, weights, (train[0][own], train[1][own]), batches, plan, defense, ctx, taps)
        update = _arrive(update, client, weights, plan, defense, server, taps)
        for name, u in update.items():
            total[name] += weight * u[0].double()
    return _apply(weights, total, plan, defense, server, taps), ids


def _arrive(
    update: Gradient, client: int, weights: Parameters, plan: Plan, defense: Defense, server: Context, taps: Taps
) -> Gradient:
    """Pass one client's update through the server's on_arrival stage and its tap."""
    if defense.on_arrival is None:
        return update
    key = keyed_generator(next(iter(update.values())).device, plan.seed, server.round, client, "arrival")
    received = defense.on_arrival(update, Context(server.round, (client,), [key], state=server.state))
    tap = Tap("received", client, server.round)
    taps.keep(tap, {name: u[0] for name, u in received.items()}, weights, plan, defense)
    return received


def _apply(
    weights: Parameters, total: Gradient, plan: Plan, defense: Defense, server: Context, taps: Taps
) -> Parameters:
    """Pass the weighted mean through on_aggregate and its tap, and take the server's step."""
    mean = {name: t[None].to(weights[name].dtype) for name, t in total.items()}  # [1, …]
    if defense.on_aggregate:
        mean = defense.on_aggregate(mean, server)
    aggregate = {name: m[0] for name, m in mean.items()}
    taps.keep(Tap("aggregate", round=server.round), aggregate, weights, plan, defense)
    return {name: w + plan.server_lr * aggregate[name] for name, w in weights.items()}


def simulate(
    model: nn.Module,
    train: Examples,
    partition: Partition,
    plan: Plan,
    defense: Defense,
    *,
    taps: Iterable[Tap] = (),
    evaluation: Examples | None = None,
    evaluate_every: int = 1,
    on_round: Callable[[RoundReport], None] | None = None,
) -> Run:
    """Train a model federatedly under a defence and keep what stands at the taps asked for.

    Parameters
    ----------
    model : its present parameters are round 0's; they are not changed
    train : examples [N, …] in float, labels [N]; on the device where everything shall run
    partition : who holds which examples
    plan : who takes part, in which batches, for how long
    defense : what fills the five stages
    taps : (stage, client, round, iteration) to keep; nothing else is
    evaluation : examples to measure the accuracy on, every `evaluate_every` rounds and after the last
    on_round : called with each round's report, e.g. a progress bar's update

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
    if partition.clients != plan.clients:
        raise InputError(f"the partition has {partition.clients} clients, the plan {plan.clients}: make them equal.")
    kept = Taps.at(taps)
    for tap in kept.wanted:
        if tap.round >= plan.rounds or tap.client >= plan.clients or tap.iteration >= plan.local_iterations:
            raise InputError(
                f"{tap} lies outside the plan ({plan.rounds} rounds, {plan.clients} clients, "
                f"{plan.local_iterations} local iterations, all counted from 0)."
            )
    weights = {name: w.to(train[0].device) for name, w in parameters_of(model).items()}
    state = defense.initial_state() if defense.initial_state else {}
    history = []
    for round in range(plan.rounds):
        weights, ids = run_round(model, weights, train, partition, plan, defense, round, state, kept)
        due = evaluation is not None and ((round + 1) % evaluate_every == 0 or round + 1 == plan.rounds)
        report = RoundReport(round, ids, accuracy(model, weights, evaluation) if due and evaluation else None)
        history.append(report)
        if on_round:
            on_round(report)
    return Run(weights, tuple(history), kept.observations, kept.truth)
