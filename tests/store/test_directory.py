"""The checkpoints of one run in one directory."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, BinaryIO

import pytest

from safeckpt.errors import SafeckptWarning, StepExistsError
from safeckpt.store import CheckpointDirectory, KeepEvery, KeepLast, commit, disk, to_prune
from tests.faults import Fault, Recorder, as_nobody, contents, descriptor_count, in_child, intercept, names_in
from tests.store.processes import PRELUDE, Process

if TYPE_CHECKING:
    from pathlib import Path

HEX = "0123456789abcdef"
FOREIGN = ["best.pt", "step-1.pt", "step-00000001.pt.bak", "notes.txt", "aside-00000001.pt", ".hidden"]


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path)


def put(directory: CheckpointDirectory, *steps: int) -> None:
    for step in steps:
        directory.path_of(step).write_bytes(b"%d" % step)


def test_steps_are_listed_by_number(directory: CheckpointDirectory) -> None:
    """Steps come in ascending order of their number, whatever the order of names, times and foreign files."""
    steps = [100_000_000, 7, 0, 99_999_999, 12]
    put(directory, *steps)
    for age, step in enumerate(steps):
        os.utime(directory.path_of(step), (age, age))
    for name in FOREIGN:
        (directory.path / name).touch()
    assert directory.steps() == [0, 7, 12, 99_999_999, 100_000_000]


def test_missing_directory_has_no_steps(tmp_path: Path) -> None:
    """A directory that is not there yet is empty, and listing does not make it."""
    directory = CheckpointDirectory(tmp_path / "no" / "run")
    assert directory.steps() == []
    assert directory.asides() == []
    assert directory.sweep() == []
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_unreadable_directory_is_not_empty(directory: CheckpointDirectory, number: int) -> None:
    """A directory that cannot be read is an error: taking it for empty would start the run over."""
    put(directory, 1)
    for look in (directory.steps, directory.asides, directory.sweep):
        fault = Fault(1, number, {"listing"})
        with intercept(fault), pytest.raises(OSError, match=os.strerror(number)) as caught:
            look()
        assert fault.fired is not None
        assert caught.value.errno == number
    assert directory.steps() == [1]


def test_directory_without_permission_is_not_empty(public_path: Path) -> None:
    """A user who may not list the directory gets the permission error."""
    public_path.chmod(0o311)
    ended = in_child(lambda: as_nobody(CheckpointDirectory(public_path).steps))
    assert isinstance(ended.error, PermissionError)
    public_path.chmod(0o755)
    assert in_child(lambda: as_nobody(CheckpointDirectory(public_path).steps)).value == []


def test_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    """A path that is a file is no empty directory, for listing and for making."""
    (tmp_path / "run").write_bytes(b"file")
    directory = CheckpointDirectory(tmp_path / "run")
    with pytest.raises(NotADirectoryError):
        directory.steps()
    with pytest.raises(FileExistsError):
        directory.create()
    assert contents(tmp_path) == {"run": b"file"}


def test_created_directory_is_durable_with_its_parents(tmp_path: Path) -> None:
    """Every directory that is made is synced into its parent before the next one is made."""
    recorder = Recorder()
    directory = CheckpointDirectory(tmp_path / "a" / "b" / "c")
    with intercept(recorder):
        directory.create()
        directory.create()
    made = [operation for operation in recorder.operations if operation.kind != "open_directory"]
    assert [(operation.kind, operation.path) for operation in made] == [
        ("make_directory", str(tmp_path / "a")),
        ("sync_directory", str(tmp_path)),
        ("make_directory", str(tmp_path / "a" / "b")),
        ("sync_directory", str(tmp_path / "a")),
        ("make_directory", str(tmp_path / "a" / "b" / "c")),
        ("sync_directory", str(tmp_path / "a" / "b")),
    ]
    assert directory.steps() == []


def test_directory_that_was_there_is_made_durable_once(tmp_path: Path) -> None:
    """The name of a directory that somebody else made is synced at its first use, and not again."""
    recorder = Recorder()
    (tmp_path / "run").mkdir()
    directory = CheckpointDirectory(tmp_path / "run")
    with intercept(recorder):
        directory.create()
        directory.create()
    synced = [(operation.kind, operation.path) for operation in recorder.operations]
    assert synced == [("open_directory", str(tmp_path)), ("sync_directory", str(tmp_path))]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("kind", ["open_directory", "sync_directory"])
def test_parent_that_cannot_be_synced_does_not_stop_a_run(tmp_path: Path, kind: str, number: int) -> None:
    """A directory below one that this user may not read, as homes often are, is used all the same."""
    fault = Fault(1, number, {kind})
    with intercept(fault):
        CheckpointDirectory(tmp_path).create()
    assert fault.fired is not None


def test_created_directory_has_the_usual_mode(tmp_path: Path) -> None:
    """A directory that is made can be used by whom the umask allows."""
    before = os.umask(0o027)
    try:
        CheckpointDirectory(tmp_path / "run").create()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o750


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("kind", ["make_directory", "open_directory", "sync_directory"])
def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path, kind: str, number: int) -> None:
    """Whatever stands in the way of making a directory comes out, and a second try works."""
    fault = Fault(1, number, {kind})
    directory = CheckpointDirectory(tmp_path / "a" / "b")
    with intercept(fault), pytest.raises(OSError, match=os.strerror(number)) as caught:
        directory.create()
    assert fault.fired is not None
    assert caught.value.errno == number
    assert names_in(tmp_path) == ([] if kind == "make_directory" else ["a"])
    directory.create()
    assert (tmp_path / "a" / "b").is_dir()


def test_directory_made_by_two_at_once_is_made(tmp_path: Path) -> None:
    """Somebody else who makes the same directory in between is no error."""
    fault = Fault(1, errno.EEXIST, {"make_directory"})

    def meanwhile(operation: object, call: object) -> object:
        (tmp_path / "run").mkdir(exist_ok=True)
        return fault(operation, call)  # type: ignore[arg-type]

    with intercept(meanwhile):
        CheckpointDirectory(tmp_path / "run").create()
    assert (tmp_path / "run").is_dir()


def test_change_of_working_directory_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory stays what it named when the object was made."""
    monkeypatch.chdir(tmp_path)
    directory = CheckpointDirectory("run")
    monkeypatch.chdir("/")
    directory.create()
    assert names_in(tmp_path) == ["run"]
    assert directory.path == tmp_path / "run"


