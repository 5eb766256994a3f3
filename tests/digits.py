"""A real run: a network with everything that a resume can lose, on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt
from tests.training import endless


class Net(nn.Module):
    """Convolution, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.head(self.dropout(x.flatten(1)))


class Digits:
    """AdamW, OneCycleLR, an average of the weights and a shuffled loader; a step is one batch.

    Attributes:
        components: What a manager has to know.
    """

    @staticmethod
    def download(path: Path) -> None:
        """Put the digits, which scikit-learn brings along, into a file."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        torch.save({"images": images, "labels": torch.tensor(digits.target)}, path)

    def __init__(self, path: Path) -> None:
        torch.manual_seed(0)
        data = torch.load(path)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=2000)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        dataset = TensorDataset(data["images"], data["labels"])
        self.loader = safeckpt.ResumableLoader(DataLoader(dataset, batch_size=64, shuffle=True))
        self._batches = endless(self.loader)
        self.components: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "loader": self.loader,
        }

    def step(self, *, poison: bool = False) -> float:
        """Train on the next batch and return the loss."""
        images, labels = next(self._batches)
        loss = nn.functional.cross_entropy(self.model(images), labels) * (float("inf") if poison else 1)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def train(self, manager: safeckpt.CheckpointManager, stop: int, *, poison: bool = False) -> list[float]:
        """Train up to step `stop` under a manager and return the losses."""
        losses = []
        for step in range(manager.step + 1, stop + 1):
            losses.append(self.step(poison=poison))
            manager.end_step(step, loss=losses[-1])
        return losses

    def losses(self, steps: int) -> list[float]:
        """Return the losses of a run that nothing interrupts."""
        return [self.step() for _ in range(steps)]
