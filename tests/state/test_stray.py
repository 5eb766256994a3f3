"""An optimizer that is not registered is named when it trains; models that no optimizer moves are no alarm."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from safeckpt import CheckpointManager, UncapturedStateWarning
from safeckpt.state import StrayOptimizers, register


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_optimizer_that_is_not_registered_is_named_once_at_the_save(memory_path):
    """The warning has the parameters that it trains; a second save says nothing more."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    known, forgotten = SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters(), lr=0.1)
    with CheckpointManager(memory_path, {"model": model, "optimizer": known}) as manager:
        step(model, known)
        manager.save(1)
        step(model, forgotten)
        with pytest.warns(UncapturedStateWarning, match=r"the Adam that trains model.1.weight, model.1.bias is not"):
            manager.save(2)
        step(model, forgotten)
        manager.save(3)


class Wrapped:
    """Holds an optimizer and saves it, as wrappers for mixed precision do."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def others(model):
    """Return objects that require gradients and that no optimizer moves."""
    return {
        "target": copy.deepcopy(model), "average": AveragedModel(model), "ema": copy.deepcopy(model).eval(),
    }  # fmt: skip


def test_models_that_no_optimizer_moves_are_no_alarm(memory_path):
    """Target networks, moving averages, and a model that is stepped by hand."""
    model, by_hand = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    components = {"model": model, "optimizer": Wrapped(optimizer), "by_hand": by_hand, **others(model)}
    with CheckpointManager(memory_path, components) as manager:
        step(model, optimizer)
        by_hand(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter.sub_(parameter.grad)
        manager.save(1)


def test_model_that_is_evaluated_is_no_alarm(memory_path):
    """A script that restores the model alone has no optimizer, and needs none."""
    model = nn.Linear(2, 1)
    with CheckpointManager(memory_path, {"model": model, "optimizer": SGD(model.parameters(), lr=1)}) as manager:
        manager.save(1)
    CheckpointManager(memory_path, {"model": nn.Linear(2, 1)}).restore(only=("model",))


def test_optimizer_of_other_parameters_is_no_concern():
    """A second model in the same process may have an optimizer of its own."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    watched = StrayOptimizers(register({"model": model, "optimizer": SGD(model.parameters(), lr=1)}))
    step(other, SGD(other.parameters(), lr=1))
    assert watched.found() == []
    watched.close()


def test_optimizer_kept_as_an_attribute_of_a_module_is_found():
    """A module's state_dict has no optimizers in it."""
    model = nn.Linear(2, 1)
    model.optimizer = SGD(model.parameters(), lr=1)
    watched = StrayOptimizers(register({"model": model}))
    step(model, model.optimizer)
    (line,) = watched.found()
    assert line.startswith("model: the SGD that trains model.weight, model.bias is not registered")
    watched.close()


def test_watch_that_is_never_closed_keeps_nothing_alive():
    """Neither the watch nor an optimizer lives on in torch's table of hooks."""
    model = nn.Linear(2, 1)
    watched = weakref.ref(StrayOptimizers(register({"model": model})))
    gc.collect()
    assert watched() is None
    optimizer = SGD(model.parameters(), lr=1)
    kept = StrayOptimizers(register({"model": model}))
    step(model, optimizer)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None
    kept.close()
