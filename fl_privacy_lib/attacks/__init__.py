"""Attacks: what an adversary at a tap makes of what it reads."""

from fl_privacy_lib.attacks.labels import infer_labels
from fl_privacy_lib.attacks.reconstruct import Attack, Reconstruction, reconstruct

__all__ = ["Attack", "Reconstruction", "infer_labels", "reconstruct"]
