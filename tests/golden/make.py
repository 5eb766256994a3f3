"""Writes the golden files of the current format: `python -m tests.golden.make`. Run once per released format version.

A golden file is never written again. When the format changes: raise FORMAT_VERSION, keep reading the old one, run
this, commit the new files beside the old ones, and add a Format entry to CHANGELOG.md.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import safeckpt
from safeckpt.file import FORMAT_VERSION
from tests.distributed import groups

HERE = Path(__file__).parent


def values() -> dict[str, Any]:
    """Return what the drop-in file holds: one of every kind that the format has a form for."""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "tensors": {
            str(dtype).removeprefix("torch."): torch.tensor([0, 1, 2]).to(dtype)
            for dtype in (
                torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
                torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
                torch.float8_e4m3fn, torch.float8_e5m2,
            )
        },
        "views": [whole, whole[1:3], whole.t(), whole[:, ::2]],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "large": torch.arange(70_000, dtype=torch.int32),
        "many small": [torch.tensor([float(index)]) for index in range(300)],
        "sparse": torch.eye(3).to_sparse(),
        "plain": [None, True, -7, 2**70, 1.5, float("inf"), 1 + 2j, "\u00e9 \ud800", b"b", b"", (1, (2, 3)), {4, 5}],
        "ordered": OrderedDict(b=1, a=2),
        "kinds": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
    }  # fmt: skip


def components() -> dict[str, Any]:
    """Return the components whose checkpoint is the other golden file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        "generator": torch.Generator().manual_seed(7),
        "counters": {"epoch": 0},
    }


def group_components(kind: str) -> dict[str, Any]:
    """Return the components of one of two ranks: of the same model, and of its own generator."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=2),
        "generator": torch.Generator().manual_seed(7 + torch.distributed.get_rank()),
        "counters": {"epoch": 0},
    }


def weight_of(parts: dict[str, Any]) -> torch.Tensor:
    """Return the last weight of the model of a group, whole."""
    *_, weight = (p for p in parts["model"].parameters() if p.dim() == 2)
    whole: torch.Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return whole.detach().clone()


def write_group(folder: Path, kind: str) -> None:
    """Save step 3 of a run of two ranks, and what the run has done next."""
    parts = group_components(kind)
    with safeckpt.CheckpointManager(folder, parts) as manager:
        losses = train(parts, 3)
        manager.save(3, loss=losses[-1], metrics={"accuracy": 0.5})
        weight = weight_of(parts)
        following: list[Any] = [None, None]
        torch.distributed.all_gather_object(following, train(parts, 2))
    if torch.distributed.get_rank() == 0:
        torch.save({"weight": weight, "next": following}, folder / "expected.pt")
        _tidy(folder)


def _tidy(folder: Path) -> None:
    for name in (".writer.lock", ".writer.json", "events.jsonl", "losses.log"):
        (folder / name).unlink(missing_ok=True)


def train(parts: dict[str, Any], steps: int) -> list[float]:
    """Train and return the losses; simple enough to come out the same on every machine, but for the last digits."""
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 4, generator=parts["generator"])
        loss = parts["model"](inputs).square().mean()
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        parts["counters"]["epoch"] += 1
        losses.append(loss.item())
    return losses


def main() -> None:
    """Write the files that are not there yet."""
    producer = f"torch-{torch.__version__.partition('+')[0]}"
    drop_in = HERE / f"format-{FORMAT_VERSION}-{producer}-save.pt"
    if not drop_in.exists():
        safeckpt.save(values(), drop_in)
    folder = HERE / f"format-{FORMAT_VERSION}-{producer}-manager"
    if not folder.exists():
        parts = components()
        with safeckpt.CheckpointManager(folder, parts) as manager:
            losses = train(parts, 3)
            manager.save(3, loss=losses[-1], metrics={"accuracy": 0.5, "bleu": float("nan")})
            weight = parts["model"][0].weight.detach().clone()
            torch.save({"weight": weight, "next": train(parts, 2)}, folder / "expected.pt")
        _tidy(folder)
    for kind in ("ddp", "fsdp"):
        folder = HERE / f"format-{FORMAT_VERSION}-{producer}-{kind}"
        if not folder.exists():
            groups.results(2, write_group, folder, kind)


if __name__ == "__main__":
    main()
