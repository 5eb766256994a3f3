"""What the promises of this library rest on, tried on a directory: nothing is believed because of its name."""

from __future__ import annotations

import functools
import os
import re
import secrets
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safeckpt.errors import SafeckptWarning
from safeckpt.store import disk
from safeckpt.store.lock import WriterLock

if sys.platform != "win32":
    import resource

__all__ = ["FAILS", "HOLDS", "WEAKER", "Trial", "try_directory"]

HOLDS, WEAKER, FAILS = "holds", "weaker", "fails"

_TRIED_BYTES = 1 << 20
_LITTLE_BYTES = 1 << 30
_FEW_FILES = 1000
_CLOCK_SECONDS = 60
_LOCK_SECONDS = 60
_MOUNTS = Path("/proc/self/mountinfo")  # of Linux; see proc_pid_mountinfo(5)
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "rootfs", "hugetlbfs"})
_REFUSED = 3  # exit code of the other process
_OTHER_PROCESS = """
import sys
from safeckpt.errors import DirectoryLockedError
from safeckpt.store import WriterLock
try:
    with WriterLock(sys.argv[1], 0): pass
except DirectoryLockedError:
    sys.exit({refused})
"""


class Trial(NamedTuple):
    """What came out of one trial.

    Attributes:
        name: What was tried.
        verdict: `HOLDS`, `WEAKER` where something to know does not break a promise, or `FAILS`.
        text: What was found.
    """

    name: str
    verdict: str
    text: str


def try_directory(directory: Path) -> list[Trial]:
    """Try on a directory what commits, locks and restores need of it, in a folder that is removed again.

    Cost: writes and reads 1 MiB, and starts one process.
    """
    folder = directory / f".safeckpt-doctor-{secrets.token_hex(4)}"
    try:
        disk.make_directory(folder)
    except OSError as error:
        return [Trial("write", FAILS, f"nothing can be created here: {error}"), *_of_the_system(directory)]
    found: list[Trial] = []
    try:
        for name, attempt in _TRIALS.items():
            try:
                verdict, text = attempt(folder)
            except OSError as error:
                verdict, text = FAILS, str(error)
            found.append(Trial(name, verdict, text))
    finally:
        try:
            disk.remove_tree(folder)
        except OSError as error:
            found.append(Trial("delete", FAILS, f"{folder} could not be removed: {error}"))
    return found + _of_the_system(directory)


def _write(folder: Path, name: str, data: bytes) -> None:
    file = disk.create(folder / name)
    try:
        view = memoryview(data)
        while view:
            view = view[disk.write(file, view) :]
        disk.sync(file)
    finally:
        disk.close(file)


def _try_reading_back(folder: Path) -> tuple[str, str]:
    data = secrets.token_bytes(_TRIED_BYTES)
    start = time.perf_counter()
    _write(folder, "data", data)
    seconds = time.perf_counter() - start
    if (folder / "data").read_bytes() != data:
        return FAILS, "other bytes came back than were written"
    return HOLDS, f"1 MiB written, synced and read back, in {seconds * 1000:.0f} ms"


def _try_exclusive_creation(folder: Path) -> tuple[str, str]:
    _write(folder, "once", b"first")
    try:
        disk.close(disk.create(folder / "once"))
    except FileExistsError:
        return HOLDS, "a name that is there is refused"
    return FAILS, "a file that is there was created again: two writers could share one temporary file"


def _try_rename(folder: Path) -> tuple[str, str]:
    _write(folder, "old", b"old")
    _write(folder, "new", b"new")
    disk.replace(folder / "new", folder / "old")
    if (folder / "old").read_bytes() != b"new" or "new" in disk.listing(folder):
        return FAILS, "after a rename the old file is still there"
    return HOLDS, "a file replaces another one in one step"


def _try_directory_sync(folder: Path) -> tuple[str, str]:
    with disk.open_directory(folder) as handle:
        if disk.sync_directory(handle):
            return HOLDS, "the system takes the request"
    return WEAKER, "directories cannot be synced here: a power loss may take the newest checkpoint back"


def _try_lock(folder: Path) -> tuple[str, str]:
    command = [sys.executable, "-c", _OTHER_PROCESS.format(refused=_REFUSED), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = functools.partial(
        subprocess.run, command, env=environment, timeout=_LOCK_SECONDS, capture_output=True, check=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", SafeckptWarning)
        try:
            with WriterLock(folder, 0):
                refused = run().returncode == _REFUSED
        except SafeckptWarning:
            return WEAKER, "there are no locks here; the file that names the holder stands in for one"
        except subprocess.TimeoutExpired:
            return FAILS, "a second process waited for the lock without end"
        taken = run().returncode == 0
    if not refused:
        return FAILS, "a second process was let in while the lock was held"
    return (HOLDS, "a second process is refused, and let in afterwards") if taken else (FAILS, "it is not given back")


def _try_case(folder: Path) -> tuple[str, str]:
    _write(folder, "case", b"")
    if (folder / "CASE").exists():
        return WEAKER, "names that differ in case alone are one file here: give runs names that differ otherwise"
    return HOLDS, "names that differ in case alone are two"


def _try_clock(folder: Path) -> tuple[str, str]:
    _write(folder, "now", b"")
    ahead = (folder / "now").stat().st_mtime - time.time()
    if abs(ahead) > _CLOCK_SECONDS:
        return WEAKER, f"the clock of the file system is {ahead:+.0f} s from this machine's; nothing is decided by it"
    return HOLDS, "the file system and this machine agree"


_TRIALS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "fsync, reading back": _try_reading_back,
    "exclusive creation": _try_exclusive_creation,
    "rename": _try_rename,
    "directory sync": _try_directory_sync,
    "lock": _try_lock,
    "case": _try_case,
    "clock": _try_clock,
}


def _of_the_system(directory: Path) -> list[Trial]:
    """Return what the system says about the file system, room and limits."""
    found = []
    if (kind := _file_system_of(directory)) is not None:
        found.append(Trial("file system", *_judged(kind)))
    if hasattr(os, "statvfs"):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        verdict = HOLDS if free >= _LITTLE_BYTES else WEAKER if free >= _TRIED_BYTES else FAILS
        found.append(Trial("free space", verdict, f"{free / 1e9:.3g} GB"))
        if status.f_files:
            text = f"{status.f_favail} more can be created"
            verdict = HOLDS if status.f_favail >= _FEW_FILES else WEAKER if status.f_favail else FAILS
            found.append(Trial("files", verdict, text))
    if sys.platform != "win32":
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(Trial("file size", WEAKER, f"this process may write no file above {limit} bytes (ulimit -f)"))
    return found


def _judged(kind: str) -> tuple[str, str]:
    """Return what becomes of files on a file system, whose syncs succeed whatever they are worth."""
    if kind in _IN_MEMORY:
        return FAILS, f"{kind} is memory: everything in it is lost when the machine stops; take a disk"
    if kind == "overlay":
        return WEAKER, "overlay: in a container it is deleted with the container; there, take a volume"
    return HOLDS, kind


def _file_system_of(directory: Path) -> str | None:
    """Return the kind of file system that a directory is on; None where the system does not tell."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    here, deepest, found = directory.resolve(), -1, None
    for line in lines:
        mount, _, source = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount.split(" ")[4]))
        if here.is_relative_to(point) and len(point.parts) >= deepest:  # of two at one place the later one is seen
            deepest, found = len(point.parts), source.partition(" ")[0]
    return found
