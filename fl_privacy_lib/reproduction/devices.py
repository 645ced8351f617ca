"""Which device computes: asked for by a parameter, answered in one sentence when it is not there."""

import os
import platform

import torch

from fl_privacy_lib._checks import InputError


def pick_device(name: str) -> torch.device:
    """Return the device 'cpu', 'cuda' or 'auto' (a CUDA device where there is one, else the CPU)."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device = 'cuda', but this machine shows no CUDA device: use device=auto or device=cpu."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the hardware's name for a record: the CUDA device, or the CPU's cores and architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"
