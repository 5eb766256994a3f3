"""History of a run, one JSON object a line, for people and their tools. No decision is ever taken from it."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import TYPE_CHECKING, Any

from safeckpt.errors import SafeckptWarning
from safeckpt.store import disk
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EventLog"]

_DEEPEST = 20  # levels of containers in an event; what is nested deeper is cut when it is written


class EventLog:
    """An append-only file of events.

    An event is written with one call, so that a crash can cut only the last line; the next event then starts on a
    line of its own. Events are not synced: a power loss may take the last ones.

    Attributes:
        path: The file; made by the first event. Its directory has to exist by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, kind: str, /, *, step: int | None = None, **data: object) -> bool:
        """Add an event and return whether it was written.

        What the system refuses is a `SafeckptWarning`, never an error: a full disk must not turn a save that
        succeeded into one that failed.

        Args:
            kind: What happened, in one word.
            step: The step it is about.
            data: More about it. NaN and infinities become strings that ``float`` reads, since JSON has no word for
                them; a value that JSON does not know becomes its ``str``.
        """
        record: dict[str, object] = {"time": _now(), "kind": kind}
        if step is not None:
            record["step"] = step
        for name, value in data.items():
            record.setdefault(name, _plain(value))
        line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="backslashreplace") + b"\n"
        try:
            disk.append(self.path, line)
        except OSError as error:
            warn_caller(f"The event {kind!r} is not in {self.path}: {error}.", SafeckptWarning)
            return False
        return True

    def read(self) -> list[dict[str, Any]]:
        """Return every event, oldest first; a line that is not whole is passed over. None when there is no file.

        Raises:
            OSError: The file is there and cannot be read.
        """
        try:
            lines = disk.read(self.path).split(b"\n")
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := _parse(line)) is not None]


def _now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _plain(value: object, depth: int = 1) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (dict, list, tuple, set, frozenset)) and depth == _DEEPEST:
        return "..."
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    return value


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # a cut line, bytes that are not UTF-8, or none of ours
        return None
    return record if isinstance(record, dict) and not _is_deep(record) else None


def _is_deep(record: dict[str, Any]) -> bool:
    """Return whether a record is nested deeper than any of ours; walking through it could end in RecursionError."""
    level: list[Any] = [record]
    for _ in range(_DEEPEST):
        if not level:
            return False
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one)
            if isinstance(item, (dict, list))
        ]
    return bool(level)
