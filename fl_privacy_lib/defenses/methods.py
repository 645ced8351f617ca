"""The papers' methods as fillings of the route, with what each implies for its guarantee."""

import math
from dataclasses import replace
from typing import Any

from fl_privacy_lib._checks import one_of, positive
from fl_privacy_lib.defenses.adaclip import AdaClip, AdaClipNoise
from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.route import BatchNoise, ClipAndNoiseUpdate, Defense, PerExample, Then
from fl_privacy_lib.defenses.rules import LargestNorm, MedianNorm, QuantileNorm, Rule
from fl_privacy_lib.defenses.schedule import Schedule, Scheduled
from fl_privacy_lib.defenses.transformations import Pruned, RandomNoise, Selective


def non_private() -> Defense:
    """Return the empty route: plain federated learning, no guarantee."""
    return Defense("non_private")


def fed_sdp(
    noise_at: str = "client",
    *,
    clip_norm: float = 4.0,
    noise_scale: float = 6.0,
    participants: int | None = None,
) -> Defense:
    """Return Fed-SDP: each client's update is clipped and noised once a round.

    Parameters
    ----------
    noise_at : {'client', 'server'}
        'client' fills per_client: types 0 and 1 read a noisy update. 'server' fills on_arrival:
        type 1, and a server that reads before it adds noise, see the update in clear. Neither
        touches ``example``: a type-2 adversary reads what it reads without any defence.
    clip_norm : float, > 0, C, per tensor of the update
    noise_scale : float, ≥ 0, σ
    participants : int or None
        None: standard deviation σC on each update, σC/√K_t on their mean (Fed-CDP paper, Algorithm
        1). K_t: σC/√K_t on each update, σC/K_t on the mean (the released code's scaling).

    Notes
    -----
    Guarantee: at most client level, for an adversary who sees noisy updates only. Noise at the
    server protects against those who see its aggregate, not against the server. Source: Fed-CDP,
    Algorithm 1.
    """
    one_of(["client", "server"], noise_at=noise_at)
    divisor = 1 if participants is None else participants
    positive(participants=divisor)
    stage = ClipAndNoiseUpdate(Clip(clip_norm), noise_scale, 1 / math.sqrt(divisor))
    if noise_at == "client":
        return Defense("fed_sdp_client", per_client=stage)
    return Defense("fed_sdp_server", on_arrival=stage)


def fed_cdp(
    noise_at: str = "example",
    *,
    divide_by: str | None = None,
    clip_norm: Scheduled = 4.0,
    noise_scale: Scheduled = 6.0,
    scope: str = "layer",
) -> Defense:
    """Return Fed-CDP: clip every example's gradient, and add noise in every local iteration.

    Parameters
    ----------
    noise_at : {'example', 'batch'}
        'example' (as printed): a type-2 adversary reads a clipped and noisy gradient. 'batch' (as
        coded, and DP-SGD): the same adversary reads a clipped gradient *without noise*.
    divide_by : {'sqrt_batch', 'batch', 'none'} or None
        What divides σC on the batch mean, see `noise.mean_std`. None: 'sqrt_batch' at the example,
        'batch' at the batch. The guarantee of the released model depends only on this and on the
        clip, not on where the noise enters.
    clip_norm : float, > 0, or Schedule, C
    noise_scale : float, ≥ 0, or Schedule, σ
    scope : {'layer', 'all'}
        'layer' as in the papers. Noise σC then protects M tensors that move by up to C√M together:
        the Gaussian mechanism's multiplier is σ/√M, not σ.

    Notes
    -----
    Guarantee: example level. Source: Fed-CDP, Algorithm 2; its released code; Fed-alphaCDP,
    Algorithm 1.

    Examples
    --------
    >>> fed_cdp("batch").per_example.noise_scale, fed_cdp("batch").per_batch.divide_by
    (0.0, 'batch')
    """
    return _noised_at(noise_at, "fed_cdp", Clip(clip_norm, scope), noise_scale, divide_by)


def _noised_at(
    noise_at: str,
    name: str,
    clip: Clip | Rule,
    noise_scale: Scheduled,
    divide_by: str | None,
) -> Defense:
    """Return a defence that clips examples, with noise of σ there or at the batch."""
    one_of(["example", "batch"], noise_at=noise_at)
    name = f"{name}_{noise_at}"
    if noise_at == "batch":
        return Defense(name, PerExample(clip), BatchNoise(clip, noise_scale, divide_by or "batch"))
    return Defense(name, PerExample(clip, noise_scale, divide_by or "sqrt_batch"))