def test_committed_step_is_listed(directory: CheckpointDirectory) -> None:
    """A committed step appears under its name, and the writer's result comes back."""
    assert directory.commit_step(12, lambda file: file.write(b"12")) == 2
    assert contents(directory.path) == {"step-00000012.pt": b"12"}
    assert directory.steps() == [12]


@pytest.mark.parametrize("dangling", [False, True])
def test_step_that_has_a_file_is_not_overwritten(directory: CheckpointDirectory, dangling: bool) -> None:
    """A file under a step's name, good or not, a link that leads nowhere even, is never replaced."""
    if dangling:
        directory.path_of(3).symlink_to("nowhere")
    else:
        put(directory, 3)
    before = names_in(directory.path)

    def write(file: BinaryIO) -> None:
        raise AssertionError("nothing may be written")

    with pytest.raises(StepExistsError) as caught:
        directory.commit_step(3, write)
    assert (caught.value.step, caught.value.path) == (3, str(directory.path_of(3)))
    assert names_in(directory.path) == before
    directory.commit_step(4, lambda file: file.write(b"4"))
    assert directory.steps() == [3, 4]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_nonsense_step_is_refused_at_once(directory: CheckpointDirectory, step: int, error: type[Exception]) -> None:
    """A step that has no name is refused before anything is written."""
    with pytest.raises(error, match="step must be"):
        directory.commit_step(step, lambda file: file.write(b""))
    assert names_in(directory.path) == []


def test_removed_step_is_gone_and_nothing_else(directory: CheckpointDirectory) -> None:
    """Removing a step deletes its file only; one that is gone already is gone."""
    put(directory, 1, 2)
    for name in FOREIGN:
        (directory.path / name).touch()
    assert directory.remove(1)
    assert directory.remove(1)
    assert names_in(directory.path) == sorted([*FOREIGN, "step-00000002.pt"])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EBUSY, errno.EIO])
def test_remove_that_fails_is_a_warning(directory: CheckpointDirectory, number: int) -> None:
    """A file that cannot be deleted is reported, stays, and can be deleted later."""
    put(directory, 1)
    fault = Fault(1, number, {"unlink"})
    with intercept(fault), pytest.warns(SafeckptWarning, match=os.strerror(number)):
        assert not directory.remove(1)
    assert fault.fired is not None
    assert contents(directory.path) == {"step-00000001.pt": b"1"}
    assert directory.remove(1)
    assert contents(directory.path) == {}


def test_directory_under_a_step_name_is_a_warning(directory: CheckpointDirectory) -> None:
    """A directory that has a checkpoint's name counts as a step and is never deleted."""
    directory.path_of(1).mkdir()
    assert directory.steps() == [1]
    with pytest.warns(SafeckptWarning, match="could not be deleted"):
        assert not directory.remove(1)
    assert directory.path_of(1).is_dir()


