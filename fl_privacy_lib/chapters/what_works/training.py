"""Trainings at an ε that is proved: of an example, by a sum of shares, and of a whole client.

In DP-FedSGD with distributed noise and secure aggregation, every client takes one local step, on
examples that it draws each by itself with probability q. It clips their gradients and adds its
share of the noise. With nobody dropping out, the sum is that of central DP-SGD, so it trains as one
client that never leaves (chapter 10). Secure aggregation itself is not run. In DP-FedAvg a trusted
server adds the noise to the clients' sum.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fl_privacy_lib._checks import one_of, positive
from fl_privacy_lib.accounting.accountants import noise_for
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.data import Dataset, Partition, two_shards
from fl_privacy_lib.defenses import Clip, Defense, Holding
from fl_privacy_lib.defenses.noisy_stages import TreeNoise
from fl_privacy_lib.defenses.route import BatchNoise, ClipAndNoiseUpdate, PerExample, Then
from fl_privacy_lib.defenses.rules import QuantileNorm
from fl_privacy_lib.defenses.transformations import Momentum
from fl_privacy_lib.reproduction.experiments.central import CentralTraining
from fl_privacy_lib.reproduction.experiments.spending import TENSORS
from fl_privacy_lib.reproduction.experiments.training import Training
from fl_privacy_lib.sampling import Plan

NOISE_AT = ("sum", "client", "tree")
"""Who is kept from the noiseless value: who sees the sum, or who sees every client's own.

'tree': who sees the models; batches follow a fixed order, and noise a tree over each pass.
"""
ACTIVATIONS = ("relu", "tanh")
ADVERSARY = {"sum": "sees_sums", "client": "sees_updates", "tree": "sees_models"}


@dataclass(frozen=True)
class SummedTraining(CentralTraining):
    """One cell: DP-FedSGD at an ε that is proved of it.

    Parameters
    ----------
    epsilon : that `noise_scale` was calibrated to; the proved one is at most this
    noise_at : one of `NOISE_AT`. 'sum': K shares make σC on the sum. 'client': every client's own
        sum carries σC, so their sum carries σC√K
    summed : K, the clients behind a sum
    scope : {'all', 'layer'}, of the clip
    momentum : γ of the server's, 0: none
    activation : one of `ACTIVATIONS`, of the papers' CNN
    """

    method: str = "dp_fedsgd"
    rounds: int = 400
    batch_size: int = 2048
    clip_norm: float = 0.1
    epsilon: float = 0.82
    noise_at: str = "sum"
    summed: int = 1000
    scope: str = "all"
    momentum: float = 0.0
    activation: str = "relu"

    methods: ClassVar[tuple[str, ...]] = ("dp_fedsgd",)
    readings: ClassVar[tuple[str, ...]] = ("batch",)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(NOISE_AT, noise_at=self.noise_at)
        one_of(ACTIVATIONS, activation=self.activation)
        positive(summed=self.summed)

    @property
    def proof(self) -> dict[str, str]:
        """Of whom, on which route and against whom its ε is proved: key columns of a record."""
        return {
            "unit": "example",
            "route": "tree_aggregation" if self.noise_at == "tree" else "distributed_noise",
            "adversary": ADVERSARY[self.noise_at],
        }

    def network(self, shape: tuple[int, ...]) -> str:
        """Return the name of the network, with the activation of its own; features have none."""
        if self.dataset.endswith("_scattering"):
            return "linear"
        return super().network(shape) + ("" if self.activation == "relu" else "_tanh")

    def plan(self, seed: int, rounds: int | None = None) -> Plan:
        """Return the plan of one seed's training; under a tree nothing is drawn."""
        sampling: Any = "one_pass_fixed" if self.noise_at == "tree" else "poisson"
        return replace(super().plan(seed, rounds), batch_sampling=sampling)

    @property
    def defense(self) -> Defense:
        """What fills the route."""
        clip = Clip(self.clip_norm, self.scope)
        scale = self.noise_scale * (math.sqrt(self.summed) if self.noise_at == "client" else 1.0)
        noise = BatchNoise(clip, scale)
        if self.noise_at == "tree":
            noise = TreeNoise(clip, scale, leaves=self.local_iterations)
        return Defense(
            self.method, PerExample(clip), noise,
            on_aggregate=Momentum(self.momentum) if self.momentum else None,
        )  # fmt: skip

    def events(self, examples: int) -> tuple[Event, ...]:
        """Return what its adversary is shown of N examples: of 'client', one client's own sums.

        With every example at one client only, that is as if the others' were not there.
        """
        at = "tree" if self.noise_at == "tree" else "sum"
        one = replace(self, noise_at=at, local_lr=1.0)
        return one.defense.events(one.plan(0), Holding(examples, examples, TENSORS))


