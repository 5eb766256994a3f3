"""A run of thousands of saves with everything on: nothing that it holds, and nothing that it leaves, grows.

The history is left out: a line an event, for people. Damaged files are not made here, since none is ever deleted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import threading
import warnings
from pathlib import Path

import safeckpt
from safeckpt import Best
from safeckpt.store import names
from tests.campaign.outcome import Outcome, Scale, alone, quiet, scratch
from tests.crash.stories import new_run, set_state, state_in
from tests.faults import descriptor_count
from tests.manager.helpers import manager_of, steps_in

_SAVES = {"fast": 240, "full": 5_000}
_WINDOWS = 6  # equal parts of the run; the first one fills caches and pools and is not compared

_MOST_GROWTH_BYTES = 4 << 20  # the allocator keeps pages of its own accord
_MOST_GROWTH_BYTES_A_SAVE = 400  # the number of a step, and its file's name parsed (the last 65,536 are kept)
_MOST_OBJECTS_A_SAVE = 1
_MOST_CHECKPOINTS = 3 + 1 + 1  # keep_last, keep_best, one being written
_MOST_ASIDES = 4  # of the last two rewinds: each is outrun after keep_last more checkpoints


def run(scale: Scale, seed: int) -> Outcome:
    """Save, refuse, roll back, damage, for thousands of times in one process."""
    return alone(_run, scale, seed)


def _run(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("thousands of saves with rotation, refusals, rollbacks and async on: what is held stays flat")
    choose = random.Random(seed)
    run = new_run()
    windows: list[dict[str, int]] = []
    acts = dict.fromkeys(["saves", "refusals", "rollbacks", "rewinds"], 0)
    with scratch() as folder, quiet(), warnings.catch_warnings():
        warnings.simplefilter("error")
        path = folder / "run"
        options = {"keep_last": 3, "keep_best": Best("loss"), "async_save": True, "save_every": 1}
        with manager_of(path, run, **options) as manager:
            for number in range(1, _SAVES[scale] + 1):
                step = manager.step + 1
                set_state(run, step, number)
                manager.end_step(step, loss=1 / number + choose.random())
                acts["saves"] += 1
                if number % 10 == 0:
                    run.weight.value[1] = float("nan")
                    with contextlib.suppress(safeckpt.NonFiniteError):
                        manager.end_step(step + 1, loss=0.5)
                        outcome.let_in(f"save {number}: NaN")
                    acts["refusals"] += 1
                    manager.rollback(changed=True, max_rollbacks=9)
                    acts["rollbacks"] += 1
                    if state_in(run) != (step, number):
                        outcome.lose(f"save {number}: rolled back to {state_in(run)}")
                if number % 35 == 0:
                    manager.wait()
                    manager.restore(steps_in(path)[-2])  # what was above it is set aside, until it is outrun
                    acts["rewinds"] += 1
                if number % (_SAVES[scale] // _WINDOWS) == 0:
                    manager.wait()
                    windows.append(_held(path))
        outcome.tried = sum(acts.values())
        found = new_run()
        with manager_of(path, found) as manager:
            manager.restore()
        if state_in(found) != state_in(run):
            outcome.lose(f"in the end {state_in(found)} is restored, the run was at {state_in(run)}")
    outcome.figures = acts | {"at the ends of the windows": windows}
    _compare(windows, _SAVES[scale], outcome)
    return outcome


def _held(path: Path) -> dict[str, int]:
    """Return what this process holds, and what is in the directory."""
    gc.collect()
    listing = [(entry.name, entry.stat().st_size) for entry in os.scandir(path)]
    history = (names.EVENTS, names.LOSSES)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory_bytes": pages * resource.getpagesize(),
        "descriptors": descriptor_count(),
        "threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "checkpoints": len(steps_in(path)),
        "asides": sum(names.parse_aside(name) is not None for name, _ in listing),
        "checkpoint_bytes": max(size for name, size in listing if names.parse_step(name) is not None),
        "directory_bytes": sum(size for name, size in listing if name not in history),
        "history_bytes": sum(size for name, size in listing if name in history),
    }


def _compare(windows: list[dict[str, int]], saves: int, outcome: Outcome) -> None:
    for window in windows:
        if window["checkpoints"] > _MOST_CHECKPOINTS:
            outcome.lose(f"{window['checkpoints']} checkpoints are kept")
        if window["asides"] > _MOST_ASIDES:
            outcome.lose(f"{window['asides']} checkpoints are set aside")
        if window["directory_bytes"] > (_MOST_CHECKPOINTS + _MOST_ASIDES) * window["checkpoint_bytes"]:
            outcome.lose(f"{window['directory_bytes']} bytes in the directory")
    first, *_, last = windows[1:]
    most = _MOST_GROWTH_BYTES + _MOST_GROWTH_BYTES_A_SAVE * saves
    if last["memory_bytes"] - first["memory_bytes"] > most:
        outcome.lose(f"memory grew from {first['memory_bytes']} to {last['memory_bytes']} bytes")
    if last["objects"] - first["objects"] > _MOST_OBJECTS_A_SAVE * saves:
        outcome.lose(f"objects: {first['objects']}, in the end {last['objects']}")
    for what in ("descriptors", "threads"):
        if last[what] > first[what]:
            outcome.lose(f"{what}: {first[what]}, in the end {last[what]}")
