"""Check arguments of the public calls: one text for each kind of mistake, with the name and the value.

A wrong type is a `TypeError`, a value out of range a `ValueError`, as for Python's own functions. A bool is no number
here: `keep_last=True` is a mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = ["checked_bool", "checked_choice", "checked_int", "checked_number"]

T = TypeVar("T")


def checked_int(name: str, value: Any, least: int = 0) -> int:
    """Return an integer that is `least` or more.

    Raises:
        TypeError: It is no int.
        ValueError: It is lower.
    """
    text = f"{name} must be an int, {least} or more; got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(text)
    if value < least:
        raise ValueError(text)
    return value


def checked_number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return a number as a float: 0 or more, or above 0 when it has to be `positive`.

    Raises:
        TypeError: It is no int and no float.
        ValueError: It is lower, or NaN.
    """
    text = f"{name} must be a number, {'more than 0' if positive else '0 or more'}; got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(text)
    if not (value > 0 if positive else value >= 0):
        raise ValueError(text)
    return float(value)


def checked_bool(name: str, value: Any) -> bool:
    """Return a bool; 0 and 1 are none.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return value


def checked_choice(name: str, value: Any, choices: Sequence[T]) -> T:
    """Return one of several values.

    Raises:
        ValueError: It is none of them.
    """
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
