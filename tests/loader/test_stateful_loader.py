"""Loaders that keep their own position, StatefulDataLoader first of all."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from safeckpt.errors import StateMismatchError
from safeckpt.loader import ResumableLoader
from tests.loader.runs import resumed, straight
from tests.loader.workloads import SAMPLES, Augmented, StatefulStream, collate


class Shuffled:
    """A loader with a memory: each epoch goes on from the shuffle before, and draws for each batch."""

    def __init__(self):
        self.order = list(range(12))
        self.at = None

    def __len__(self):
        return 4

    def __iter__(self):
        if self.at is None:
            random.shuffle(self.order)
            self.at = 0
        while self.at < 4:
            self.at += 1
            yield [*self.order[3 * self.at - 3 : 3 * self.at], random.random(), np.random.rand(), torch.rand(()).item()]
        self.at = None

    def state_dict(self):
        return {"order": list(self.order), "at": self.at}

    def load_state_dict(self, state):
        self.order, self.at = list(state["order"]), state["at"]


def test_loader_with_a_state_resumes_at_every_position():
    """The loader's own state and the draws of this process give the rest of the uninterrupted run."""
    run = straight(Shuffled)
    assert len({str(batches) for batches in run.batches}) == 3
    for position, state in run.states.items():
        assert resumed(Shuffled, state) == (run.rest(position) if position[0] < 3 else []), position


def test_loader_with_a_state_is_rewound_in_the_loop():
    """Rewinding reloads the loader's state and makes a new iterator."""
    run = straight(Shuffled, epochs=2)
    loader = ResumableLoader(Shuffled(), seed=1)
    seen, done = [], False
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch)
            if loader.last_batches(1) == [(1, 1)] and not done:
                loader.load_state_dict(run.states[0, 2])
                done = True
    first, second = run.batches
    assert seen == first + second[:2] + first[2:] + second


def test_other_loader_class_is_refused():
    """The state of one loader class means nothing to another."""

    class Other(Shuffled):
        pass

    with pytest.raises(StateMismatchError, match="loader class: 'Shuffled' in the saved state"):
        ResumableLoader(Other()).load_state_dict(ResumableLoader(Shuffled()).state_dict())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_stateful_dataloader_is_delegated_to(workers, kind):
    """Order, and without workers every draw, is that of the uninterrupted run; breaks are taken along."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make():
        torch.manual_seed(0)  # its sampler takes a seed of its own from the global stream
        if kind == "map":
            data, options = Augmented(), {"shuffle": True}
        else:
            data, options = StatefulStream(SAMPLES), {}
        return torchdata.StatefulDataLoader(data, batch_size=3, collate_fn=collate, num_workers=workers, **options)

    def exact(batches):
        return [[row[:1] if workers else row[:6] for row in batch] for batch in batches]

    run = straight(make)
    for position in [(0, 0), (0, 1), (0, 3), (1, 0), (1, 2), (2, 0)]:
        rest = resumed(make, run.states[position])
        assert [exact(batches) for batches in rest] == [exact(batches) for batches in run.rest(position)], position

    loader = ResumableLoader(make(), seed=1)
    for _ in loader:
        break
    loader.end_epoch()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    assert exact(resumed(make, state, epochs=2)[0]) == exact(list(loader))


def test_place_behind_the_last_step_is_reached_from_an_earlier_state():
    """A loader that only says where it is now is put back, and passes over what was trained."""
    run = straight(Shuffled)
    loader = ResumableLoader(Shuffled(), seed=1)
    loader.expect_end_step()
    it = iter(loader)
    for step in (1, 2, 3):
        next(it)
        if step < 3:
            loader.end_step(step)
        if step == 1:
            loader.state_dict()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"], state["snapshot"]["at"]) == (0, 2, 1)
    assert resumed(Shuffled, state) == run.rest((0, 2))
