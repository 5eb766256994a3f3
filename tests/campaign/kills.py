"""Processes that save, prune, roll back and rewind are killed, terminated and interrupted at any moment.

A process tells through a pipe what a restore may give from here on, before it does it, and what is safe, once it is.
What it leaves is then read by another process, and the next one goes on in the same directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safeckpt
from safeckpt import CheckpointManager
from tests.campaign.crash_points import SuccessRecorder, recorded
from tests.campaign.outcome import Outcome, Scale, WrongBitsError, alone, scratch
from tests.crash.stories import STORIES, Promise, State, Story, check_afterwards, new_run, set_state, state_in
from tests.faults import Operation, in_child, intercept
from tests.manager.helpers import flip, manager_of, step_path, steps_in, temps_in
from tests.training import Marked

_ROUNDS = {"fast": 100, "full": 1_000}
_MOST_OPERATIONS = 150  # about six saves
_MOST_SECONDS = 0.06
_MOST_ACTS = 1_000
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGINT)

Say = Callable[..., None]


@dataclass(frozen=True)
class _Death:
    """How a process is to end.

    Attributes:
        number: Of the signal.
        operation: Before or after which operation of the store it comes; None for a moment that the parent chooses.
        when: "before" or "after" that operation.
        graceful: The manager listens to the signal.
        async_save: The manager writes in the background.
        seed: Of what the process does.
        first_number: States are numbered from here.
    """

    number: signal.Signals
    operation: int | None
    when: str
    graceful: bool
    async_save: bool
    seed: int
    first_number: int

    @classmethod
    def draw(cls, choose: random.Random, index: int) -> _Death:
        number = choose.choice(_SIGNALS)
        return cls(
            number=number,
            operation=choose.randint(1, _MOST_OPERATIONS) if choose.random() < 0.5 else None,
            when=choose.choice(["before", "after"]),
            graceful=number is signal.SIGTERM and choose.random() < 0.5,
            async_save=choose.random() < 0.5,
            seed=choose.randrange(1 << 32),
            first_number=index * _MOST_ACTS,
        )


def run(scale: Scale, seed: int) -> Outcome:
    """Kill process after process."""
    return alone(_kill_them, scale, seed)


def around(name: str, kind: str | None) -> Outcome:
    """Kill a process with SIGKILL right after each operation of one kind in one story.

    Args:
        name: Of the story.
        kind: Of the operations; None for a kill before the first one.
    """
    story = STORIES[name]
    outcome = Outcome(f"SIGKILL after {kind or 'nothing'} in {name}")
    with scratch() as folder:
        points = [(0, frozenset({story.first}))]
        if kind is not None:
            _, _, operations, promise = recorded(story, folder)
            points = [(number, promise.after(number)) for number, one in enumerate(operations, 1) if one.kind == kind]
        for number, allowed in points:
            path = story.fresh(folder, number)
            outcome.tried += 1
            ended = in_child(lambda path=path, number=number: _tell_and_die(story, path, number))
            with outcome.judging(f"{name}: killed after operation {number}"):
                assert ended.error is None, repr(ended.error)
                check_afterwards(path, story, allowed, {})
    return outcome


def _tell_and_die(story: Story, path: Path, operations: int) -> None:
    manager, run = story.manager(path)
    story.ready(manager, run)
    if operations:
        with intercept(_KillAfter(operations)):
            story.tell(manager, run, Promise(story.first, lambda: 0))
            manager.close()
    os.kill(os.getpid(), signal.SIGKILL)


class _KillAfter(SuccessRecorder):
    """Kills this process when so many operations have succeeded."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self._last = operations

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        result = super().__call__(operation, call)
        if len(self.operations) == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def _kill_them(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("SIGKILL, SIGTERM or SIGINT at any moment of saves, prunes, rollbacks and rewinds")
    outcome.figures = {"signals": {}, "half-written files left": 0, "checkpoints acknowledged": 0}
    choose = random.Random(seed)
    allowed: frozenset[State] = frozenset({(0, 0)})
    damaged: set[int] = set()  # steps whose file was damaged on purpose
    with scratch() as folder:
        path = folder / "run"
        for number in range(_ROUNDS[scale]):
            death = _Death.draw(choose, number)
            messages = _die(path, death, choose.random() * _MOST_SECONDS)
            outcome.tried += 1
            name = death.number.name + (", graceful" if death.graceful else "")
            outcome.figures["signals"][name] = outcome.figures["signals"].get(name, 0) + 1
            for message in messages:
                allowed |= _states(message, "may")
                allowed = _states(message, "now") or allowed
                outcome.figures["checkpoints acknowledged"] += "now" in message
                damaged |= {message["damaged"]} if "damaged" in message else set()
                if "wrong" in message:
                    outcome.lose(f"process {number}, {death}: {message['wrong']}")
            ended = messages[-1].get("ended") if messages else None
            gone = ended is None  # by the signal, before it could say anything
            if gone != (death.number is signal.SIGKILL or (death.number is signal.SIGTERM and not death.graceful)):
                outcome.lose(f"process {number}, {death}: ended by {ended}")
            if path.exists():
                for step in steps_in(path):
                    if step not in damaged and not _is_good(step_path(path, step)):
                        outcome.lose(f"process {number}, {death}: the file of step {step} is not whole")
                outcome.figures["half-written files left"] += bool(temps_in(path))
                allowed = _check(path, allowed, f"process {number}, {death}", outcome)
    return outcome


def _states(message: dict[str, Any], key: str) -> frozenset[State]:
    return frozenset((step, timeline) for step, timeline in message.get(key, ()))


def _check(path: Path, allowed: frozenset[State], where: str, outcome: Outcome) -> frozenset[State]:
    """Read what is there, as the next process will; return what it is from now on."""
    run = new_run()
    try:
        with manager_of(path, run) as manager, warnings.catch_warnings():
            warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)  # files are damaged on purpose
            manager.restore()
        found = state_in(run)
    except WrongBitsError as error:
        outcome.let_in(f"{where}: {error}")
    except Exception as error:
        outcome.lose(f"{where}: {error!r}")
    else:
        if found not in allowed:
            outcome.lose(f"{where}: found {found}, allowed {sorted(allowed)}")
        return frozenset({found})
    return allowed


