"""The settings of an attack, its first dummy images, and the published attacks."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fl_privacy_lib._checks import InputError, in_range, one_of, positive, whole_number
from fl_privacy_lib.attacks.objective import DISTANCES
from fl_privacy_lib.attacks.optimisers import OPTIMISERS

CHOICES: dict[str, Iterable[str]] = {
    "start": ("patterned", "normal"),
    "optimiser": OPTIMISERS,
    "objective": DISTANCES,
    "label_rule": ("inferred", "joint", "given"),
    "mask": ("none", "zeros"),
}
"""Setting of an attack → the words it may be."""


@dataclass(frozen=True)
class Attack:
    """The settings of a reconstruction: an objective, a start, an optimiser and a label rule.

    Parameters
    ----------
    start : {'patterned', 'normal'}, see `start`
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
        From the last layer's gradient (`evidence.infer_labels`); as soft labels optimised with the
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
        falls = (3 / 8, 5 / 8, 7 / 8) if self.decay else ()
        return self.learning_rate / 10 ** sum(iteration > f * self.max_iterations for f in falls)


def start(
    kind: str, count: int, shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Return dummy images to begin a reconstruction with.

    Parameters
    ----------
    kind : {'patterned', 'normal'}
        'patterned': one random quarter, U(0, 1), tiled 2×2 (CPL); 'normal': N(0, 1) (DLG).
    count : int, number of images
    shape : (channels, height, width)

    Returns
    -------
    tensor [count, *shape], on the generator's device

    Notes
    -----
    Source: CPL (Wei et al. 2020) and its released code; DLG (Zhu et al. 2019) for 'normal'.
    """
    device = generator.device
    if kind == "normal":
        return torch.randn((count, *shape), generator=generator, device=device)
    channels, height, width = shape
    size = (count, channels, math.ceil(height / 2), math.ceil(width / 2))
    tile = torch.rand(size, generator=generator, device=device)
    return tile.repeat(1, 1, 2, 2)[..., :height, :width]


PUBLISHED: dict[str, Attack] = {
    # Squared distance, a normal start, L-BFGS, the label optimised with the image. Source: Zhu et
    # al., Deep Leakage from Gradients, NeurIPS 2019, and its released code (300 iterations).
    "dlg": Attack(start="normal", label_rule="joint"),
    # DLG with the label inferred from the last layer's gradient and fixed. Source: Zhao et al.,
    # iDLG, 2020, and its released code (300 iterations, stops below 1e-6).
    "idlg": Attack(start="normal"),
    # iDLG from a patterned start; the Fed-CDP papers attack with it. Its reported pictures are the
    # iterates nearest to the truth, which no attacker can choose. Source: Wei et al., A Framework
    # for Evaluating Client Privacy Leakages in Federated Learning, ESORICS 2020, and its released
    # code (300 iterations).
    "cpl": Attack(),
    # GradInv: cosine distance, total variation, signed Adam in the box [0, 1]. 240 iterations of 20
    # steps are its 4,800; the papers' counts of its iterations are counts of steps. It never stops
    # before its budget ends. Source: Geiping et al., Inverting Gradients, NeurIPS 2020, and its
    # released code: the rate falls to a tenth at 3/8, 5/8 and 7/8, total variation × 1e-4.
    "grad_inversion": Attack(
        start="normal",
        optimiser="signed_adam",
        learning_rate=0.1,
        max_iterations=240,
        decay=True,
        box=True,
        objective="cosine",
        tv=1e-4,
        stall=(240, 0.0),
    ),
    # The compensation paper's "deep gradient attack": DLG with a known label. Source: Wang et al.,
    # Protect Privacy from Gradient Leakage Attack in Federated Learning, INFOCOM 2022, section VI:
    # one image a batch.
    "dga": Attack(start="normal", label_rule="given", max_iterations=500),
    # The same paper's "gradient inversion attack": GradInv with plain Adam. 50 iterations of 20
    # steps are its 1,000. Source: section VI, and its released code: rate 0.1, total variation ×
    # 1e-4, gradients unsigned, no box, 800 iterations.
    "gia": Attack(
        start="normal",
        label_rule="given",
        optimiser="adam",
        learning_rate=0.1,
        max_iterations=50,
        objective="cosine",
        tv=1e-4,
        stall=(50, 0.0),
    ),
}
"""Published attack → its settings."""
