"""Numbers, sizes and texts of others for people."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["from_here", "is_harmless", "number", "parse_size", "printable", "size"]

_UNITS = ("B", "kB", "MB", "GB", "TB")
_BYTES = {"": 1, "B": 1, "kB": 1000}
_BYTES |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)}
_BYTES |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", start=1)}


def printable(text: str, keep: str = "\n") -> str:
    """Return a text with every character escaped that a terminal may obey or hide: controls, directions, surrogates.

    Args:
        text: Any text.
        keep: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(one if is_harmless(one) or one in keep else _escaped(one) for one in text)


def is_harmless(character: str) -> bool:
    """Return whether a character is one to be seen, or a space of any script."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def from_here(path: str | Path) -> str:
    """Return a path as it is called from the current directory, where it is below that."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):  # there may be no such directory any more
        return str(path)


def size(count: float) -> str:
    """Return a number of bytes.

    Example:
        >>> size(1_234_000)
        '1.23 MB'
    """
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def parse_size(text: str) -> int | None:
    """Return the number of bytes that a text such as 5GB or 500MiB stands for; None when it is none.

    Example:
        >>> parse_size("1.5 kB"), parse_size("5 apples")
        (1500, None)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text)
    return int(float(match[1]) * _BYTES[match[2]]) if match is not None and match[2] in _BYTES else None


def number(value: Any) -> str:
    """Return a loss or a metric: six digits of each number.

    Example:
        >>> number({"val": 0.25, "acc": 0.875})
        'val 0.25, acc 0.875'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(number(one) for one in value)
    return "" if value is None else f"{value:.6g}"
