"""DDP: several processes are one run, in one file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from tests.distributed import groups
from tests.distributed.training import Kind, Run, manager_of, same


def _straight(path: Path, kind: Kind, stop: int) -> Any:
    run = Run(kind)
    return [run.step(number) for number in range(1, stop + 1)], run.full_state()


def _first_half(path: Path, kind: Kind, stop: int, options: dict[str, Any]) -> Any:
    run = Run(kind)
    with manager_of(run, path / "run", save_every=4, save_on_exit=False, **options) as manager:  # as a kill would
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {}),
        pytest.param("fsdp", {"async_save": True}, marks=pytest.mark.slow),
        pytest.param("ddp", {"async_save": True}, marks=pytest.mark.campaign),
        pytest.param("fsdp", {}, marks=pytest.mark.campaign),
    ],
)
def test_resumed_group_is_the_same_run(tmp_path: Path, kind: Kind, options: dict[str, Any]) -> None:
    """Every rank's losses and the final state after a resume are those of the run that was never stopped."""
    straight = groups.results(2, _straight, tmp_path, kind, 14)
    groups.results(2, _first_half, tmp_path, kind, 9, options)
    resumed = groups.results(2, _second_half, tmp_path, kind, 14, options)
    for (losses, state), (step, again, state_again, _) in zip(straight, resumed, strict=True):
        assert step == 8
        assert again == losses[8:]
        assert same(state, state_again) == []
    assert [one[3]["rank"] for one in resumed] == [0, 1]


def _elsewhere(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    mine = torch.get_rng_state()
    with manager_of(run, path / "run") as manager, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        checkpoint = manager.restore()
        assert checkpoint is not None
    texts = [str(one.message) for one in given]
    kept = torch.equal(mine, torch.get_rng_state())
    return run.full_state(), kept, (run.loader.epoch, run.loader.batch), texts, run.counters["rank"]


@pytest.mark.slow
def test_group_of_another_size_has_the_same_model_and_sample(tmp_path: Path) -> None:
    """Two ranks' file in four and in one: the state exact, the loader at its sample, each stream accounted for."""
    (_, state), _ = groups.results(2, _first_half, tmp_path, "ddp", 8, {})
    four = groups.results(4, _elsewhere, tmp_path, "ddp")
    one = groups.results(1, _elsewhere, tmp_path, "alone")
    for rank, (again, kept, position, texts, counted) in enumerate(four):
        buffers = {"norm.running_mean", "norm.running_var"} if rank == 1 else set()  # it has its own back
        assert set(same(state, again)) <= buffers
        assert kept == (rank >= 2)
        assert position == (0, 4)
        assert "world_size: 2 -> 4 (ranks 2 to 3 keep the random streams of their script" in texts[0]
        assert counted == (rank if rank < 2 else 0)
    assert same(state, one[0][0]) == []
    assert one[0][2] == (0, 16)
    assert "world_size: 2 -> 1 (the random streams of 1 rank(s) are left out" in one[0][3][0]


def test_file_of_a_group_is_an_ordinary_file(tmp_path: Path) -> None:
    """Plain torch reads it; rank 0's state is where one process has its own; the rest is under the reserved key."""
    groups.results(2, _first_half, tmp_path, "ddp", 8, {})
    payload = torch.load(tmp_path / "run" / "step-00000008.pt", weights_only=True)
    assert payload["counters"]["rank"] == 0
    assert payload["safeckpt"]["world_size"] == 2
    (own,) = payload["safeckpt"]["ranks"]
    assert own["states"]["counters"]["rank"] == 1
    assert set(own["states"]) == {"counters", "noise"}  # what is equal to rank 0's is not there again
    assert set(own) <= {"rng", "states", "buffers", "records", "environment"}
    assert safeckpt.verify(tmp_path / "run" / "step-00000008.pt").self_proving


def _deletes_its_newest(path: Path, kind: Kind) -> Any:
    run = Run(kind)
    with manager_of(run, path / "run") as manager:
        run.train(manager, 2)
        checkpoint = manager.save(2)
        if run.rank == 0:
            checkpoint.path.unlink()
        torch.distributed.barrier()
        again = manager.save(2)
        latest = manager.latest()
    return again == latest


def test_newest_step_that_was_deleted_is_saved_anew_by_all(tmp_path: Path) -> None:
    """All ranks learn that there is nothing to compare with."""
    assert groups.results(2, _deletes_its_newest, tmp_path, "ddp") == [True, True]
