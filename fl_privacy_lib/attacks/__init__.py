"""Attacks on what stands at a tap: images by gradient matching, labels from the last layer."""

from fl_privacy_lib.attacks.attack import PUBLISHED, Attack
from fl_privacy_lib.attacks.evidence import infer_labels
from fl_privacy_lib.attacks.reconstruct import Reconstruction, reconstruct

__all__ = ["PUBLISHED", "Attack", "Reconstruction", "infer_labels", "reconstruct"]
