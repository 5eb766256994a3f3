"""FSDP2 and tensor parallel: a checkpoint is a directory, damaged ones are found, and other layouts read it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.cli import main
from tests.distributed import groups
from tests.distributed.scenarios import outcome
from tests.distributed.training import Kind, Run, manager_of, same


def _train_and_save(path: Path, kind: Kind, steps: tuple[int, ...]) -> Any:
    run = Run(kind)
    with manager_of(run, path / "run", keep_last=9) as manager:
        for step in steps:
            run.train(manager, step)
            manager.save(step, loss=0.5, metrics={"accuracy": 0.25})
    return run.full_state(), dict(run.counters)


def _restore_all(path: Path, kind: Kind, names: tuple[str, ...]) -> Any:
    """Restore each of several damaged directories in one group."""
    found = {}
    for name in names:
        run = Run(kind)
        with warnings.catch_warnings(record=True) as given, manager_of(run, path / name) as manager:
            warnings.simplefilter("always")
            result = outcome(manager.restore)
        found[name] = result["step"], [str(one.message) for one in given]
    return found


def _saved(tmp_path_factory: pytest.TempPathFactory, size: int, kind: Kind) -> tuple[Path, list[Any]]:
    path = tmp_path_factory.mktemp(f"{kind}{size}")
    return path, groups.results(size, _train_and_save, path, kind, (1, 2))


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Steps 1 and 2 of two FSDP ranks."""
    return _saved(tmp_path_factory, 2, "fsdp")


def test_sharded_checkpoint_is_listed_and_verified(fsdp2: tuple[Path, list[Any]], capsys: Any) -> None:
    """Without objects, a group or a lock: listing, latest, verify and the command line know directories."""
    path = fsdp2[0] / "run"
    newest = safeckpt.latest(path)
    assert newest is not None
    assert (newest.step, newest.loss, newest.metrics) == (2, 0.5, {"accuracy": 0.25})
    assert newest.path == path / "step-00000002"
    assert newest.size_bytes == sum(one.stat().st_size for one in newest.path.iterdir())
    report = safeckpt.verify(newest.path)
    assert report.self_proving
    assert report.size_bytes == newest.size_bytes
    assert report.records == len(list(newest.path.iterdir()))
    assert main(["list", str(path), "--json"]) == 0
    assert '"step": 2' in capsys.readouterr().out
    assert main(["verify", str(newest.path)]) == 0
    assert main(["verify", str(path)]) == 0


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "flipped shard": lambda path: _flip(path / "__1_0.distcp", 700),
    "flipped last byte": lambda path: _flip(path / "__0_0.distcp", -1),
    "cut shard": lambda path: (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1]),
    "longer shard": lambda path: (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes() + b"x"),
    "missing shard": lambda path: (path / "__1_0.distcp").unlink(),
    "swapped shards": lambda path: _swap(path / "__0_0.distcp", path / "__1_0.distcp"),
    "shard of another step": lambda path: shutil.copy(path.parent / "step-00000001/__1_0.distcp", path),
    "flipped metadata": lambda path: _flip(path / ".metadata", 100),
    "missing metadata": lambda path: (path / ".metadata").unlink(),
    "flipped index": lambda path: _flip(path / "safeckpt.pt", 3000),
    "missing index": lambda path: (path / "safeckpt.pt").unlink(),
    "cut index": lambda path: (path / "safeckpt.pt").write_bytes((path / "safeckpt.pt").read_bytes()[:500]),
    "index of another step": lambda path: shutil.copy(path.parent / "step-00000001/safeckpt.pt", path),
    "empty directory": lambda path: [one.unlink() for one in list(path.iterdir())],
}


