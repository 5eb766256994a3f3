"""DDP: several processes are one run, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import groups
from tests.distributed.training import Kind, Run, manager_of, same


def _straight(path: Path, kind: Kind, stop: int) -> Any:
    run = Run(kind)
    return [run.step(number) for number in range(1, stop + 1)], run.full_state()


def _first_half(path: Path, kind: Kind, stop: int, options: dict[str, Any]) -> Any:
    run = Run(kind)
    with manager_of(run, path / "run", save_every=4, **options) as manager:
        assert manager.restore() is None
        losses = run.train(manager, stop)
    return losses, run.full_state()


def _second_half(path: Path, kind: Kind, stop: int, options: dict[str, Any]) -> Any:
    run = Run(kind)
    torch.rand(3 + run.rank)
    with manager_of(run, path / "run", save_every=4, **options) as manager:
        checkpoint = manager.restore()
        assert checkpoint is not None
        losses = run.train(manager, stop)
    return checkpoint.step, losses, run.full_state(), dict(run.counters)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["sync", "async"])
def test_resumed_group_is_the_same_run(tmp_path: Path, kind: Kind, options: dict[str, Any]) -> None:
    """Every rank's losses and the final state after a resume are those of the run that was never stopped."""
    straight = groups.results(2, _straight, tmp_path, kind, 14)
    groups.results(2, _first_half, tmp_path, kind, 9, options)
    resumed = groups.results(2, _second_half, tmp_path, kind, 14, options)
    for (losses, state), (step, again, state_again, counters) in zip(straight, resumed, strict=True):
        assert step == 8
        assert again == losses[8:]
        assert same(state, state_again) == []
    assert [one[3]["rank"] for one in resumed] == [0, 1]