def fed_cdp_decay(
    noise_at: str = "example",
    *,
    clip_norm: float = 6.0,
    end: float = 2.0,
    rounds: int = 100,
    shape: str = "linear",
    cycles: int = 1,
    divide_by: str | None = None,
    noise_scale: float = 6.0,
    scope: str = "layer",
) -> Defense:
    """Return Fed-CDP(decay): the clipping bound, and with it the noise, falls over the rounds.

    Parameters
    ----------
    clip_norm, end, rounds, shape, cycles : see `Schedule`
    noise_at, divide_by, noise_scale, scope : as in `fed_cdp`

    Notes
    -----
    Guarantee: that of `fed_cdp` with the same σ, since bound and noise fall together and by a
    schedule without data. Source: Fed-CDP, section VII, linear from 6 to 2 in 100 rounds.

    Examples
    --------
    >>> [fed_cdp_decay().per_example.clip.bound(round) for round in (0, 50)]
    [6.0, 4.0]
    """
    clip = Clip(Schedule(clip_norm, end, rounds, shape, cycles), scope)
    return _noised_at(noise_at, "fed_cdp_decay", clip, noise_scale, divide_by)


def fed_alpha_cdp(
    reading: str = "example",
    *,
    clip_norm: Scheduled | None = 4.0,
    noise_scale: Scheduled = 6.0,
    divide_by: str | None = None,
    scope: str = "layer",
) -> Defense:
    """Return Fed-αCDP: clipped as Fed-CDP, with noise scaled by the largest norm that is left.

    Parameters
    ----------
    reading : {'example', 'batch', 'code'}
        'example' (section 5.2): σS on each example, σS/√B on the mean. 'batch' (Algorithm 1): σS on
        the batch mean, undivided; a type-2 adversary reads a clipped gradient *without noise*.
        'code' (the released script): as 'batch', with S the mean of the examples' largest tensor
        norms, each at least 0.1, and σS/B; `clip_norm` and `scope` are then the code's own, 32 by
        tensor, which hardly ever clips.
    clip_norm : float, > 0, or Schedule, C, so that S ≤ C; or None: nothing is clipped
    noise_scale : float, ≥ 0, or Schedule, σ
    divide_by : {'sqrt_batch', 'batch', 'none'} or None
        None: as the reading says. 'batch' with 'sqrt_batch' has the distribution of 'example' at
        every tap but the example's, and takes the fast engine.
    scope : {'layer', 'all'}, of the clip

    Notes
    -----
    Guarantee: none, see `LargestNorm`. The papers' ε counts σ as if S were a bound. Source:
    Fed-αCDP, section 5.2 and Algorithm 1; its released code.
    """
    one_of(["example", "batch", "code"], reading=reading)
    clip = None if clip_norm is None else Clip(clip_norm, scope)
    rule = LargestNorm(Clip(32.0), "mean", 0.1) if reading == "code" else LargestNorm(clip)
    name = f"fed_alpha_cdp_{reading}"
    if reading == "example":
        return Defense(name, per_example=PerExample(rule, noise_scale, divide_by or "sqrt_batch"))
    noise = BatchNoise(rule, noise_scale, divide_by or {"batch": "none", "code": "batch"}[reading])
    return Defense(name, per_example=PerExample(rule.clip), per_batch=noise)


def median_clipped(
    noise_at: str = "example",
    *,
    noise_scale: float = 6.0,
    divide_by: str | None = None,
    scope: str = "layer",
) -> Defense:
    """Return Fed-CDP with the bound C that the paper suggests: the median of the batch's own norms.

    Parameters
    ----------
    noise_at, noise_scale, divide_by, scope : as in `fed_cdp`; the noise is scaled with the median

    Notes
    -----
    Guarantee: none. The bound is read off private data and shows in the noise, see `MedianNorm`.
    Source: Fed-CDP, section IV-C.
    """
    return _noised_at(noise_at, "median_clip", MedianNorm(scope), noise_scale, divide_by)


