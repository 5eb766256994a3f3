"""Gradients that a later step still needs are state, of whatever parameters there are at the save."""

import pytest
import torch
from torch import nn

from safeckpt import CheckpointManager, NonFiniteError
from safeckpt.state import capture, register
from safeckpt.state.gradients import Gradients
from tests.state.runs import refusal


def built(classes):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, classes))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def grow(components, classes):
    """Put another head into the model, as class-incremental training does."""
    model, optimizer = components["model"], components["optimizer"]
    model[1] = nn.Linear(8, classes)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def test_gradients_of_a_head_made_while_training_are_saved_and_restored(memory_path):
    """Between two micro-steps, those of the new head come back, and the old head's are gone with it."""
    components = built(2)
    with CheckpointManager(memory_path, components) as manager:
        components["model"](torch.randn(3, 4)).sum().backward()
        manager.save(1)
        grow(components, 4)
        components["model"](torch.randn(3, 4)).sum().backward()
        manager.save(2)
    expected = {name: p.grad.clone() for name, p in components["model"].named_parameters()}
    live = built(4)
    with CheckpointManager(memory_path, live) as manager:
        manager.restore()
    for name, parameter in live["model"].named_parameters():
        assert torch.equal(parameter.grad, expected[name])


def test_nan_in_the_gradient_of_a_new_head_is_refused(memory_path):
    """It would ruin the next step as any other does."""
    components = built(2)
    with CheckpointManager(memory_path, components) as manager:
        grow(components, 4)
        components["model"](torch.randn(3, 4)).sum().backward()
        components["model"][1].weight.grad[0, 0] = torch.nan
        with pytest.raises(NonFiniteError, match=r"model\.1\.weight\.grad: 1 NaN"):
            manager.save(1)


def test_saved_gradients_that_fit_no_parameter_are_refused_before_anything_is_changed():
    """A file may hold one for a parameter of another shape, or of none."""
    components = built(2)
    components["model"](torch.randn(3, 4)).sum().backward()
    gradients = {"model.1.weight": torch.ones(4, 8), "model.9.weight": torch.ones(1), "other.x": torch.ones(1)}
    payload = capture(register(components), gradients=gradients).payload
    assert refusal(payload, components) == [
        "model.1.weight: saved gradient of shape [4, 8], live shape [2, 8]",
        "model.9.weight: the checkpoint has a gradient for it, and there is no such parameter now",
    ]


def test_gradient_that_a_second_optimizer_still_needs_is_pending():
    """Two optimizers on one parameter: the gradient is spent when both have stepped with it."""
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.weight], lr=0.1)]
    watched = Gradients(register({"model": model, "first": optimizers[0], "second": optimizers[1]}))
    model(torch.ones(1, 2)).sum().backward()
    assert watched.pending().keys() == {"model.weight", "model.bias"}
    optimizers[0].step()
    assert watched.pending().keys() == {"model.weight"}
    optimizers[1].step()
    assert watched.pending() == {}
    watched.close()


def test_parameter_of_a_group_added_while_training_has_its_gradient_saved():
    """Unfreezing layer by layer puts parameters under an optimizer that it did not hold before."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    watched = Gradients(register({"model": model, "optimizer": optimizer}))
    model(torch.ones(1, 2)).sum().backward()
    assert watched.pending().keys() == {"model.1.weight", "model.1.bias"}
    optimizer.add_param_group({"params": list(model[0].parameters())})
    assert watched.pending().keys() == {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}
    watched.close()