def _die(path: Path, death: _Death, seconds: float) -> list[dict[str, Any]]:
    """Fork a process, have it end as told, and return what it said."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _be_a_child(path, death, write_end)
    os.close(write_end)
    lines: list[bytes] = []
    with os.fdopen(read_end, "rb") as pipe:
        ready = pipe.readline()
        if ready and death.operation is None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, death.number)
        lines = [ready, *pipe.read().splitlines()] if ready else []
    os.waitpid(pid, 0)
    return [json.loads(line) for line in lines]


def _be_a_child(path: Path, death: _Death, write_end: int) -> None:
    def say(**message: Any) -> None:
        os.write(write_end, json.dumps(message).encode() + b"\n")

    try:
        _work(path, death, say)
    except BaseException as error:
        say(wrong="".join(traceback.format_exception(error))[-1500:], ended=type(error).__name__)
    finally:
        os._exit(0)


def _is_good(path: Path) -> bool:
    try:
        safeckpt.verify(path)
    except safeckpt.LoadError:
        return False
    return True


class _Ctrl:
    """What became of the interrupts that were sent."""

    def __init__(self) -> None:
        self.sent = 0
        self.swallowed: list[str] = []

    def handle(self, number: int, frame: Any) -> None:
        self.sent += 1
        raise KeyboardInterrupt

    def unraisable(self, what: Any) -> None:
        self.swallowed.append(f"{what.exc_value!r} in {what.object!r}")


def _work(path: Path, death: _Death, say: Say) -> None:
    ctrl = _Ctrl()
    choose = random.Random(death.seed)
    run = new_run()
    options: dict[str, Any] = {"keep_last": 2, "async_save": death.async_save}
    if death.graceful:
        options |= {"stop_signals": (death.number,), "save_every": 3}
    seen = 0

    def strike(operation: Operation, call: Callable[[], Any]) -> Any:
        nonlocal seen
        seen += 1
        due = seen == death.operation
        if due and death.when == "before":
            os.kill(os.getpid(), death.number)
        try:
            return call()
        finally:  # also after a call that fails by itself
            if due and death.when == "after":
                os.kill(os.getpid(), death.number)

    warnings.simplefilter("ignore")
    with manager_of(path, run, **options) as manager:
        manager.restore()
        writer = _Writer(manager, run, choose, say, death)
        if death.number is signal.SIGINT:
            signal.signal(signal.SIGINT, ctrl.handle)
            sys.unraisablehook = ctrl.unraisable
        try:
            say(ready=True)
            with intercept(strike):
                for _ in range(_MOST_ACTS):
                    if death.graceful:
                        if not writer.end_step():
                            say(ended="stopped")
                            return
                    else:
                        writer.act()
                    if ctrl.sent:  # and nothing was raised
                        say(wrong=f"Ctrl-C was lost: {ctrl.swallowed}")
                        break
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The same manager goes on, as in a notebook.
        manager.wait()
        try:
            writer.save(wait=True)
        except ValueError as error:  # an interrupted restore must not be saved
            if "stopped half-way" not in str(error):
                raise
            manager.restore()
            writer.save(wait=True)
        if temps_in(path):
            say(wrong=f"temporary files after an interrupt: {temps_in(path)}")
    say(ended="KeyboardInterrupt" if ctrl.sent else "nothing")


class _Writer:
    """Does things to a directory, and says so.

    Args:
        death: Tells how the manager was built, and from where states are numbered.
    """

    def __init__(self, manager: CheckpointManager, run: Marked, choose: random.Random, say: Say, death: _Death) -> None:
        self._manager = manager
        self._run = run
        self._choose = choose
        self._say = say
        self._number = death.first_number
        self._asynchronous = death.async_save
        self._safe: State = state_in(run)
        self._pending: State | None = None  # a save in the background

    def act(self) -> None:
        acts = [self.save, self._refuse, self._damage, self._rewind]
        self._choose.choices(acts, weights=[6, 1, 1, 1])[0]()

    def _good(self) -> list[State]:
        return [
            (checkpoint.step, int(checkpoint.metrics["timeline"]))
            for checkpoint in self._manager.checkpoints()
            if _is_good(checkpoint.path)
        ]

    def _next_state(self, steps: int) -> State:
        self._number += 1
        state = (self._manager.step + steps, self._number)
        set_state(self._run, *state)
        return state

    def save(self, *, wait: bool | None = None) -> None:
        state = self._next_state(self._choose.randint(1, 3))
        self._say(may=[state])
        self._manager.save(state[0], metrics={"timeline": state[1]})
        if self._pending is not None:  # a save waits for the one before it
            self._safe = self._pending
        self._pending = state
        self._say(now=[self._safe, self._pending])
        if not self._asynchronous or (self._choose.random() < 0.5 if wait is None else wait):
            self._settle()

    def _settle(self) -> None:
        self._manager.wait()
        if self._pending is not None:
            self._safe, self._pending = self._pending, None
        self._say(now=[self._safe])

    def _refuse(self) -> None:
        self._settle()
        if self._safe == (0, 0):
            return
        step, _ = self._next_state(1)
        self._run.weight.value[1] = float("nan")
        with contextlib.suppress(safeckpt.NonFiniteError):
            self._manager.save(step)
        self._manager.rollback(changed=True, max_rollbacks=10**6)
        assert state_in(self._run) == self._safe

    def _damage(self) -> None:
        """Damage the newest checkpoint, as a disk might, and roll back to the one before it."""
        self._settle()
        good = self._good()
        if len(good) < 2:
            return
        self._say(may=good[-2:], damaged=good[-1][0])
        flip(step_path(self._manager.directory, good[-1][0]))
        self._safe = good[-2]
        self._say(now=[self._safe])
        self._manager.rollback(changed=True, max_rollbacks=10**6)
        assert state_in(self._run) == self._safe

    def _rewind(self) -> None:
        """Go back to the older one of two checkpoints and save on another timeline."""
        self._settle()
        good = self._good()
        if len(good) < 2:
            return
        self._manager.restore(good[0][0])
        self._safe = good[0]
        self._say(may=good)
        self.save()

    def end_step(self) -> bool:
        """End a step, and return whether the run goes on."""
        state = self._next_state(1)
        self._say(may=[state])
        saved = self._manager.end_step(state[0], metrics={"timeline": state[1]})
        if self._manager.stop_requested and saved is not None:
            self._manager.wait()
            self._say(now=[state])
        return not self._manager.stop_requested or saved is None