def quantile_clipped(
    *,
    clip_norm: float = 4.0,
    noise_scale: float = 6.0,
    target: float = 0.5,
    rate: float = 0.2,
    count_scale: float = 10.0,
    scope: str = "all",
) -> Defense:
    """Return clipping of examples at a quantile of norms that is itself estimated privately.

    The noise on the batch mean is σC_t/B.

    Parameters
    ----------
    clip_norm : float, > 0, C_0, the bound of round 0
    noise_scale : float, ≥ 0, σ
    target, rate, count_scale : see `QuantileNorm`
    scope : {'layer', 'all'}, a bound for each tensor, or one for all

    Notes
    -----
    Guarantee: example level, of gradients and counts together: 1/z² = 1/z_gradients² + 1/z_counts²,
    which `Defense.events` puts into one event.
    Source: Andrew et al. (2021), with noise on every client's own counts; σ and C_0 as in Fed-αCDP,
    Table 10.
    """
    rule = QuantileNorm(Clip(clip_norm, scope), target, rate, count_scale)
    noise = BatchNoise(rule, noise_scale)
    return Defense(
        "quantile_clip", PerExample(rule), noise, on_aggregate=rule, initial_state=rule.start
    )


def adaclip(
    *,
    clip_norm: float = 4.0,
    noise_scale: float = 6.0,
    divide_by: str = "batch",
    scope: str = "all",
) -> Defense:
    """Return AdaClip: coordinates are centred and scaled by earlier moments before clipping.

    Parameters
    ----------
    clip_norm, scope : see `AdaClip`; the first iteration of a participation clips to C_0
    noise_scale, divide_by : as in `fed_cdp`, on the batch mean: a type-2 adversary reads none

    Notes
    -----
    Guarantee: example level, of a clip to norm 1 at twice the sensitivity under both relations, for
    the centring. Source: Pichapati et al. (2019); σ and C_0 as in Fed-αCDP, Table 10.
    """
    rule = AdaClip(clip_norm, scope)
    noise = AdaClipNoise(rule, noise_scale, divide_by)
    return Defense("adaclip", per_example=rule, per_batch=noise, begin_client=rule.begin)


def _after(defense: Defense | None, at: str, name: str, stage: Any) -> Defense:
    """Return a defence with one more rule behind what it has at a stage."""
    one_of(["per_example", "per_batch", "per_client"], at=at)
    base = defense or non_private()
    here = getattr(base, at)
    filled: dict[str, Any] = {at: stage if here is None else Then(here, stage)}
    return replace(base, name=name if base == non_private() else f"{base.name}+{name}", **filled)


def pruned(
    fraction: float, at: str = "per_client", *, scope: str = "all", defense: Defense | None = None
) -> Defense:
    """Return gradient compression: the coordinates of smallest magnitude are not sent.

    Parameters
    ----------
    fraction, scope : see `Pruned`
    at : {'per_example', 'per_batch', 'per_client'}, where
    defense : Defense or None, what comes before it at the same stage, and everywhere else

    Notes
    -----
    Guarantee: none of its own. After a noisy stage it is computed from what is released and costs
    nothing. Noisy examples that are pruned one by one are counted each with its noise alone: their
    mean is no longer a mean plus noise. Source: Fed-αCDP, section 4.1 and Fig. 3 (10 and 90 %);
    Fed-CDP, Fig. 5 (0 to 90 %).
    """
    return _after(
        defense, at, "gradient_compression", Pruned(fraction, scope, 1 + (at == "per_example"))
    )


def dssgd(
    share: float = 0.1,
    threshold: float = 0.0,
    at: str = "per_client",
    *,
    scope: str = "all",
    defense: Defense | None = None,
) -> Defense:
    """Return distributed selective SGD: a random part of what passes a threshold is sent.

    Parameters
    ----------
    share, threshold, scope : see `Selective`
    at, defense : as in `pruned`

    Notes
    -----
    Guarantee: none. Source: Shokri and Shmatikov (2015); Fed-αCDP, section 4.1 and Fig. 3, which
    do not print the share.
    """
    return _after(
        defense, at, "dssgd", Selective(share, threshold, scope, 1 + (at == "per_example"))
    )


def random_noise(
    std: float,
    distribution: str = "gaussian",
    at: str = "per_client",
    *,
    defense: Defense | None = None,
) -> Defense:
    """Return noise of a fixed standard deviation for each coordinate, whatever the gradient's size.

    Parameters
    ----------
    std, distribution : see `RandomNoise`
    at, defense : as in `pruned`

    Notes
    -----
    Guarantee: none, since nothing bounds what one example can change. Source: Fed-αCDP, section 4.2
    and Fig. 3, at 0.001 and 0.01.
    """
    return _after(defense, at, "random_noise", RandomNoise(std, distribution))
