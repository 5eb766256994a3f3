"""Two writers take turns in one directory and are killed in it, while processes and threads read it all the time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import selectors
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import safeckpt
from tests.campaign.outcome import Outcome, Scale, alone, scratch
from tests.crash.stories import new_run, set_state, state_in
from tests.faults import Operation, intercept
from tests.manager.helpers import manager_of, steps_in

_SAVES = {"fast": 60, "full": 600}
LISTINGS = 4  # of a reader; the most that one makes here is three
_SAVES_A_KILL = 12
_MOST_SECONDS = 60  # without a save: only a hang takes so long

Say = Callable[[str], None]


def run(scale: Scale, seed: int) -> Outcome:
    """Have them all at work."""
    return alone(_run, scale, seed)


def _run(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("two writers, killed while they hold the lock, and many readers in one directory")
    for number in range(1, LISTINGS + 1):
        for ask in ("restore", "restore one", "latest", "checkpoints"):
            with scratch() as folder:
                save_in_between(folder / "run", ask, number, outcome)
    with scratch() as folder:
        hold_the_lock(folder / "run", outcome)
    with scratch() as folder:
        _work_together(folder / "run", outcome, _SAVES[scale], random.Random(seed))
    for number in (errno.ENOLCK, errno.ENOSYS):
        with scratch() as folder:
            _without_locks(folder / "run", number, outcome)
    return outcome


def save_in_between(path: Path, ask: str, number: int, outcome: Outcome) -> None:
    """Have another writer save and prune right after a reader has listed the directory for the number-th time."""
    where = f"{ask}, a save after listing {number}"
    writer_run, run = new_run(), new_run()
    set_state(writer_run, 1, 1)
    seen = 0

    def late(operation: Operation, call: Callable[[], Any]) -> Any:
        nonlocal seen
        result = call()
        if operation.kind == "listing" and inside:
            seen += 1
            if seen == number:
                inside.clear()
                rng = torch.get_rng_state()  # the writer is another process, but for this
                set_state(writer_run, 2, 1)
                writer.save(2)
                writer.close()
                torch.set_rng_state(rng)
        return result

    inside = [True]
    with manager_of(path, writer_run, keep_last=1) as writer, manager_of(path, run) as manager:
        writer.save(1)
        found: Any = None
        with intercept(late):
            if ask == "restore one":
                with contextlib.suppress(safeckpt.CheckpointNotFoundError):  # it was pruned meanwhile
                    found = manager.restore(1)
            else:
                found = getattr(manager, ask)()
                if found in (None, ()):
                    outcome.lose(f"{where}: nothing was found")
        if inside:  # it does not list so often
            return
        outcome.tried += 1
        if ask.startswith("restore") and found is not None:
            if state_in(run) != (found.step, 1):
                outcome.let_in(f"{where}: {state_in(run)} instead of step {found.step}")
            saved = steps_in(path)
            set_state(run, 3, 1)
            with contextlib.suppress(safeckpt.DirectoryInUseError):
                manager.save(3)
                saved = [found.step]
            if not set(saved) <= set(steps_in(path)):
                outcome.lose(f"{where}: steps {saved} were there, now {steps_in(path)}")


def hold_the_lock(path: Path, outcome: Outcome) -> None:
    """Save into a directory that another writer holds."""
    outcome.tried += 1
    first, second = new_run(), new_run()
    set_state(first, 1, 1)
    set_state(second, 2, 1)
    with manager_of(path, first) as holder, manager_of(path, second) as other:
        holder.save(1)
        other.restore()
        set_state(second, 2, 1)
        try:
            other.save(2)
        except safeckpt.DirectoryLockedError as error:
            if error.pid != os.getpid():
                outcome.lose(f"a held lock: the holder is said to be {error.pid}")
        else:
            outcome.let_in("a held lock: a second writer has saved")


class _Worker:
    """A forked process that says things, a line each."""

    def __init__(self, work: Callable[[Say, Path], None], path: Path) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            status = 1
            try:
                warnings.simplefilter("error")  # a file that is passed over is one, too
                work(lambda text: void(os.write(write_end, text.encode() + b"\n")), path)
                status = 0
            except BaseException:
                os.write(write_end, b"wrong " + traceback.format_exc().replace("\n", " | ")[-700:].encode() + b"\n")
            finally:
                os._exit(status)
        os.close(write_end)
        self.is_writer = work is _write
        self.pipe = os.fdopen(read_end, "rb", buffering=0)
        self._rest = b""

    def lines(self) -> list[str] | None:
        """Return what was said since, None at the end."""
        data = os.read(self.pipe.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in lines] if data else None


def void(_: object) -> None:
    """Return nothing."""


def _work_together(path: Path, outcome: Outcome, saves: int, choose: random.Random) -> None:
    workers = selectors.DefaultSelector()

    def begin(work: Callable[[Say, Path], None]) -> None:
        worker = _Worker(work, path)
        workers.register(worker.pipe, selectors.EVENT_READ, worker)

    figures = dict.fromkeys(["saved", "refused", "taken_over", "killed", "read"], 0)
    saved: dict[int, int] = {}
    next_kill = choose.randint(3, _SAVES_A_KILL)
    for work in (_write, _write, _read, _read, _read_in_threads):
        begin(work)
    deadline = time.monotonic() + _MOST_SECONDS
    while workers.get_map():
        ready = workers.select(timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            outcome.lose(f"nobody went on after {figures}")
            break
        for key, _ in ready:
            worker: _Worker = key.data
            lines = worker.lines()
            if lines is None:
                workers.unregister(worker.pipe)
                worker.pipe.close()
                os.waitpid(worker.pid, 0)
                continue
            for line in lines:
                word, _, rest = line.partition(" ")
                if word == "wrong":
                    outcome.lose(rest)
                    _stop(path)
                    continue
                figures[word] = figures.get(word, 0) + 1
                if word != "saved":
                    continue
                deadline = time.monotonic() + _MOST_SECONDS
                if saved.setdefault(int(rest), worker.pid) != worker.pid:
                    outcome.lose(f"step {rest} was saved by two writers")
                if len(saved) == saves:
                    _stop(path)
                if figures["saved"] == next_kill and len(saved) < saves:
                    os.kill(worker.pid, signal.SIGKILL)
                    figures["killed"] += 1
                    next_kill += choose.randint(3, _SAVES_A_KILL)
                    begin(_write)
    for key in list(workers.get_map().values()):
        os.kill(key.data.pid, signal.SIGKILL)
        os.waitpid(key.data.pid, 0)
    outcome.tried += sum(figures.values())
    outcome.figures |= figures
    latest = safeckpt.latest(path)
    if latest is None or latest.step < max(saved, default=0):
        outcome.lose(f"step {max(saved, default=0)} was acknowledged, the latest is {latest}")


def _stop_file(path: Path) -> Path:
    return path.with_name("stop")


def _stop(path: Path) -> None:
    _stop_file(path).touch()


def _write(say: Say, path: Path) -> None:
    """Open the directory, save some steps, close it, and again."""
    choose = random.Random(os.getpid())
    last = -1
    while not _stop_file(path).exists():
        run = new_run()
        with manager_of(path, run, keep_last=2, async_save=choose.random() < 0.3) as manager:
            try:
                manager.restore()
                if last not in (-1, manager.step):
                    say("taken_over")
                for _ in range(choose.randint(1, 4)):
                    step = manager.step + 1
                    set_state(run, step, 1)
                    manager.save(step)
                    manager.wait()
                    last = step
                    say(f"saved {step}")
            except (safeckpt.DirectoryLockedError, safeckpt.DirectoryInUseError):
                say("refused")  # by the other one, who has the lock or has saved meanwhile
        time.sleep(choose.random() * 0.01)


def _read(say: Say, path: Path) -> None:
    run = new_run()
    newest = 0
    with manager_of(path, run) as manager:
        while not _stop_file(path).exists():
            for look in (manager.restore, manager.latest, lambda: (manager.checkpoints() or (None,))[-1]):
                found = look()
                step = 0 if found is None else found.step
                assert step >= newest, f"step {step} after step {newest}"
                newest = step
                if look == manager.restore:
                    assert state_in(run) == ((step, 1) if step else (0, 0))
            say("read")


def _read_in_threads(say: Say, path: Path) -> None:
    problems: list[str] = []

    def look() -> None:
        newest = 0
        try:
            while not _stop_file(path).exists():
                found = safeckpt.latest(path)
                step = 0 if found is None else found.step
                assert step >= newest, f"step {step} after step {newest}"
                newest = step
                say("read")
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems[0]


def _without_locks(path: Path, number: int, outcome: Outcome) -> None:
    """Save where the system has no locks: a warning that says so, a whole checkpoint, and no second writer."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    run = new_run()
    set_state(run, 1, 1)
    outcome.tried += 1
    with mock.patch.object(fcntl, "flock", flock), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with manager_of(path, run) as manager:
            manager.save(1)
            second = new_run()
            with manager_of(path, second) as other:
                other.restore()
                set_state(second, 2, 1)
                try:
                    other.save(2)
                except safeckpt.DirectoryLockedError:
                    pass
                else:
                    outcome.let_in("without locks: a second writer has saved")
    if not any("no file locks" in str(one.message) for one in caught):
        outcome.lose(f"without locks: nothing was said, only {[str(one.message) for one in caught]}")
    if steps_in(path) != [1]:
        outcome.lose(f"without locks: {steps_in(path)}")
    with manager_of(path, run) as manager:
        manager.restore()
        set_state(run, 2, 1)
        manager.save(2)
    if steps_in(path) != [1, 2]:
        outcome.lose(f"with locks again: {steps_in(path)}")
