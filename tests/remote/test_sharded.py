"""Two ranks that shard their state, and a mirror: every rank sends its files, the index comes last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import safeckpt
from tests.distributed import groups
from tests.distributed.training import Run, manager_of

pytest.importorskip("obstore")

pytestmark = pytest.mark.slow


def url_in(path: Path) -> str:
    return f"file://{path}/store"


def save_and_train(path: Path, name: str, steps: list[int], wait: str) -> tuple[list[float], Any]:
    """Restore, train to each of some steps and save there; return the losses and what the store then counted."""
    run = Run("fsdp")
    mirror = safeckpt.Mirror(url_in(path), wait=wait)  # type: ignore[arg-type]
    with manager_of(run, path / name, keep_last=2, mirror=mirror) as manager:
        manager.restore()
        losses = []
        for step in steps:
            losses += run.train(manager, step)
            manager.save(step)
        durable = manager.mirror.durable_step if manager.mirror is not None else None
    return losses, durable


def keys_of(path: Path) -> list[str]:
    store = path / "store"
    return sorted(str(one.relative_to(store)) for one in store.rglob("*") if one.is_file() and "/step-" in str(one))


@pytest.mark.parametrize("wait", ["close", "save"])
def test_sharded_run_goes_on_on_an_empty_disk(tmp_path: Path, wait: str) -> None:
    """Each checkpoint in the store is whole, of both ranks, and a new machine goes on with the same losses."""
    straight = groups.results(2, save_and_train, tmp_path / "straight", "a", [2, 4, 6], wait)
    groups.results(2, save_and_train, tmp_path, "a", [2, 4], wait)
    found = keys_of(tmp_path)
    for step in (2, 4):
        of_step = [key.rpartition("/")[2] for key in found if f"step-{step:08d}/" in key]
        assert {"safeckpt.pt", ".metadata"} <= set(of_step)
        assert {name[:4] for name in of_step if name.endswith(".distcp")} == {"__0_", "__1_"}
    resumed = groups.results(2, save_and_train, tmp_path, "b", [6], wait)
    for rank in range(2):
        assert resumed[rank][0] == straight[rank][0][4:]
    assert [key.partition("/")[0] for key in keys_of(tmp_path) if key.endswith("step-00000006/safeckpt.pt")] == [
        "epoch-00000002"
    ]
    assert not any("step-00000002/" in key for key in keys_of(tmp_path))  # keep_last=2


def test_part_of_a_sharded_checkpoint_that_is_missing_is_found(tmp_path: Path) -> None:
    """Without one file of one rank the older checkpoint is taken, and the warning says which file is missing."""
    groups.results(2, save_and_train, tmp_path, "a", [2, 4], "save")
    lost = next(path for path in (tmp_path / "store").rglob("__1_*.distcp") if "step-00000004" in str(path))
    lost.unlink()
    with pytest.warns(
        safeckpt.SkippedCheckpointWarning, match=f"step-00000004 was passed over: {lost.name} is missing"
    ):
        newest = safeckpt.latest(url_in(tmp_path))
    assert newest is not None
    assert newest.step == 2
    state = safeckpt.load(newest.path)
    assert state["safeckpt"]


def test_index_is_sent_last(tmp_path: Path) -> None:
    """A sharded checkpoint whose index is not there yet counts as none."""
    groups.results(2, save_and_train, tmp_path, "a", [2, 4], "save")
    next((tmp_path / "store").rglob("step-00000004/safeckpt.pt")).unlink()
    newest = safeckpt.latest(url_in(tmp_path))
    assert newest is not None
    assert newest.step == 2
