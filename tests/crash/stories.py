"""What a run does to its directory while faults happen, and what is promised at each point."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import safeckpt
from safeckpt import Best, CheckpointManager
from safeckpt.store import names
from tests.comparing import bits
from tests.faults import Operation, intercept
from tests.manager.helpers import checkpoint_files, flip, manager_of, step_path, steps_in, temps_in
from tests.training import Marked

State = tuple[int, int]  # step and timeline; (0, 0) for a run without a checkpoint

NEXT = 70  # the step that is saved after a fault

_NOISE = 2_000  # elements, so that a checkpoint has some pages


class WrongBitsError(Exception):
    """What was restored is no state that was saved."""


def set_state(run: Marked, step: int, timeline: int = 0) -> None:
    """Give the run the state of a step: every bit of it, the random stream too, depends on step and timeline."""
    seed = 1_000_003 * step + timeline
    torch.manual_seed(seed)
    run.step = step
    run.weight.timeline.fill_(timeline)
    run.weight.noise.copy_(torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed)))


def new_state(run: Marked, step: int) -> None:
    """Give the run a state of this step that can be told from the old timeline's of the same step."""
    set_state(run, step, 1)


def new_run() -> Marked:
    run = Marked()
    run.weight.register_buffer("timeline", torch.zeros(()))
    run.weight.register_buffer("noise", torch.zeros(_NOISE))
    return run


def state_in(run: Marked) -> State:
    """Return which state a run is in: all of it has to be of one step and timeline, bit for bit.

    Raises:
        WrongBitsError: It is a state that was never saved.
    """
    try:
        found = run.step, int(run.weight.timeline)
    except AssertionError as error:
        raise WrongBitsError(str(error)) from None
    if found != (0, 0) and (bits(run.weight.noise), bits(torch.get_rng_state())) != _expected(*found):
        raise WrongBitsError(f"not the bits, or not the random stream, of step {found[0]} on timeline {found[1]}")
    return found


@functools.lru_cache(maxsize=50)
def _expected(step: int, timeline: int) -> tuple[Any, Any]:
    run, rng = new_run(), torch.get_rng_state()
    set_state(run, step, timeline)
    found = bits(run.weight.noise), bits(torch.get_rng_state())
    torch.set_rng_state(rng)
    return found


class Promise:
    """Which states a restore may give, from which operation on.

    Args:
        first: The newest checkpoint before the story.
        position: How many operations there were so far.
    """

    def __init__(self, first: State, position: Callable[[], int]) -> None:
        self.first = first
        self._position = position
        self._entries: list[tuple[int, frozenset[State]]] = [(0, frozenset({first}))]

    def begin(self, *states: State) -> None:
        """Say that these states, too, may be found as soon as the next operation is done."""
        self._entries.append((self._position() + 1, self._entries[-1][1] | set(states)))

    def end(self, state: State) -> None:
        """Say that this state is safe now."""
        self._entries.append((self._position(), frozenset({state})))

    def after(self, operations: int) -> frozenset[State]:
        """Return what may be found when the process ended after so many operations."""
        return next(states for position, states in reversed(self._entries) if position <= operations)

    @property
    def ever(self) -> frozenset[State]:
        """Every state that may be found at some time."""
        return frozenset().union(*(states for _, states in self._entries))


@dataclass(frozen=True)
class Story:
    """Something that a run does.

    Attributes:
        steps: Checkpoints that are there before.
        ready: Brings a manager to where the story begins.
        tell: The story itself.
        options: Of the manager.
        spoil: Does something to the directory before anybody looks at it.
        damaged: Whether the newest file is damaged before the story begins.
    """

    name: str
    steps: tuple[int, ...]
    ready: Callable[[CheckpointManager, Marked], object]
    tell: Callable[[CheckpointManager, Marked, Promise], object]
    options: Mapping[str, Any] = field(default_factory=dict)
    spoil: Callable[[Path], None] | None = None
    damaged: bool = False

    def fresh(self, folder: Path, number: int | str) -> Path:
        """Return a directory as it is before the story; the first call makes it, later ones copy it."""
        template = folder / f"{self.name} before"
        if self.steps and not template.exists():
            run = new_run()
            with manager_of(template, run, keep_last=9) as manager:
                for step in self.steps:
                    set_state(run, step)
                    manager.save(step, loss=1 / step)
            if self.spoil is not None:
                self.spoil(template)
        path = folder / f"{self.name} {number}"
        if self.steps:
            shutil.copytree(template, path)
        return path

    def manager(self, path: Path) -> tuple[CheckpointManager, Marked]:
        run = new_run()
        return manager_of(path, run, **{"keep_last": 2, **self.options}), run

    def operations(self, path: Path) -> tuple[list[tuple[str, bool]], Promise]:
        """Let it happen; return the kind of each of the store's operations and whether it succeeds, and the promise."""
        found: list[tuple[str, bool]] = []

        def note(operation: Operation, call: Callable[[], Any]) -> Any:
            found.append((operation.kind, False))
            result = call()
            found[-1] = (operation.kind, True)
            return result

        promise = Promise(self.first, lambda: len(found))
        manager, run = self.manager(path)
        with manager:
            self.ready(manager, run)
            with intercept(note):
                self.tell(manager, run, promise)
        return found, promise

    def retold(self, manager: CheckpointManager, run: Marked) -> None:
        """Let it happen where the promise is known already."""
        self.tell(manager, run, Promise(self.first, lambda: 0))

    @property
    def first(self) -> State:
        """What a restore gives before the story."""
        good = self.steps[:-1] if self.damaged else self.steps
        return (max(good), 0) if good else (0, 0)


