"""Ctrl-C on every line of Python that a save executes: in the package, and in everything that it calls.

A line is one of a file; of a line in a loop the first time, the last time and some in between are tried.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import random
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

import safeckpt
from safeckpt import CheckpointManager
from tests.campaign.outcome import Outcome, Scale, alone, scratch
from tests.crash.stories import new_run, set_state, state_in
from tests.faults import Interrupt, Tracing, descriptor_count, intercept
from tests.manager.helpers import manager_of, steps_in, temps_in
from tests.training import Marked

_LINES = {"fast": 60, "full": None}  # of each kind of save
_TIMES = {"fast": 1, "full": 1}  # of each line
_PACKAGE = str(Path(safeckpt.__file__).parent)
_OWN = (str(Path(__file__).parent), weakref.__file__, "<")

_LOAD_CONST = bytes([dis.opmap["LOAD_CONST"]])

Place = tuple[str, int]


def run(scale: Scale, seed: int) -> Outcome:
    """Interrupt save after save."""
    return alone(_interrupt_them, scale, seed)


def around(save: str, kind: str) -> Outcome:
    """Interrupt one kind of save before and after each operation of one kind.

    Args:
        save: Of `SAVES`.
        kind: Of the store's operations.
    """
    outcome = Outcome(f"KeyboardInterrupt at {kind} of a save: {save}")
    with scratch() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)
        SAVES[save](folder, outcome).interrupt_operations(kind)
    return outcome


def _interrupt_them(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("KeyboardInterrupt on any line of Python that a save executes")
    for kind in SAVES.values():
        choose = random.Random(f"{seed} {kind.__name__}")
        with scratch() as folder, warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", ResourceWarning)  # a file that is dropped is closed by its finalizer
            kind(folder, outcome).interrupt_all(choose, _LINES[scale], _TIMES[scale])
    return outcome


def _new_run() -> Marked:
    """Return a run with tensors so large that other threads copy them and take their checksums."""
    run = new_run()
    for name in ("large", "larger"):
        run.weight.register_buffer(name, torch.arange(40_000))
    return run


class _Tracer(Tracing):
    """Counts the lines of Python, and raises KeyboardInterrupt on one.

    Args:
        place: The line; None to interrupt nothing.
        time: At which of its executions, from 1.
    """

    def __init__(self, place: Place | None = None, time: int = 1) -> None:
        self._place = place
        self._left = time
        self.seen: dict[Place, int] = {}
        self.fired = False

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        # Python swallows whatever is raised in a finalizer, in a callback of a weak reference, and in a bare
        # `except: pass` of copyreg's _slotnames.
        if code.co_name in {
            "__del__",
            "_close_all",
            "_end",
            "_remove",
            "_slotnames",
            "remove",
        } or code.co_filename.startswith(_OWN):
            return None
        if event == "line" and _leaves_a_with(frame):
            return self._trace
        if self._place is None:
            if event == "line":
                place = (code.co_filename, frame.f_lineno)
                self.seen[place] = self.seen.get(place, 0) + 1
        elif code.co_filename != self._place[0] or self.fired:
            return None
        elif event == "line" and frame.f_lineno == self._place[1]:
            self._left -= 1
            if not self._left:
                self.fired = True
                raise KeyboardInterrupt
        return self._trace


class _Operation:
    """Raises KeyboardInterrupt at an operation of the store."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._stack = contextlib.ExitStack()

    @property
    def fired(self) -> bool:
        return self._interrupt.fired is not None

    def __enter__(self) -> None:
        self._stack.enter_context(intercept(self._interrupt))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


_Interrupting = _Tracer | _Operation


