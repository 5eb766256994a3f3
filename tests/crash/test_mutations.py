"""The campaign can fail: each break of the protocol, made on purpose, is found by the class that is there for it.

`MUTATIONS` is the table: what is broken, how, and which class of the campaign becomes red. Classes of damaged and
hostile files add their rows below those of the store.
"""

# Replacements have the parameters of what they replace:
# ruff: noqa: ARG005

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safeckpt.run import Timeline, schedule
from safeckpt.run.background import BackgroundWriter
from safeckpt.run.catalog import Catalog
from safeckpt.store import directory as directory_module
from safeckpt.store import disk
from safeckpt.store.lock import WriterLock
from tests.campaign.outcome import FoundError, Outcome, alone, run

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
    prune = schedule.Pruning.prune

    def swallowing(self: Any, saved: int) -> list[int]:
        with contextlib.suppress(KeyboardInterrupt):
            return prune(self, saved)
        return []

    schedule.Pruning.prune = swallowing  # type: ignore[method-assign]


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
    from safeckpt.run import catalog

    catalog._MOST_RELISTINGS = 1


def _take_strangers_for_own() -> None:
    Timeline._refuse_strangers = lambda self: None  # type: ignore[method-assign]
    adopt = Timeline.adopt

    def all_of_them(self: Any, checkpoint: Any, there: Any) -> None:
        adopt(self, checkpoint, range(1 << 30))

    Timeline.adopt = all_of_them  # type: ignore[method-assign]


def _prune_nothing() -> None:
    schedule.Pruning.prune = lambda self, saved: []  # type: ignore[method-assign]


def _open_and_forget() -> None:
    commit_step = directory_module.CheckpointDirectory.commit_step
    opened: list[int] = []

    def forgetful(self: Any, *arguments: Any, **options: Any) -> Any:
        opened.append(os.open(self.path, os.O_RDONLY))
        return commit_step(self, *arguments, **options)

    directory_module.CheckpointDirectory.commit_step = forgetful  # type: ignore[method-assign]


def _forget_nothing() -> None:
    Catalog.forget = lambda self, path: None  # type: ignore[method-assign]


MUTATIONS: list[tuple[Callable[[], None], str]] = [
    # The store's protocol
    (_skip_file_sync, "crash_points"),
    (_skip_directory_sync, "crash_points"),
    (_rename_before_sync, "crash_points"),
    (_prune_before_commit, "crash_points"),
    (_write_in_place, "crash_points"),
    (_set_aside_without_sync, "crash_points"),
    (_write_in_place, "kills"),
    (_return_before_durable, "kills"),
    (_trust_every_file, "kills"),
    (_keep_temporary_file, "interrupts"),
    (_leak_a_descriptor, "interrupts"),
    (_swallow_interrupt, "interrupts"),
    (_retry_failed_sync, "disk_errors"),
    (_wrap_errors, "disk_errors"),
    (_ignore_write_error, "disk_errors"),
    (_keep_temporary_file, "disk_errors"),
    (_prune_before_commit, "disk_errors"),
    (_no_lock, "writers_readers"),
    (_list_once, "writers_readers"),
    (_take_strangers_for_own, "writers_readers"),
    (_prune_nothing, "long_run"),
    (_open_and_forget, "long_run"),
    (_forget_nothing, "long_run"),
    # Damaged and hostile files
]


def _run_broken(mutation: Callable[[], None], name: str) -> Outcome:
    mutation()
    Outcome.stop_at_first = True
    try:
        return run(name, "fast", SEED)
    except FoundError as found:
        return Outcome("", lost=[str(found)])


@pytest.mark.parametrize(
    ("mutation", "name"), MUTATIONS, ids=[f"{name}-{mutation.__name__.strip('_')}" for mutation, name in MUTATIONS]
)
def test_broken_protocol_makes_its_class_red(mutation: Callable[[], None], name: str) -> None:
    """A class of the campaign that is run on a broken protocol finds it."""
    outcome = alone(_run_broken, mutation, name)
    assert not outcome.clean
