"""Defences: fillings of a gradient's route from an example to the global model."""

from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.events import Holding
from fl_privacy_lib.defenses.methods import fed_cdp, fed_sdp, non_private
from fl_privacy_lib.defenses.route import STAGES, TAPS, THREAT_TYPES, Defense, PerExample

__all__ = [
    "STAGES",
    "TAPS",
    "THREAT_TYPES",
    "Clip",
    "Defense",
    "Holding",
    "PerExample",
    "fed_cdp",
    "fed_sdp",
    "non_private",
]
