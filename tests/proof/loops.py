"""Training loops to be proven, right ones and wrong ones; fresh processes import this module by its name."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import safeckpt
from tests.training import seed_all, update

ROWS, WIDTH = 96, 6
_fixed = torch.Generator().manual_seed(1)
DATA = torch.randn(ROWS, WIDTH, generator=_fixed)
TARGET = DATA.sum(dim=1, keepdim=True)

Components = dict[str, Any]


class Net(nn.Module):
    """Batch norm, frozen batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.2)
        self.frozen = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 1)
        self.frozen.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.dropout(torch.relu(self.norm(self.first(x))))))


# -- the whole of what can be lost, in one loop ------------------------------------------------------------------------


def build() -> Components:
    """Everything is a component: a right loop, as long as everything is restored."""
    seed_all()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": OneCycleLR(optimizer, max_lr=2e-2, total_steps=100),
        "scaler": torch.amp.GradScaler("cpu", init_scale=3.0, growth_factor=1.7, growth_interval=4),
        "average": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "loader": safeckpt.ResumableLoader(DataLoader(TensorDataset(DATA, TARGET), batch_size=16, shuffle=True)),
        "noise": torch.Generator().manual_seed(3),
        "counters": {"steps": 0},
    }


def next_batch(loader: Any) -> Any:
    """Return the next batch of an endless iteration; the iterator is kept where a script would keep it."""
    iterator = getattr(next_batch, "iterator", None)
    if iterator is None or next_batch.loader is not loader:
        next_batch.loader, next_batch.iterator = loader, iter(loader)
    batch = next(next_batch.iterator, None)
    if batch is None:
        next_batch.iterator = iter(loader)
        batch = next(next_batch.iterator)
    return batch


def train_step(c: Components) -> float:
    """Depend on every component; the loss sees each of them."""
    x, y = next_batch(c["loader"])
    x = x + 0.01 * torch.randn(x.size(), generator=c["noise"]) + 0.01 * random.random() + 0.01 * np.random.rand()
    with torch.no_grad():
        teacher = c["average"](x)
    prediction = c["model"](x)
    loss = nn.functional.mse_loss(prediction, y) + 0.1 * nn.functional.mse_loss(prediction, teacher)
    c["optimizer"].zero_grad()
    c["scaler"].scale(loss).backward()
    c["scaler"].step(c["optimizer"])
    c["scaler"].update()
    c["scheduler"].step()
    c["average"].update_parameters(c["model"])
    c["counters"]["steps"] += 1
    return loss.item() + 1e-3 * c["counters"]["steps"] + 1e-3 * c["scaler"].get_scale()


# -- what a script may do wrong at its restore -------------------------------------------------------------------------


def restore_without(manager: safeckpt.CheckpointManager, c: Mapping[str, Any], *, name: str) -> None:
    if name == "rng":
        manager.restore(only=tuple(c))
    else:
        manager.restore(fresh=(name,))


def restore_then_evaluate(manager: safeckpt.CheckpointManager, c: Mapping[str, Any]) -> None:
    manager.restore()
    c["model"].eval()  # a validation pass that nobody turned off


def restore_then_train(manager: safeckpt.CheckpointManager, c: Mapping[str, Any]) -> None:
    manager.restore()
    c["model"].train()  # one call that undoes the frozen batch norm


def restore_then_nudge(manager: safeckpt.CheckpointManager, c: Mapping[str, Any]) -> None:
    manager.restore()
    with torch.no_grad():
        weight = c["model"].first.weight
        weight[3, 2] = torch.nextafter(weight[3, 2], torch.tensor(10.0))


def restore_then_draw(manager: safeckpt.CheckpointManager, c: Mapping[str, Any]) -> None:
    manager.restore()
    torch.rand(1)


def restore_then_clear_gradients(manager: safeckpt.CheckpointManager, c: Mapping[str, Any]) -> None:
    manager.restore()
    c["optimizer"].zero_grad()


# -- loops that keep something from their manager ----------------------------------------------------------------------


def build_small() -> Components:
    seed_all()
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2)}


def small_step(c: Components, scale: float = 1.0) -> torch.Tensor:
    rows = torch.randint(0, ROWS, (16,))
    return update(c["optimizer"], None, lambda: scale * nn.functional.mse_loss(c["model"](DATA[rows]), TARGET[rows]))


class Counting(nn.Module):
    """Counts its calls in a plain attribute, and its noise fades with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) + 1.0 / self.calls


class Buffered(nn.Module):
    """Keeps a running mean in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        return self.layer(x - self.mean)


def build_around(model: type[nn.Module]) -> Components:
    seed_all()
    module = model()
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1e-2)}


