"""The book's chapters, one folder each, found by number or name. Nothing heavy is imported here.

A folder holds `parameters` (its settings class), `run` (its ``EXPERIMENT``) and what else only
this chapter needs: `grid`, the recorded points, and `reading`, what is read off the records.
No chapter imports another.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fl_privacy_lib._checks import InputError, nearest
from fl_privacy_lib.reproduction.settings import Settings

if TYPE_CHECKING:  # torch is heavy
    from fl_privacy_lib.reproduction.experiment import Experiment


def _settings_of(folder: str) -> type[Settings]:
    module = import_module(f"{__name__}.{folder}.parameters")
    (kind,) = (
        v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__
    )
    return kind


_KINDS = [_settings_of(folder.name) for folder in pkgutil.iter_modules(__path__)]
CHAPTERS = {kind.notebook[:2]: kind for kind in sorted(_KINDS, key=lambda kind: kind.notebook)}
"""Chapter number → its settings class, which names the notebook."""


def chapter(name: str) -> type[Settings]:
    """Return the settings class of a chapter.

    Parameters
    ----------
    name : number, folder or notebook: '01', '1', 'threat_types' or '01_threat_types'

    Raises
    ------
    InputError
        If no chapter has this name.

    Examples
    --------
    >>> chapter("threat_types").notebook
    '01_threat_types'
    """
    for number, kind in CHAPTERS.items():
        folder = kind.__module__.split(".")[-2]
        if name in (number, number.lstrip("0"), kind.notebook, kind.notebook[3:], folder):
            return kind
    words = [word for number, kind in CHAPTERS.items() for word in (number, kind.notebook)]
    raise InputError(
        f"there is no notebook {name!r}{nearest(name, words)}; there are {', '.join(words)}."
    )


def experiment(kind: type[Settings]) -> "Experiment":
    """Return what a chapter measures; `experiment.record` records it."""
    run: Any = import_module(kind.__module__.replace(".parameters", ".run"))
    return run.EXPERIMENT
