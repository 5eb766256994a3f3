"""A real run: a network with everything that a resume can lose, on scikit-learn's digits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import safeckpt
from tests.training import endless, seed_all


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


class ShiftedDigits(Dataset):
    """Digits moved by a random pixel or so: augmentation that draws from all three streams."""

    def __init__(self, path: Path) -> None:
        data = safeckpt.load(path)
        self.images, self.labels = data["images"], data["labels"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = (random.randint(-1, 1), int(np.random.randint(-1, 2)))
        noise = 0.01 * torch.randn(8, 8)
        return (torch.roll(self.images[index], shift, (0, 1)) + noise)[None], self.labels[index]


class Digits:
    """AdamW, OneCycleLR, a gradient scaler, an average of the weights, a shuffled loader; a step is one batch.

    Attributes:
        components: What a manager has to know.
    """

    EPOCH = 29  # batches of 64 in 1,797 digits

    @staticmethod
    def download(path: Path) -> None:
        """Put the digits into a file: importing scikit-learn, which brings them along, takes longer than training."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32)
        safeckpt.save({"images": images, "labels": torch.tensor(digits.target)}, path)

    def __init__(self, path: Path, *, workers: int = 0, total_steps: int = 2000) -> None:
        seed_all()
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=total_steps)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
        dataloader = DataLoader(ShiftedDigits(path), batch_size=64, shuffle=True, num_workers=workers)
        self.loader = safeckpt.ResumableLoader(dataloader)
        self._batches = endless(self.loader)
        self.components: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "scaler": self.scaler,
            "loader": self.loader,
        }

    def learn(self, images: torch.Tensor, labels: torch.Tensor, *, poison: bool = False) -> float:
        """Train on a batch and return the loss; a poisoned one turns the weights to NaN, past the scaler."""
        loss = nn.functional.cross_entropy(self.model(images), labels) * (float("inf") if poison else 1)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if poison:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def step(self, *, poison: bool = False) -> float:
        """Train on the next batch and return the loss."""
        return self.learn(*next(self._batches), poison=poison)

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
