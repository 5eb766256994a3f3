"""The system refuses: every call of the store fails with every errno, real disks fill up, real limits are reached."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safeckpt
from tests import children
from tests.campaign.outcome import Outcome, Scale, quiet, scratch
from tests.crash.stories import STORIES, Promise, Story, check_afterwards, new_run, set_state
from tests.faults import Fault, Operation, Recorder, descriptor_count, intercept
from tests.manager.helpers import checkpoint_files, manager_of, steps_in, temps_in

ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NUMBERS = "bytes, "  # "needs 8192 bytes, 4096 are free"
_SHARE = {"fast": 0.04, "full": 0.5}


def run(scale: Scale, seed: int) -> Outcome:
    """Fail call after call, then fill disks and reach limits."""
    outcome = Outcome("ENOSPC, EDQUOT, EIO, EROFS, EACCES or EMFILE at any call, full disks, limits")
    outcome.figures = {"errors raised": 0, "warnings": 0}
    choose = random.Random(seed)
    for story in STORIES.values():
        with scratch() as folder, quiet():
            _fail_everywhere(story, folder, outcome, choose, scale)
    for limit in (_file_size, _descriptors, _small_disk):
        with scratch() as folder:
            _try_limit(limit, folder, outcome, scale)
    return outcome


# -- one call --------------------------------------------------------------------------------------------------------


def around(name: str, kind: str) -> Outcome:
    """Fail each operation of one kind in one story, with every errno."""
    outcome = Outcome(f"an errno at {kind} in {name}", figures={"errors raised": 0, "warnings": 0})
    story = STORIES[name]
    with scratch() as folder, quiet():
        _fail_each(story, folder, [fault for fault in _faults(story, folder) if fault[2] == kind], outcome)
    return outcome


_Fault = tuple[int, int, str, bool, int]  # number of the operation, errno, kind, for good, bytes that get through


def _faults(story: Story, folder: Path) -> list[_Fault]:
    """Return every fault that a story can meet."""
    recorder = _Attempts()
    _tell(story, story.fresh(folder, "recorded"), recorder)
    return [
        (number, error, kind, for_good, part_bytes)
        for number, kind in enumerate(recorder.kinds, 1)
        for error in ERRNOS
        for for_good, part_bytes in ((False, 0), (True, 0), *([(False, 1_000)] if kind == "write" else []))
    ]


def _fail_everywhere(story: Story, folder: Path, outcome: Outcome, choose: random.Random, scale: Scale) -> None:
    faults = _faults(story, folder)
    # A failed sync of each kind is always among them: what may not be tried again is what goes wrong in silence.
    certain = [fault for fault in faults if fault[2].startswith("sync") and fault[1] == errno.EIO and not fault[3]]
    some = choose.sample(faults, int(len(faults) * _SHARE[scale]))
    _fail_each(story, folder, list(dict.fromkeys([*certain, *some])), outcome)


def _fail_each(story: Story, folder: Path, faults: list[_Fault], outcome: Outcome) -> None:
    for index, (number, error, kind, for_good, part_bytes) in enumerate(faults):
        path = story.fresh(folder, index)
        watch = _Watch(Fault(number, error, part_bytes=part_bytes, for_good=for_good))
        times = "for good" if for_good else "once"
        where = f"{story.name}: {errno.errorcode[error]} at operation {number} ({kind}), {times}"
        outcome.tried += 1
        with outcome.judging(where):
            _fail_once(story, path, watch, outcome)


class _Attempts(Recorder):
    """Counts calls that fail by themselves, too, as a `Fault` does."""

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        self.operations.append(operation)
        return call()


class _Watch:
    """A fault, and a look at what is done with a file whose sync has failed."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.used_again: list[str] = []
        self._lost: set[str] = set()

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.path in self._lost and operation.kind in {"sync", "replace", "write"}:
            self.used_again.append(operation.kind)
        try:
            return self.fault(operation, call)
        except OSError:
            if operation.kind == "sync":
                self._lost.add(operation.path)
            raise


def _tell(
    story: Story, path: Path, handler: Any
) -> tuple[dict[str, bytes], Promise, OSError | None, list[warnings.WarningMessage]]:
    """Let the story happen; return what was there before, what was promised, raised and warned of."""
    manager, run = story.manager(path)
    story.ready(manager, run)
    before = checkpoint_files(path)
    promise = Promise(story.first, lambda: 0)
    problem = None
    with warnings.catch_warnings(record=True) as caught, intercept(handler):
        warnings.simplefilter("always")
        try:
            story.tell(manager, run, promise)
        except OSError as error:
            problem = error
        try:
            manager.close()
        except OSError as error:
            problem = problem or error
    return before, promise, problem, caught


