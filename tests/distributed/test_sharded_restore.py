"""A sharded restore reads from the files into the live tensors: no second copy, nothing twice, nothing unverified."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import safeckpt
from safeckpt.file.reading import sharded
from safeckpt.file.reading.checkpoint_file import CheckpointFile
from tests.distributed import groups
from tests.distributed.scenarios import outcome, rank
from tests.distributed.training import Run, manager_of, same


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is read of a checkpoint in this process, by name."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: Any, name: str, what: str) -> None:
            original = getattr(owner, name)

            def counting(*arguments: Any, **options: Any) -> Any:
                counts[what] += 1
                return original(*arguments, **options)

            patch.setattr(owner, name, counting)

        count(CheckpointFile, "_load", "payloads")
        count(CheckpointFile, "check_structure", "structures")
        count(Path, "iterdir", "listings")
        count(sharded, "_shard_of", "files verified")
        count(torch.distributed, "all_gather_object", "collectives of the engine")
        count(torch.distributed, "scatter_object_list", "collectives of the engine")
        yield counts


def _restore_counted(path: Path) -> Any:
    run = Run("fsdp")
    with manager_of(run, path / "run") as manager:
        run.train(manager, 2)
        manager.save(2)
        state = run.full_state()
        run.train(manager, 4)
        with counted() as counts:
            manager.restore()
        return dict(counts), same(state, run.full_state())


def test_each_rank_reads_the_index_once_and_verifies_its_own_file(tmp_path: Path) -> None:
    """One index, one structure, one listing; no collective of the engine; rank 0 also verifies the metadata."""
    for number, (counts, wrong) in enumerate(groups.results(2, _restore_counted, tmp_path)):
        assert wrong == []
        assert counts == {
            "payloads": 1 if number == 0 else 2,  # the state of its own is one more
            "structures": 1,
            "listings": 1,
            "files verified": 2 if number == 0 else 1,
        }


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _large(size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def _restore_measured(path: Path) -> int:
    components = _large(2)
    with safeckpt.CheckpointManager(path / "run", components) as manager:
        manager.save(1)
        manager.restore()  # what is imported and started at the first one
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes()
        manager.restore()
        return _peak_bytes() - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux")
def test_restore_needs_no_second_copy_in_memory(tmp_path: Path) -> None:
    """Of 100 MB a rank, a restore takes a few above what is there."""
    for above in groups.results(2, _restore_measured, tmp_path):
        assert above < 25_000_000


def _save(path: Path, steps: tuple[int, ...]) -> Any:
    run = Run("fsdp")
    with manager_of(run, path / "run", keep_last=9) as manager:
        for step in steps:
            run.train(manager, step)
            manager.save(step)
    return run.full_state()


def _restore_under_faults(path: Path) -> Any:
    """Harm a shard that this rank reads and another one verifies, after it was verified or in a mapped form."""
    found = {}
    for name in ("other rank", "changed"):
        run = Run("fsdp")
        with manager_of(run, path / name) as manager, pytest.MonkeyPatch.context() as patch:
            if name == "changed":
                original = sharded.CheckpointFolder.verify

                def verify(self: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
                    report = original(self, *arguments, **options)
                    if rank() == 0 and self.path.endswith("2"):
                        with (Path(self.path) / "__0_0.distcp").open("r+b") as file:
                            file.seek(-1, 2)
                            file.write(b"x")
                    return report

                patch.setattr(sharded.CheckpointFolder, "verify", verify)
            with pytest.MonkeyPatch.context() as quiet:
                quiet.setattr("safeckpt.run.finding.warn_skipped", lambda *_: None)
                result = outcome(manager.restore)
            found[name] = result["error"], result["step"]
    return found


def test_one_rank_checks_what_another_has_verified_before_it_applies_it(tmp_path: Path) -> None:
    """A damaged file, or one that changes behind the check: the step before is restored, on all ranks."""
    groups.results(2, _save, tmp_path, (1, 2))
    for name in ("other rank", "changed"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
    shard = tmp_path / "other rank" / "step-00000002" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    for found in groups.results(2, _restore_under_faults, tmp_path):
        assert found["other rank"] == (None, 1)
        assert found["changed"] == (None, 1)


def _save_by_columns(path: Path) -> Any:
    """Shard weights along their columns."""
    return _by(path, 1)


def _by(path: Path, dimension: int) -> Any:
    size = torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 1))
    mesh = init_device_mesh("cpu", (size,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(dimension if p.dim() > 1 else 0))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = safeckpt.CheckpointManager(path / "run", {"model": model, "optimizer": optimizer}, keep_last=9)
    step = 0
    with manager:
        if manager.checkpoints():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            with pytest.warns(safeckpt.SafeckptWarning):
                step = manager.restore().step
        else:
            model(torch.ones(2, 12)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        moments = {n: optimizer.state[p]["exp_avg"].full_tensor() for n, p in model.named_parameters()}
        manager.save(step + 1)
    return state, moments


def _by_rows(path: Path) -> Any:
    """Shard weights along their rows: some ranks have nothing of the one with one row."""
    return _by(path, 0)


@pytest.mark.slow
def test_tensors_are_put_together_from_any_other_layout(tmp_path: Path) -> None:
    """Columns of two ranks, then rows of three, columns of one, rows of two: every tensor as it was."""
    first = groups.results(2, _save_by_columns, tmp_path)[0]
    for size, function in ((3, _by_rows), (1, _save_by_columns), (2, _by_rows)):
        for state, moments in groups.results(size, function, tmp_path):
            assert same(first[0], state) == []
            assert same(first[1], moments) == []