def _leaves_a_with(frame: Any) -> bool:
    """Return whether a `__exit__` is called next.

    Tracing sees a line there. Python looks for no signal before the call is made: an exception would leave a lock
    locked, which Ctrl-C cannot.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return bytes([code[at]]) == _LOAD_CONST and code[at : at + 2] == code[at + 2 : at + 4] == code[at + 4 : at + 6]


class _Kind:
    """A kind of save, done again and again by one process."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, folder: Path, outcome: Outcome) -> None:
        self.folder = folder
        self.outcome = outcome
        self.step = 0

    def save(self, tracer: _Interrupting) -> None:
        """Do what comes before a save, and the save under a tracer."""
        raise NotImplementedError

    def after(self) -> CheckpointManager:
        """Return the manager that was interrupted, its save at an end."""
        raise NotImplementedError

    def interrupt_all(self, choose: random.Random, most_lines: int | None, times: int) -> None:
        for _ in range(3):
            everything = _Tracer()
            self.save(everything)  # the first one fills caches; the last one is as all others
            self.after()
        descriptors = descriptor_count()
        lines = list(everything.seen.items())
        name = type(self).__name__.strip("_")
        self.outcome.figures[f"lines of {name}"] = len(lines)
        self.outcome.figures[f"lines of {name} in the package"] = sum(p.startswith(_PACKAGE) for (p, _), _ in lines)
        if most_lines is not None:
            lines = choose.sample(lines, min(most_lines, len(lines)))
        for place, count in lines:
            numbers = {1, count} | {choose.randint(1, count) for _ in range(times - 2)}
            for number in choose.sample(sorted(numbers), min(times, len(numbers))):
                where = f"{place[0]}:{place[1]}, execution {number}"
                self._interrupt(_Tracer(place, number), where, descriptors)

    def interrupt_operations(self, kind: str) -> None:
        for _ in range(3):
            self.save(_Operation(Interrupt(0, "before")))
            self.after()
        descriptors = descriptor_count()
        for when in ("before", "after"):
            for number in itertools.count(1):
                fault = _Operation(Interrupt(number, when, {kind}))
                self._interrupt(fault, f"{when} {kind} {number}", descriptors)
                if not fault.fired:
                    break

    def _interrupt(self, tracer: _Interrupting, where: str, descriptors: int) -> None:
        where = f"{type(self).__name__.strip('_')}, {where}"
        ended: BaseException | None = None
        try:
            self.save(tracer)
        except BaseException as error:
            ended = error
        if not tracer.fired:
            self.outcome.figures["not reached"] = self.outcome.figures.get("not reached", 0) + 1
        else:
            self.outcome.tried += 1
            if type(ended) is not KeyboardInterrupt:
                self.outcome.lose(f"{where}: came out as {ended!r}")
        ended = None
        with self.outcome.judging(where):
            manager = self.after()
            self._look(manager, descriptors)

    def _look(self, manager: CheckpointManager, descriptors: int) -> None:
        if not manager.directory.exists():
            return
        left = temps_in(manager.directory)
        assert not left, f"a temporary file was left: {left}"
        assert descriptor_count() <= descriptors, "a descriptor was leaked"
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and thread.is_alive():
                thread.join(20)  # it was told to end, or never will
                assert not thread.is_alive(), f"the thread {thread.name} was left behind"
        found = steps_in(manager.directory)
        newest = manager.latest()
        assert (newest.step if newest else None) == (found[-1] if found else None)
        assert manager.step == (found[-1] if found else 0)
        run = _new_run()
        with manager_of(manager.directory, run) as reader:
            reader.restore()
        assert state_in(run) == ((newest.step, 1) if newest else (0, 0))


class _Save(_Kind):
    """The save of a run that goes on: guard, encode, write, commit, prune."""

    def __init__(self, folder: Path, outcome: Outcome) -> None:
        super().__init__(folder, outcome)
        self.run: Marked = _new_run()
        self.manager = manager_of(folder / "run", self.run, keep_last=2, **self.options)

    def save(self, tracer: _Interrupting) -> None:
        self._next()
        self.manager.save(self.step)  # so that every round finds as many files
        self.manager.wait()
        self._next()
        with tracer:
            self.manager.save(self.step)
            self.manager.wait()

    def _next(self) -> None:
        self.step += 1
        set_state(self.run, self.step, 1)

    def after(self) -> CheckpointManager:
        self.manager.wait()
        return self.manager


class _AsyncSave(_Save):
    options = {"async_save": True}  # noqa: RUF012


class _FirstSave(_Kind):
    """The first save of a process: the directory is made or taken over, its lock taken, half a file swept."""

    manager: CheckpointManager | None = None

    def save(self, tracer: _Interrupting) -> None:
        self._close()
        self.step += 1
        path = self.folder / str(self.step)
        if self.step % 2:
            path.mkdir()
            (path / ".step-00000001.pt.0123456789abcdef.tmp").write_bytes(b"half a checkpoint")
        run = _new_run()
        self.manager = manager_of(path, run)
        set_state(run, 1, 1)
        with tracer:
            self.manager.save(1)

    def after(self) -> CheckpointManager:
        assert self.manager is not None
        return self.manager

    def _look(self, manager: CheckpointManager, descriptors: int) -> None:
        for name in temps_in(manager.directory) if manager.directory.exists() else ():
            assert name.endswith(".0123456789abcdef.tmp")
            (manager.directory / name).unlink()
        super()._look(manager, descriptors + 1)
        # The lock was left free, or belongs to a manager that can go on.
        manager.close()
        run = _new_run()
        with manager_of(manager.directory, run) as other:
            other.restore()
            set_state(run, 2, 1)
            other.save(2)

    def _close(self) -> None:
        if self.manager is not None:
            self.manager.close()


SAVES: dict[str, type[_Kind]] = {"sync": _Save, "async": _AsyncSave, "first": _FirstSave}
