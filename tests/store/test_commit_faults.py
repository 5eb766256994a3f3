"""Every operation of a commit, a rotation and a set-aside fails, is interrupted or is the last one of its process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

import safeckpt.store
from safeckpt.errors import DurabilityUnknownError, SafeckptWarning
from safeckpt.store import CheckpointDirectory, EventLog, KeepLast, commit, names, to_prune
from tests.faults import (
    Fault,
    Interrupt,
    Kill,
    LineInterrupt,
    Recorder,
    contents,
    descriptor_count,
    in_child,
    intercept,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OLD = b"old" * 100
NEW = b"new" * 100
NEXT = b"next" * 100
STORE = Path(safeckpt.store.__file__).parent
ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]

Content = dict[str, bytes]


def write(file: BinaryIO, data: bytes = NEW) -> None:
    file.write(data[:10])
    file.write(data[10:])


@dataclass(frozen=True)
class Scenario:
    """Something that is done to a directory, what was there before, and what is there at each point."""

    name: str
    before: Content
    run: Callable[[Path], None]
    after: Content
    committed: Content  # right after the rename, before anything is pruned
    goes_on: Callable[[Path], Content]  # the next operation; returns what has to be there after it


def _save(path: Path) -> None:
    commit(path / "model.pt", write, check=lambda file, _: file.read(1))


def _save_again(path: Path) -> Content:
    commit(path / "model.pt", lambda file: write(file, NEXT))
    return {"model.pt": NEXT}


def _rotate(path: Path) -> None:
    directory = CheckpointDirectory(path)
    directory.commit_step(4, write)
    for step in to_prune(directory.steps(), [KeepLast(3)], is_good=bool):
        directory.remove(step)


def _rotate_again(path: Path) -> Content:
    directory = CheckpointDirectory(path)
    directory.sweep()
    directory.commit_step(5, lambda file: write(file, NEXT))
    steps = directory.steps()
    gone = to_prune(steps, [KeepLast(3)], is_good=bool)
    assert all(directory.remove(step) for step in gone)
    content = {names.step_name(step): OLD for step in steps if step not in gone}
    if 4 in steps:
        content[names.step_name(4)] = NEW
    return content | {names.step_name(5): NEXT}


def _three() -> Content:
    return {names.step_name(step): OLD for step in (1, 2, 3)}


SCENARIOS = [
    Scenario("first", {}, _save, {"model.pt": NEW}, {"model.pt": NEW}, _save_again),
    Scenario("overwrite", {"model.pt": OLD}, _save, {"model.pt": NEW}, {"model.pt": NEW}, _save_again),
    Scenario(
        "rotation",
        _three(),
        _rotate,
        {names.step_name(2): OLD, names.step_name(3): OLD, names.step_name(4): NEW},
        _three() | {names.step_name(4): NEW},
        _rotate_again,
    ),
]
by_name = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def fresh(folder: Path, number: int, content: Content) -> Path:
    path = folder / str(number)
    path.mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


def operations(folder: Path, scenario: Scenario) -> list[str]:
    recorder = Recorder()
    with intercept(recorder):
        scenario.run(fresh(folder, 0, scenario.before))
    return recorder.kinds


def without_temps(content: Content) -> Content:
    return {name: data for name, data in content.items() if names.temp_final(name) is None}


@by_name
@pytest.mark.parametrize("error", ERRNOS, ids=errno.errorcode.get)
def test_operation_that_fails_loses_nothing(memory_path: Path, scenario: Scenario, error: int) -> None:
    """Whichever operation fails, the errno comes out, the directory is as before or as after, and the next save works.

    Before the rename nothing has changed; when the directory cannot be synced the new file is there, nothing older is
    gone, and the error says so; a prune that fails is a warning; a listing for the sweep may fail unheard.
    """
    for number, kind in enumerate(operations(memory_path, scenario), 1):
        path = fresh(memory_path, number, scenario.before)
        fault = Fault(number, error)
        before = descriptor_count()
        with warnings.catch_warnings(record=True) as caught, intercept(fault):
            warnings.simplefilter("always")
            raised: OSError | None = None
            try:
                scenario.run(path)
            except OSError as problem:
                raised = problem
        assert fault.fired is not None
        assert fault.fired.kind == kind
        assert descriptor_count() == before
        if kind == "unlink":
            assert raised is None
            assert [warning.category for warning in caught] == [SafeckptWarning]
            assert contents(path) == scenario.committed
        elif kind == "listing" and scenario.name != "rotation":
            assert raised is None
            assert contents(path) == scenario.after
        else:
            assert raised is not None
            assert raised.errno == error
            assert isinstance(raised, DurabilityUnknownError) == (kind == "sync_directory")
            gone_through = kind in {"sync_directory", "listing"}
            assert contents(path) == (scenario.committed if gone_through else scenario.before)
            assert str(path) in str(raised)
        expected = scenario.goes_on(path)
        assert contents(path) == expected


@by_name
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupt_at_an_operation_loses_nothing(memory_path: Path, scenario: Scenario, when: str) -> None:
    """Ctrl-C before or after any operation comes out as itself, with the old or the new content and no temporary."""
    for number, kind in enumerate(operations(memory_path, scenario), 1):
        path = fresh(memory_path, number, scenario.before)
        interrupt = Interrupt(number, when)
        before = descriptor_count()
        with warnings.catch_warnings(), intercept(interrupt):
            # The fault throws an open file away, where the real interrupt finds it not yet opened or already kept.
            warnings.simplefilter("ignore", ResourceWarning)
            with contextlib.suppress(KeyboardInterrupt):
                scenario.run(path)
                pytest.fail(f"the interrupt {when} {kind} was lost")
        assert interrupt.fired is not None
        assert descriptor_count() == before
        assert contents(path) in (scenario.before, scenario.committed, scenario.after)
        expected = scenario.goes_on(path)
        assert contents(path) == expected


@by_name
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_kill_at_an_operation_loses_nothing(memory_path: Path, scenario: Scenario, when: str) -> None:
    """SIGKILL before or after any operation leaves the old or the new content, and the next save clears the rest."""

    def run() -> None:
        with intercept(kill):
            scenario.run(path)

    temps = 0
    for number in range(1, len(operations(memory_path, scenario)) + 1):
        path = fresh(memory_path, number, scenario.before)
        kill = Kill(number, when)
        assert in_child(run).signal == signal.SIGKILL
        assert without_temps(contents(path)) in (scenario.before, scenario.committed, scenario.after)
        temps += contents(path) != without_temps(contents(path))
        expected = scenario.goes_on(path)
        assert contents(path) == expected
    assert temps > 0


@by_name
def test_interrupt_at_any_line_loses_nothing(memory_path: Path, scenario: Scenario) -> None:
    """Ctrl-C at any executed line of the package comes out as itself and leaves no temporary file or descriptor."""
    number, fired = 0, True
    before = descriptor_count()
    while fired:
        number += 1
        path = fresh(memory_path, number, scenario.before)
        interrupt = LineInterrupt(number, STORE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                with interrupt:
                    scenario.run(path)
            except KeyboardInterrupt:
                assert interrupt.fired
            else:
                assert not interrupt.fired, f"the interrupt at line event {number} was lost"
        fired = interrupt.fired
        assert descriptor_count() == before
        assert contents(path) in (scenario.before, scenario.committed, scenario.after)
        if number % 10 == 0:
            expected = scenario.goes_on(path)
            assert contents(path) == expected
    assert number > 50


def test_clean_up_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    """When the disk fails for good the first error comes out, with a note about the temporary file left behind."""
    fault = Fault(1, errno.EIO, {"sync", "unlink"}, for_good=True)
    with intercept(fault), pytest.raises(OSError, match="Input/output") as caught:
        _save(tmp_path)
    assert fault.fired is not None
    assert caught.value.errno == errno.EIO
    assert fault.fired.kind == "sync"
    assert "could not be removed" in caught.value.__notes__[0]
    assert list(contents(tmp_path).values()) == [NEW]
    assert without_temps(contents(tmp_path)) == {}
    assert _save_again(tmp_path) == contents(tmp_path)


def test_sync_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    """After a failed sync the file is given up: the kernel may call its lost pages clean the second time."""
    fault, recorder = Fault(1, errno.EIO, {"sync"}), Recorder()
    with intercept(recorder), intercept(fault), pytest.raises(OSError, match="Input/output"):
        _save(tmp_path)
    assert fault.seen == 1
    assert "replace" not in recorder.kinds
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("part_bytes", [0, 7])
def test_full_disk_says_needed_and_free_bytes(tmp_path: Path, error: int, part_bytes: int) -> None:
    """A full disk keeps its errno and names the file, what it needs and what is free."""
    fault = Fault(2, error, {"write"}, part_bytes=part_bytes)
    with intercept(fault), pytest.raises(OSError, match=r"needs 300 bytes, \d+ are free") as caught:
        commit(tmp_path / "model.pt", write, size_bytes=len(NEW))
    assert fault.fired is not None
    assert caught.value.errno == error
    assert caught.value.filename == str(tmp_path / "model.pt")
    assert contents(tmp_path) == {}
    with intercept(Fault(2, error, {"write"})), pytest.raises(OSError, match="needs more than 10 bytes"):
        commit(tmp_path / "model.pt", write)


def test_unsynced_directory_says_what_is_there(tmp_path: Path) -> None:
    """The error after the rename carries the step, the path, the errno and its cause."""
    directory = CheckpointDirectory(tmp_path)
    with intercept(Fault(1, errno.EIO, {"sync_directory"})), pytest.raises(DurabilityUnknownError) as caught:
        directory.commit_step(7, write)
    assert (caught.value.step, caught.value.errno) == (7, errno.EIO)
    assert caught.value.path == str(directory.path_of(7))
    assert isinstance(caught.value.__cause__, OSError)
    assert contents(tmp_path) == {names.step_name(7): NEW}


@pytest.mark.parametrize("limit", [0, 1, 9, 10, 11, 150, 299])
def test_file_size_limit_keeps_the_old_file(tmp_path: Path, limit: int) -> None:
    """A real RLIMIT_FSIZE of any size is an EFBIG that names the limit, the old file stays, no temporary is left."""
    (tmp_path / "model.pt").write_bytes(OLD)

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        _save(tmp_path)

    error = in_child(save).error
    assert isinstance(error, OSError)
    assert error.errno == errno.EFBIG
    assert f"files of {limit}" in str(error)
    assert contents(tmp_path) == {"model.pt": OLD}
    assert _save_again(tmp_path) == contents(tmp_path)


def test_descriptor_limit_keeps_the_old_file(tmp_path: Path) -> None:
    """Without a free descriptor the save is an EMFILE before anything is written."""
    (tmp_path / "model.pt").write_bytes(OLD)

    def save(spare: int) -> None:
        limit = 64 + descriptor_count()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(tmp_path, os.O_RDONLY))
        for descriptor in held[:spare]:
            os.close(descriptor)
        _save(tmp_path)

    for spare in range(3):
        error = in_child(lambda spare=spare: save(spare)).error
        assert isinstance(error, OSError)
        assert error.errno == errno.EMFILE
        assert contents(tmp_path) == {"model.pt": OLD}
    assert in_child(lambda: save(4)).error is None
    assert contents(tmp_path) == {"model.pt": NEW}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_disk_that_is_really_full_keeps_the_old_files(small_disk: Path) -> None:
    """On a full file system the save fails with the numbers, older files stay, and with space freed it works."""
    directory = CheckpointDirectory(small_disk)
    log = EventLog(small_disk / names.EVENTS)
    large = bytes(40 * 1024)
    directory.commit_step(1, lambda file: file.write(large))
    with pytest.raises(OSError, match=f"needs {len(large)} bytes, 24576 are free") as caught:
        directory.commit_step(2, lambda file: file.write(large), size_bytes=len(large))
    assert caught.value.errno == errno.ENOSPC
    assert contents(small_disk) == {names.step_name(1): large}
    (small_disk / "ballast").write_bytes(bytes(24 * 1024))
    with pytest.warns(SafeckptWarning, match="No space left"):
        assert not log.append("saved", step=1)
    assert directory.remove(1)
    directory.commit_step(2, lambda file: file.write(large[:30_000]))
    assert directory.steps() == [2]


def _set_aside(path: Path) -> None:
    CheckpointDirectory(path).set_aside([2, 3])


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EMFILE])
def test_set_aside_that_fails_can_be_done_again(tmp_path: Path, error: int) -> None:
    """Whichever operation of a set-aside fails, every file keeps one of its names and a second call ends it."""
    recorder = Recorder()
    with intercept(recorder):
        _set_aside(fresh(tmp_path, 0, _three()))
    assert recorder.kinds == ["listing", "open_directory", "replace", "replace", "sync_directory"]
    for number in range(1, len(recorder.kinds) + 1):
        path = fresh(tmp_path, number, _three())
        fault = Fault(number, error)
        with intercept(fault), pytest.raises(OSError, match=os.strerror(error)) as caught:
            _set_aside(path)
        assert fault.fired is not None
        assert caught.value.errno == error
        assert sorted(contents(path).values()) == [OLD, OLD, OLD]
        directory = CheckpointDirectory(path)
        assert directory.steps() in ([1], [1, 2], [1, 2, 3])
        directory.set_aside(step for step in directory.steps() if step > 1)
        assert set(contents(path)) == {names.step_name(1), names.aside_name(2, 1), names.aside_name(3, 1)}
