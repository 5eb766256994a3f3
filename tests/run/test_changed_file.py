"""A checkpoint that somebody writes into while it is restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import safeckpt

POISON = b"\x00\x00\x00\x41"


@pytest.mark.parametrize("moment", ["before it is read", "after it was verified"])
def test_file_that_changes_during_a_restore_is_not_taken(tmp_path: Path, moment: str) -> None:
    """What is applied is what was verified: the older checkpoint is restored, and the changed one is named."""
    model = torch.nn.Linear(512, 512)
    with safeckpt.CheckpointManager(tmp_path, {"model": model}, save_on_exit=False) as manager:
        for parameter in model.parameters():
            parameter.requires_grad_(requires_grad=False)
        older = model.weight.clone()
        manager.save(1)
        model.weight.add_(1.0)
        newer = manager.save(2).path
    offset = newer.read_bytes().index(model.weight.numpy().tobytes()[:64])

    def change(what: str, done: int, total: int) -> None:
        if what == "verify" and done == total and moment == "after it was verified":
            with newer.open("r+b") as file:
                os.pwrite(file.fileno(), POISON, offset + 400)

    if moment == "before it is read":
        with newer.open("r+b") as file:
            os.pwrite(file.fileno(), POISON, offset + 400)
    model.weight.zero_()
    with safeckpt.CheckpointManager(tmp_path, {"model": model}, progress=change) as manager:
        with pytest.warns(safeckpt.SkippedCheckpointWarning, match=r"step-00000002\.pt was passed over: "):
            restored = manager.restore()
        assert restored is not None
    assert restored.step == 1
    assert torch.equal(model.weight, older)
