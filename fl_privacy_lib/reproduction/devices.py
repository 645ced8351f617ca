"""The device that computes: named by a parameter, refused in one sentence where it is absent."""

import os
import platform

import torch

from fl_privacy_lib._checks import InputError


def pick_device(name: str) -> torch.device:
    """Return a device by its name.

    Parameters
    ----------
    name : 'cpu', 'cuda' or 'auto', a CUDA device where there is one and else the CPU

    Raises
    ------
    InputError
        If 'cuda' is asked for and this machine has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device = 'cuda', but this machine shows no CUDA device: use device=auto or device=cpu."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the hardware's name for a record: of the CUDA device, or the CPU's cores and kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"
