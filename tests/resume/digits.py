"""The run of the kill tests: scikit-learn's digits with everything that a resume can lose, in a child that dies."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import safeckpt
from tests.training import state_of

STEPS = 150
EPOCH = 29  # batches of 62 in 1,797 digits


def unpack_digits(path: Path) -> None:
    """Put the digits into a file: importing scikit-learn takes longer than a child lives."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    safeckpt.save({"images": images, "labels": torch.tensor(digits.target)}, path)


class ShiftedDigits(Dataset):
    """Digits moved by a random pixel or so: augmentation that draws from all three streams."""

    def __init__(self, path: Path) -> None:
        digits = safeckpt.load(path)
        self.images, self.labels = digits["images"], digits["labels"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = (random.randint(-1, 1), int(np.random.randint(-1, 2)))
        noise = 0.01 * torch.randn(8, 8)
        return (torch.roll(self.images[index], shift, (0, 1)) + noise)[None], self.labels[index]


class DigitsRun:
    """A CNN with batch norm and dropout, AdamW, OneCycleLR, an EMA of the weights, a gradient scaler, a loader."""

    def __init__(self, digits: Path, workers: int) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(8 * 16, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=STEPS + 1)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
        # Under forkserver, the way this process was started, each child would import torch for its workers again.
        context = "fork" if workers else None
        dataset = ShiftedDigits(digits)
        dataloader = DataLoader(
            dataset, batch_size=62, shuffle=True, num_workers=workers, multiprocessing_context=context
        )
        self.loader = safeckpt.ResumableLoader(dataloader)
        self.components: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "average": self.average,
            "scaler": self.scaler,
            "loader": self.loader,
        }

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss.item()


def train(digits: Path, directory: Path | None, losses: Path, workers: int, *, async_save: bool = False) -> Any:
    """Train to the end, from the newest checkpoint if there is one, and return the whole state.

    Args:
        digits: What `unpack_digits` wrote.
        directory: Of the checkpoints; None for a run without any.
        losses: Each step and its loss go there as a line, as soon as it is computed.
        workers: Of the DataLoader.
        async_save: Write in the background.
    """
    os.setpgid(0, 0)  # so that the workers of the loader can be killed with it
    run = DigitsRun(digits, workers)
    manager = None
    if directory is not None:
        manager = safeckpt.CheckpointManager(directory, run.components, save_every=3, async_save=async_save)
        manager.restore()
    step = manager.step if manager else 0
    with losses.open("a") as record:
        for _ in run.loader.epochs(STEPS // EPOCH + 1):
            for images, labels in run.loader:
                step += 1
                loss = run.step(images, labels)
                record.write(json.dumps([step, loss]) + "\n")
                record.flush()
                if manager:
                    manager.end_step(step, loss=loss)
                if step == STEPS:
                    if manager:
                        manager.close()
                    return state_of({name: one for name, one in run.components.items() if name != "loader"})
    raise AssertionError("the epochs ended before the steps")


def recorded(losses: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every whole line; a kill may cut the last."""
    lines = losses.read_bytes().split(b"\n")[:-1] if losses.exists() else []
    return [tuple(json.loads(line)) for line in lines]
