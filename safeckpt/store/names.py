"""Builds and parses every file name that the library owns. Nothing else is ever renamed, swept or deleted.

::

    checkpoint   step-{digits}.pt              digits: the step, padded with zeros to 8, no other leading zero
    sharded      step-{digits}                 a directory, with the index safeckpt.pt in it
    set aside    aside-{digits}.{number}.pt    number: 1, 2, ... without leading zeros; without .pt when sharded
    temporary    .{final}.{16 hex}.tmp         final: the name it will get, shortened when that would be too long;
                                               also the name under which a directory is deleted
    writer       .writer.lock                  who holds it: .writer.json
    history      events.jsonl, and the losses of the run: losses.log
    mirror       .mirror.json, which copy in a store this directory has agreed with last

A name is parsed whole and as ASCII: ``step-100.pt``, ``step-000000100.pt``, ``step-00000100.pt.bak`` and
``Step-00000100.pt`` belong to the user. So renaming a checkpoint is a way to keep it for good.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from safeckpt.system.arguments import checked_int

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "EVENTS",
    "HOLDER",
    "LOCK",
    "LOSSES",
    "MIRROR",
    "aside_name",
    "expand_user",
    "folder_name",
    "is_folder",
    "parse_aside",
    "parse_step",
    "step_name",
    "temp_final",
    "temp_name",
    "temps_of",
]

T = TypeVar("T")

LOCK = ".writer.lock"
HOLDER = ".writer.json"
EVENTS = "events.jsonl"
LOSSES = "losses.log"
MIRROR = ".mirror.json"

_DIGITS = r"([0-9]{8}|[1-9][0-9]{8,})"
_STEP = re.compile(rf"step-{_DIGITS}(?:\.pt)?")
_ASIDE = re.compile(rf"aside-{_DIGITS}\.([1-9][0-9]*)(?:\.pt)?")
_TEMP = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)

_TEMP_EXTRA_BYTES = len(".." + 16 * "f" + ".tmp")
# eCryptfs allows 143 bytes in a name, the least in common use; a file system that takes a longer final name
# takes a temporary one of that length too.
_ALWAYS_ALLOWED_BYTES = 143


def step_name(step: int) -> str:
    """Return the file name of a step's checkpoint.

    Example:
        >>> step_name(1200)
        'step-00001200.pt'
    """
    return f"step-{checked_int('step', step):08d}.pt"


def folder_name(step: int) -> str:
    """Return the name of the directory that is a step's sharded checkpoint.

    Example:
        >>> folder_name(1200)
        'step-00001200'
    """
    return step_name(step).removesuffix(".pt")


def is_folder(name: str) -> bool:
    """Return whether a checkpoint's name, set aside or not, is that of a directory."""
    return not name.endswith(".pt") and (parse_step(name) is not None or parse_aside(name) is not None)


def expand_user(path: T) -> T:
    """Return a path with `~` and `~user` at its start replaced as a shell does; anything else as it is.

    Example:
        >>> expand_user("runs/~tmp")
        'runs/~tmp'
    """
    if not isinstance(path, str | os.PathLike):
        return path
    text = os.fspath(cast("Any", path))
    expanded = os.path.expanduser(text)  # noqa: PTH111 - pathlib raises where a shell leaves the name as it is
    if expanded == text:
        return path
    return cast("T", Path(expanded) if isinstance(path, Path) else expanded)


# A listing is parsed at every save and hardly changes: looking a name up again costs a tenth of matching it.
@functools.lru_cache(maxsize=1 << 16)
def parse_step(name: str) -> int | None:
    """Return the step of a checkpoint's name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def aside_name(step: int, number: int, *, folder: bool = False) -> str:
    """Return the name of the number-th checkpoint of a step that was set aside."""
    return f"aside-{checked_int('step', step):08d}.{number}" + ("" if folder else ".pt")


def parse_aside(name: str) -> tuple[int, int] | None:
    """Return (step, number) of a set-aside checkpoint's name, None for any other name."""
    if not name.startswith("aside-"):
        return None  # as most names are, and a listing is parsed at every save
    match = _ASIDE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _shortened(final: str) -> str:
    limit = max(len(os.fsencode(final)), _ALWAYS_ALLOWED_BYTES) - _TEMP_EXTRA_BYTES
    while len(os.fsencode(final)) > limit:  # whole characters: some file systems refuse half a UTF-8 sequence
        final = final[:-1]
    return final


def temp_name(final: str) -> str:
    """Return a new random temporary name for a file that will be called `final`."""
    return f".{_shortened(final)}.{secrets.token_hex(8)}.tmp"


def temp_final(name: str) -> str | None:
    """Return the final name inside a temporary name, None for any other name."""
    match = _TEMP.fullmatch(name)
    return match[1] if match else None


def temps_of(final: str, listing: Iterable[str]) -> list[str]:
    """Return the temporary names in a listing that were made for `final`."""
    shortened = _shortened(final)
    start = f".{shortened}."
    return [name for name in listing if name.startswith(start) and temp_final(name) == shortened]
