"""Plans of a sharded save: made once, kept while the tensors stay the same, and made anew when they change."""

from __future__ import annotations

import contextlib
import errno
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import default_planner

import safeckpt
from tests.distributed import groups
from tests.distributed.scenarios import outcome, rank
from tests.distributed.training import Kind, Run, manager_of, same
from tests.faults import Fault, intercept


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Yield a list that gets the number of ranks at each plan that the engine makes."""
    plans: list[int] = []
    original = default_planner.create_default_global_save_plan

    def counting(all_plans: Any, *arguments: Any, **options: Any) -> Any:
        plans.append(len(all_plans))
        return original(all_plans, *arguments, **options)

    default_planner.create_default_global_save_plan = counting
    try:
        yield plans
    finally:
        default_planner.create_default_global_save_plan = original


def _is_whole(path: Path, step: int, run: Run) -> list[str]:
    """Return the names of the parameters that one process does not read back as this run has them."""
    state = run.full_state()
    read = {name: one for name, one in safeckpt.load(path / f"step-{step:08d}")["model"].items() if name in state}
    torch.distributed.barrier()
    own = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}  # of rank 0
    return sorted(set(same({name: state[name] for name in read}, read)) - own)


def _saves(path: Path, kind: Kind) -> Any:
    """Save while training goes on, and say how often was planned and what each checkpoint holds."""
    run = Run(kind)
    found: dict[str, Any] = {}
    step = 0

    with manager_of(run, path / "run", keep_last=99) as manager, _counted() as plans:

        def save(what: str) -> None:
            nonlocal step
            step += 1
            before = len(plans)
            run.counters["seen"] *= 1000  # a rank's own state has another size each time
            manager.save(step)
            found[what] = len(plans) - before, _is_whole(path / "run", step, run)

        save("first")
        run.step(1)
        save("with the optimizer's state")
        run.step(2)
        save("unchanged")
        run.step(3)
        save("unchanged again")
        run.model.register_buffer("seen", torch.zeros(3))
        save("a new key")
        run.model.register_buffer("seen", torch.zeros(5))
        save("another shape")
        run.step(4)
        save("unchanged at the end")
    return found


def test_a_second_save_plans_nothing_and_a_changed_state_plans_anew(tmp_path: Path) -> None:
    """Rank 0 plans for both when names or shapes have changed, and not otherwise; all that is saved is right."""
    first, second = groups.results(2, _saves, tmp_path, "fsdp")
    assert {what: count for what, (count, _) in first.items()} == {
        "first": 1,
        "with the optimizer's state": 1,
        "unchanged": 0,
        "unchanged again": 0,
        "a new key": 1,
        "another shape": 1,
        "unchanged at the end": 0,
    }
    assert all(count == 0 for count, _ in second.values())
    assert all(wrong == [] for one in (first, second) for _, wrong in one.values())


def _two_managers(path: Path, kind: Kind) -> Any:
    """Save two runs in turn: each has plans of its own."""
    one, other = Run(kind), Run(kind)
    other.model.register_buffer("more", torch.ones(7))
    found = []
    with (
        manager_of(one, path / "one") as first,
        manager_of(other, path / "other") as second,
        _counted() as plans,
    ):
        for step in (1, 2, 3):
            for run, manager, name in ((one, first, "one"), (other, second, "other")):
                manager.save(step)
                found.append((len(plans), _is_whole(path / name, step, run)))
    return found


@pytest.mark.slow
def test_two_managers_do_not_share_plans(tmp_path: Path) -> None:
    """Each plans once, and neither writes what the other has planned."""
    first, _ = groups.results(2, _two_managers, tmp_path, "fsdp")
    assert [count for count, _ in first] == [1, 2, 2, 2, 2, 2]
    assert all(wrong == [] for _, wrong in first)


def _after_failures(path: Path, kind: Kind) -> Any:
    """Fail on one rank, then on the other, and save: with the plans of before, or with new ones."""
    run = Run(kind)
    found = []
    step = 1
    with manager_of(run, path / "run", keep_last=99) as manager:
        manager.save(step)
        for victim in (0, 1, 1, 0):
            run.step(step)
            fault = Fault(3, errno.ENOSPC)
            with intercept(fault) if rank() == victim else contextlib.nullcontext():
                failed = outcome(lambda step=step: manager.save(step + 1))
            torch.distributed.barrier()
            step += 2
            manager.save(step)
            found.append((failed["error"], _is_whole(path / "run", step, run)))
    return found


@pytest.mark.slow
def test_a_save_that_failed_on_one_rank_leaves_no_half_of_a_plan(tmp_path: Path) -> None:
    """All ranks forget their plans together; the next save is right."""
    for found in groups.results(2, _after_failures, tmp_path, "fsdp"):
        assert [(error, wrong) for error, wrong in found] == [("OSError", [])] * 4


def _metadata(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    run.step(1)
    with manager_of(run, path / "run", keep_last=99) as manager:
        for step in (1, 2, 3):
            manager.save(step)
            run.step(step)


@pytest.mark.slow
def test_kept_metadata_is_what_would_have_been_planned(tmp_path: Path) -> None:
    """The engine's metadata of a save that planned nothing names the same parts at the same places."""
    groups.results(2, _metadata, tmp_path, "fsdp")
    one, other = (pickle.loads((tmp_path / f"run/step-0000000{step}/.metadata").read_bytes()) for step in (2, 3))
    assert one.state_dict_metadata == other.state_dict_metadata
    assert one.storage_data == other.storage_data
    sizes = [one.stat().st_size for one in sorted((tmp_path / "run/step-00000003").glob("*.distcp"))]
    ends = {}
    for info in other.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    assert [ends[name] for name in sorted(ends)] == sizes
