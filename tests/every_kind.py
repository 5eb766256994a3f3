"""Components of every kind, of the user's own classes, and a step that changes every bit of them.

Where a run trains in order to be compared, its loop is that of `tests.training`; here a step only has to change all
that there is, and code of the user's own stands wherever it may stand, to be made to raise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.training import seed_all


class Stateful:
    """Any object with a state."""

    def __init__(self) -> None:
        self.value: Any = {"count": 0, "tensor": torch.zeros(3), "array": np.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = dict(state)


class Loader(Stateful):
    """What is taken for a loader."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Module(nn.Module):
    """A module with a tied weight, statistics, and state besides its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(x)))
        return found

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Optimizer(torch.optim.Adam):
    """An optimizer of the user's own."""


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """A scheduler of the user's own."""


class Scaler(torch.amp.GradScaler):
    """A scaler of the user's own."""


# Code that may raise, by component: the class, and its method for the save and for the restore.
CODE: dict[str, tuple[type, str, str]] = {
    "model": (Module, "get_extra_state", "set_extra_state"),
    "optimizer": (Optimizer, "state_dict", "load_state_dict"),
    "scheduler": (Scheduler, "state_dict", "load_state_dict"),
    "scaler": (Scaler, "state_dict", "load_state_dict"),
    "loader": (Loader, "state_dict", "load_state_dict"),
    "object": (Stateful, "state_dict", "load_state_dict"),
}


def built() -> dict[str, Any]:
    """Return components of every kind, after no step; the same ones each time."""
    torch.manual_seed(0)
    model = Module()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    return {
        "model": model, "optimizer": optimizer, "scheduler": Scheduler(optimizer, 1, gamma=0.5),
        "scaler": Scaler("cpu", init_scale=4.0), "loader": Loader(), "object": Stateful(),
        "generator": torch.Generator(), "numbers": np.random.default_rng(0), "python": random.Random(0),
        "dict": {"best": 0.5, "kept": torch.zeros(2), "list": [torch.zeros(2), 0]},
    }  # fmt: skip


def train(components: dict[str, Any], number: int) -> None:
    """Change every bit of state, as a step does; and the process's streams."""
    seed_all(number)
    model, optimizer, scaler = (components[name] for name in ("model", "optimizer", "scaler"))
    model.train(number % 2 == 0)
    model.last.bias.requires_grad_(number % 2 == 0)
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 3)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update(float(number + 1))
    components["scheduler"].step()
    model.extra = number
    for name in ("loader", "object"):
        components[name].value = {"count": number, "tensor": torch.randn(3), "array": np.random.rand(2)}
    components["generator"].manual_seed(number)
    components["numbers"].random(number)
    components["python"].seed(number)
    kept = components["dict"]
    kept["best"] = number / 7
    kept["kept"].fill_(number)
    kept["list"][0].fill_(number)
    kept["list"][1] = number
    model(torch.randn(4, 3)).sum().backward()  # of the next step, which has begun


def trained(steps: int) -> dict[str, Any]:
    """Return components of every kind, after some steps."""
    components = built()
    for number in range(1, steps + 1):
        train(components, number)
    return components
