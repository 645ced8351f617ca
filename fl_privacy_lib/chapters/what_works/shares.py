"""Distributed noise: each client adds a share, and only the sum is seen (chapter 10)."""

import math

from fl_privacy_lib._checks import in_range, positive, refuse, whole_number


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


def noise_left(share: float, clients: int, dropped: int = 0, colluding: int = 0) -> float:
    """Return the noise multiplier of the sum, against a server that some clients help.

    Parameters
    ----------
    share : noise multiplier of one client's share, > 0
    clients : K ≥ 1 that are asked in a round
    dropped : of them, whose share never arrives
    colluding : of the others, who tell the server their shares, so that it can subtract them

    Raises
    ------
    InputError
        If a number is out of range, or nobody is left who adds secret noise.

    Examples
    --------
    >>> round(noise_left(0.5, 100, dropped=30, colluding=6), 9)
    4.0
    """
    positive(share=share)
    in_range(0, clients, dropped=dropped, colluding=colluding)
    refuse({
        f"dropped = {dropped} and colluding = {colluding} leave none of clients = {clients} who "
        "adds secret noise: no ε holds.": dropped + colluding >= clients,
    })  # fmt: skip
    return share * math.sqrt(clients - dropped - colluding)