def _restore(manager: CheckpointManager, run: Marked) -> None:
    manager.restore()


def _save(manager: CheckpointManager, run: Marked, promise: Promise, step: int, **options: Any) -> None:
    new_state(run, step)
    promise.begin((step, 1))
    manager.save(step, **options)
    manager.wait()
    promise.end((step, 1))


def _save_some(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    for step in (4, 5, 6):
        _save(manager, run, promise, step)


def _end_steps(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    """Losses go up and down, so that the best and the newest are different files, and are recorded in between."""
    for step, loss in zip(range(4, 10), (0.9, 0.1, 0.8, 0.7, 0.05, 0.6), strict=True):
        new_state(run, step)
        if step % 2 == 0:
            promise.begin((step, 1))
        manager.end_step(step, loss=loss)
        if step % 2 == 0:
            promise.end((step, 1))


def _save_without_waiting(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    for step in (4, 5, 6):
        new_state(run, step)
        promise.begin((step, 1))
        manager.save(step)
    manager.wait()
    promise.end((6, 1))


def _refuse_and_roll_back(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    _save(manager, run, promise, 4)
    new_state(run, 5)
    run.weight.value[1] = math.nan
    with contextlib.suppress(safeckpt.NonFiniteError):
        manager.save(5)
    manager.rollback(changed=True)
    assert state_in(run) == (4, 1)
    _save(manager, run, promise, 5)


def _damage_the_newest(manager: CheckpointManager, run: Marked) -> None:
    manager.restore()
    flip(step_path(manager.directory, 3))


def _roll_back_and_save(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
        manager.rollback(changed=True)
    _save(manager, run, promise, 3)


def _go_back(manager: CheckpointManager, run: Marked) -> None:
    manager.restore(1)


def _save_on_another_timeline(manager: CheckpointManager, run: Marked, promise: Promise) -> None:
    # Highest first: what a crash leaves of the old timeline are steps that were saved one after the other.
    promise.begin((2, 0), (1, 0))
    _save(manager, run, promise, 2)


def _leave_as_the_dead_do(path: Path) -> None:
    """Leave what a killed writer leaves: its lock file, its name, half a checkpoint, a whole one without its name."""
    (path / names.LOCK).touch()
    (path / names.HOLDER).write_text('{"pid": 1, "host": "gone"')
    whole = step_path(path, 3).read_bytes()
    (path / f".{names.step_name(4)}.0123456789abcdef.tmp").write_bytes(whole[: len(whole) // 3])
    (path / f".{names.step_name(5)}.fedcba9876543210.tmp").write_bytes(whole)
    with (path / names.EVENTS).open("ab") as file:
        file.write(b'{"time": "2026-')


_ALL = [
    Story("first", (), _restore, functools.partial(_save, step=1)),
    Story("save and prune", (1, 2, 3), _restore, functools.partial(_save, step=4)),
    Story("rollback", (1, 2, 3), _damage_the_newest, _roll_back_and_save, damaged=True),
    Story("rewind", (1, 2, 3), _go_back, _save_on_another_timeline),
    Story("one is kept", (3,), _restore, _save_some, {"keep_last": 1}),
    Story(
        "the best is kept", (1, 2, 3), _restore, _end_steps,
        {"keep_last": 1, "keep_best": Best("loss"), "save_every": 2},
    ),
    Story("take-over", (1, 2, 3), _restore, _save_some, spoil=_leave_as_the_dead_do),
    Story("async", (1, 2, 3), _restore, _save_without_waiting, {"async_save": True, "keep_last": 1}),
    Story("async rollback", (1, 2, 3), _restore, _refuse_and_roll_back, {"async_save": True}),
]  # fmt: skip
STORIES = {story.name: story for story in _ALL}


def check_afterwards(path: Path, story: Story, allowed: frozenset[State], before: Mapping[str, bytes]) -> State:
    """Do what the next process does: restore, save, restore. Return the state that was found at first.

    Args:
        path: The directory.
        story: What has happened to it.
        allowed: What a restore may give.
        before: The checkpoints that were there before the story.

    Raises:
        WrongBitsError: What was restored was never saved.
        Exception: Whatever else is not as it has to be.
    """
    run = new_run()
    with warnings.catch_warnings(), manager_of(path, run, keep_last=2, keep_best=()) as manager:
        warnings.simplefilter("error")
        if story.damaged:
            warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
        restored = manager.restore()
        found = state_in(run)
        assert found in allowed, f"found {found}, allowed {sorted(allowed)}, in the directory {steps_in(path)}"
        assert (0 if restored is None else restored.step) == found[0]
        if found == story.first:  # nothing newer: nothing older may have gone either
            gone = set(before.values()) - set(checkpoint_files(path).values())
            assert not gone, f"{len(gone)} older checkpoints are gone and no newer one is there"
        set_state(run, NEXT, 1)
        manager.save(NEXT)
        assert steps_in(path)[-1] == NEXT
        assert temps_in(path) == []
        latest = manager.latest()
        assert latest is not None
        assert latest.step == NEXT
        assert latest == manager.checkpoints()[-1]
        assert safeckpt.load(step_path(path, NEXT))["counters"] == {"step": NEXT}
    return found
