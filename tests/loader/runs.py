"""An uninterrupted run over a loader, with the state it would have saved at every position."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from safeckpt.loader import ResumableLoader
from safeckpt.state.tree import map_tensors

State = dict[str, Any]
Position = tuple[int, int]


class Straight(NamedTuple):
    """`batches` of every epoch, and `states`: by (epoch, batch), (epoch, 0) being after the loop before."""

    batches: list[list[Any]]
    states: dict[Position, State]

    def rest(self, position: Position) -> list[list[Any]]:
        epoch, batch = position
        return [self.batches[epoch][batch:], *self.batches[epoch + 1 :]]


def through_a_file(state: State) -> State:
    """Return what a fresh process reads: only plain values and tensors survive `weights_only=True`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(state: State) -> Any:
    """Return the state with tensors as lists, to be compared as a whole."""
    return map_tensors(state, torch.Tensor.tolist)


def straight(make: Callable[[], Any], epochs: int = 3, **options: Any) -> Straight:
    loader = ResumableLoader(make(), seed=1, **options)
    run = Straight([], {(0, 0): through_a_file(loader.state_dict())})
    for epoch in range(epochs):
        assert (loader.epoch, loader.batch) == (epoch, 0)
        run.batches.append([])
        for batch in loader:
            run.batches[-1].append(batch)
            assert (loader.epoch, loader.batch) == (epoch, len(run.batches[-1]))
            run.states[epoch, loader.batch] = through_a_file(loader.state_dict())
        run.states[epoch + 1, 0] = through_a_file(loader.state_dict())
    return run


def resumed(make: Callable[[], Any], state: State, epochs: int = 3, **options: Any) -> list[list[Any]]:
    """Return the batches of each epoch from `state` on, by a loader that was built anew and has another seed."""
    loader = ResumableLoader(make(), **options)
    loader.load_state_dict(state)
    assert (loader.epoch, loader.batch) == (state["epoch"], state["batch"])
    return [list(loader) for _ in loader.epochs(epochs)]
