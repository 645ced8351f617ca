"""Where things lie. The only module of the library that reads the environment."""

import os
from pathlib import Path

import fl_privacy_lib
from fl_privacy_lib._checks import refuse

ROOT = Path(fl_privacy_lib.__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PUBLISHED = RESULTS / "published"
MEASURED = RESULTS / "measured"
BUILD = ROOT / "_build"


def data_root() -> Path:
    """Return the folder of data sets: FL_PRIVACY_DATA, else ~/.cache/fl-privacy.

    Raises
    ------
    InputError
        If FL_PRIVACY_DATA names something that is not a folder or cannot be read.
    """
    named = os.environ.get("FL_PRIVACY_DATA")
    if not named:
        return Path.home() / ".cache" / "fl-privacy"
    folder = Path(named).expanduser().absolute()
    refuse(
        {
            f"FL_PRIVACY_DATA = {named} is not a folder: name the data sets' folder, or unset "
            "it.": not folder.is_dir(),
            f"FL_PRIVACY_DATA = {named} cannot be read: change its rights, or name another "
            "folder.": not os.access(folder, os.R_OK | os.X_OK),
        }
    )
    os.environ["FL_PRIVACY_DATA"] = str(folder)  # processes of ours may start in another folder
    return folder


def decoded_cache() -> Path:
    """Return the folder of decoded data sets, outside the data folder, which may be read-only."""
    return Path.home() / ".cache" / "fl-privacy" / "decoded"


def point_cache(chapter: str) -> Path:
    """Return the folder of a chapter's finished points: an interrupted run finds them again."""
    return BUILD / "points" / chapter
