"""The losses of a run, so that a restart can be compared with what it replays. One line a step, bounded in size.

::

    {step} {value} {crc}      the loss of a step, in hexadecimal, exactly
    back {step} {crc}         what is above this step and before this line belongs to a timeline that was left

The CRC-32 of each line tells a whole one from one that a crash cut: half a number is a number too. Of two lines for
one step the later one counts. Nothing here decides which checkpoint is good.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from zlib import crc32

from safeckpt.errors import SafeckptWarning
from safeckpt.store import disk
from safeckpt.store.commit import commit
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["LossLog", "Timelines", "timelines_of"]

_MOST_BYTES = 4 << 20  # about 100,000 steps; the file is then rewritten with the newest half
_BACK = b"back"


class LossLog:
    """An append-only file of losses.

    It is not synced: a power loss may take the last lines, and then there is less to compare.

    Attributes:
        path: The file; made by the first line. Its directory has to exist by then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: disk.Handle | None = None
        self._size_bytes = 0

    def append(self, losses: Iterable[tuple[int, str]]) -> bool:
        """Add the losses of some steps with one write, and return whether they were written.

        What the system refuses is a `SafeckptWarning`: training does not stop for want of a record.

        Args:
            losses: (step, value), the value without a blank in it.
        """
        return self._append(b"".join(_line(b"%d %s" % (step, value.encode())) for step, value in losses))

    def back_to(self, step: int) -> bool:
        """Say that the run goes on from `step` on another timeline: what is recorded above it is void."""
        return self._append(_line(b"%s %d" % (_BACK, step)))

    def _append(self, lines: bytes) -> bool:
        try:
            if self._open is None:
                self._open, self._size_bytes = disk.open_append(self.path)
            disk.append(self._open, lines)
            self._size_bytes += len(lines)
        except OSError as error:
            self.close()
            warn_caller(
                f"The record of losses {self.path} cannot be written: {error}.",
                SafeckptWarning,
            )
            return False
        return True

    @property
    def is_long(self) -> bool:
        """True when `shorten` should be called before more is added."""
        return self._size_bytes > _MOST_BYTES

    def shorten(self) -> None:
        """Rewrite the file with the newest losses only. The directory's writer lock has to be held.

        Raises:
            OSError: It could not be rewritten; the old file is untouched.
        """
        kept: list[bytes] = []
        size = 0
        for step, value in sorted(self._read(-1).items(), reverse=True):
            line = _line(b"%d %s" % (step, value.encode()))
            size += len(line)
            if size > _MOST_BYTES // 2:
                break
            kept.append(line)
        content = b"".join(reversed(kept))

        def write(file: BinaryIO) -> None:
            file.write(content)

        commit(self.path, write)
        self.close()  # what is open is the old file

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._open is not None:
            self._open.close()
        self._open = None
        self._size_bytes = 0

    def read(self, after: int) -> dict[int, str]:
        """Return the losses of the steps above `after`, by step; none when there is no file.

        A file that cannot be read is a `SafeckptWarning`: then there is nothing to compare with.
        """
        try:
            return self._read(after)
        except OSError as error:
            warn_caller(f"The record of losses {self.path} cannot be read: {error}.", SafeckptWarning)
            return {}

    def timelines(self) -> Timelines:
        """Return every loss on record: those of the run as it is now, and those that were left.

        Raises:
            OSError: The file is there and cannot be read.
        """
        try:
            return timelines_of(disk.read(self.path))
        except FileNotFoundError:
            return Timelines({}, [])

    def _read(self, after: int) -> dict[int, str]:
        return {step: value for step, value in self.timelines().current.items() if step > after}


class Timelines(NamedTuple):
    """The losses of a run by step.

    Attributes:
        current: Those that count.
        left: Those that do not: computed before the run went back to an earlier step, one dict for each time.
    """

    current: dict[int, str]
    left: list[dict[int, str]]


def timelines_of(content: bytes) -> Timelines:
    """Return the losses in the content of a record; a line that is cut or damaged is passed over."""
    current: dict[int, str] = {}
    left: list[dict[int, str]] = [{}]
    void_above: float = math.inf
    for first, second in reversed([entry for line in content.split(b"\n") if (entry := _parse(line)) is not None]):
        if first == _BACK:
            void_above = min(void_above, int(second))
            left.append({})
            continue
        step, value = int(first), second.decode()
        if step <= void_above and current.setdefault(step, value) == value:
            continue
        if left[-1] and step >= next(reversed(left[-1])):  # backwards the steps of one timeline fall
            left.append({})
        left[-1][step] = value
    return Timelines(_ascending(current), [_ascending(one) for one in reversed(left) if one])


def _parse(line: bytes) -> tuple[bytes, bytes] | None:
    content, _, crc = line.rpartition(b" ")
    first, _, second = content.partition(b" ")
    return (first, second) if second and crc == b"%08x" % crc32(content) else None


def _ascending(losses: dict[int, str]) -> dict[int, str]:
    return dict(sorted(losses.items()))


def _line(content: bytes) -> bytes:
    return b"%s %08x\n" % (content, crc32(content))
