"""Defences: fillings of a gradient's route from an example to the global model."""

from fl_privacy_lib.defenses.clipping import Clip, Gradient, layer_norms
from fl_privacy_lib.defenses.holding import Holding
from fl_privacy_lib.defenses.methods import (
    adaclip,
    dssgd,
    fed_alpha_cdp,
    fed_cdp,
    fed_cdp_decay,
    fed_sdp,
    median_clipped,
    non_private,
    pruned,
    quantile_clipped,
    random_noise,
)
from fl_privacy_lib.defenses.noise import keyed_generator, mean_std
from fl_privacy_lib.defenses.route import (
    BatchNoise,
    ClientContext,
    Context,
    Defense,
    PerExample,
    Then,
)
from fl_privacy_lib.defenses.schedule import Schedule
from fl_privacy_lib.defenses.stage import (
    STAGES,
    TAPS,
    THREAT_TYPES,
    Declaration,
    Noise,
    Stage,
    Transformation,
)

__all__ = [
    "STAGES",
    "TAPS",
    "THREAT_TYPES",
    "BatchNoise",
    "ClientContext",
    "Clip",
    "Context",
    "Declaration",
    "Defense",
    "Gradient",
    "Holding",
    "Noise",
    "PerExample",
    "Schedule",
    "Stage",
    "Then",
    "Transformation",
    "adaclip",
    "dssgd",
    "fed_alpha_cdp",
    "fed_cdp",
    "fed_cdp_decay",
    "fed_sdp",
    "keyed_generator",
    "layer_norms",
    "mean_std",
    "median_clipped",
    "non_private",
    "pruned",
    "quantile_clipped",
    "random_noise",
]
