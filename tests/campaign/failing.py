"""Code of the user's own raises, at every position of a save and of a restore, in every kind of component.

A `state_dict` or a `load_state_dict` may raise whatever it likes. After a failed save the checkpoint before it is
there; after a failed restore every live object is what it was, bit for bit. Either way the same manager restores and
saves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from safeckpt import CheckpointManager
from tests.campaign.outcome import Outcome, Scale, WrongBitsError, quiet, scratch
from tests.comparing import Bits, bits, changes, streams
from tests.manager.helpers import checkpoint_files, temps_in

_ORDERS = {"fast": 2, "full": 4}  # in which the components are given
_ERRORS = (RuntimeError, KeyError, KeyboardInterrupt)


class _Stateful:
    """Any object with a state."""

    def __init__(self) -> None:
        self.value: Any = {"count": 0, "tensor": torch.zeros(3), "array": np.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = dict(state)


class _Loader(_Stateful):
    """What is taken for a loader."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _Module(nn.Module):
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


class _Optimizer(torch.optim.Adam):
    """An optimizer of the user's own."""


class _Scheduler(torch.optim.lr_scheduler.StepLR):
    """A scheduler of the user's own."""


class _Scaler(torch.amp.GradScaler):
    """A scaler of the user's own."""


# Code that may raise, by component: the class, and its method for the save and for the restore.
_CODE: dict[str, tuple[type, str, str]] = {
    "model": (_Module, "get_extra_state", "set_extra_state"),
    "optimizer": (_Optimizer, "state_dict", "load_state_dict"),
    "scheduler": (_Scheduler, "state_dict", "load_state_dict"),
    "scaler": (_Scaler, "state_dict", "load_state_dict"),
    "loader": (_Loader, "state_dict", "load_state_dict"),
    "object": (_Stateful, "state_dict", "load_state_dict"),
}


def _built() -> dict[str, Any]:
    """Return components of every kind, after no step."""
    model = _Module()
    optimizer = _Optimizer(model.parameters(), lr=0.1)
    return {
        "model": model, "optimizer": optimizer, "scheduler": _Scheduler(optimizer, 1, gamma=0.5),
        "scaler": _Scaler("cpu", init_scale=4.0), "loader": _Loader(), "object": _Stateful(),
        "generator": torch.Generator(), "numbers": np.random.default_rng(0), "python": random.Random(0),
        "dict": {"best": 0.5, "kept": torch.zeros(2), "list": [torch.zeros(2), 0]},
    }  # fmt: skip