@dataclass(frozen=True)
class ClientTraining(CentralTraining):
    """One cell: DP-FedAvg at an ε that is proved for a client, on all training data.

    Parameters
    ----------
    setting : {'fixed', 'adaptive'}, the clipping bound; an adaptive one follows the median norm
    participants : K_t, on average: each client is drawn by itself, with probability K_t/K
    clip_norm : C, of a whole update in units of η, so that the bound on the gradients in it stays
        when η is searched; of an adaptive bound the first
    epsilon : that `noise_scale` was calibrated to; the proved one is at most this

    Notes
    -----
    Examples are cut into two shards a client, of about one class each, none held twice. The noise
    on a count is K_t/20. Source: McMahan et al. (2018); Andrew et al. (2021), section 3.
    """

    method: str = "dp_fedavg"
    setting: str = "fixed"
    clients: int = 1000
    participants: int = 100
    rounds: int = 100
    batch_size: int = 10
    clip_norm: float = 1.0
    epsilon: float = 3.0

    methods: ClassVar[tuple[str, ...]] = ("dp_fedavg",)
    readings: ClassVar[tuple[str, ...]] = ("fixed", "adaptive")
    proof: ClassVar[dict[str, str]] = {
        "unit": "client", "route": "dp_fedavg", "adversary": "sees_models"
    }  # fmt: skip

    def plan(self, seed: int, rounds: int | None = None) -> Plan:
        """Return the plan of one seed's training; every client is drawn by itself."""
        drawn: Any = {"client_sampling": "poisson", "batch_sampling": "with_replacement"}
        return replace(Training.plan(self, seed, rounds), **drawn)

    def split(self, data: Dataset, rng: np.random.Generator) -> Partition:
        """Give each client as many examples as there are for it, an even number."""
        each = len(data.train_y) // self.clients // 2 * 2
        return two_shards(data.train_y, self.clients, each, rng)

    @property
    def bound(self) -> Clip | QuantileNorm:
        """What clips an update, and scales the noise."""
        clip = Clip(self.clip_norm * self.local_lr, "all")
        if self.setting == "fixed":
            return clip
        return QuantileNorm(clip, count_scale=self.participants / 20, summed=True)

    @property
    def defense(self) -> Defense:
        """What fills the route: clients clip, and the server adds the noise to their sum."""
        bound = self.bound
        clip, noise = ClipAndNoiseUpdate(bound, 0.0), BatchNoise(bound, self.noise_scale)
        clipped = Defense(self.method, per_client=clip, on_aggregate=noise)
        if isinstance(bound, Clip):
            return clipped
        return replace(clipped, on_aggregate=Then(noise, bound), initial_state=bound.start)

    def events(self, examples: int = 1) -> tuple[Event, ...]:
        """Return what is shown of one client to anyone who sees the models.

        As if nobody else were there: then the noise of the sum is that on the client's own update.
        """
        alone = ClipAndNoiseUpdate(self.bound, self.noise_scale)
        one = replace(self, local_lr=1.0)
        return Defense(self.method, per_client=alone).events(
            one.plan(0), Holding(examples, 1, TENSORS), unit="client", tap="aggregate"
        )


def calibrated(point: Any, examples: int, tolerance: float = 1e-4) -> float:
    """Return the smallest σ, to three decimals, at which a training's proved ε is its `epsilon`.

    Parameters
    ----------
    point : a `SummedTraining` or `ClientTraining`; its `noise_scale` does not count
    examples : N of the training data
    tolerance : relative, > 0; the answer is on the noisier side

    Notes
    -----
    Privacy loss distributions at δ = 1e-5; one example, or client, added or removed.
    """
    found = noise_for(
        point.epsilon, lambda scale: replace(point, noise_scale=scale).events(examples), "pld",
        DELTA, tolerance,
    )  # fmt: skip
    return math.ceil(1000 * found) / 1000
