"""Identity of the process that holds a directory: for error texts, and in place of a lock where the system has none."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import secrets
import sys
from pathlib import Path
from typing import Any

from safeckpt.store import disk

__all__ = ["Holder", "describe", "is_gone", "is_own", "read", "write"]

Holder = dict[str, Any]

_MOST_BYTES = 1 << 14  # of a file that is ours, all of it


def describe() -> Holder:
    """Return the record of this process, with a random token that no other record has."""
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "started": _started(os.getpid()),
        # Not its arguments: the directory may be readable by people who must not see what is in them.
        "command": sys.argv[0] if sys.argv else "",
        "token": secrets.token_hex(8),
    }


def read(path: Path) -> Holder:
    """Return the record in a file; empty when it is missing or incomplete."""
    try:
        holder = json.loads(disk.read(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def write(path: Path, holder: Holder) -> None:
    """Write a record into a file that did not exist.

    Raises:
        FileExistsError: The file exists; it is untouched.
        OSError: The system refused; the file may hold a part.
    """
    file = disk.create(path)
    try:
        disk.write(file, memoryview(json.dumps(holder).encode()))
    finally:
        disk.close(file)


def is_own(holder: Holder) -> bool:
    """Return whether a record is of this process."""
    own = describe()
    return all(holder.get(name) == own[name] for name in ("pid", "host", "started"))


def is_gone(holder: Holder) -> bool:
    """Return whether the process of a record is known to have ended; that of another host is never known to."""
    pid = holder.get("pid")
    if holder.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0 or sys.platform == "win32":
        return False  # on Windows signal 0 is Ctrl-C, and its locks never fail
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass  # another user's
    # Ids are used again: after a restart in a container nearly always.
    return holder.get("started") is not None and holder["started"] != _started(pid)


def _started(pid: int) -> int | None:
    """Return when a process began, in the system's own unit; None where that cannot be had."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Field 22; the second, the name in brackets, may hold blanks and brackets, proc_pid_stat(5).
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return None
