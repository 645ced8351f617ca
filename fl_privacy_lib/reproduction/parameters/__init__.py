"""Every chapter's parameters, by its number. Nothing heavy is imported here."""

from fl_privacy_lib._checks import InputError, nearest
from fl_privacy_lib.reproduction.parameters.counting import CountingPrivacy
from fl_privacy_lib.reproduction.parameters.leakage import AdaptiveAttacks, ThreatTypes
from fl_privacy_lib.reproduction.parameters.local import FedSel
from fl_privacy_lib.reproduction.parameters.speed import FastTraining
from fl_privacy_lib.reproduction.parameters.training import FedCdp
from fl_privacy_lib.reproduction.settings import Settings

__all__ = [
    "CHAPTERS", "AdaptiveAttacks", "CountingPrivacy", "FastTraining", "FedCdp", "FedSel", "ThreatTypes", "chapter",
]  # fmt: skip

CHAPTERS: dict[str, tuple[str, type[Settings]]] = {
    "01": ("01_threat_types", ThreatTypes),
    "02": ("02_adaptive_attacks", AdaptiveAttacks),
    "03": ("03_counting_privacy", CountingPrivacy),
    "04": ("04_fast_private_training", FastTraining),
    "05": ("05_fed_cdp", FedCdp),
    "08": ("08_fedsel", FedSel),
}
"""Chapter number → notebook name and settings class."""


def chapter(name: str) -> tuple[str, type[Settings]]:
    """Return (notebook, settings class) of a chapter given as '01', '1', 'threat_types' or '01_threat_types'.

    >>> chapter("threat_types")[0]
    '01_threat_types'
    """
    for number, (notebook, settings) in CHAPTERS.items():
        if name in (number, number.lstrip("0"), notebook, notebook.partition("_")[2]):
            return notebook, settings
    words = [word for number, (notebook, _) in CHAPTERS.items() for word in (number, notebook)]
    raise InputError(f"there is no notebook {name!r}{nearest(name, words)}; there are {', '.join(words)}.")
