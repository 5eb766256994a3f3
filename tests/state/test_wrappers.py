"""Wrappers of others, registered by their class: the object inside is the component."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt.state import wrappers
from tests.manager.helpers import manager_of
from tests.training import Run


class Tuned(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer that never calls Optimizer.__init__ and hands everything on."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


class Paced:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


class Deeper(Paced):
    """A subclass, around another wrapper."""


def optimizer_of(tuned: Any) -> Any:
    return tuned.optimizer


def scheduler_of(paced: Any) -> Any:
    return paced.scheduler


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "_inner_of", {})


def test_wrapped_components_are_those_inside(tmp_path: Path) -> None:
    """Saved under wrappers and restored without them, and the other way round, it is the same run."""
    safeckpt.register_wrapper(Tuned, optimizer_of)
    safeckpt.register_wrapper(Paced, scheduler_of)
    for path, wrap_before in ((tmp_path / "a", True), (tmp_path / "b", False)):
        run, fresh = Run(), Run(seed=3)
        one = run if wrap_before else fresh
        one.components |= {"optimizer": Tuned(one.optimizer), "scheduler": Deeper(Paced(one.scheduler))}
        with manager_of(path, run) as manager:
            run.steps(2)
            manager.save(2)
            expected = run.steps(3)
        with manager_of(path, fresh) as manager:
            manager.restore()
            assert fresh.steps(3) == expected


def test_wrapper_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    """The mapping is compared with the objects that were given, not with those inside."""
    safeckpt.register_wrapper(Paced, scheduler_of)
    run = Run()
    run.components["scheduler"] = Paced(run.scheduler)
    with manager_of(tmp_path, run) as manager:
        manager.save(1)
        run.components["scheduler"] = Paced(run.scheduler)
        with pytest.raises(safeckpt.UnsavableStateError):
            manager.save(2)


def test_object_and_its_wrapper_are_one_object(tmp_path: Path) -> None:
    """Under two names it is refused, as without the wrapper."""
    safeckpt.register_wrapper(Paced, scheduler_of)
    run = Run()
    run.components["again"] = Paced(run.scheduler)
    with pytest.raises(ValueError, match="are the same object"):
        manager_of(tmp_path, run)


def test_registration_is_idempotent_and_refuses_a_conflict() -> None:
    """The same function again is nothing; another one is an error, and the first stays."""
    safeckpt.register_wrapper(Paced, scheduler_of)
    safeckpt.register_wrapper(Paced, scheduler_of)
    with pytest.raises(ValueError, match="Paced is registered with another function already"):
        safeckpt.register_wrapper(Paced, optimizer_of)
    assert wrappers.unwrapped({"a": Paced(1)}) == {"a": 1}


def test_wrong_arguments_are_refused() -> None:
    """No class, nothing to call, and a wrapper that has itself inside."""
    with pytest.raises(TypeError, match="takes a class"):
        safeckpt.register_wrapper("Paced", scheduler_of)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callable"):
        safeckpt.register_wrapper(Paced, 1)  # type: ignore[arg-type]
    safeckpt.register_wrapper(Paced, lambda paced: paced)
    with pytest.raises(TypeError, match=r"'a' is a Paced, .* leads back to it"):
        wrappers.unwrapped({"a": Paced(1)})
