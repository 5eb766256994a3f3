"""torchrun restarts a killed group, and the run that comes out is the one that was never killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
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
@pytest.mark.parametrize(
    "options", [{}, {"async_save": True}, {"async_save": "process"}], ids=["sync", "async", "process"]
)
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


@pytest.mark.slow
def test_group_killed_while_processes_write_is_the_same_run(tmp_path: Path) -> None:
    """A rank that dies in the middle of a write takes its writing process with it; nothing of it is in the way."""
    plan = [{"rank": 1, "step": 10, "at": "sync"}, {"rank": 0, "step": 10, "at": "replace"}]
    _killed(tmp_path, "fsdp", 2, 12, plan, async_save="process")


def _started(path: Path, kind: Kind, plan: list[Any], **options: Any) -> Any:
    return groups.torchrun(2, str(path), kind, "12", json.dumps(plan), json.dumps({"keep_last": 9, **options}))


def _check_end(path: Path, kind: Kind) -> None:
    losses, state = groups.results(2, _straight, path / "straight", kind, 12)[0]
    assert list(groups.losses_in(path / "losses-0.jsonl").values()) == losses
    assert same(state, torch.load(path / "final.pt")) == []


@pytest.mark.slow
def test_orphans_of_a_killed_agent_are_named_at_the_next_start(tmp_path: Path) -> None:
    """They go on; a start beside them ends on every rank before it trains, and one after them resumes their run."""
    plan = [{"rank": None, "step": 6, "agent": signal.SIGKILL}]
    assert _started(tmp_path, "ddp", plan).returncode == -signal.SIGKILL
    beside = _started(tmp_path, "ddp", [])
    holder = json.loads((tmp_path / "run" / ".writer.json").read_text())
    assert beside.returncode != 0
    assert beside.stderr.count("SafeckptWarning: ") >= 2
    assert f"pid {holder['pid']} on {holder['host']}, since {holder['since']}" in beside.stderr
    assert len((tmp_path / "losses-0.jsonl").read_text().splitlines()) == 6
    os.kill(holder["pid"], signal.SIGKILL)  # the other one ends when it misses this one
    (tmp_path / "go on").touch()
    after = _started(tmp_path, "ddp", [])
    assert after.returncode == 0, after.stderr[-3000:]
    _check_end(tmp_path, "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, "process"])
def test_group_that_is_told_to_end_saves_and_resumes(tmp_path: Path, async_save: Any) -> None:
    """A SIGTERM to the agent reaches all ranks; they end at one step, whose checkpoint is the newest."""
    plan = [{"rank": None, "step": 7, "agent": signal.SIGTERM}]
    options = {"stop_signals": [signal.SIGTERM], "async_save": async_save, "save_on_exit": False}
    told = _started(tmp_path, "fsdp", plan, **options)
    assert told.returncode != 0
    assert safeckpt.latest(tmp_path / "run").step >= 7  # type: ignore[union-attr]  # there is one
    again = _started(tmp_path, "fsdp", [], **options)
    assert again.returncode == 0, again.stderr[-3000:]
    _check_end(tmp_path, "fsdp")
