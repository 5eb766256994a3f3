"""The power fails after any operation: every disk that a crash may leave has the old checkpoint or the new one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaign.outcome import Outcome, Scale, scratch
from tests.crash.disk_model import Content, Disk
from tests.crash.stories import STORIES, Promise, Story, check_afterwards
from tests.faults import Operation, Recorder, contents, intercept

_MOST = {"fast": (90, 8), "full": (2_000, 64)}  # disks for each story, combinations of names for each crash


def run(scale: Scale, seed: int) -> Outcome:
    """Cut the power after every operation of every story."""
    outcome = Outcome("power lost after any operation of a save, a prune, a rollback or a take-over")
    outcome.figures = {"operations": 0, "disks": {}}
    for story in STORIES.values():
        with scratch() as folder:
            _crash_everywhere(story, folder, outcome, random.Random(f"{seed} {story.name}"), scale)
    return outcome


def _crash_everywhere(story: Story, folder: Path, outcome: Outcome, choose: random.Random, scale: Scale) -> None:
    most, most_names = _MOST[scale]
    root, before, operations, promise = recorded(story, folder)
    disk = Disk(root, before)
    disks: dict[tuple[object, frozenset[tuple[int, int]]], tuple[int, Content | None]] = {}
    for number in range(len(operations) + 1):
        if number:
            disk.apply(operations[number - 1])
        allowed = promise.after(number)
        for left in disk.crashes(choose, most_names):
            disks.setdefault((None if left is None else frozenset(left.items()), allowed), (number, left))
    found_on = choose.sample(list(disks.items()), min(most, len(disks)))
    outcome.figures["operations"] += len(operations)
    outcome.figures["disks"][story.name] = f"{len(found_on)} of {len(disks)}"
    checkpoints = {name: data for name, data in (before or {}).items() if name.endswith(".pt")}
    for index, ((_, allowed), (number, left)) in enumerate(found_on):
        path = folder / f"disk {index}"
        put(path, left)
        outcome.tried += 1
        last = operations[number - 1].kind if number else "nothing"
        where = f"{story.name}: disk {index}, power lost after operation {number} of {len(operations)} ({last})"
        with outcome.judging(where):
            check_afterwards(path, story, allowed, checkpoints)
        shutil.rmtree(path, ignore_errors=True)


def around(name: str, kind: str | None) -> Outcome:
    """Cut the power right after each operation of one kind in one story, and look at every disk that may be left.

    Args:
        name: Of the story.
        kind: Of the operations; None for the last operation, whatever it is.
    """
    story = STORIES[name]
    outcome = Outcome(f"power lost after {kind or 'everything'} in {name}")
    with scratch() as folder:
        root, before, operations, promise = recorded(story, folder)
        disk = Disk(root, before)
        checkpoints = {name: data for name, data in (before or {}).items() if name.endswith(".pt")}
        for number, operation in enumerate(operations, 1):
            disk.apply(operation)
            if operation.kind != kind and (kind is not None or number != len(operations)):
                continue
            lefts = {None if left is None else frozenset(left.items()): left for left in disk.every_crash()}
            for index, left in enumerate(lefts.values()):
                path = folder / f"disk {number} {index}"
                put(path, left)
                outcome.tried += 1
                where = f"{name}: disk {index}, power lost after operation {number} ({operation.kind})"
                with outcome.judging(where):
                    check_afterwards(path, story, promise.after(number), checkpoints)
                shutil.rmtree(path, ignore_errors=True)
    return outcome


def recorded(story: Story, folder: Path) -> tuple[Path, Content | None, list[Operation], Promise]:
    """Let the story happen; return its directory, what was there before, the operations and what is promised."""
    path = story.fresh(folder, "recorded")
    recorder = SuccessRecorder()
    promise = Promise(story.first, lambda: len(recorder.operations))
    manager, run = story.manager(path)
    story.ready(manager, run)
    before = contents(path) if path.exists() else None
    with intercept(recorder):
        story.tell(manager, run, promise)
        manager.close()
    disk = Disk(path, before)
    for operation in recorder.operations:
        disk.apply(operation)
    really = {name: data for name, data in contents(path).items() if name != ".writer.lock"}
    modelled = {name: data for name, data in (disk.contents() or {}).items() if name != ".writer.lock"}
    assert modelled == really, "the model of the disk is not the disk"
    return path, before, recorder.operations, promise


class SuccessRecorder(Recorder):
    """Leaves out a deletion that did not happen because the file is in use."""

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        result = super().__call__(operation, call)
        if operation.kind == "unlink_unclaimed" and not result:
            self.operations.remove(operation)
        return result


def put(path: Path, left: Content | None) -> None:
    """Make the directory that a crash left."""
    if left is None:
        return
    path.mkdir()
    for name, data in left.items():
        (path / name).write_bytes(data)
