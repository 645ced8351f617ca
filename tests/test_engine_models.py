"""Models that a naive reading gets wrong: shared modules, frozen tensors, layers with a memory."""

import copy

import numpy as np
import oracles
import pytest
import torch
from torch import nn

from fl_privacy_lib._checks import InputError
from fl_privacy_lib.data import iid
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses import fed_cdp, non_private
from fl_privacy_lib.federated import simulate
from fl_privacy_lib.federated.stacked import stack
from fl_privacy_lib.models import parameters_of
from fl_privacy_lib.sampling import Plan


def shared_activation():
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(6, 5), act, nn.Linear(5, 5), act, nn.Linear(5, 3))


def shared_parameter():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    return nn.Sequential(
        nn.Linear(6, 5), nn.Sigmoid(), first, nn.Sigmoid(), second, nn.Sigmoid(), nn.Linear(5, 3)
    )


def shared_layer():
    square = nn.Linear(5, 5)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Sigmoid(), square, nn.Sigmoid(), square, nn.Sigmoid(), nn.Linear(5, 3)
    )


def frozen_layer():
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))
    return model[0].requires_grad_(False) and model


def frozen_tensor():
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))
    model[2].bias.requires_grad_(False)
    return model


def data(shape, count=12, clients=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(3, (count,), generator=generator)
    return (x, y), iid(count, clients, count // clients, np.random.default_rng(seed))


def plan_of(**changes):
    values = {
        "participants": 3,
        "rounds": 1,
        "local_iterations": 2,
        "batch_size": 2,
        "local_lr": 0.5,
    }
    return Plan(clients=3, **(values | changes))


def naive_update(model, train, partition, plan):
    """Loop over clients and examples; each gradient is clipped to 0.5 by tensor."""
    mean = {}
    for client, indices in enumerate(partition.indices):
        local = copy.deepcopy(model).double()
        moving = {n: p for n, p in local.named_parameters() if p.requires_grad}
        before = {n: p.detach().clone() for n, p in moving.items()}
        for batch in plan.batches(client, len(indices), 0):
            total = {n: torch.zeros_like(p) for n, p in moving.items()}
            for i in indices[batch]:
                loss = oracles.entropy(local(train[0][i][None].double())[0], train[1][i])
                for n, g in zip(
                    moving, torch.autograd.grad(loss, list(moving.values())), strict=True
                ):
                    total[n] += g * min(1.0, 0.5 / max(float(g.norm()), 1e-30))
            with torch.no_grad():
                for n, p in moving.items():
                    p.sub_(plan.local_lr * total[n] / plan.batch_size)
        for n, p in moving.items():
            mean[n] = mean.get(n, 0) + (p.detach() - before[n]) / 3
    return mean


@pytest.mark.parametrize(
    "build", [shared_activation, shared_layer, shared_parameter, frozen_layer, frozen_tensor]
)
@pytest.mark.parametrize("engine", ["auto", "generic"])
def test_shared_modules_and_frozen_tensors_train_the_network_that_was_given(build, engine):
    torch.manual_seed(0)
    model, (train, partition), plan = build(), data((6,)), plan_of()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    run = simulate(
        model, train, partition, plan, fed_cdp(clip_norm=0.5, noise_scale=0.0), engine=engine
    )
    assert set(run.weights) == set(parameters_of(model)) and not set(frozen) & set(run.weights)
    update = {n: run.weights[n] - w for n, w in parameters_of(model).items()}
    assert oracles.relative_distance(update, naive_update(model, train, partition, plan)) <= 1e-5
    assert all(torch.equal(dict(model.named_parameters())[n], w) for n, w in frozen.items())


def test_the_fast_engine_takes_a_shared_activation_and_no_shared_weights():
    assert stack(shared_activation(), (6,)) is not None
    assert all(
        stack(build(), (6,)) is None for build in (shared_layer, shared_parameter, frozen_layer)
    )


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_padded_convolution_of_a_single_pixel(chunk):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    (train, partition), plan = data((2, 1, 1)), plan_of(batch_size=1)
    runs = [
        simulate(
            model,
            train,
            partition,
            plan,
            fed_cdp(clip_norm=0.1, noise_scale=0.0),
            engine=engine,
            **options,
        )
        for engine, options in (("stacked", {"clients_per_chunk": chunk}), ("generic", {}))
    ]
    fast, slow = ({n: run.weights[n] - w for n, w in parameters_of(model).items()} for run in runs)
    assert oracles.relative_distance(fast, slow) <= 1e-5


class Recurrent(nn.Module):
    def __init__(self, memory):
        super().__init__()
        self.memory, self.out = memory, nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.memory(x)[0][:, -1])


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)), (6,),
         "draws masks .* call .eval"),
        (Recurrent(nn.GRU(2, 4, batch_first=True)), (3, 2),
         "'memory' .GRU. cannot be differentiated"),
        (Recurrent(nn.RNN(2, 4, batch_first=True)), (3, 2),
         "'memory' .RNN. cannot be differentiated"),
        (nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(),
                       nn.Linear(6, 3)), (2, 3), "moves running statistics"),
        (nn.Sequential(nn.Linear(6, 3)).requires_grad_(False), (6,), "no trainable parameter"),
    ],
    ids=["dropout", "gru", "rnn", "instance norm", "all frozen"],
)  # fmt: skip
def test_a_model_that_cannot_be_taken_is_refused_in_one_sentence(model, shape, message):
    train, partition = data(shape)
    with pytest.raises(InputError, match=message):
        simulate(model, train, partition, plan_of(), non_private())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5).eval(), nn.Linear(4, 3)), (6,)),
        (Recurrent(nn.LSTM(2, 4, batch_first=True)), (3, 2)),
        (nn.Sequential(nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 3)), (2, 3)),
    ],
    ids=["dropout in evaluation", "lstm", "instance norm"],
)
def test_what_can_be_taken_has_the_naive_gradients(model, shape):
    (train, partition), plan = data(shape), plan_of()
    run = simulate(model, train, partition, plan, fed_cdp(clip_norm=0.5, noise_scale=0.0))
    update = {n: run.weights[n] - w for n, w in parameters_of(model).items()}
    assert oracles.relative_distance(update, naive_update(model, train, partition, plan)) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("engine", ["auto", "generic"])
@pytest.mark.parametrize("workers", [1, 2])
def test_every_update_counts_for_the_same_share(engine, workers):
    """1/K_t, whatever a client holds, against single updates."""
    torch.manual_seed(2)
    model, (train, _) = nn.Sequential(nn.Linear(6, 3)), data((6,))
    partition = Partition("unequal", (np.arange(2), np.arange(2, 5), np.arange(5, 12)), 12)
    plan = plan_of(participants=2)
    ids = [int(c) for c in plan.participants_of(0)]
    one, other = (naive_one(model, train, partition.indices[c], plan, c) for c in ids)
    run = simulate(model, train, partition, plan, non_private(), engine=engine, workers=workers)
    update = {n: run.weights[n] - w for n, w in parameters_of(model).items()}
    expected = {n: (one[n] + other[n]) / 2 for n in one}
    assert oracles.relative_distance(update, expected) <= 1e-5


def naive_one(model, train, indices, plan, client):
    return oracles.client_update(
        model,
        train[0][indices],
        train[1][indices],
        plan.batches(client, len(indices), 0),
        plan.batch_size,
        plan.local_lr,
        None,
    )
