"""The papers' methods as fillings of the route, with what each implies for its guarantee."""

import math

from fl_privacy_lib._checks import in_range, one_of, positive
from fl_privacy_lib.defenses.clipping import Clip
from fl_privacy_lib.defenses.route import BatchNoise, ClipAndNoiseUpdate, Defense, PerExample


def non_private() -> Defense:
    """Return the empty route: plain federated learning, no guarantee."""
    return Defense("non_private")


def fed_sdp(
    noise_at: str = "client", *, clip_norm: float = 4.0, noise_scale: float = 6.0, participants: int | None = None
) -> Defense:
    """Return Fed-SDP: each client's update is clipped and noised once a round.

    Parameters
    ----------
    noise_at : {'client', 'server'}
        'client' fills per_client: types 0 and 1 read a noisy update. 'server' fills on_arrival: what leaves the
        client is the raw update, so type 1, and a server that reads before it adds noise, see it in clear.
        Neither touches ``example``: a type-2 adversary reads exactly what it reads without any defence.
    clip_norm : float, > 0, C, per tensor of the update
    noise_scale : float, ≥ 0, σ
    participants : int or None
        None: standard deviation σC on each update, σC/√K_t on their mean (Fed-CDP paper, Algorithm 1). K_t: σC/√K_t on
        each update, σC/K_t on the mean (the released code's scaling).

    Notes
    -----
    Guarantee: at most client level, for an adversary who sees noisy updates only. Noise at the server protects
    against those who see its aggregate, not against the server. Source: Fed-CDP, Algorithm 1.
    """
    one_of(["client", "server"], noise_at=noise_at)
    in_range(0, math.inf, noise_scale=noise_scale)
    if participants is not None:
        positive(participants=participants)
    scale = 1.0 if participants is None else 1 / math.sqrt(participants)
    stage = ClipAndNoiseUpdate(Clip(clip_norm), noise_scale, scale)
    if noise_at == "client":
        return Defense("fed_sdp_client", per_client=stage)
    return Defense("fed_sdp_server", on_arrival=stage)


def fed_cdp(
    noise_at: str = "example",
    *,
    divide_by: str | None = None,
    clip_norm: float = 4.0,
    noise_scale: float = 6.0,
    scope: str = "layer",
) -> Defense:
    """Return Fed-CDP: every example's gradient is clipped, and noise is added in every local iteration.

    Parameters
    ----------
    noise_at : {'example', 'batch'}
        'example' (as printed): a type-2 adversary reads a clipped and noisy gradient. 'batch' (as coded, and
        DP-SGD): the same adversary reads a clipped gradient *without noise*.
    divide_by : {'sqrt_batch', 'batch', 'none'} or None
        What divides σC on the batch mean, see `noise.mean_std`. None: 'sqrt_batch' at the example, 'batch' at
        the batch. The guarantee of the released model depends on this number and on the clip alone, not on
        where the noise enters; the type-2 adversary's view depends on `noise_at`.
    clip_norm : float, > 0, C
    noise_scale : float, ≥ 0, σ
    scope : {'layer', 'all'}
        'layer' as in the papers. Noise σC then protects M tensors that move by up to C√M together: the
        Gaussian mechanism's multiplier is σ/√M, not σ.

    Notes
    -----
    Guarantee: example level. Source: Fed-CDP, Algorithm 2; its released code; Fed-alphaCDP, Algorithm 1.

    Examples
    --------
    >>> fed_cdp("batch").per_example.noise_scale, fed_cdp("batch").per_batch.divide_by
    (0.0, 'batch')
    """
    one_of(["example", "batch"], noise_at=noise_at)
    clip = Clip(clip_norm, scope)
    if noise_at == "example":
        return Defense("fed_cdp_example", per_example=PerExample(clip, noise_scale, divide_by or "sqrt_batch"))
    noise = BatchNoise(clip, noise_scale, divide_by or "batch")
    return Defense("fed_cdp_batch", per_example=PerExample(clip), per_batch=noise)