def test_removed_file_stays_readable_for_its_reader(directory: CheckpointDirectory) -> None:
    """A reader that has a file open reads on after it was pruned."""
    put(directory, 1)
    with directory.path_of(1).open("rb") as file:
        directory.remove(1)
        assert file.read() == b"1"


def test_set_aside_steps_are_never_latest(directory: CheckpointDirectory) -> None:
    """Set-aside checkpoints keep their content under a name of their own and are no steps any more."""
    put(directory, 1, 2, 3)
    moved = directory.set_aside([2, 3])
    assert [path.name for path in moved] == ["aside-00000003.1.pt", "aside-00000002.1.pt"]
    assert directory.steps() == [1]
    assert [(aside.step, aside.path.name) for aside in directory.asides()] == [
        (2, "aside-00000002.1.pt"),
        (3, "aside-00000003.1.pt"),
    ]
    assert contents(directory.path) == {
        "step-00000001.pt": b"1",
        "aside-00000002.1.pt": b"2",
        "aside-00000003.1.pt": b"3",
    }


def test_set_aside_is_durable_and_highest_first(directory: CheckpointDirectory) -> None:
    """All are renamed from the highest down and then synced together; without any nothing is touched."""
    put(directory, 1, 2, 3)
    recorder = Recorder()
    with intercept(recorder):
        assert directory.set_aside([]) == []
        assert recorder.operations == []
        directory.set_aside(iter([1, 3, 2]))
    assert recorder.kinds == ["listing", "open_directory", "replace", "replace", "replace", "sync_directory"]
    renamed = [operation.path for operation in recorder.operations if operation.kind == "replace"]
    assert renamed == [str(directory.path_of(step)) for step in (3, 2, 1)]


def test_step_set_aside_again_and_again_loses_nothing(directory: CheckpointDirectory) -> None:
    """Each time that a step is set aside it gets a number of its own, in the order of time."""
    for number in range(1, 12):
        directory.path_of(5).write_bytes(b"%d" % number)
        directory.set_aside([5])
    assert [aside.path.read_bytes() for aside in directory.asides()] == [b"%d" % number for number in range(1, 12)]
    assert directory.asides()[-1].path.name == "aside-00000005.11.pt"


def test_step_that_vanished_is_passed_over(directory: CheckpointDirectory) -> None:
    """A file that somebody deleted meanwhile is in nobody's way."""
    put(directory, 1, 3)
    assert [path.name for path in directory.set_aside([1, 2, 3])] == ["aside-00000003.1.pt", "aside-00000001.1.pt"]


def test_set_aside_checkpoint_is_removed(directory: CheckpointDirectory, tmp_path: Path) -> None:
    """Only a set-aside file of this very directory can be removed as one."""
    put(directory, 1, 2)
    directory.set_aside([2])
    (aside,) = directory.asides()
    for wrong in (directory.path_of(1), tmp_path / "sub" / aside.path.name, tmp_path / "best.pt"):
        with pytest.raises(ValueError, match="not a set-aside checkpoint"):
            directory.remove_aside(aside._replace(path=wrong))
    assert directory.remove_aside(aside)
    assert directory.remove_aside(aside)
    assert names_in(directory.path) == ["step-00000001.pt"]


def test_sweep_removes_stale_temps_of_steps_only(directory: CheckpointDirectory) -> None:
    """Temporary checkpoints of dead writers go; everything else stays, near misses and drop-in files too."""
    stale = [f".step-00000001.pt.{HEX}.tmp", f".step-100000000.pt.{HEX}.tmp"]
    kept = [f".model.pt.{HEX}.tmp", f".step-1.pt.{HEX}.tmp", f".step-00000001.pt.{HEX[1:]}.tmp", *FOREIGN]
    for name in [*stale, *kept]:
        (directory.path / name).touch()
    assert directory.sweep() == stale
    assert names_in(directory.path) == sorted(kept)


def test_sweep_removes_stale_temps_inside_checkpoints(directory: CheckpointDirectory) -> None:
    """A writer that died while it rewrote an index left its temporary beside it; what else is there stays."""
    kept = ["safeckpt.pt", "__0_0.distcp", f"notes.{HEX}.tmp"]
    stale = f".safeckpt.pt.{HEX}.tmp"
    places = [directory.path / name for name in ("step-00000001", "aside-00000002.1", "mine")]
    for place in places:
        place.mkdir()
        for name in [*kept, stale]:
            (place / name).touch()
    (directory.path / "step-00000003").symlink_to(directory.path / "mine")
    assert directory.sweep() == ["aside-00000002.1/" + stale, "step-00000001/" + stale]
    assert [names_in(place) for place in places] == [sorted(kept), sorted(kept), sorted([*kept, stale])]


