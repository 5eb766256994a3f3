"""What a module keeps besides its state_dict is compared at a restore, and named where it changes while training."""

import warnings

import pytest
import torch
from torch import nn

from safeckpt import CheckpointManager, ComponentChangedWarning, UncapturedStateWarning
from safeckpt.state import HiddenState, capture, plan, register
from tests.state.runs import payload_of


class Scaled(nn.Module):
    """A layer of the user's that says how it was built."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def extra_repr(self):
        return f"scale={self.scale}"


class Broken(nn.Module):
    """A layer whose description fails."""

    def extra_repr(self):
        return f"size={self.missing}"


BUILT = {
    "dropout": (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.5), ["m.0 (Dropout): saved p=0.1, live p=0.5"]),
    "norm": (
        lambda: nn.BatchNorm1d(2, eps=1e-5, momentum=0.1), lambda: nn.BatchNorm1d(2, eps=1e-3, momentum=0.2),
        ["m.0 (BatchNorm1d): saved eps=1e-05, live eps=0.001",
         "m.0 (BatchNorm1d): saved momentum=0.1, live momentum=0.2"],
    ),
    "convolution": (
        lambda: nn.Conv1d(1, 1, 3), lambda: nn.Conv1d(1, 1, 3, stride=2),
        ["m.0 (Conv1d): saved stride=(1,), live stride=(2,)"],
    ),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2), lambda: nn.MultiheadAttention(4, 4),
        ["m.0 (MultiheadAttention): saved head_dim=2, live head_dim=1",
         "m.0 (MultiheadAttention): saved num_heads=2, live num_heads=4"],
    ),
    "of the user's": (lambda: Scaled(1), lambda: Scaled(2), ["m.0 (Scaled): saved scale=1, live scale=2"]),
    "without a description": (Broken, Broken, []),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILT)
def test_layer_that_is_built_differently_is_noticed(kind):
    """Every tensor fits, and the run is another: module, saved and live value are named."""
    saved, live, notices = BUILT[kind]
    ready = plan(register({"m": nn.Sequential(live())}), payload_of({"m": nn.Sequential(saved())}))
    assert ready.notices == notices
    assert plan(register({"m": nn.Sequential(saved())}), payload_of({"m": nn.Sequential(saved())})).notices == []


def test_restore_of_a_layer_that_is_built_differently_warns(memory_path):
    """The restore is made, and the live value stays."""
    with CheckpointManager(memory_path, {"m": nn.Dropout(0.1), "c": {}}) as manager:
        manager.save(1)
    live = nn.Dropout(0.5)
    manager = CheckpointManager(memory_path, {"m": live, "c": {}})
    with manager, pytest.warns(ComponentChangedWarning, match=r"m \(Dropout\): saved p=0.1, live p=0.5"):
        manager.restore()
    assert live.p == 0.5


class Counting(nn.Module):
    """Keeps state in every place that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.calls = 0
        self.kind = "fixed"
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def train_once(self):
        self.calls += 1
        self.seen += 1
        self.table = torch.arange(3.0)  # computed again, and the same
        self.cache = torch.zeros(self.calls)  # grows
        self.drop.p += 0.1


def test_state_that_changes_while_training_is_named_once(memory_path):
    """A non-persistent buffer, an argument of a layer and a counter are named; constants and caches are not."""
    model = Counting()
    with CheckpointManager(memory_path, {"model": model, "c": {}}) as manager:
        manager.save(1)
        model.train_once()
        with pytest.warns(UncapturedStateWarning) as caught:
            manager.save(2)
        found = sorted(str(one.message) for one in caught)
        assert [text.partition(",")[0].partition(" which")[0] for text in found] == [
            "Not captured: model.calls: a plain attribute",
            "Not captured: model.drop: Dropout was p=0.1",
            "Not captured: model.seen: a non-persistent buffer",
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.train_once()
            manager.save(3)


def test_layer_that_nothing_changes_is_not_named():
    """Training as usual, in and out of eval mode, leaves nothing to say."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1), nn.LSTM(2, 2))
    registered = register({"m": model})
    hidden = HiddenState(registered)
    model[:2](torch.ones(3, 2)).sum().backward()
    model.eval()
    assert hidden.changed(capture(registered).pairs) == []
    model.train()
    assert hidden.changed(capture(registered).pairs) == []


class Kept(nn.Linear):
    """A layer that has its counter in its state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_attribute_of_a_module_with_a_state_of_its_own_is_not_named(memory_path):
    """What get_extra_state returns is in the checkpoint, and comes back."""
    model = Kept(2, 2)
    components = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with CheckpointManager(memory_path, components) as manager:
        for step in (1, 2, 3):
            model.calls = step
            manager.save(step)
        model.calls = 9
        manager.restore()
    assert model.calls == 3
