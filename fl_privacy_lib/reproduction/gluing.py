"""Values that the text quotes: computed in a cell, never typed."""

from typing import Any


def glue(name: str, value: Any) -> None:
    """Make a value available to the page's text under a name; outside the book nothing happens.

    Parameters
    ----------
    name : the key that ``{glue:text}`` names
    value : text or a number
    """
    try:
        from myst_nb import glue as myst_glue
    except ImportError:  # a notebook opened where the book's tools are not installed
        return
    myst_glue(name, value, display=False)
