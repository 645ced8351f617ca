"""The registry of methods: each name once, with its builder, its title and its name in the papers.

To add a defence, write its stage and one entry of `METHODS`; the page *Add your own defence* does
both. What a method shows at each tap, how it can be attacked and what it costs follow from its
stages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature

from fl_privacy_lib._checks import one_of
from fl_privacy_lib.defenses import compensation, representation
from fl_privacy_lib.defenses import methods as m
from fl_privacy_lib.defenses.route import Defense


@dataclass(frozen=True)
class Method:
    """One entry.

    Parameters
    ----------
    title : what a reader calls it
    builder : settings, by name → the defence
    published : its name in the published tables, where it is another
    live : whether it stands in chapter 01's live table
    """

    title: str
    builder: Callable[..., Defense]
    published: str = ""
    live: bool = True


def _placed(builder: Callable[..., Defense]) -> Callable[..., Defense]:
    """Return a builder whose one number is the setting `level`."""
    return lambda level, at="per_client": builder(level, at=at)


def _compressed(
    builder: Callable[..., Defense], level: float, clip_norm: float, noise_scale: float
) -> Defense:
    """Return a defence whose noised examples are pruned, a fraction `level` of each."""
    return m.pruned(
        level, "per_example", defense=builder(clip_norm=clip_norm, noise_scale=noise_scale)
    )


METHODS: dict[str, Method] = {
    "non_private": Method("no defence", m.non_private),
    "fed_sdp_client": Method("Fed-SDP at client", partial(m.fed_sdp, "client"), "fed_sdp"),
    "fed_sdp_server": Method("Fed-SDP at server", partial(m.fed_sdp, "server")),
    "fed_cdp_example": Method("Fed-CDP per example", partial(m.fed_cdp, "example"), "fed_cdp"),
    "fed_cdp_batch": Method("Fed-CDP per batch", partial(m.fed_cdp, "batch"), "fed_cdp"),
    "fed_cdp": Method("Fed-CDP", m.fed_cdp, live=False),
    "fed_cdp_decay_example": Method(
        "Fed-CDP(decay) per example",
        partial(m.fed_cdp_decay, "example"),
        "fed_cdp_decay",
        live=False,
    ),
    "fed_cdp_decay_batch": Method(
        "Fed-CDP(decay) per batch", partial(m.fed_cdp_decay, "batch"), "fed_cdp_decay", live=False
    ),
    "fed_alpha_cdp_example": Method(
        "Fed-αCDP[σ], noise on examples",
        partial(m.fed_alpha_cdp, "example"),
        "fed_alpha_cdp_sigma",
        live=False,
    ),
    "fed_alpha_cdp_batch": Method(
        "Fed-αCDP[σ], noise on the batch",
        partial(m.fed_alpha_cdp, "batch"),
        "fed_alpha_cdp_sigma",
        live=False,
    ),
    "median_clip_example": Method(
        "median clipping per example",
        partial(m.median_clipped, "example"),
        "median_clip",
        live=False,
    ),
    "median_clip_batch": Method(
        "median clipping per batch", partial(m.median_clipped, "batch"), "median_clip", live=False
    ),
    "quantile_clip": Method("quantile clipping", m.quantile_clipped, live=False),
    "adaclip": Method("AdaClip", m.adaclip, live=False),
    "dssgd": Method("DSSGD", _placed(m.dssgd), live=False),
    "pruned": Method("pruning", _placed(m.pruned), live=False),
    "fed_cdp_pruned": Method("Fed-CDP, pruned", partial(_compressed, m.fed_cdp), live=False),
    "fed_cdp_decay_pruned": Method(
        "Fed-CDP(decay), pruned", partial(_compressed, m.fed_cdp_decay), live=False
    ),
    "gaussian": Method("normal noise", _placed(m.random_noise), live=False),
    "laplace": Method(
        "Laplace noise", _placed(partial(m.random_noise, distribution="laplace")), live=False
    ),
    "risk_compensation": Method(
        "slices and compensation", compensation.risk_compensated, live=False
    ),
    "pld": Method("Soteria", representation.soteria, live=False),
    "dp_fedsgd": Method(  # what a sum shows of one example to who knows all others
        "DP-FedSGD", partial(m.fed_cdp, scope="all"), live=False
    ),
    "clipped": Method(
        "clipping alone",
        lambda clip_norm: m.fed_cdp(clip_norm=clip_norm, noise_scale=0.0),
        live=False,
    ),
    "clipped_gaussian": Method(
        "clipped, normal noise",
        lambda level, clip_norm: m.fed_cdp(clip_norm=clip_norm, noise_scale=level / clip_norm),
        live=False,
    ),
}
"""Name → method. `level` is the strength of a method without C and σ: a standard deviation per
coordinate, or a fraction pruned or shared."""


_signature = cache(signature)  # `build` is called for every point


def build(name: str, **settings: object) -> Defense:
    """Return a method's defence; settings that only other methods take are left out.

    Raises
    ------
    InputError
        If there is no such method, or no method takes a setting.
    """
    one_of(METHODS, method=name)
    builder = METHODS[name].builder
    known = {k for method in METHODS.values() for k in _signature(method.builder).parameters}
    if unknown := settings.keys() - known:
        one_of(sorted(known), setting=min(unknown))
    return builder(**{k: v for k, v in settings.items() if k in _signature(builder).parameters})