def _train(components: dict[str, Any], number: int) -> None:
    """Change every bit of state, as a step does; and the process's streams."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)
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


def _photo(components: dict[str, Any]) -> Bits:
    """Return everything that is live, in comparable form: without code that may raise."""
    model, optimizer, scheduler, scaler = (components[key] for key in ("model", "optimizer", "scheduler", "scaler"))
    return bits(
        {
            "model": {**dict(model.named_parameters()), **dict(model.named_buffers())},
            "extra": model.extra,
            "tied": model.first.weight is model.last.weight,
            "modes": [one.training for one in model.modules()],
            "flags": [one.requires_grad for one in model.parameters()],
            "gradients": [one.grad for one in model.parameters()],
            "moments": [optimizer.state.get(one) for one in model.parameters()],
            "groups": [{key: value for key, value in one.items() if key != "params"} for one in optimizer.param_groups],
            "trained": [id(one) for group in optimizer.param_groups for one in group["params"]],
            "scheduler": {
                key: value for key, value in vars(scheduler).items() if isinstance(value, int | float | list)
            },
            "scaler": [scaler.get_scale(), scaler._get_growth_tracker()],
            "objects": [components["loader"].value, components["object"].value],
            "generators": [
                components["generator"].get_state(),
                str(components["numbers"].bit_generator.state),
                components["python"].getstate(),
            ],
            "dict": components["dict"],
            "streams": streams(),
        }
    )


class _Raising:
    """Makes one method of a component raise, in its class: before it has done anything, or when it has done it all."""

    def __init__(self, component: str, when: str, error: type[BaseException]) -> None:
        self.component = component
        self.when = when
        self.error = error

    def __str__(self) -> str:
        return f"{self.component} raises {self.error.__name__} {self.when} its own work"

    def at_save(self) -> contextlib.AbstractContextManager[None]:
        """Raise in the first call of the method that gives the state."""
        kind, method, _ = _CODE[self.component]
        return self._raising(kind, method)

    def at_restore(self) -> contextlib.AbstractContextManager[None]:
        """Raise in the first call of the method that takes a state; the second one puts back what was there."""
        kind, _, method = _CODE[self.component]
        return self._raising(kind, method)

    @contextlib.contextmanager
    def _raising(self, kind: type, name: str) -> Iterator[None]:
        own, original = vars(kind).get(name), getattr(kind, name)
        calls = itertools.count()

        @functools.wraps(original)
        def method(obj: Any, *arguments: Any, **options: Any) -> Any:
            is_first = next(calls) == 0
            found = original(obj, *arguments, **options) if not is_first or self.when == "after" else None
            if is_first:
                raise self.error("made on purpose")
            return found

        setattr(kind, name, method)
        try:
            yield
        finally:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)


_Fail = Callable[[CheckpointManager, dict[str, Any], _Raising], None]


def run(scale: Scale, seed: int) -> Outcome:
    """Let every piece of code raise, with the components in many orders."""
    outcome = Outcome("a state_dict or load_state_dict that raises, in every kind and position, at saves and restores")
    choose = random.Random(seed)
    orders = [list(_built()), list(reversed(_built()))]
    orders += [choose.sample(orders[0], len(orders[0])) for _ in range(_ORDERS[scale] - 2)]
    for order, component in itertools.product(orders, _CODE):
        errors = _ERRORS if scale == "full" else (choose.choice(_ERRORS),)
        for when, error in itertools.product(("before", "after"), errors):
            for fail in (_fail_a_save, _fail_a_restore):
                _try(fail, order, _Raising(component, when, error), outcome)
    return outcome


def around(component: str) -> Outcome:
    """Fail the restore of one kind."""
    outcome = Outcome(f"a restore of {component} that raises")
    _try(_fail_a_restore, list(_built()), _Raising(component, "after", RuntimeError), outcome)
    return outcome


def _try(fail: _Fail, order: list[str], raising: _Raising, outcome: Outcome) -> None:
    outcome.tried += 1
    built = _built()
    components = {name: built[name] for name in order}
    where = f"{fail.__name__[1:]}: {raising}, in {order}"
    with scratch() as folder, quiet(), warnings.catch_warnings(), outcome.judging(where):
        warnings.simplefilter("error")
        with CheckpointManager(folder, components, keep_last=2, save_on_exit=False) as manager:
            _train(components, 1)
            manager.save(1)
            first = _photo(components)
            _train(components, 2)
            fail(manager, components, raising)
            if manager.restore(1) is None or _photo(components) != first:
                raise WrongBitsError("afterwards, step 1 does not come back as it was")
            _train(components, 3)
            manager.save(3)
            third = _photo(components)
            _train(components, 4)
            manager.restore()
            if _photo(components) != third:
                raise WrongBitsError("afterwards, a new step does not come back as it was")


def _fail_a_save(manager: CheckpointManager, components: dict[str, Any], raising: _Raising) -> None:
    before, files = _photo(components), checkpoint_files(manager.directory)
    with raising.at_save():
        try:
            manager.save(2)
        except raising.error:
            pass
        else:
            raise WrongBitsError("the save has swallowed it")
    _compare(before, _photo(components))
    assert checkpoint_files(manager.directory) == files
    assert temps_in(manager.directory) == []


def _fail_a_restore(manager: CheckpointManager, components: dict[str, Any], raising: _Raising) -> None:
    manager.save(2)
    _train(components, 5)
    before, files = _photo(components), checkpoint_files(manager.directory)
    with raising.at_restore():
        try:
            manager.restore()
        except raising.error:
            pass
        else:
            raise WrongBitsError("the restore has swallowed it")
    _compare(before, _photo(components))
    assert checkpoint_files(manager.directory) == files


def _compare(before: Bits, after: Bits) -> None:
    changed = changes(before, after)
    if changed:
        raise WrongBitsError(f"it has changed {', '.join(changed)}")
