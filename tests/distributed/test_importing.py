"""A file that one process has saved with torch.save goes on under several ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests.distributed import groups
from tests.distributed.training import Kind, Run, manager_of, same


def _go_on(path: Path, kind: Kind, wanted: dict[str, torch.Tensor]) -> Any:
    run = Run(kind)
    with warnings.catch_warnings(record=True) as given, manager_of(run, path / "run") as manager:
        warnings.simplefilter("always", safeckpt.ImportedStateWarning)
        manager.restore()
        differing = same(run.full_state(), wanted)
        manager.end_step(4, loss=run.step(4))
        manager.save(4)
    again = Run(kind)
    with manager_of(again, path / "run") as manager:
        checkpoint = manager.restore()
    texts = [str(one.message) for one in given if one.category is safeckpt.ImportedStateWarning]
    return differing, texts, None if checkpoint is None else checkpoint.step, same(again.full_state(), run.full_state())


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_file_of_one_process_goes_on_under_two_ranks(tmp_path: Path, kind: Kind) -> None:
    """Every rank has its part of model and optimizer, one of them warns, and the next checkpoint is theirs."""
    alone = Run("alone")
    for number in range(1, 4):
        alone.step(number)
    states = {"net": alone.model.state_dict(), "opt": alone.optimizer.state_dict(), "step": 3}
    torch.save(states, tmp_path / "old.pt")
    safeckpt.import_checkpoint(tmp_path / "old.pt", tmp_path / "run", mapping={"model": "net", "optimizer": "opt"})
    for differing, texts, step, lost in groups.results(2, _go_on, tmp_path, kind, alone.full_state()):
        assert differing == []
        assert "\n  scheduler\n" in texts[0]
        assert step == 4
        assert lost == []
