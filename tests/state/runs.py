"""Small training runs, and the proof that one resumed from a real file is the run that was never stopped."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from safeckpt import CheckpointManager, StateMismatchError, load
from safeckpt.state import Mixture, capture, copy_tree, plan, register
from safeckpt.state.run_state import RESERVED_KEY
from tests.comparing import bits, changes, photograph, streams
from tests.training import seed_all, update


class Net(nn.Module):
    """Two layers, dropout and batch norm: something of everything that can be lost."""

    def __init__(self, bias=True):
        super().__init__()
        self.first = nn.Linear(4, 6, bias=bias)
        self.norm = nn.BatchNorm1d(6, affine=bias)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(6, 3, bias=bias)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class SparseNet(nn.Module):
    """One embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 3, sparse=True)

    def forward(self, x):
        return self.embedding((x[:, :2].abs() * 10).long() % 12).tanh().sum(dim=1)


def batch(dtype=torch.float32):
    """Draw a batch from all three streams, so that a run depends on each of them."""
    x = torch.randn(8, 4, dtype=torch.float64) + np.random.rand() + random.random()
    y = torch.randn(8, 3, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def train_step(components, dtype=torch.float32):
    """Do one step with everything that is among the components; return the loss as a float."""
    x, y = batch(dtype)

    def loss():
        output = components["model"](x)
        if output.is_complex():
            output = torch.view_as_real(output).sum(-1)
        return ((output - y) ** 2).mean()

    return update(components["optimizer"], components.get("scheduler"), loss).item()


def run(components, steps, step=train_step):
    return [step(components) for _ in range(steps)]


def state_of(components):
    """Return everything that a checkpoint of the components would hold, in comparable form."""
    payload = capture(register(components)).payload
    return {key: bits(value) for key, value in payload.items() if key != RESERVED_KEY}


def resumed(build, path, kill, more, *, step=train_step, build_again=None, between=None, late=False, **options):
    """Train, save to a file, build everything anew from other seeds, restore; return all losses and the objects.

    Args:
        build_again: Builds the objects that take the state, when not `build` itself.
        between: Is called with them before the restore.
        late: Make the saving manager only after training.
    """
    seed_all(1)
    components = build()
    losses = run(components, kill if late else 0, step)
    with CheckpointManager(path, components, **options) as manager:
        losses += run(components, 0 if late else kill, step)
        manager.save(kill)
    seed_all(2)
    components = (build_again or build)()
    if between is not None:
        between(components)
    with CheckpointManager(path, components, **options) as manager:
        manager.restore()
    return losses + run(components, more, step), components


def straight(build, steps, step=train_step):
    seed_all(1)
    components = build()
    return run(components, steps, step), components


def assert_resumes(build, path, *, kill=4, more=5, step=train_step, build_again=None, between=None, late=False):
    """Assert that losses, final state and random streams of a resumed run equal those of one never stopped.

    Every warning is an error in these tests, so a report of a hyper-parameter that did not change fails it too.
    """
    expected, never_stopped = straight(build, kill + more, step)
    final, drawn = state_of(never_stopped), streams()
    losses, components = resumed(
        build, path, kill, more, step=step, build_again=build_again, between=between, late=late
    )
    assert losses == expected
    assert streams() == drawn
    if build_again is None:
        assert state_of(components) == final
    return components


def payload_of(components):
    """Return a payload of its own memory, as read from a file."""
    return copy_tree(capture(register(components)).payload)


def refusal(payload, components, **options):
    """Plan a restore that has to be refused; return the mismatches after asserting that nothing at all has changed."""
    registered = register(components)
    before = photograph(**components)
    with pytest.raises(StateMismatchError) as caught:
        plan(registered, payload, **options)
    assert changes(before, photograph(**components)) == []
    return sorted(caught.value.mismatches)


def give(payload, components, **options):
    """Restore a payload into components; return the plan."""
    ready = plan(register(components), payload, **options)
    ready.apply(Mixture())
    return ready


def through_file(components, path):
    """Save the components to a file and return the payload as it is read back."""
    with CheckpointManager(path, components) as manager:
        checkpoint = manager.save(1)
    return load(checkpoint.path)
