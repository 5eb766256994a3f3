"""torchrun restarts a killed group, and the run that comes out is the one that was never killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import groups
from tests.distributed.training import Kind, Run, same

ONE: Any = {"rank": 1, "step": 8}
ALL: Any = {"rank": None, "step": 13}
COMMIT: Any = {"rank": 0, "step": 10, "at": "replace"}


def _straight(path: Path, kind: Kind, stop: int) -> Any:
    run = Run(kind)
    return [run.step(number).hex() for number in range(1, stop + 1)], run.full_state()


def _killed(path: Path, kind: Kind, size: int, stop: int, plan: list[Any], **options: Any) -> None:
    straight = groups.results(size, _straight, path, kind, stop)
    done = groups.torchrun(
        size, str(path), kind, str(stop), json.dumps(plan), json.dumps(options), restarts=len(plan), seconds=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, (losses, state) in enumerate(straight):
        assert list(groups.losses_in(path / f"losses-{rank}.jsonl").values()) == losses
        if rank == 0:
            assert same(state, torch.load(path / "final.pt")) == []
    attempts = {json.loads(line)["attempt"] for line in (path / "losses-0.jsonl").read_text().splitlines()}
    assert len(attempts) == len(plan) + 1, "not every kill has happened"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        pytest.param("ddp", [ONE, COMMIT], marks=pytest.mark.campaign),
        ("fsdp", [{**ALL, "step": 8}, {**COMMIT, "step": 10}]),
    ],
)
def test_killed_group_restarts_as_the_same_run(tmp_path: Path, kind: Kind, plan: list[Any]) -> None:
    """One rank, all ranks, or the writing one in the middle of a commit: every loss and the weights are bit-equal."""
    _killed(tmp_path, kind, 2, 12, plan)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["sync", "async"])
@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_group_killed_five_times_is_the_same_run(
    tmp_path: Path, kind: Kind, size: int, options: dict[str, Any]
) -> None:
    """Five kills each, thirty in all: in the loop, of one rank and of all, and at several places of a commit."""
    plan = [
        {"rank": size - 1, "step": 7},
        {"rank": 0, "step": 10, "at": "replace"},
        {"rank": 0, "step": 15, "at": "write", "number": 2},
        {"rank": None, "step": 18},
        {"rank": 0, "step": 20, "at": "sync_directory", "number": 1},
    ]
    _killed(tmp_path, kind, size, 23, plan, **options)
