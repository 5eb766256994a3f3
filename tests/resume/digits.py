"""The run of the kill tests: scikit-learn's digits in a child that dies."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safeckpt
from tests.digits import Digits
from tests.training import state_of

STEPS = 150


def train(digits: Path, directory: Path | None, losses: Path, workers: int, *, async_save: bool = False) -> Any:
    """Train to the end, from the newest checkpoint if there is one, and return the whole state.

    Args:
        digits: What `Digits.download` wrote.
        directory: Of the checkpoints; None for a run without any.
        losses: Each step and its loss go there as a line, as soon as it is computed.
        workers: Of the DataLoader.
        async_save: Write in the background.
    """
    os.setpgid(0, 0)  # so that the workers of the loader can be killed with it
    run = Digits(digits, workers=workers, total_steps=STEPS + 1)
    manager = None
    if directory is not None:
        manager = safeckpt.CheckpointManager(directory, run.components, save_every=3, async_save=async_save)
        manager.restore()
    step = manager.step if manager else 0
    with losses.open("a") as record:
        for _ in run.loader.epochs(STEPS // Digits.EPOCH + 1):
            for images, labels in run.loader:
                step += 1
                loss = run.learn(images, labels)
                record.write(json.dumps([step, loss]) + "\n")
                record.flush()
                if manager:
                    manager.end_step(step, loss=loss)
                if step == STEPS:
                    if manager:
                        manager.close()
                    return state_of({name: one for name, one in run.components.items() if name != "loader"})
    raise AssertionError("the epochs ended before the steps")


def recorded(losses: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every whole line; a kill may cut the last."""
    lines = losses.read_bytes().split(b"\n")[:-1] if losses.exists() else []
    return [tuple(json.loads(line)) for line in lines]
