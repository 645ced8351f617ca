"""Checks of a user's input: each failure is one sentence that says what to do."""

import difflib
import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """An input the user can mend; its message is one complete sentence."""


def refuse(problems: Mapping[str, bool]) -> None:
    """Raise `InputError` with the first sentence whose problem occurs.

    Parameters
    ----------
    problems : sentence → whether it is the case

    Examples
    --------
    >>> refuse({"1 is not 1.": 1 != 1})
    """
    for sentence, occurs in problems.items():
        if occurs:
            raise InputError(sentence)


def positive(**values: float) -> None:
    """Raise `InputError` unless every value is finite and greater than zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} = {value} must be a finite number greater than 0.")


def in_range(low: float, high: float, **values: float) -> None:
    """Raise `InputError` unless every value lies in [low, high] (NaN never does)."""
    for name, value in values.items():
        refuse({f"{name} = {value} must lie between {low} and {high}.": not low <= value <= high})


def one_of(allowed: Iterable[str], **values: str) -> None:
    """Raise `InputError`, with the nearest allowed word, unless every value is allowed."""
    words = list(allowed)
    for name, value in values.items():
        if value not in words:
            raise InputError(
                f"{name} = {value!r} is not one of {', '.join(words)}{nearest(value, words)}."
            )


def nearest(word: str, words: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the closest of words, or an empty string.

    >>> nearest("mnits", ["mnist", "lfw"])
    ' (did you mean mnist?)'
    """
    close = difflib.get_close_matches(str(word), list(words), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def whole_number(least: int, **values: Any) -> None:
    """Raise `InputError` unless every value is a whole number of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InputError(f"{name} = {value!r} must be a whole number of at least {least}.")
