"""What the tests of schedules and of chapter 06 share."""

from importlib.util import find_spec

import pytest
import torch

from fl_privacy_lib.chapters.dynamic_parameters.parameters import DynamicParameters
from fl_privacy_lib.defenses import Clip, Defense, PerExample, Schedule
from fl_privacy_lib.defenses.route import BatchNoise
from fl_privacy_lib.defenses.rules import LargestNorm

CPU = torch.device("cpu")
FULL = DynamicParameters.of_profile("full")
NO_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="the extra 'fast'")
ENGINES = ("generic", "stacked", pytest.param("compiled", marks=NO_NUMBA))


def one_sentence(error):
    text = str(error.value)
    return text.endswith(".") and ". " not in text and text.count("\n") == 0


SCALE, BOUND = Schedule(2.0, 1.0, 3), Schedule(0.03, 0.01, 3, "exponential")
FALL = [(2, 0.03), (5 / 3, 0.03 / 3 ** (1 / 3)), (4 / 3, 0.03 / 3 ** (2 / 3)), (1, 0.01)]
"""σ_t and C_t of four rounds; a gradient's norm C√3 is nothing beside noise in 78,200 numbers."""
BATCH = 4
FALLING = {
    "batch": Defense("b", PerExample(Clip(BOUND)), BatchNoise(Clip(BOUND), SCALE)),
    "largest": Defense("l", PerExample(Clip(BOUND)), BatchNoise(LargestNorm(Clip(BOUND)), SCALE)),
    "example": Defense("e", PerExample(Clip(BOUND), SCALE, "batch")),
}

TABLE_1 = {
    # the bound falls, S is the batch's largest norm
    "dp_baseline": (False, False),
    "dp_dyns_cdecay": (True, False),
    "dp_dyns_l2max": (False, True),
    "dp_dyns": (True, True),
    "dp_dynsigma": (False, False),
    "dp_dyns_cdecay_sigma": (True, False),
    "dp_dyns_l2max_sigma": (False, True),
    "dp_dyns_sigma": (True, True),
}