def test_sweep_leaves_a_save_in_flight(directory: CheckpointDirectory) -> None:
    """A plain save into the directory, under a step's name even, is not disturbed by a writer that takes it over."""

    def write(file: BinaryIO) -> None:
        file.write(b"new")
        assert directory.sweep() == []
        sweeping = threading.Thread(target=directory.sweep)
        sweeping.start()
        sweeping.join()
        assert in_child(directory.sweep).value == []

    commit(directory.path_of(1), write)
    assert contents(directory.path) == {"step-00000001.pt": b"new"}


def test_sweep_removes_what_a_killed_writer_left(directory: CheckpointDirectory) -> None:
    """A writer killed in the middle leaves a temporary file that is in use until it dies, and is swept after."""
    setup = f"""
directory = CheckpointDirectory({str(directory.path)!r})
def write(file):
    file.write(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""
    with Process(setup) as other:
        assert other.ask("directory.commit_step(3, write)") == "writing"
        assert directory.sweep() == []
        assert len(names_in(directory.path)) == 1
        other.kill()
        assert len(directory.sweep()) == 1
    assert names_in(directory.path) == []


def test_temp_that_cannot_be_swept_is_a_warning(directory: CheckpointDirectory) -> None:
    """A stale file that cannot be deleted is reported and does not stop the writer."""
    name = f".step-00000001.pt.{HEX}.tmp"
    (directory.path / name).touch()
    fault = Fault(1, errno.EROFS, {"unlink_unclaimed"})
    before = descriptor_count()
    with intercept(fault), pytest.warns(SafeckptWarning, match="Read-only"):
        assert directory.sweep() == []
    assert fault.fired is not None
    assert descriptor_count() == before
    assert directory.sweep() == [name]


@pytest.mark.parametrize("make", ["symlink", "directory", "pipe"])
def test_something_else_under_a_temp_name_is_not_followed(directory: CheckpointDirectory, make: str) -> None:
    """A link's target is not deleted, and neither a pipe nor a directory stops the sweep."""
    path = directory.path / f".step-00000001.pt.{HEX}.tmp"
    (directory.path / "precious").write_bytes(b"x")
    if make == "symlink":
        path.symlink_to("precious")
    elif make == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    if make == "pipe":
        assert directory.sweep() == [path.name]
    else:
        with pytest.warns(SafeckptWarning, match="could not be deleted"):
            assert directory.sweep() == []
    assert (directory.path / "precious").read_bytes() == b"x"


def test_temp_that_vanishes_is_passed_over(directory: CheckpointDirectory) -> None:
    """A temporary file that another sweep deleted first is gone, and that is all."""
    name = f".step-00000001.pt.{HEX}.tmp"

    def listing(operation: object, call: object) -> object:
        return [name] if operation.kind == "listing" else call()  # type: ignore[attr-defined, operator]

    with intercept(listing):
        assert directory.sweep() == []


def test_large_directory_is_not_looked_into(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 older files that stay for good, the plan of a save looks at the three others only."""
    listing = [f"step-{step:08d}.pt" for step in [*range(0, 100_000, 10), 100_001, 100_002, 100_003]]
    monkeypatch.setattr(disk, "listing", lambda _: listing)
    asked = []
    gone = to_prune(directory.steps(), [KeepEvery(10), KeepLast(2)], is_good=lambda step: not asked.append(step))
    assert gone == [100_001]
    assert sorted(asked) == [100_001, 100_002, 100_003]


def test_store_imports_neither_torch_nor_numpy() -> None:
    """The store works without torch and without NumPy."""
    script = PRELUDE + "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout == "[]\n"


def test_rotation_with_events_leaves_nothing_behind(directory: CheckpointDirectory) -> None:
    """After many rotations the directory holds the kept files and nothing else, and no descriptor is open."""
    before = descriptor_count()
    for step in range(1, 101):
        directory.commit_step(step, lambda file: file.write(b"x" * 100))
        for old in to_prune(directory.steps(), [KeepLast(3), KeepEvery(50)], is_good=bool):
            directory.remove(old)
        directory.events.append("saved", step=step)
    assert directory.steps() == [50, 98, 99, 100]
    assert len(names_in(directory.path)) == 5
    assert len(directory.events.read()) == 100
    assert descriptor_count() == before
