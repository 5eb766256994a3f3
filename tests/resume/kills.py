"""Kill a training script with SIGKILL at random places until it ends; compare it with the run that nothing stopped.

A place is a line of the script or an operation of the store, by its number: nothing depends on the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import safeckpt
from tests import children
from tests.comparing import assert_same
from tests.faults import Kill, Operation, Tracing, intercept

Script = Callable[[str], Any]


@dataclass(frozen=True)
class Place:
    """Where a run dies: at a line of its script, or before or after an operation of the store."""

    kind: str
    number: int
    when: str = "before"


class _Lines(Tracing):
    """Counts the lines that this process runs in the file of a script, and dies at one of them."""

    def __init__(self, file: str, deadly: int | None) -> None:
        self.file = file
        self.deadly = deadly
        self.seen = 0
        self.process = os.getpid()  # workers inherit the trace

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file or os.getpid() != self.process:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.deadly:
                _die()
        return self._trace


class _Operations:
    """Counts the operations of the store."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        self.seen += 1
        return call()


class _DeadlyOperation(Kill):
    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if not self.is_due(operation):
            return call()
        try:
            if self.when == "after":
                self.result = call()  # kept: a file that was opened is not closed by its end
        finally:
            _die()


def _die() -> None:
    os.killpg(0, signal.SIGKILL)  # the workers of a loader as well


def _record_losses(file: Path) -> None:
    """Write down the loss of every step before the manager sees it."""
    end_step = safeckpt.CheckpointManager.end_step

    def record_and_end(self: safeckpt.CheckpointManager, step: int, **options: Any) -> Any:
        loss = options["loss"]
        with file.open("a") as record:
            record.write(json.dumps([step, loss.item() if isinstance(loss, torch.Tensor) else loss]) + "\n")
        return end_step(self, step, **options)

    safeckpt.CheckpointManager.end_step = record_and_end  # type: ignore[method-assign]


def run_script(script: Script, directory: str, place: Place | None, streams: int) -> tuple[Any, int, int]:
    """Run a script in this process, which is a child; return its result, and how many places it passed of each kind.

    Args:
        script: Trains in the directory `run` of the current one.
        directory: Becomes the current one.
        place: Where the process dies.
        streams: Seeds what scripts leave unseeded.
    """
    os.setpgid(0, 0)
    os.chdir(directory)
    random.seed(streams)
    np.random.seed(streams)
    _record_losses(Path("losses.jsonl"))
    lines = _Lines(script.__code__.co_filename, place.number if place and place.kind == "line" else None)
    handler: Any = _Operations()
    if place and place.kind == "operation":
        handler = _DeadlyOperation(place.number, place.when)
    with intercept(handler), lines:
        value = script("run")
    return value, lines.seen, handler.seen


def recorded(directory: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every step, those that were computed again too; a kill may cut a line."""
    file = directory / "losses.jsonl"
    losses = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            losses.append(tuple(json.loads(line)))
    return losses


def final_state(directory: Path) -> Any:
    """Return the newest checkpoint without what names the run."""
    newest = safeckpt.latest(directory / "run")
    assert newest is not None
    state = safeckpt.load(newest.path)
    state["safeckpt"].pop("run_id", None)
    return state


def _places(chance: random.Random, kills: int, lines: int, operations: int) -> list[Place]:
    """Choose places in the first half of a run, so that a resumed one dies as well; each kind at least once."""
    kinds = ["line", "operation", *chance.choices(["line", "operation"], k=kills - 2)]
    chance.shuffle(kinds)
    most = {"line": lines // 2, "operation": operations // 2}
    return [Place(kind, chance.randint(1, most[kind]), chance.choice(["before", "after"])) for kind in kinds]


def assert_killed_run_is_the_straight_one(script: Script, directory: Path, seed: int, kills: int = 5) -> int:
    """Run a script straight and through kills; compare losses, result and last checkpoint; return how many it took."""
    straight, killed = directory / "straight", directory / "killed"
    straight.mkdir()
    killed.mkdir()
    ended = children.run(run_script, script, str(straight), None, 0)
    if ended.error is not None:
        raise ended.error
    value, lines, operations = ended.value
    expected = dict(recorded(straight))
    deaths = 0
    places = _places(random.Random(f"{seed} {script.__name__}"), kills, lines, operations)
    print(f"{script.__name__} with seed {seed}: of {lines} lines and {operations} operations, dies at {places}")
    for place in [*places, None]:
        # What a script draws before `restore` does not matter, except where there is nothing to restore.
        streams = 0 if safeckpt.latest(killed / "run") is None else deaths
        ended = children.run(run_script, script, str(killed), place, streams)
        if ended.error is not None:
            raise ended.error
        if ended.signal is None:
            break
        assert ended.signal == signal.SIGKILL
        deaths += 1

    again = recorded(killed)
    assert [(step, loss) for step, loss in again if loss != expected[step]] == []
    assert [dict(again)[step] for step in sorted(dict(again))] == [expected[step] for step in sorted(expected)]
    resumed = ended.value[0]
    assert resumed == (value[-len(resumed) :] if isinstance(value, list) and resumed else value)
    # A tensor that two components hold is restored into each, so that it may be two objects now.
    assert_same(final_state(killed), final_state(straight), ties=False)
    return deaths
