"""Trains on every case of a matrix: `main` is run in a process of its own.

`straight` runs to the end, `killed` saves each case at its position and then kills its own process with loaders in
full swing, `resumed` goes on from the saved files. Each writes or completes, for each case, the list of what was
seen: every batch and the loss of its step, which also depends on the training process's own random streams.
"""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safeckpt.loader import ResumableLoader
from safeckpt.state.random_streams import RngStreams
from tests.loader.workloads import dataloader

EPOCHS = 2
POSITIONS = ("first", "middle", "last", "boundary")


class Training:
    """One weight, trained with noise from all three of the process's streams."""

    def __init__(self, order: str, workers: int, persistent: bool, seed: int | None) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        options = {"persistent_workers": True} if persistent and workers else {}
        self.loader = ResumableLoader(dataloader(order, workers, **options), seed=seed)
        self.weight = torch.zeros(3)
        self.seen: list[Any] = []

    def step(self, batch: list[list[float]]) -> None:
        noise = torch.randn(3) + random.gauss(0, 1) + np.random.randn()
        x = torch.tensor(batch, dtype=torch.float32).mean(dim=0)[:3]
        gap = self.weight + noise - x
        self.weight = self.weight - 0.1 * gap
        self.seen.append([batch, gap.square().sum().item()])

    def save(self, path: Path) -> None:
        state = {"loader": self.loader.state_dict(), "weight": self.weight, "seen": self.seen}
        torch.save(state | {"rng": RngStreams.capture()}, path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.loader.load_state_dict(state["loader"])
        self.weight, self.seen = state["weight"], state["seen"]
        RngStreams.apply(state["rng"])


def at(position: str, lengths: list[int]) -> tuple[int, int]:
    return {"first": (0, 1), "middle": (1, 2), "last": (0, lengths[0]), "boundary": (1, 0)}[position]


def main(mode: str, folder: Path, workers: int, cases: list[tuple[str, str]], persistent: bool) -> None:
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if mode == "straight":
        result: dict[str, Any] = {}
        for order, _ in cases:
            training = Training(order, workers, persistent, seed=11)
            lengths = []
            for _ in training.loader.epochs(EPOCHS):
                before = len(training.seen)
                for batch in training.loader:
                    training.step(batch)
                lengths.append(len(training.seen) - before)
            result[order] = {"lengths": lengths, "seen": training.seen}
        (folder / "straight.json").write_text(json.dumps(result))
        return
    straight = json.loads((folder / "straight.json").read_text())
    if mode == "killed":
        alive = []
        for order, position in cases:
            training = Training(order, workers, persistent, seed=11)
            alive = [*alive[-1:], run_to(training, at(position, straight[order]["lengths"]))]
            training.save(folder / f"{order}.{position}.pt")
        os.kill(os.getpid(), signal.SIGKILL)
    result = {}
    for order, position in cases:
        training = Training(order, workers, persistent, seed=None)
        training.restore(folder / f"{order}.{position}.pt")
        assert (training.loader.epoch, training.loader.batch) == at(position, straight[order]["lengths"])
        for _ in training.loader.epochs(EPOCHS):
            for batch in training.loader:
                training.step(batch)
        result[f"{order}.{position}"] = training.seen
    (folder / "resumed.json").write_text(json.dumps(result))


def run_to(training: Training, position: tuple[int, int]) -> Any:
    """Train up to a position and return the iterator, with its workers and what they have prefetched."""
    while True:
        iterator = iter(training.loader)
        for batch in iterator:
            training.step(batch)
            if (training.loader.epoch, training.loader.batch) == position:
                return iterator
        if (training.loader.epoch, training.loader.batch) == position:
            return None
