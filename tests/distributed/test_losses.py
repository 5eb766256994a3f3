"""A process of the group dies or hangs: the others get an error in bounded time, and no checkpoint is lost."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import safeckpt
from tests.distributed import groups
from tests.distributed.scenarios import latest, outcome
from tests.distributed.training import Kind, Run, manager_of
from tests.faults import Kill, intercept

HANG_SECONDS = 0.5  # how long a rank that hangs is waited for
ENDED = "ended"  # the file that the rank which does not hang leaves


def _save_and_die(path: Path, kind: Kind, victim: int, options: dict[str, Any], fault: tuple[int, str, str]) -> Any:
    """Save two steps; in the third save one rank dies at an operation of the store, or hangs."""
    run = Run(kind)
    number, when, where = fault
    manager = manager_of(run, path / "run", ranks=safeckpt.Ranks(60.0), **options)
    run.train(manager, 2)
    manager.save(2)
    run.train(manager, 3)
    manager.save(3)
    manager.wait()
    kill: Any = contextlib.nullcontext()
    if where == "hang":
        groups.wait_for_ranks(HANG_SECONDS)
    if torch.distributed.get_rank() == victim:
        if where == "hang":
            manager._saver._capture = lambda *_, **__: _until_the_other_has_ended(path)  # type: ignore[method-assign]
        else:
            kill = intercept(Kill(number, when, {where}))
    with kill:

        def saved() -> Any:
            manager.save(4)
            return manager.wait()

        found = outcome(saved), manager.step
        (path / ENDED).touch()
        return found


def _until_the_other_has_ended(path: Path) -> None:
    while not (path / ENDED).exists():
        time.sleep(0.01)


def _resumed(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path / "run") as manager:
        checkpoint = manager.restore()
        assert checkpoint is not None
        again = outcome(lambda: manager.save(5))
        return checkpoint.step, again, sorted(one.name for one in (path / "run").iterdir() if one.name.endswith("tmp"))


class Case(NamedTuple):
    """Who dies, where, and which step is the newest afterwards."""

    kind: Kind
    victim: int
    options: dict[str, Any]
    fault: tuple[int, str, str]
    newest: int


CASES = [
    Case("ddp", 0, {}, (1, "before", "replace"), 3),
    Case("ddp", 1, {}, (1, "before", "hang"), 3),
    Case("fsdp", 0, {}, (1, "after", "sync_directory"), 3),
    Case("fsdp", 1, {}, (1, "before", "write"), 3),
]
MORE = [
    Case("ddp", 0, {}, (1, "after", "replace"), 4),
    Case("ddp", 0, {"async_save": True}, (2, "before", "write"), 3),
    Case("ddp", 0, {"async_save": True}, (1, "after", "replace"), 4),
    Case("ddp", 0, {}, (1, "before", "sync"), 3),
    Case("fsdp", 0, {}, (1, "before", "make_directory"), 3),
    Case("fsdp", 0, {}, (1, "after", "make_directory"), 3),
    Case("fsdp", 0, {}, (1, "before", "write"), 3),
    Case("fsdp", 1, {}, (1, "before", "sync"), 3),
    Case("fsdp", 0, {}, (2, "before", "sync"), 3),
    Case("fsdp", 0, {}, (3, "after", "sync"), 3),
    Case("fsdp", 0, {}, (1, "before", "replace"), 3),
    Case("fsdp", 0, {}, (1, "after", "replace"), 4),
    Case("fsdp", 0, {"async_save": True}, (1, "after", "replace"), 4),
    Case("fsdp", 1, {"async_save": True}, (1, "before", "write"), 3),
    Case("fsdp", 0, {"async_save": True}, (1, "before", "write"), 3),
    Case("fsdp", 1, {}, (1, "before", "hang"), 3),
]


@pytest.mark.parametrize(
    "case",
    [
        CASES[0],
        *(pytest.param(one, marks=pytest.mark.slow) for one in CASES[1:]),
        *(pytest.param(one, marks=pytest.mark.campaign) for one in MORE),
    ],
)
def test_lost_rank_leaves_the_checkpoint_before(tmp_path: Path, case: Case) -> None:
    """The survivor gets a RankLostError within the timeout; a new group restores the newest commit and saves on."""
    kind, victim, options, fault, newest = case
    ended = groups.run_all(2, _save_and_die, tmp_path, kind, victim, options, fault)
    survivor = ended[1 - victim]
    assert survivor.error is None
    assert survivor.value is not None
    found, step = groups.answer(survivor)
    assert found["error"] == "RankLostError", found
    assert (
        f"rank {victim} {f'did not answer within {HANG_SECONDS}' if fault[2] == 'hang' else 'was lost'}"
        in found["text"]
    )
    assert found["seconds"] < (60 if fault[2] != "hang" else HANG_SECONDS + 15)
    assert step in (3, 4)
    if fault[2] != "hang":
        assert ended[victim].signal == signal.SIGKILL
    assert latest(tmp_path / "run") == newest
    for restored, again, left in groups.results(2, _resumed, tmp_path, kind):
        assert restored == newest
        assert again["error"] is None, again
        assert left == []


def _never_comes(path: Path) -> Any:
    run = Run("ddp")
    torch.distributed.barrier()
    manager = manager_of(run, path / "run", ranks=safeckpt.Ranks(HANG_SECONDS))
    if torch.distributed.get_rank() == 1:
        _until_the_other_has_ended(path)
        return None
    found = outcome(lambda: manager.save(1))
    (path / ENDED).touch()
    return found


@pytest.mark.slow
def test_rank_that_never_saves_is_no_hang(tmp_path: Path) -> None:
    """A rank that is not there for the first save at all: an error in bounded time."""
    found, _ = groups.results(2, _never_comes, tmp_path)
    assert found["error"] == "RankLostError"
    assert found["seconds"] < HANG_SECONDS + 15
    assert safeckpt.latest(tmp_path / "run") is None
