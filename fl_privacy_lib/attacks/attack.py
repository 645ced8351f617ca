"""The settings of an attack, and what its attacker is given: plain data, to print with a result."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fl_privacy_lib._checks import InputError, in_range, one_of, positive, whole_number
from fl_privacy_lib.attacks.objective import DISTANCES
from fl_privacy_lib.attacks.optimisers import OPTIMISERS
from fl_privacy_lib.attacks.starts import STARTS

CHOICES: dict[str, Iterable[str]] = {
    "start": STARTS,
    "optimiser": OPTIMISERS,
    "objective": DISTANCES,
    "label_rule": ("inferred", "joint", "given"),
    "mask": ("none", "zeros"),
}
"""Setting of an attack → the words it may be."""
# Of the budget, where a decaying learning rate loses a factor of ten.
DECAYS = (3 / 8, 5 / 8, 7 / 8)


@dataclass(frozen=True)
class Attack:
    """The settings of a reconstruction: an objective, a start, an optimiser and a label rule.

    Parameters
    ----------
    start : one of `starts.STARTS`
    optimiser : {'lbfgs', 'adam', 'signed_adam'}
    learning_rate : float, > 0; the papers use 1 for L-BFGS
    max_iterations : int, attack iterations, each of `steps` optimiser steps
    clip_aware : bool, whether the dummy gradient passes the defence's own clipping, see
        `objective.replay`
    stop_loss : float, > 0; a victim whose objective falls below it is done
    stall : (int, float); stop a victim whose objective fell by less than this fraction in so many
        iterations
    restarts : int, fresh starts a victim gets when its iterate diverges
    seed : int
    steps : int, optimiser steps an attack iteration; 20 as in the published code
    objective : {'squared', 'relative', 'cosine', 'layer_cosine'}, see `objective.DISTANCES`
    tv : float, ≥ 0, weight of the images' total variation in the objective
    box : bool, whether every step is projected on the pixels' range [0, 1]
    decay : bool, whether the learning rate falls to a tenth at 3/8, 5/8 and 7/8 of the budget
    label_rule : {'inferred', 'joint', 'given'}
        From the last layer's gradient (`labels.infer_labels`); as soft labels optimised with the
        images; from the caller.
    mask : {'none', 'zeros'}
        Which coordinates the attacker leaves out: one that is exactly zero was pruned, or says
        nothing.
    tries : int, independent starts of every victim; the one with the least objective counts
    """

    start: str = "patterned"
    optimiser: str = "lbfgs"
    learning_rate: float = 1.0
    max_iterations: int = 300
    clip_aware: bool = False
    stop_loss: float = 1e-6
    stall: tuple[int, float] = (10, 0.01)
    restarts: int = 2
    seed: int = 0
    steps: int = 20
    objective: str = "squared"
    tv: float = 0.0
    box: bool = False
    decay: bool = False
    label_rule: str = "inferred"
    mask: str = "none"
    tries: int = 1

    def __post_init__(self) -> None:
        for name, words in CHOICES.items():
            one_of(words, **{name: getattr(self, name)})
        positive(learning_rate=self.learning_rate, stop_loss=self.stop_loss)
        in_range(0, math.inf, tv=self.tv)
        whole_number(1, max_iterations=self.max_iterations, steps=self.steps, tries=self.tries)
        whole_number(0, restarts=self.restarts, seed=self.seed)
        window, fraction = self.stall
        if not isinstance(window, int) or window < 1 or not 0 <= fraction < 1:
            raise InputError(
                f"stall = {self.stall} must be (iterations ≥ 1, fraction in [0, 1)), such as "
                "(10, 0.01)."
            )

    def rate(self, iteration: int) -> float:
        """Return the learning rate in an iteration, 1 … max_iterations.

        >>> [Attack(decay=True, max_iterations=8).rate(i) for i in (3, 4, 6, 8)]
        [1.0, 0.1, 0.01, 0.001]
        """
        passed = sum(iteration > part * self.max_iterations for part in DECAYS) if self.decay else 0
        return self.learning_rate / 10**passed


def describe_defense(public: dict[str, Any]) -> str:
    """Return a defence's name and its stages, from ``Defense.public()``."""
    stages = ", ".join(f"{stage}: {value}" for stage, value in public.items() if stage != "name")
    return f"{public['name']} ({stages})" if stages else str(public["name"])


@dataclass(frozen=True)
class Knowledge:
    """What an attacker is given and takes for granted. A success rate means nothing without it.

    Attributes
    ----------
    tap : where on the route it reads
    observations : R, gradients of the same images, each with the weights it was taken at
    batch_size : B, the images behind a gradient
    local_iterations, local_lr : of the update it divides by; the attack takes L iterations for one
    labels : 'inferred', 'joint' or 'given'
    defense : ``Defense.public()``
    replays_defense : whether the dummies pass that defence, without its noise
    mask : 'none', 'zeros', 'given' or 'zeros and given': which coordinates are left out
    prior : weight of the total variation; 0 for none
    """

    tap: str
    observations: int
    batch_size: int
    local_iterations: int
    local_lr: float
    labels: str
    defense: dict[str, Any]
    replays_defense: bool
    mask: str
    prior: float

    def describe(self) -> list[tuple[str, str]]:
        """Return (what, how much of it) for a printed table."""
        left_out = {"none": "nothing", "zeros": "exact zeros", "given": "as told"}
        labels = {
            "inferred": "inferred from the gradient",
            "joint": "optimised with the images",
            "given": "given",
        }
        return [
            ("reads", f"{self.observations} observation(s) at the tap {self.tap!r}"),
            ("weights", "of the model, at every observation"),
            ("batch size", str(self.batch_size)),
            ("local training", f"L = {self.local_iterations}, η = {self.local_lr}"),
            ("labels", labels[self.labels]),
            ("defence", describe_defense(self.defense)),
            ("replays it", "yes, without noise" if self.replays_defense else "no"),
            ("left out", " and ".join(left_out[word] for word in self.mask.split(" and "))),
            ("prior on images", f"total variation × {self.prior:g}" if self.prior else "none"),
            ("truth", "unknown"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{what:>15}: {value}" for what, value in self.describe())
