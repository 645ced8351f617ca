"""DP-FedSGD with distributed noise and secure aggregation, as the sum that the server sees.

Every client takes one local step, on examples that it draws each by itself with probability q. It
clips their gradients and adds its share of the noise. With nobody dropping out, the sum is that of
central DP-SGD, so it trains as one client that never leaves (chapter 10). Secure aggregation itself
is not run.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fl_privacy_lib._checks import one_of, positive
from fl_privacy_lib.accounting.accountants import noise_for
from fl_privacy_lib.accounting.conventions import DELTA
from fl_privacy_lib.accounting.events import Event
from fl_privacy_lib.defenses import Clip, Defense, Holding
from fl_privacy_lib.defenses.route import BatchNoise, PerExample
from fl_privacy_lib.defenses.transformations import Momentum
from fl_privacy_lib.defenses.tree import TreeNoise
from fl_privacy_lib.reproduction.experiments.central import CentralTraining
from fl_privacy_lib.reproduction.experiments.spending import TENSORS
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

    def network(self, shape: tuple[int, ...]) -> str:
        """Return the name of the network, with the activation of its own."""
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


def calibrated(point: SummedTraining, examples: int, tolerance: float = 1e-4) -> float:
    """Return the smallest σ, to three decimals, at which a training's proved ε is its `epsilon`.

    Parameters
    ----------
    point : its `noise_scale` does not count
    examples : N of the training data
    tolerance : relative, > 0; the answer is on the noisier side

    Notes
    -----
    Privacy loss distributions at δ = 1e-5; one example added or removed.
    """
    found = noise_for(
        point.epsilon, lambda scale: replace(point, noise_scale=scale).events(examples), "pld",
        DELTA, tolerance,
    )  # fmt: skip
    return math.ceil(1000 * found) / 1000
