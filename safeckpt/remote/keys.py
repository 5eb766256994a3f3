"""Builds and parses the keys of the objects below a mirror's prefix. Nothing else there is ever read or deleted.

::

    epoch-{number}.json             the claim of a writer: who it is. Created only if absent, never changed.
    epoch-{number}.start.json       where it goes on: the checkpoints of earlier epochs that are its own past
    epoch-{number}/{checkpoint}     a checkpoint that it uploaded, under the name that it has in a directory:
                                    step-00001200.pt, or step-00001200/{file} for each file of a sharded one
    epoch-{number}/events.jsonl     the history of the run, and its losses: losses.log. Written again as they grow.
    probe.json                      shows whether the store honours "only if absent"

    number   1, 2, ... padded with zeros to 8, no other leading zero

A key is parsed whole and as ASCII; what differs in one letter belongs to somebody else.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from safeckpt.store import names

__all__ = [
    "PROBE",
    "Claimed",
    "History",
    "Part",
    "Started",
    "claim_key",
    "epoch_prefix",
    "parse",
    "parse_top",
    "start_key",
]

PROBE = "probe.json"

_NUMBER = r"([0-9]{8}|[1-9][0-9]{8,})"
_CLAIM = re.compile(rf"epoch-{_NUMBER}\.json")
_START = re.compile(rf"epoch-{_NUMBER}\.start\.json")
_PREFIX = re.compile(rf"epoch-{_NUMBER}/?")
_INSIDE = re.compile(rf"epoch-{_NUMBER}/([^/]+)(?:/([^/]+))?")
_FILE = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9_.-]*")  # the names that torch.distributed.checkpoint gives, and ours
_HISTORIES = (names.EVENTS, names.LOSSES)


class Claimed(NamedTuple):
    """The key of a claim."""

    epoch: int


class Started(NamedTuple):
    """The key of a start."""

    epoch: int


class History(NamedTuple):
    """The key of a history."""

    epoch: int
    name: str


class Part(NamedTuple):
    """The key of a checkpoint: of the one file it is, or of one file in it.

    Attributes:
        epoch: Whose it is.
        step: Its step.
        file: The file in a sharded checkpoint; None where it is one file.
    """

    epoch: int
    step: int
    file: str | None


def claim_key(epoch: int) -> str:
    """Return the key of an epoch's claim."""
    return f"epoch-{epoch:08d}.json"


def start_key(epoch: int) -> str:
    """Return the key of an epoch's start."""
    return f"epoch-{epoch:08d}.start.json"


def epoch_prefix(epoch: int) -> str:
    """Return what the keys of an epoch's checkpoints and history begin with."""
    return f"epoch-{epoch:08d}/"


def parse(key: str) -> Claimed | Started | History | Part | None:
    """Return what a key is of; None for one that is not ours.

    Example:
        >>> parse("epoch-00000007/step-00001200.pt")
        Part(epoch=7, step=1200, file=None)
    """
    if not key.isascii():
        return None
    if match := _CLAIM.fullmatch(key):
        return Claimed(int(match[1])) if int(match[1]) else None
    if match := _START.fullmatch(key):
        return Started(int(match[1])) if int(match[1]) else None
    match = _INSIDE.fullmatch(key)
    if match is None or not int(match[1]):
        return None
    epoch, name, file = int(match[1]), match[2], match[3]
    if file is None and name in _HISTORIES:
        return History(epoch, name)
    step = names.parse_step(name)
    if step is None or names.is_folder(name) != (file is not None):
        return None
    if file is not None and not _FILE.fullmatch(file):
        return None
    return Part(epoch, step, file)


def parse_top(name: str) -> int | None:
    """Return the epoch of a name at the top of the prefix, a claim, a start or a folder; None for any other."""
    for pattern in (_CLAIM, _START, _PREFIX):
        if name.isascii() and (match := pattern.fullmatch(name)):
            return int(match[1]) or None
    return None