COUNT = 0
OPTIMIZERS: dict[str, torch.optim.Optimizer] = {}
NOISE = torch.Generator().manual_seed(5)


def global_counter_step(c: Components) -> torch.Tensor:
    global COUNT  # noqa: PLW0603 - the fault that is to be found
    COUNT += 1
    return small_step(c, scale=1.0 + 1.0 / COUNT)


def build_hidden_optimizer() -> Components:
    components = build_small()
    OPTIMIZERS["adam"] = components.pop("optimizer")
    return components


def hidden_optimizer_step(c: Components) -> torch.Tensor:
    return small_step({**c, "optimizer": OPTIMIZERS["adam"]})


def hidden_generator_step(c: Components) -> torch.Tensor:
    return small_step(c, scale=1.0 + torch.rand((), generator=NOISE).item())


class Settings:
    """A class that is used as a bag of global variables."""

    calls = 0


def class_attribute_step(c: Components) -> torch.Tensor:
    Settings.calls += 1
    return small_step(c, scale=1.0 + 1.0 / Settings.calls)


def default_argument_step(c: Components, cache: dict[str, int] = {"calls": 0}) -> torch.Tensor:  # noqa: B006
    cache["calls"] += 1
    return small_step(c, scale=1.0 + 1.0 / cache["calls"])


def accumulating_step(c: Components) -> torch.Tensor:
    """Step the optimizer every fourth time only."""
    rows = torch.randint(0, ROWS, (16,))
    loss = nn.functional.mse_loss(c["model"](DATA[rows]), TARGET[rows])
    loss.backward()
    c["counters"]["micro"] += 1
    if c["counters"]["micro"] % 4 == 0:
        c["optimizer"].step()
        c["optimizer"].zero_grad()
    return loss


def build_accumulating() -> Components:
    return {**build_small(), "counters": {"micro": 0}}


# -- right loops -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(1, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.first(x[:, :, None])).mean(dim=1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.embed(x))).sum(dim=1, keepdim=True)


OPTIMIZER_KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}

SCHEDULER_KINDS: dict[str, Callable[[Any], LRScheduler]] = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=2e-2, total_steps=60, cycle_momentum=False),
    "step": lambda o: StepLR(o, step_size=4, gamma=0.5),
    "warm restarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=5),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 6), ExponentialLR(o, 0.9)], milestones=[6]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=False),
}

MODEL_KINDS: dict[str, type[nn.Module]] = {"norms": Net, "lstm": Recurrent, "attention": Attention, "tied": Tied}


def build_kind(model: str, optimizer: str, scheduler: str) -> Components:
    seed_all()
    module = MODEL_KINDS[model]()
    one = OPTIMIZER_KINDS[optimizer](module.parameters())
    return {"model": module, "optimizer": one, "scheduler": SCHEDULER_KINDS[scheduler](one)}


def kind_step(c: Components) -> float:
    rows = torch.randint(0, ROWS, (16,))
    loss = update(c["optimizer"], c["scheduler"], lambda: nn.functional.mse_loss(c["model"](DATA[rows]), TARGET[rows]))
    return loss.item()


# -- runs that do not come to an end, or are never the same ------------------------------------------------------------


def unseeded_step(c: Components) -> torch.Tensor:
    return small_step(c, scale=1.0 + np.random.default_rng().random())


def failing_step(c: Components, at: int) -> torch.Tensor:
    c["counters"]["micro"] += 1
    if c["counters"]["micro"] == at:
        raise KeyError("no such batch")
    return small_step(c)


def checked_step(c: Components) -> torch.Tensor:
    """Fail at the third step when optimizer and counters disagree on how many there were."""
    loss = small_step(c)
    c["counters"]["micro"] += 1
    steps = {int(one["step"]) for one in c["optimizer"].state.values()}
    if c["counters"]["micro"] == 3 and steps != {3}:
        raise KeyError("no such batch")
    return loss


def dying_step(c: Components) -> torch.Tensor:
    print("a last word", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("unreachable")


def pid_step(c: Components, folder: str) -> torch.Tensor:
    """Leave a trace of the process that does this step."""
    with (Path(folder) / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    return small_step(c)


def nan_step(c: Components) -> dict[str, Any]:
    return {"main": small_step(c), "empty": float("nan"), "parts": [torch.tensor([1.0, 2.0])]}


def for_command_line() -> tuple[Any, Any]:
    """Return closures, which only this function can give to a new process."""
    extra = 0.5
    return build_small, lambda c: small_step(c, scale=extra)


around_counting = functools.partial(build_around, Counting)
around_buffered = functools.partial(build_around, Buffered)
