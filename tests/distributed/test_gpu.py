"""NCCL, one rank for each device: what is on the device comes back, and host memory holds what is read for it."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import safeckpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _member(function: Callable[..., Any], rank: int, size: int, store: Path, arguments: Any) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=dt.timedelta(seconds=60), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    store.with_suffix(f".{rank}").write_bytes(pickle.dumps(function(*arguments)))
    torch.distributed.destroy_process_group()


def results(function: Callable[..., Any], path: Path, *arguments: Any) -> list[Any]:
    """Run a function on one rank for each device, two at most, and return what each rank returned."""
    size = min(2, torch.cuda.device_count())
    context = multiprocessing.get_context("spawn")
    store = path / f"store-{os.urandom(4).hex()}"
    members = [
        context.Process(target=_member, args=(function, rank, size, store, (path, *arguments))) for rank in range(size)
    ]
    for one in members:
        one.start()
    for one in members:
        one.join(120)
    assert [one.exitcode for one in members] == [0] * size
    return [pickle.loads(store.with_suffix(f".{rank}").read_bytes()) for rank in range(size)]


def _built(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, 8)).cuda()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, {"model": model, "optimizer": optimizer}


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[str]:
    losses = []
    for number in numbers:
        generator = torch.Generator("cuda").manual_seed(10 * number + torch.distributed.get_rank())
        loss = model(torch.randn(16, 64, generator=generator, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    return whole.cpu()


def _saved(path: Path, kind: str, background: bool) -> Any:
    model, optimizer, components = _built(kind)
    torch.cuda.manual_seed(torch.distributed.get_rank())
    with safeckpt.CheckpointManager(path / "run", components, async_save=background) as manager:
        _steps(model, optimizer, range(3))
        manager.save(3)
        losses = _steps(model, optimizer, range(3, 7))  # also while the checkpoint is written
    return losses, [_whole(p) for p in model.parameters()]


def _resumed(path: Path, kind: str) -> Any:
    model, optimizer, components = _built(kind, seed=9)
    _steps(model, optimizer, range(1))  # the optimizer has its state, on the device
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with safeckpt.CheckpointManager(path / "run", components) as manager:
        checkpoint = manager.restore()
        assert checkpoint is not None
        above = torch.cuda.max_memory_allocated() - before
        losses = _steps(model, optimizer, range(3, 7))
    devices = {p.device.type for p in model.parameters()} | {
        value.device.type for one in optimizer.state.values() for key, value in one.items() if key != "step"
    }
    return losses, [_whole(p) for p in model.parameters()], above, devices


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resumed_group_is_the_same_run_on_devices(tmp_path: Path, kind: str, background: bool) -> None:
    """Losses and weights after a resume are those of the run that went on; nothing is read into the device's memory."""
    straight = results(_saved, tmp_path, kind, background)
    resumed = results(_resumed, tmp_path, kind)
    size = sum(p.nbytes for p in straight[0][1])
    for (losses, weights), (again, weights_again, above, devices) in zip(straight, resumed, strict=True):
        assert again == losses
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))
        assert devices == {"cuda"}
        assert above < 2 * size


def _refused(path: Path, kind: str) -> str:
    model, _, components = _built(kind)
    with safeckpt.CheckpointManager(path / "run", components) as manager:
        manager.save(1)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            weight: Any = next(iter(model.parameters())).detach()
            (weight.to_local() if hasattr(weight, "to_local") else weight)[0, 0] = float("nan")
        try:
            manager.save(2)
        except safeckpt.NonFiniteError as error:
            manager.rollback(changed=True)
            return error.tensors[0].name
        return "saved"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_nan_on_one_device_is_refused_by_all(tmp_path: Path, kind: str) -> None:
    """The guard looks at local parts on their device; every rank goes back."""
    assert set(results(_refused, tmp_path, kind)) == {"model.0.weight"}
