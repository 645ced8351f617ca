"""Local reports: very many clients with one example each, a round in a few operations.

The model is linear: d weights without bias, whose margin decides between two classes (FedSel,
section 5.1).
It is `simulate` with one local iteration on one example, the same plan and the same ``per_client``
stage; a test holds the two together. What makes it fast: all gradients of a round are one matrix,
and its clients share a generator.
"""

import torch

from fl_privacy_lib._checks import refuse, whole_number
from fl_privacy_lib.defenses import STAGES, ClientContext, Defense, keyed_generator
from fl_privacy_lib.federated.gradients import MarginLoss
from fl_privacy_lib.federated.rounds import Examples
from fl_privacy_lib.federated.simulation import RoundReport, Run, is_due
from fl_privacy_lib.sampling import Plan

WEIGHT = "0.weight"  # the name of the model's one tensor


def simulate_reports(
    train: Examples,
    plan: Plan,
    defense: Defense,
    loss: MarginLoss,
    *,
    evaluation: Examples | None = None,
    evaluate_every: int = 1,
) -> Run:
    """Train a linear model from zero weights, each client holding one example.

    Parameters
    ----------
    train : features [K, d] in float, labels [K] in {0, 1}; example i is client i's
    plan : with one local iteration and a batch of one
    defense : what fills ``per_client``, the only stage supported here; it is called once a round
        with all updates [K_t, 1, d], and with a single generator for all of them
    evaluation : examples to measure the accuracy on; a margin of 0 counts as class 0
    evaluate_every : rounds between two accuracies; the last round always has one

    Returns
    -------
    Run
        Without observations.

    Raises
    ------
    InputError
        If the plan is not one example a client, or the defence fills another stage.

    Notes
    -----
    Source: FedSel, Algorithm 1; ``plan.local_lr`` = 1 with ``server_lr`` = η sends raw gradients up
    (the paper's adaptation), ``local_lr`` = η with ``server_lr`` = 1 sends η times the gradient
    (its variant "-O").
    """
    refuse(
        {
            f"simulate_reports needs clients with one example each: local_iterations = "
            f"{plan.local_iterations} and batch_size = {plan.batch_size} must be 1; use simulate "
            "for longer participations.": (plan.local_iterations, plan.batch_size) != (1, 1),
            f"the plan has {plan.clients} clients, the data {len(train[1])} examples: make them "
            "equal.": plan.clients != len(train[1]),
            "simulate_reports takes plain steps: leave local_optimizer and weight_factor, or use "
            "simulate.": (plan.local_optimizer, plan.weight_factor) != ("sgd", 1.0),
            "features have to be finite, and labels 0 or 1: mend them.": not (
                train[0].isfinite().all() and ((train[1] == 0) | (train[1] == 1)).all()
            ),
            "this evaluation set is empty: leave it out.": (
                evaluation is not None and not len(evaluation[1])
            ),
        }
        | {
            f"simulate_reports has only per_client, but {defense.name} fills {stage}: use "
            "simulate.": bool(getattr(defense, stage))
            for stage in (*STAGES, "begin_client")
            if stage != "per_client"
        }
    )
    whole_number(1, evaluate_every=evaluate_every)
    x, labels = train[0], train[1].to(train[0].dtype)
    weight, history = x.new_zeros(x.shape[1]), []
    state = defense.initial_state() if defense.initial_state else {}
    for round in range(plan.rounds):
        chosen = plan.participants_of(round)
        ids, index = chosen.tolist(), torch.from_numpy(chosen).to(x.device)
        update = -plan.local_lr * loss.gradients(weight, x[index], labels[index])  # [K_t, d]
        if defense.per_client and ids:
            generator = keyed_generator(x.device, plan.seed, round, "crowd")
            ctx = ClientContext(round, ids, [generator], state=state, batch_size=1)
            update = defense.apply("per_client", {WEIGHT: update[:, None]}, ctx)[WEIGHT][:, 0]
        weight = weight + plan.server_lr / plan.participants * update.sum(0)
        score = None
        if evaluation and is_due(evaluate_every, plan, round):
            right = (evaluation[0] @ weight > 0) == (evaluation[1] > 0)
            score = float(right.double().mean())
        history.append(RoundReport(round, tuple(ids), score))
    return Run({WEIGHT: weight[None]}, tuple(history), {}, {})
