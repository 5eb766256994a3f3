"""Training runs to be saved, broken and resumed, and their whole state as something that `==` compares bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.comparing import bits, streams


def seed_all(number: int = 0) -> None:
    """Seed every stream that a run draws from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def update(optimizer: Any, scheduler: Any, loss_of: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Do one step of the optimizer, and of the scheduler where it is one and not None, down a loss; return it.

    Runs with a scaler, with accumulation or with several optimizers are about just that, and write their step out.
    """

    def closure() -> torch.Tensor:  # which L-BFGS calls several times
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    loss: torch.Tensor = optimizer.step(closure)
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss.item())
    elif scheduler is not None:
        scheduler.step()
    return loss


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def state_of(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the next step depends on: states, gradients, modes, flags, random streams."""
    found: dict[str, Any] = {"rng": streams()}
    for name, obj in components.items():
        if isinstance(obj, torch.Generator):
            found[name] = bits(obj.get_state())
            continue
        found[name] = bits(dict(obj) if type(obj) is dict else obj.state_dict())
        if isinstance(obj, nn.Module):
            found[f"{name} grad"] = {key: None if p.grad is None else bits(p.grad) for key, p in obj.named_parameters()}
            found[f"{name} flags"] = {key: p.requires_grad for key, p in obj.named_parameters()}
            found[f"{name} modes"] = {key: module.training for key, module in obj.named_modules()}
    return found


class Run:
    """A network with dropout, batch norm, AdamW moments and a schedule; each step draws its batch from torch's stream.

    Attributes:
        components: What a manager has to know.
    """

    def __init__(self, seed: int = 0, total_steps: int = 400) -> None:
        seed_all(seed)
        fixed = torch.Generator().manual_seed(1)
        self._data = torch.randn(256, 8, generator=fixed)
        self._target = self._data.sum(dim=1, keepdim=True)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=total_steps)
        self.counters = {"steps": 0}
        self.components: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "counters": self.counters,
        }

    def step(self, *, poison: bool = False) -> float:
        """Do one step and return its loss."""
        rows = torch.randint(0, len(self._data), (16,))
        # Noise from the other two streams, so that a run that lost either is another run.
        noise = 1e-3 * (random.random() + np.random.rand())
        target = self._target[rows] * (float("inf") if poison else 1.0) + noise
        loss = update(
            self.optimizer, self.scheduler, lambda: nn.functional.mse_loss(self.model(self._data[rows]), target)
        )
        self.counters["steps"] += 1
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]

    @property
    def state(self) -> dict[str, Any]:
        return state_of(self.components)


class Marked:
    """The least that a manager saves: every number in it says which step it belongs to.

    Attributes:
        components: What a manager has to know.
    """

    def __init__(self) -> None:
        self.weight = nn.Module()
        self.weight.register_buffer("value", torch.zeros(3))
        self.counters = {"step": 0}
        self.components: dict[str, Any] = {"model": self.weight, "counters": self.counters}

    @property
    def step(self) -> int:
        """The step that all of the state belongs to; a mixture of two is an error."""
        steps = {*self.weight.value.tolist(), float(self.counters["step"])}
        assert len(steps) == 1, f"a mixture of steps {steps}"
        return int(steps.pop())

    @step.setter
    def step(self, step: int) -> None:
        self.weight.value.fill_(step)
        self.counters["step"] = step

    def poison(self) -> None:
        self.weight.value[1] = float("nan")
