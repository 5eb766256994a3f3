"""What the tests of the manager do to directories, and how they look at them."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt import CheckpointManager
from safeckpt.store import names
from tests.faults import contents
from tests.training import Marked


def manager_of(path: Path, run: Any, **options: Any) -> CheckpointManager:
    """Return a manager that does not wait long for a lock."""
    return CheckpointManager(path, run.components, **{"lock_timeout_seconds": 0.0, **options})


def save_steps(path: Path, *steps: int, **options: Any) -> None:
    """Save checkpoints of a run whose state says which step it is, and close the directory."""
    run = Marked()
    with manager_of(path, run, **{"keep_last": len(steps), **options}) as manager:
        for step in steps:
            run.step = step
            manager.save(step, loss=1 / (1 + step), metrics={"accuracy": step / 100})


def step_path(path: Path, step: int) -> Path:
    return path / names.step_name(step)


def steps_in(path: Path) -> list[int]:
    """Return the steps that have a file, good or not."""
    return sorted(step for file in path.iterdir() if (step := names.parse_step(file.name)) is not None)


def asides_in(path: Path) -> list[tuple[int, int]]:
    """Return (step, number) of what was set aside."""
    return sorted(found for file in path.iterdir() if (found := names.parse_aside(file.name)) is not None)


def checkpoint_files(path: Path) -> dict[str, bytes]:
    """Return every file but the history and the lock's, with its bytes."""
    own = {names.LOCK, names.HOLDER, names.EVENTS, names.LOSSES}
    return {name: data for name, data in contents(path).items() if name not in own} if path.is_dir() else {}


def temps_in(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if names.temp_final(file.name) is not None]


def events_in(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds, oldest first; all without kinds."""
    file = path / names.EVENTS
    if not file.exists():
        return []
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return [event for event in events if not kinds or event["kind"] in kinds]


# -- damage ----------------------------------------------------------------------------------------------------------


def empty(file: Path) -> None:
    file.write_bytes(b"")


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_by_one(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    """Flip one bit of a tensor: the file's structure stays whole."""
    data = bytearray(file.read_bytes())
    value = torch.load(file)["model"]["value"].numpy().tobytes()
    at = data.find(value)
    assert at > 0
    data[at + 2] ^= 1
    file.write_bytes(data)


def zero_page(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:8192] = bytes(4096)
    file.write_bytes(data)


def foreign(file: Path) -> None:
    file.write_text("not a checkpoint at all\n" * 100)


def plain_torch(file: Path) -> None:
    torch.save({"model": {"value": torch.zeros(3)}}, file)


def drop_in(file: Path) -> None:
    file.unlink()
    safeckpt.save({"model": {"value": torch.zeros(3)}}, file)


def renamed(file: Path) -> None:
    """Put a good checkpoint of a lower step under this name."""
    steps = [step for step in steps_in(file.parent) if step < (names.parse_step(file.name) or 0)]
    file.write_bytes(step_path(file.parent, steps[0]).read_bytes())


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def dangling(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.parent / "nowhere")


def newer_format(file: Path) -> None:
    """Make it a file that a later version wrote."""
    data = bytearray(file.read_bytes())
    trailer = data[-128:-10].replace(b"SAFECKPT 0001", b"SAFECKPT 0002")
    data[-128:] = b"%s %08x\n" % (bytes(trailer), zlib.crc32(trailer))
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (empty, "empty|no torch file|0 bytes"),
    "truncated": (truncate, ""),
    "cut by one": (cut_by_one, ""),
    "flipped": (flip, "model.value are not those that were written"),
    "zeroed page": (zero_page, ""),
    "foreign": (foreign, "torch file|zip"),
    "plain torch": (plain_torch, "not written by a CheckpointManager"),
    "drop-in": (drop_in, "not written by a CheckpointManager"),
    "renamed": (renamed, "somebody renamed it"),
    "directory": (folder, "directory"),
    "pipe": (pipe, "no regular file"),
    "dangling link": (dangling, "link that leads nowhere"),
}
each_damage = pytest.mark.parametrize("damage", DAMAGES)


def spoil(path: Path, step: int, damage: str) -> None:
    DAMAGES[damage][0](step_path(path, step))


def reason_pattern(damage: str) -> str:
    return DAMAGES[damage][1]


@contextmanager
def skipping(*paths: Path, reason: str = "") -> Iterator[None]:
    """Expect exactly one warning for each of these files, newest first, and no other warning."""
    with pytest.warns(safeckpt.SkippedCheckpointWarning) as caught:
        yield
    texts = [str(warning.message) for warning in caught]
    assert [warning.category for warning in caught] == [safeckpt.SkippedCheckpointWarning] * len(paths), texts
    for text, path in zip(texts, paths, strict=True):
        assert text.startswith(f"{path} was passed over: ")
        assert re.search(reason, text), text