def _swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.slow
def test_damage_to_any_file_is_found_and_walked_back_over(fsdp2: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """A shard, the engine's metadata or the index cut, flipped, swapped or missing: the step before is restored."""
    for name, harm in DAMAGE.items():
        shutil.copytree(fsdp2[0] / "run", tmp_path / name)
        harm(tmp_path / name / "step-00000002")
        with pytest.raises((safeckpt.DamagedCheckpointError, IsADirectoryError)):
            safeckpt.verify(tmp_path / name / "step-00000002")
        with pytest.warns(safeckpt.SkippedCheckpointWarning):
            newest = safeckpt.latest(tmp_path / name)
        assert newest is not None
        assert newest.step == 1, name
    for rank, found in enumerate(groups.results(2, _restore_all, tmp_path, "fsdp", tuple(DAMAGE))):
        for name, (step, given) in found.items():
            assert step == 1, name
            assert len(given) == (1 if rank == 0 else 0), (name, given)
            assert rank == 1 or "step-00000002 was passed over" in given[0]


def _moved(path: Path, kind: Kind, source: str) -> Any:
    """Restore under another number of ranks, save there, and return the full state as it was restored."""
    run = Run(kind)
    mine = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as given, manager_of(run, path / source, keep_last=9) as manager:
        warnings.simplefilter("always")
        checkpoint = manager.restore()
        assert checkpoint is not None
        state, own = run.full_state(), torch.equal(mine, torch.get_rng_state())
        position = (run.loader.epoch, run.loader.batch)
        lr = run.optimizer.param_groups[0]["lr"]
        manager.save(checkpoint.step + 1)
    texts = [str(one.message) for one in given if issubclass(one.category, safeckpt.EnvironmentChangedWarning)]
    return state, own, position, lr, texts, dict(run.counters)


@pytest.mark.slow
def test_two_ranks_then_four_then_one_have_equal_full_states(tmp_path: Path) -> None:
    """Resharded by the engine: model, optimizer, schedule exact, the loader at the same sample, the rest named."""
    (first, _), _ = groups.results(2, _train_and_save, tmp_path, "fsdp", (1, 2))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    four = groups.results(4, _moved, tmp_path, "fsdp", "run")
    one = groups.results(1, _moved, tmp_path, "fsdp", "run")
    plain = groups.results(1, _moved, tmp_path, "alone", "copy")
    for rank, (state, own, position, lr, texts, counters) in enumerate(four):
        buffers = {"norm.running_mean", "norm.running_var"} if rank == 1 else set()  # rank 1 has its own back
        assert set(same(first, state)) <= buffers
        assert own == (rank >= 2)
        assert position == (0, 1)  # 2 ranks x 2 batches of 16 are 4 ranks x 1 batch
        assert lr == four[0][3]
        assert "world_size: 2 -> 4 (ranks 2 to 3 keep the random streams of their script" in texts[0]
        assert counters["rank"] == (rank if rank < 2 else 0)
    for state, own, position, _, texts, _ in (*one, *plain):
        assert same(first, state) == []
        assert not own
        assert position == (0, 4)
        assert "-> 1 (the random streams of" in texts[0]


@pytest.mark.slow
def test_mesh_of_two_by_two_resumes_bit_for_bit(tmp_path: Path) -> None:
    """FSDP over tensor parallel: four ranks, each with its quarter, go on as if they had never stopped."""
    straight = groups.results(4, _straight_2d, tmp_path, 6)
    groups.results(4, _train_and_save, tmp_path, "2d", (2, 3))
    resumed = groups.results(4, _resume_2d, tmp_path, 6)
    for (losses, state), (step, again, state_again) in zip(straight, resumed, strict=True):
        assert step == 3
        assert again == losses[3:]
        assert same(state, state_again) == []


def _straight_2d(path: Path, stop: int) -> Any:
    run = Run("2d")
    return [run.step(number) for number in range(1, stop + 1)], run.full_state()


def _resume_2d(path: Path, stop: int) -> Any:
    run = Run("2d")
    with manager_of(run, path / "run") as manager:
        checkpoint = manager.restore()
        assert checkpoint is not None
        losses = run.train(manager, stop)
    return checkpoint.step, losses, run.full_state()


def test_plain_torch_reads_the_model_out_of_the_directory(fsdp2: tuple[Path, list[Any]]) -> None:
    """Without safeckpt: torch.distributed.checkpoint finds each parameter under its component and name."""
    from torch.distributed import checkpoint as engine

    path, ((state, _), _) = fsdp2
    model = Run("alone").model
    wanted = {"model": {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        engine.load(wanted, checkpoint_id=path / "run" / "step-00000002")
    assert same({name: state[name] for name in wanted["model"]}, wanted["model"]) == []


def test_sharded_model_becomes_safetensors_in_one_process(fsdp2: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """Every tensor whole, in one file, several, or a file of torch; nothing but one component is read into memory."""
    library = pytest.importorskip("safetensors.torch")
    path, ((state, _), _) = fsdp2
    source = path / "run" / "step-00000002"
    model = Run("alone").model
    expected = {name: state[name] for name in model.state_dict()}
    one = safeckpt.export(source, "model", tmp_path / "one.safetensors")
    several = safeckpt.export(source, "model", tmp_path / "several.safetensors", max_shard_size="2KB")
    (plain,) = safeckpt.export(source, "model", tmp_path / "plain.pt")
    assert len(several) > 3
    assert same(expected, library.load_file(one[0])) == []
    parts = [library.load_file(file) for file in several[:-1]]
    assert same(expected, {name: tensor for part in parts for name, tensor in part.items()}) == []
    assert same(expected, torch.load(plain)) == []
    assert main(["extract", str(source), "model", "-o", str(tmp_path / "cli.safetensors")]) == 0
    assert (tmp_path / "cli.safetensors").read_bytes() == one[0].read_bytes()
    with pytest.raises(safeckpt.UnsavableStateError, match=r"no tensors \(state"):
        safeckpt.export(source, "optimizer", tmp_path / "optimizer.safetensors")
    (moments,) = safeckpt.export(source, "optimizer", tmp_path / "optimizer.pt")
    whole = safeckpt.load(source)["optimizer"]["state"]
    read = torch.load(moments)["state"]
    assert all(torch.equal(read[key]["exp_avg"], whole[key]["exp_avg"]) for key in whole)
