"""Distributed noise: each client adds a share, and only the sum is seen (chapter 10)."""

import math

from fl_privacy_lib._checks import in_range, positive, whole_number


def noise_share(noise_multiplier: float, clients: int, margin: int = 0) -> float:
    """Return the noise multiplier of one client's share.

    Parameters
    ----------
    noise_multiplier : z > 0 that the sum must carry
    clients : K ≥ 1 that are asked in a round
    margin : how many of them may drop out or collude before the sum carries less, 0 ≤ margin < K

    Raises
    ------
    InputError
        If a number is out of range.

    Notes
    -----
    Variances of independent shares add up: K - margin shares of z/√(K - margin) have z together.
    Source: Kairouz, Liu and Steinke (2021), section 1, there with discrete noise.

    Examples
    --------
    >>> noise_share(4.0, 100), round(noise_share(4.0, 100, margin=36), 9)
    (0.4, 0.5)
    """
    positive(noise_multiplier=noise_multiplier)
    whole_number(1, clients=clients)
    in_range(0, clients - 1, margin=margin)
    return noise_multiplier / math.sqrt(clients - margin)


def noise_left(share: float, clients: int, gone: int = 0) -> float:
    """Return the noise multiplier of the sum, against a server that some clients help.

    Parameters
    ----------
    share : noise multiplier of one client's share, > 0
    clients : K ≥ 1 that are asked in a round
    gone : of them, whose share never arrives, or who tell it to the server, to subtract

    Raises
    ------
    InputError
        If a number is out of range, or nobody is left who adds secret noise.

    Examples
    --------
    >>> round(noise_left(0.5, 100, gone=30 + 6), 9)
    4.0
    """
    positive(share=share)
    in_range(0, clients - 1, gone=gone)
    return share * math.sqrt(clients - gone)
