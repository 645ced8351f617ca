"""Attackers who know that a share of a gradient's slices is noisy, and look for the noisy ones.

Each turns what was observed into what is worth matching. A coordinate that is set to zero is left
out by an attack with ``mask="zeros"``, in every observation by itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.data.partition import Partition
from fl_privacy_lib.defenses.compensation import Compensation
from fl_privacy_lib.defenses.representation import last_dense
from fl_privacy_lib.defenses.route import Defense
from fl_privacy_lib.defenses.slices import Slices, flat, unflat
from fl_privacy_lib.federated.participation import Examples, Observation, Tap
from fl_privacy_lib.federated.simulation import simulate
from fl_privacy_lib.sampling import Plan

ARMS = ("naive", "muted", "mask_aware", "known_slices", "slice_aware", "compensating", "learned")
"""What an attacker adds to the published attack, or instead of it has learned; only 'known_slices'
is told a secret."""

Pair = tuple[Observation, Observation]
"""An update as it is sent, and the same one without its noise, which no attacker holds."""
MEDIAN = 0.6744897501960817 * math.sqrt(2)  # of |a − b| for two standard normal numbers


def _row(observation: Observation) -> torch.Tensor:
    """Return what was observed as a row [d]."""
    return flat({name: v[None] for name, v in observation.values.items()})[0]


def _with_row(observation: Observation, row: torch.Tensor) -> Observation:
    like = {name: v[None] for name, v in observation.values.items()}
    return replace(observation, values={n: v[0] for n, v in unflat(row[None], like).items()})


def suspects(observation: Observation, slices: Slices, noisy: int, std: float) -> list[int]:
    """Return the slices that look most like the noise that is announced.

    Parameters
    ----------
    observation : one client's update
    slices : the public slices
    noisy : how many of them got noise
    std : σ of that noise, in units of the update

    Notes
    -----
    Neighbouring coordinates of noise of standard deviation σ differ by 0.954 σ in the median,
    whatever smooth signal lies below; those of a gradient seldom do. No truth is used.

    Examples
    --------
    >>> g = torch.Generator().manual_seed(0)
    >>> values = {"w": torch.cat([torch.zeros(50), torch.randn(50, generator=g)])}
    >>> from fl_privacy_lib.federated import Tap
    >>> seen = Observation(Tap("update"), values, {}, 1.0, 1, 1, {})
    >>> suspects(seen, Slices((0, 25, 50, 75, 100)), 2, 1.0)
    [2, 3]
    """
    distances = []
    for run in _row(observation).split(slices.sizes):
        level = (run.diff().abs().median() if len(run) > 1 else run.abs()[0]) / (MEDIAN * std)
        distances.append(abs(math.log(max(float(level), 1e-30))))
    return sorted(sorted(range(len(distances)), key=distances.__getitem__)[:noisy])


def without_slices(
    observation: Observation, slices: Slices, left_out: Sequence[int]
) -> Observation:
    """Return an observation with zeros in the slices that are left out."""
    kept = torch.ones(1, len(slices.sizes))
    kept[:, list(left_out)] = 0.0
    row = _row(observation)
    return _with_row(observation, torch.where(slices.spread(kept.to(row))[0] > 0, row, 0.0))


def without_tensor(observation: Observation, name: str) -> Observation:
    """Return an observation with zeros in one tensor: the muted attack on Soteria."""
    zeros = torch.zeros_like(observation.values[name])
    return replace(observation, values=observation.values | {name: zeros})


def compensated(observation: Observation, stage: Compensation) -> Observation:
    """Return one client's update after the server's own compensation, as of a single client."""
    return _with_row(observation, stage.repaired(_row(observation), torch.ones(1)))


@dataclass(frozen=True)
class SliceReader:
    """What attackers of several kinds make of an update before they match gradients.

    Parameters
    ----------
    model, defense : the network, and what its clients and its server do
    """

    model: nn.Module
    defense: Defense

    @property
    def stage(self) -> Any:
        """The defence's noise on slices."""
        return self.defense.per_client

    def guess(self, seen: Observation) -> list[int]:
        """Return the slices that look noisy."""
        return suspects(seen, self.stage.slices, self.stage.noisy, self.stage.noise_std)

    def truth(self, seen: Observation, clear: Observation) -> list[int]:
        """Return the slices that are noisy, for an oracle and for scoring."""
        parts = (_row(seen) - _row(clear)).split(self.stage.slices.sizes)
        return [i for i, part in enumerate(parts) if bool((part != 0).any())]

    def found(self, seen: Observation, clear: Observation) -> float:
        """Return the share of the noisy slices that a guess has found."""
        true = set(self.truth(seen, clear))
        return len(true & set(self.guess(seen))) / len(true)

    def read(self, arm: str, seen: Observation, clear: Observation) -> Observation:
        """Return what an attacker, one of `ARMS`, matches; `clear` is for the oracle alone."""
        one_of(ARMS, arm=arm)
        if arm == "muted":
            return without_tensor(seen, last_dense(self.model)[0])
        if arm == "compensating":
            stage: Any = self.defense.on_aggregate
            return compensated(seen, stage)
        if arm in ("slice_aware", "known_slices"):
            out = self.guess(seen) if arm == "slice_aware" else self.truth(seen, clear)
            return without_slices(seen, self.stage.slices, out)
        return seen

    def updates(self, examples: Examples, rounds: int, seed: int) -> list[list[Pair]]:
        """Return each image's update, sent in several rounds at the same weights, [V][R].

        One local iteration at rate 1 makes an update the negative gradient: noise on the one is
        noise on the other.

        Parameters
        ----------
        examples : images [V, …] and labels [V], one a client
        rounds : R
        seed : of the noise and the slices
        """
        count = len(examples[1])
        held = Partition("victims", tuple(np.array([i]) for i in range(count)), count)
        # the server's step is too small to move a weight
        plan = Plan(count, count, rounds, 1, 1, local_lr=1.0, server_lr=1e-12, seed=seed)
        taps = [[Tap("update", i, r) for r in range(rounds)] for i in range(count)]
        sent, clear = (
            simulate(
                self.model, examples, held, plan, d, taps=[tap for row in taps for tap in row]
            ).observations
            for d in (self.defense, self.defense.noiseless())
        )
        return [[(sent[tap], clear[tap]) for tap in row] for row in taps]