def _fail_once(story: Story, path: Path, watch: _Watch, outcome: Outcome) -> None:
    descriptors = descriptor_count()
    before, promise, problem, caught = _tell(story, path, watch)
    fault = watch.fault
    if fault.fired is None:
        assert story.options.get("async_save"), "the fault did not happen"  # two threads: sometimes one call fewer
        return
    assert not watch.used_again, f"{watch.used_again} after a failed sync of the same file"
    assert descriptor_count() <= descriptors, "a descriptor was leaked"
    if not fault.for_good:
        assert set(temps_in(path) if path.exists() else ()) <= set(before), "a temporary file was left"
    unknown = [warning for warning in caught if not issubclass(warning.category, safeckpt.SafeckptWarning)]
    assert not unknown, unknown[:1]
    outcome.figures["warnings"] += len(caught)
    if problem is not None:
        outcome.figures["errors raised"] += 1
        number = problem.errno
        assert number == fault.error, f"{problem!r} has errno {number}"
        unsure = isinstance(problem, safeckpt.DurabilityUnknownError)
        # One that fails for good may meet the main thread first and the directory's sync of the other one next.
        assert unsure <= (fault.fired.kind == "sync_directory" or fault.for_good), f"{problem!r}"
        if number in _FULL and not fault.for_good and fault.fired.kind in {"create", "write", "sync", "close"}:
            assert _NUMBERS in str(problem), f"no numbers in {problem}"
    for name in temps_in(path) if path.exists() else ():
        (path / name).unlink()
    checkpoints = {name: data for name, data in before.items() if name.endswith(".pt")}
    check_afterwards(path, story, promise.after(1), checkpoints)


# -- limits of the system --------------------------------------------------------------------------------------------


def _try_limit(limit: Callable[..., list[str]], folder: Path, outcome: Outcome, scale: Scale) -> None:
    count = 6 if scale == "fast" else 60
    ended = children.run(limit, folder, count)
    name = limit.__name__.strip("_").replace("_", " ")
    if ended.error is not None:
        if isinstance(ended.error, PermissionError):
            outcome.figures[name] = f"not allowed here: {ended.error}"
        else:
            outcome.lose(f"{name}: {ended.error!r}")
        return
    outcome.tried += count
    outcome.figures[name] = count
    for line in ended.value:
        outcome.lose(f"{name}: {line}")


def _file_size(folder: Path, count: int) -> list[str]:
    """Limit the size of a file to a part of a checkpoint."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    size = _size(folder)
    # Not below the history, which is written too.
    return _refuse(
        folder / "run",
        [16_000 + (size - 16_001) * number // count for number in range(1, count + 1)],
        lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard)),
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
        (errno.EFBIG,),
    )


def _descriptors(folder: Path, count: int) -> list[str]:
    """Leave a save fewer descriptors than it needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _size(folder)

    def limit(free: int) -> None:
        highest = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(highest, _first_free() + free), hard))

    return _refuse(
        folder / "run",
        [number % 4 for number in range(count)],
        limit,
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        (errno.EMFILE, None),  # with three it may be enough
    )


def _first_free() -> int:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def _small_disk(folder: Path, count: int) -> list[str]:
    """Fill a real small disk up to some pages, and free it again."""
    disk = folder / "disk"
    disk.mkdir()
    size = _size(folder)
    if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS: nobody else sees the mount
        raise PermissionError(ctypes.get_errno(), "unshare")
    done = subprocess.run(
        ["sh", "-c", f"mount --make-rprivate / && mount -t tmpfs -o size={8 * size} none {disk}"],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise PermissionError(errno.EPERM, done.stderr.decode(errors="replace"))
    ballast = disk / "ballast"

    def fill(leave_bytes: int) -> None:
        free = os.statvfs(disk)
        ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave_bytes)))

    parts = [size * number // (count + 1) for number in range(count)]
    return _refuse(disk / "run", parts, fill, lambda: ballast.unlink(missing_ok=True), (errno.ENOSPC,))


def _size(folder: Path) -> int:
    run = new_run()
    with manager_of(folder / "size", run) as manager:
        return manager.save(1).size_bytes


def _refuse(
    path: Path,
    limits: list[int],
    limit: Callable[[int], None],
    free: Callable[[], None],
    errors: tuple[int | None, ...],
) -> list[str]:
    """Save under each limit and then without it; return what went wrong."""
    run = new_run()
    wrong = []
    with manager_of(path, run, keep_last=2) as manager:
        warnings.simplefilter("always")
        for step, much in enumerate(limits, 3):
            if step == 3:
                for first in (1, 2):
                    set_state(run, first)
                    manager.save(first)
            before = checkpoint_files(path)
            set_state(run, 2 * step)
            found: int | None = None
            text = ""
            limit(much)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", safeckpt.SafeckptWarning)  # no room for the history either
                    manager.save(2 * step)
            except OSError as error:
                found, text = error.errno, str(error)
            finally:
                free()
            if found not in errors:
                wrong.append(f"limit {much}: errno {found}, {text}")
            elif found is not None and found != errno.EMFILE and "bytes" not in text:
                wrong.append(f"limit {much}: no numbers in {text}")
            if found is not None and checkpoint_files(path) != before:
                wrong.append(f"limit {much}: the directory has changed")
            set_state(run, 2 * step + 1)
            manager.save(2 * step + 1)
            if steps_in(path)[-1] != 2 * step + 1 or temps_in(path):
                wrong.append(f"limit {much}: afterwards {steps_in(path)}, {temps_in(path)}")
        latest = manager.latest()
        if latest is None or latest.step != 2 * step + 1:
            wrong.append(f"in the end {latest}")
    return wrong
