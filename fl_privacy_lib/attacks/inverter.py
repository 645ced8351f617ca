"""The trained form of the learned attacker: what it was trained for, and how it reads images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_privacy_lib._checks import InputError, refuse
from fl_privacy_lib.attacks.objective import as_gradient
from fl_privacy_lib.defenses.slices import flat
from fl_privacy_lib.federated.participation import Observation
from fl_privacy_lib.models import Parameters


@dataclass(frozen=True, eq=False)
class LearnedInverter:
    """A trained attacker: observations in, images out.

    Attributes
    ----------
    weights, defense, batch_size, round : what it was trained for; other observations are refused
    projection, centre : [d, p], [p], from a gradient to features
    network : from features to images
    public_images, views : how many were used
    held_out_mse : [epochs + 1], on public images that were not fitted; first that of the mean image
    """

    weights: Parameters
    defense: dict[str, Any]
    batch_size: int
    round: int
    projection: torch.Tensor
    centre: torch.Tensor
    network: nn.Module
    public_images: int
    views: int
    held_out_mse: tuple[float, ...]

    def __call__(self, observations: Sequence[Observation]) -> torch.Tensor:
        """Return images [V, 1, C, H, W] in [0, 1]: the first example of each observation.

        A gradient that holds no numbers is read as the average gradient.

        Raises
        ------
        InputError
            Unless each was read at the tap ``example``, at the weights, round, batch size and
            defence of the training.
        """
        if not observations:
            raise InputError("there are no observations: give at least one, of the tap 'example'.")
        for observation in observations:
            self._check(observation)
        seen = [as_gradient(observation) for observation in observations]
        rows = flat({name: torch.stack([g[name] for g in seen]) for name in self.weights})  # [V, d]
        features = rows @ self.projection - self.centre
        sound = torch.isfinite(features).all(1, keepdim=True)
        with torch.no_grad():
            return self.network(torch.where(sound, features, 0.0))[:, None]

    def _check(self, observation: Observation) -> None:
        stage, weights = observation.tap.stage, observation.weights
        plan = (observation.batch_size, observation.tap.round)
        same_weights = weights.keys() == self.weights.keys() and all(
            torch.equal(w, weights[name]) for name, w in self.weights.items()
        )
        refuse(
            {
                "the learned attacker reads the tap 'example', but an observation is of "
                f"{stage!r}.": stage != "example",
                "an observation was made at other weights than the training's: train at its "
                "weights.": not same_weights,
                f"an observation's defence is not the training's, {self.defense}: train under its "
                "own.": observation.defense != self.defense,
                f"an observation has (batch size, round) = {plan}: train for these, not for "
                f"{(self.batch_size, self.round)}.": plan != (self.batch_size, self.round),
            }
        )
