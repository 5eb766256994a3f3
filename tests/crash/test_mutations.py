"""The campaign can fail: each break of the protocol, made on purpose, is found by the check that is there for it.

`MUTATIONS` is the table: what is broken, which of `CHECKS` becomes red, and what it says. A check is one class of the
campaign at one story and one kind of operation: all of what can happen there, none of it left to chance.
"""

# Replacements have the parameters of what they replace:
# ruff: noqa: ARG005

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from safeckpt.run.background import BackgroundWriter
from safeckpt.run.catalog import Catalog
from safeckpt.run.pruning import Pruning
from safeckpt.run.restoring import Restorer
from safeckpt.run.run_directory import RunDirectory
from safeckpt.store import directory as directory_module
from safeckpt.store import disk
from safeckpt.store.lock import WriterLock
from tests.campaign import changing, crash_points, disk_errors, failing, interrupts, kills, writers_readers
from tests.campaign.outcome import FoundError, Outcome, alone, run, scratch

SEED = 7

commit_module: Any = importlib.import_module("safeckpt.store.commit")  # the package has a function of that name


class _Above:
    """Stands above the seam, so that the campaign sees what the protocol does and not what it means to do."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.get(name) or getattr(disk, name)


def _skip_file_sync() -> None:
    commit_module.disk = _Above(sync=lambda file: None)


def _skip_directory_sync() -> None:
    commit_module.disk = _Above(sync_directory=lambda directory: True)


def _rename_before_sync() -> None:
    """Sync the content when the file has its name already."""

    def replace_and_sync(source: Path, target: Path) -> None:
        disk.replace(source, target)
        with target.open("rb+", buffering=0) as file:
            disk.sync(file)

    commit_module.disk = _Above(sync=lambda file: None, replace=replace_and_sync)


def _prune_before_commit() -> None:
    commit_step = directory_module.CheckpointDirectory.commit_step

    def prune_and_commit(self: Any, step: int, write: Any, **options: Any) -> Any:
        for old in self.steps()[:-1] or self.steps():
            self.remove(old)
        return commit_step(self, step, write, **options)

    directory_module.CheckpointDirectory.commit_step = prune_and_commit  # type: ignore[method-assign]


def _write_in_place() -> None:
    def commit(path: Path, write: Callable[[Any], Any], **_: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(path)
        file = commit_module.NewFile(disk.create(path))
        result = write(file)
        disk.sync(file.raw)
        file.close()
        with disk.open_directory(path.parent) as directory:
            disk.sync_directory(directory)
        return result

    directory_module.commit = commit


def _set_aside_without_sync() -> None:
    set_aside = directory_module.CheckpointDirectory.set_aside

    def unsynced(self: Any, steps: Any) -> Any:
        sync_directory, disk.sync_directory = disk.sync_directory, lambda directory: True
        try:
            return set_aside(self, steps)
        finally:
            disk.sync_directory = sync_directory

    directory_module.CheckpointDirectory.set_aside = unsynced  # type: ignore[method-assign]


def _return_before_durable() -> None:
    """Wait for no write; and let the system run the writing thread as late as it may, at the start of the next one."""

    def start(self: Any, job: Callable[[], object], what: str) -> None:
        waiting.get(self, int)()
        waiting[self] = job

    waiting: dict[BackgroundWriter, Callable[[], object]] = {}
    BackgroundWriter.start = start  # type: ignore[method-assign]
    BackgroundWriter.wait = lambda self: None  # type: ignore[method-assign]


def _trust_every_file() -> None:
    """Ignore the digest of a file."""
    from safeckpt.file.reading.checkpoint_file import CheckpointFile

    CheckpointFile.verify = lambda self, *_, **__: None  # type: ignore[method-assign, assignment, return-value]


def _keep_temporary_file() -> None:
    def discard(file: Any, claim: Any, temp: Any, error: BaseException) -> None:
        if claim is not None:
            claim.close()
        if file is not None:
            file.close()

    commit_module._discard = discard


def _leak_a_descriptor() -> None:
    def discard(file: Any, claim: Any, temp: Any, error: BaseException) -> None:
        leaked.append(file)
        if claim is not None:
            leaked.append(claim)
        if temp is not None:
            disk.unlink(temp)

    leaked: list[Any] = []
    commit_module._discard = discard


def _swallow_interrupt() -> None:
    prune = Pruning.prune

    def swallowing(self: Any, saved: int) -> list[int]:
        with contextlib.suppress(KeyboardInterrupt):
            return prune(self, saved)
        return []

    Pruning.prune = swallowing  # type: ignore[method-assign]


def _retry_failed_sync() -> None:
    def sync(file: Any) -> None:
        with contextlib.suppress(OSError):
            disk.sync(file)
            return
        disk.sync(file)

    commit_module.disk = _Above(sync=sync)


def _wrap_errors() -> None:
    commit = directory_module.commit

    def wrapping(*arguments: Any, **options: Any) -> Any:
        try:
            return commit(*arguments, **options)
        except OSError as error:
            raise OSError("the save failed") from error

    directory_module.commit = wrapping


def _ignore_write_error() -> None:
    write = commit_module.NewFile.write

    def lenient(self: Any, data: Any) -> int:
        try:
            return write(self, data)
        except OSError:
            self.failure = None
            self.raw.seek(len(memoryview(data).cast("B")), io.SEEK_CUR)
            return len(memoryview(data).cast("B"))

    commit_module.NewFile.write = lenient  # type: ignore[method-assign]


def _no_lock() -> None:
    WriterLock.acquire = lambda self: None  # type: ignore[method-assign]
    WriterLock.check = lambda self: None  # type: ignore[method-assign]


def _list_once() -> None:
    """Take a file that was pruned meanwhile for one that never was."""
    find_latest = Catalog.find_latest

    def once(self: Catalog) -> Any:
        listed = self.files.steps()
        with mock.patch.object(self.files, "steps", return_value=listed):
            return find_latest(self)

    Catalog.find_latest = once  # type: ignore[method-assign]


def _take_strangers_for_own() -> None:
    RunDirectory._refuse_unknown_steps = lambda self: None  # type: ignore[method-assign]
    adopt = Restorer.adopt

    def all_of_them(self: Any, restored: Any) -> None:
        restored.steps_before = range(1 << 30)
        adopt(self, restored)

    Restorer.adopt = all_of_them  # type: ignore[method-assign]


def _prune_nothing() -> None:
    Pruning.prune = lambda self, saved: []  # type: ignore[method-assign]


def _open_and_forget() -> None:
    commit_step = directory_module.CheckpointDirectory.commit_step
    opened: list[int] = []

    def forgetful(self: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(os.open(self.path, os.O_RDONLY))
        return commit_step(self, *arguments, **options)

    directory_module.CheckpointDirectory.commit_step = forgetful  # type: ignore[method-assign]


def _forget_nothing() -> None:
    Catalog.forget = lambda self, path: None  # type: ignore[method-assign]


def _look_once() -> None:
    """Trust what the guard saw a moment ago."""
    pickling: Any = importlib.import_module("safeckpt.file.writing.pickling")
    pickling.mark_guarded = lambda *_: None


def _write_live_memory() -> None:
    """Take a checksum of the live memory, and write it a moment later."""
    copies: Any = importlib.import_module("safeckpt.file.writing.stable_copies")
    pieces = copies._pieces
    copies._pieces = lambda *arguments: ((memory, True, look) for memory, _, look in pieces(*arguments))


def _put_nothing_back() -> None:
    """Leave the objects as a failed restore left them, and say that they are as before."""
    run_state: Any = importlib.import_module("safeckpt.state.run_state")
    run_state._put_back = lambda before, begun: []


def _locked() -> Outcome:
    outcome = Outcome("a held lock")
    with scratch() as folder:
        writers_readers.hold_the_lock(folder / "run", outcome)
    return outcome


def _between(ask: str) -> Outcome:
    outcome = Outcome(f"a save by another writer after any listing of {ask}")
    for listing in range(1, writers_readers.LISTINGS + 1):
        with scratch() as folder:
            writers_readers.save_in_between(folder / "run", ask, listing, outcome)
    return outcome


# What looks at a protocol, by name: a class of the campaign at one story and one kind of operation, all of what can
# happen there.
CHECKS: dict[str, Callable[[], Outcome]] = {
    "power lost after the directory's sync": lambda: crash_points.around("save and prune", "sync_directory"),
    "power lost after a new name": lambda: crash_points.around("save and prune", "replace"),
    "power lost after a new temporary file": lambda: crash_points.around("save and prune", "create"),
    "power lost after an old name is set aside": lambda: crash_points.around("rewind", "replace"),
    "power lost at the end of a rewind": lambda: crash_points.around("rewind", None),
    "killed after a write": lambda: kills.around("save and prune", "write"),
    "killed after a prune in the background": lambda: kills.around("async", "unlink"),
    "killed before a rollback": lambda: kills.around("rollback", None),
    "interrupted at a write": lambda: interrupts.around("sync", "write"),
    "interrupted at a prune": lambda: interrupts.around("sync", "unlink"),
    "failing create": lambda: disk_errors.around("save and prune", "create"),
    "failing write": lambda: disk_errors.around("save and prune", "write"),
    "failing sync": lambda: disk_errors.around("save and prune", "sync"),
    "NaN at an operation": lambda: changing.around("sync", "parameter"),
    "change at an operation": lambda: changing.around("drop-in", "large parameter"),
    "raising restore": lambda: failing.around("optimizer"),
    "held lock": _locked,
    "save in the middle of a look": lambda: _between("latest"),
    "save in the middle of a restore": lambda: _between("restore"),
    "long run": lambda: run("long_run", "fast", SEED),
}

QUICK = "power lost after the directory's sync"  # in a plain run; the others are slow

# What is broken, which check finds it, and what that says.
MUTATIONS: list[tuple[Callable[[], None], str, str]] = [
    (_skip_file_sync, "power lost after the directory's sync", "was passed over"),
    (_skip_directory_sync, "power lost at the end of a rewind", r"found \(1, 0\), allowed \[\(2, 1\)\]"),
    (_rename_before_sync, "power lost after a new name", "was passed over"),
    (_prune_before_commit, "power lost after a new temporary file", "holds no checkpoint, but its history says"),
    (_write_in_place, "power lost after a new temporary file", "was passed over"),
    (_set_aside_without_sync, "power lost after an old name is set aside", "1 older checkpoints are gone"),
    (_write_in_place, "killed after a write", "was passed over"),
    (_return_before_durable, "killed after a prune in the background", "a mixture of steps"),
    (_trust_every_file, "killed before a rollback", "a mixture of steps"),
    (_keep_temporary_file, "interrupted at a write", "a temporary file was left"),
    (_leak_a_descriptor, "interrupted at a write", "a descriptor was leaked"),
    (_swallow_interrupt, "interrupted at a prune", "came out as None"),
    (_retry_failed_sync, "failing sync", "after a failed sync of the same file"),
    (_wrap_errors, "failing create", "has errno None"),
    (_ignore_write_error, "failing write", "cannot be read back"),
    (_keep_temporary_file, "failing sync", "a temporary file was left"),
    (_prune_before_commit, "failing create", "holds no checkpoint, but its history says"),
    (_look_once, "NaN at an operation", r"model\.small holds \[nan\]"),
    (_write_live_memory, "change at an operation", "are not those that were written"),
    (_put_nothing_back, "raising restore", "it has changed .*moments"),
    (_no_lock, "held lock", "a second writer has saved"),
    (_list_once, "save in the middle of a look", "nothing was found"),
    (_take_strangers_for_own, "save in the middle of a restore", r"steps \[1\] were there, now \[2, 3\]"),
    (_prune_nothing, "long run", "checkpoints are kept"),
    (_open_and_forget, "long run", "descriptors"),
    (_forget_nothing, "long run", "objects: "),
]


def _checked(mutation: Callable[[], None] | None, check: str) -> Outcome:
    if mutation is not None:
        mutation()
        Outcome.stop_at_first = True
    try:
        return CHECKS[check]()
    except FoundError as found:
        return Outcome("", lost=[str(found)])


@pytest.mark.parametrize(
    ("mutation", "check", "finding"),
    [
        pytest.param(
            *row, marks=[] if row[1] == QUICK else pytest.mark.slow, id=f"{row[0].__name__.strip('_')}, {row[1]}"
        )
        for row in MUTATIONS
    ],
)
def test_broken_protocol_is_found(mutation: Callable[[], None], check: str, finding: str) -> None:
    """The check that is there for a break of the protocol finds it, and says what was lost."""
    outcome = alone(_checked, mutation, check)
    (found,) = (*outcome.lost, *outcome.undetected)
    assert re.search(finding, found), found


@pytest.mark.parametrize(
    "check", [QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in CHECKS if one != QUICK)]
)
def test_protocol_as_it_is_passes_each_check(check: str) -> None:
    """Nothing is found where nothing is broken."""
    outcome = alone(_checked, None, check)
    assert outcome.tried > 0
    assert outcome.clean, (*outcome.lost, *outcome.undetected)[:3]
