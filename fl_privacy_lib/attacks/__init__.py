"""Attacks on what stands at a tap: images by gradient matching, labels from the last layer."""

from fl_privacy_lib.attacks.attack import Attack, Knowledge
from fl_privacy_lib.attacks.labels import infer_labels
from fl_privacy_lib.attacks.presets import PUBLISHED
from fl_privacy_lib.attacks.reconstruct import Reconstruction, reconstruct

__all__ = ["PUBLISHED", "Attack", "Knowledge", "Reconstruction", "infer_labels", "reconstruct"]
