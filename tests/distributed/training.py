"""A small transformer on scikit-learn's digits, trained by several processes: DDP, FSDP2, tensor parallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import safeckpt
from tests.comparing import bits
from tests.training import endless, update

Kind = Literal["alone", "ddp", "fsdp", "2d"]

WIDTH = 16


class Block(nn.Module):
    """Attention over the rows of an image, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Two blocks, and a batch norm whose statistics are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    return TensorDataset(torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target))


class Run:
    """Everything that one rank of a training run consists of.

    Attributes:
        components: What a manager has to know.
        bad: The rank and step at which the loss is NaN.
    """

    def __init__(self, kind: Kind = "ddp", *, world: int | None = None) -> None:
        torch.manual_seed(0)
        self.kind = kind
        model: nn.Module = Net()
        rank, size = 0, 1
        if kind != "alone":
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.rank = rank
        self.model = self._parallel(model, kind, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=2000)
        if kind == "2d":  # the ranks of one tensor-parallel group are one consumer
            rank, size = rank // (size // 2), 2
        sampler = DistributedSampler(digits(), size, rank, shuffle=True, seed=3)
        batches = DataLoader(digits(), batch_size=16, sampler=sampler)
        self.loader = safeckpt.ResumableLoader(batches, seed=5, convert=("world_size",))
        self.counters = {"rank": self.rank, "seen": 0}
        self.generator = torch.Generator().manual_seed(100 + rank)
        torch.manual_seed(1000 + rank)  # dropout of its own on every rank
        self._batches = endless(self.loader)
        self.bad: tuple[int, int] | None = None
        self.components: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "counters": self.counters,
            "noise": self.generator,
        }

    def _parallel(self, model: Any, kind: Kind, size: int) -> nn.Module:
        if kind == "ddp":
            return DistributedDataParallel(model)
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        if kind == "2d":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("fsdp", "tp"))
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(block, mesh=mesh["fsdp"])
            fully_shard(model, mesh=mesh["fsdp"])
        return model

    def step(self, number: int) -> float:
        """Train on the next batch and return this rank's loss."""
        images, labels = next(self._batches)
        images = images + 0.01 * torch.randn(images.shape, generator=self.generator)
        scale = float("nan") if self.bad == (self.rank, number) else 1.0
        loss = update(
            self.optimizer,
            self.scheduler,
            lambda: scale * nn.functional.cross_entropy(self.model(images), labels),
        )
        self.counters["seen"] += len(labels)
        return loss.item()

    def train(self, manager: safeckpt.CheckpointManager, stop: int) -> list[float]:
        """Train up to step `stop` under a manager and return the losses."""
        losses = []
        for number in range(manager.step + 1, stop + 1):
            losses.append(self.step(number))
            manager.end_step(number, loss=losses[-1])
        return losses

    def full_state(self) -> dict[str, torch.Tensor]:
        """Return every tensor of model and optimizer whole, by name: the same on every rank."""
        inner = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found = {}
        for name, tensor in inner.state_dict().items():
            found[name] = whole(tensor)
        for name, parameter in inner.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = whole(value)
        return found


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def manager_of(run: Run, path: Path, **options: Any) -> safeckpt.CheckpointManager:
    return safeckpt.CheckpointManager(
        path, run.components, **{"lock_timeout_seconds": 5.0, "ranks": safeckpt.Ranks(20.0), **options}
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not bit-equal."""
    assert one.keys() == other.keys()
    return [name for name in one if bits(one[name]) != bits(other[name])]
