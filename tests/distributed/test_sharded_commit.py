"""What a sharded save does to the directory: in which order, and what is left when any one operation fails."""

from __future__ import annotations

import contextlib
import errno
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests.distributed import groups
from tests.distributed.scenarios import latest, outcome, rank
from tests.distributed.training import Kind, Run, manager_of
from tests.faults import Fault, Operation, Recorder, intercept


def _recorded(path: Path, kind: Kind) -> list[Operation]:
    run = Run(kind)
    with manager_of(run, path / "run", keep_last=1) as manager:
        return _operations_of_step_2(manager)


def _operations_of_step_2(manager: safeckpt.CheckpointManager) -> list[Operation]:
    """Save steps 1 and 2, and return what this rank does to the directory for the second."""
    manager.save(1)
    recorder = Recorder()
    with intercept(recorder):
        manager.save(2)
    return recorder.operations


def broken_promises(of_ranks: list[list[Operation]], directory: Path) -> list[str]:
    """Return what a power loss could take of a sharded save, from what each rank did."""
    found = []
    first = of_ranks[0]
    commit = next(number for number, one in enumerate(first) if one.kind == "replace" and one.target is not None
                  and Path(one.target).name == "step-00000002")  # fmt: skip
    temp = first[commit].path
    for number, operations in enumerate(of_ranks):
        until = operations[:commit] if number == 0 else operations
        made = [one.path for one in until if one.kind == "create" and one.path.startswith(f"{temp}/")]
        synced = {one.path for one in until if one.kind == "sync"}
        if not made:
            found.append(f"rank {number} wrote nothing into the directory")
        found += [f"rank {number}: {path} has its name before it is synced" for path in made if path not in synced]
        for path in made:
            last = max(index for index, one in enumerate(until) if one.path == path and one.kind == "write")
            if last > max(
                (index for index, one in enumerate(until) if one.path == path and one.kind == "sync"), default=-1
            ):
                found.append(f"rank {number}: {path} is written to after its sync")
    names = [number for number, one in enumerate(first) if (one.kind, one.path) == ("sync_directory", temp)]
    last_name = max(number for number, one in enumerate(first[:commit]) if one.kind == "create")
    if not any(last_name < number < commit for number in names):
        found.append("the names of the shards are not synced before the commit")
    durable = [number for number, one in enumerate(first)
               if number > commit and (one.kind, one.path) == ("sync_directory", str(directory))]  # fmt: skip
    gone = [number for number, one in enumerate(first) if one.kind in ("remove_tree", "replace") and number != commit
            and "step-00000001" in one.path]  # fmt: skip
    if not durable:
        found.append("the commit is not synced")
    elif gone and min(gone) < durable[0]:
        found.append("an older checkpoint goes before the new one is durable")
    return found


def test_everything_is_durable_before_it_is_needed(tmp_path: Path) -> None:
    """Content before names, names before the commit, the commit before anything older goes."""
    of_ranks = groups.results(2, _recorded, tmp_path, "fsdp")
    assert broken_promises(of_ranks, tmp_path / "run") == []
    kinds = [one.kind for one in of_ranks[0]]
    for kind in ("sync", "sync_directory"):  # this test can fail
        for number in (index for index, one in enumerate(kinds) if one == kind):
            lacking = [*of_ranks[0][:number], *of_ranks[0][number + 1 :]]
            needed = of_ranks[0][number].path.startswith(str(tmp_path / "run" / ".step")) or number > kinds.index(
                "replace"
            )
            assert bool(broken_promises([lacking, of_ranks[1]], tmp_path / "run")) == needed, of_ranks[0][number]


def _failed(path: Path, kind: Kind, number: int) -> list[Any]:
    """Let operations of a save fail, one after the other, on each rank in turn."""
    found = []
    run = Run(kind)
    with manager_of(run, path / "run", keep_last=1) as manager:
        counts: list[Any] = [None, None]
        torch.distributed.all_gather_object(counts, len(_operations_of_step_2(manager)))
        step = 2
        for victim, most in enumerate(counts):
            for operation in range(1, most + 1):
                before, step = manager._run.timeline.saved_step, step + 1
                fault = Fault(operation, number)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what could not be deleted
                    with intercept(fault) if rank() == victim else contextlib.nullcontext():
                        ended = outcome(lambda step=step: manager.save(step))
                        torch.distributed.barrier()
                    after = latest(path / "run")
                    torch.distributed.barrier()
                    what = fault.fired.kind if fault.fired is not None else None
                    good = outcome(lambda step=step: manager.save(step + 1))
                step += 1
                error = ended["error"], ended.get("errno")
                found.append((victim, operation, what, *error, before, after, step - 1, good))
        manager.save(step + 1)
    torch.distributed.barrier()  # closed on rank 0, which then waits for what it deletes
    left = sorted(one.name for one in (path / "run").iterdir() if one.name.endswith(".tmp"))
    return [*found, left]


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.campaign)])
def test_any_operation_that_fails_leaves_the_checkpoint_before(tmp_path: Path, number: int) -> None:
    """On either rank: both raise with errno, or both have saved; the next save works; nothing is left behind."""
    (*first, left), (*second, _) = groups.results(2, _failed, tmp_path, "fsdp", number)
    assert left == []
    assert len(first) == len(second) > 15
    assert {one[2] for one in (*first, *second)} >= {"create", "write", "sync", "replace", "sync_directory"}
    for one, other in zip(first, second, strict=True):
        victim, operation, *_ = one
        where = (victim, operation, one[2] or other[2])
        assert (one[3] is None) == (other[3] is None), where
        for _, _, _, error, number_of, before, after, step, good in (one, other):
            assert good["error"] is None, (where, good)
            if error is None or error == "DurabilityUnknownError":
                assert after == step, where
            else:
                assert (number_of, after) == (number, before), (where, error)
