"""The order of an epoch: which indices make which batch, drawn from streams that belong to the loader alone."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from safeckpt.errors import StateMismatchError, UncapturedStateWarning
from safeckpt.loader.plain_state import PlainState
from safeckpt.loader.private_generators import find_generators
from safeckpt.loader.streams import PrivateStreams
from safeckpt.state.component import Captured
from safeckpt.state.random_streams import GeneratorComponent
from safeckpt.system.warn import warn_caller

__all__ = ["EpochOrder", "sampler_chain"]

# These use the global streams when the iteration begins or at the first index, and never after it.
_DRAW_AT_ONCE = (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    list,
    range,
    tuple,
)
_LARGEST_PIECE = 64  # batches that a sampler of unknown habits draws in one visit to the private streams


def sampler_chain(dataloader: DataLoader[Any]) -> list[Any]:
    """Return what makes the batches of indices, then the sampler inside it, and so on."""
    sampler: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
    chain: list[Any] = []
    while sampler is not None and not any(sampler is known for known in chain):
        chain.append(sampler)
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return chain


def _consume(iterator: Iterator[Any], count: int) -> int:
    """Draw up to `count` items and return how many there were."""
    counter = itertools.count()
    deque(zip(itertools.islice(iterator, count), counter, strict=False), maxlen=0)
    return next(counter)


class EpochOrder:
    """Draws the batches of indices of one epoch after the other.

    What the order depends on: the seed and number of the epoch (through the private streams and `set_epoch`), the
    positions of the samplers' own generators at the start of the epoch, the samplers' own `state_dict`, and the plain
    values that samplers without one have changed.

    Args:
        dataloader: The user's; only its samplers are used.
    """

    def __init__(self, dataloader: DataLoader[Any]) -> None:
        self._chain = sampler_chain(dataloader)
        self._sampler: Iterable[Any] = self._chain[0]
        self._bare_generator = dataloader.generator
        self._persistent = dataloader.persistent_workers
        roots = {"generator": dataloader.generator, "sampler": self._sampler}
        found = find_generators(roots, skip=(dataloader.dataset,))
        self._generators = {path: GeneratorComponent(path, generator) for path, generator in found.items()}
        self._stateful = [s for s in self._chain if hasattr(s, "state_dict") and hasattr(s, "load_state_dict")]
        own = {
            f"sampler{number or ''}": sampler
            for number, sampler in enumerate(self._chain)
            if type(sampler) not in (BatchSampler, *_DRAW_AT_ONCE) and sampler not in self._stateful
        }
        self._values = PlainState(own, skip=(dataloader.dataset, *(s for s in self._chain if s not in own.values())))
        self._offset: tuple[int, int] | None = None
        self._warned = False

    def state(self) -> dict[str, Any]:
        """Return what the order of an epoch that starts now depends on, besides its seed and number."""
        generators = {path: component.capture() for path, component in self._generators.items()}
        return {
            "generators": {path: {"state": c.state, "record": c.record} for path, c in generators.items()},
            "samplers": [sampler.state_dict() for sampler in self._stateful],
            "values": self._values.capture(),
            "offset": self._offset and list(self._offset),
        }

    def check(self, state: dict[str, Any]) -> list[str]:
        """Return what keeps `state` from being restored, one sentence each."""
        saved, live = state["generators"], self._generators
        found = [f"the order drew from {path}, which is not there now" for path in saved if path not in live]
        found += [f"the order draws from {path}, which is not in the saved state" for path in live if path not in saved]
        for path, component in live.items():
            if path in saved:
                found += component.check(Captured(**saved[path]))
        if len(state["samplers"]) != len(self._stateful):
            found.append(f"samplers with a state_dict: {len(state['samplers'])} saved, {len(self._stateful)} now")
        return found + self._values.check(state.get("values", {}))

    def restore(self, state: dict[str, Any]) -> None:
        """Put the samplers where they were at the start of an epoch."""
        self._values.restore(state.get("values", {}))
        for path, component in self._generators.items():
            component.apply(Captured(**state["generators"][path]))
        for sampler, saved in zip(self._stateful, state["samplers"], strict=True):
            sampler.load_state_dict(saved)
        self._offset = state["offset"] and tuple(state["offset"])

    def draw(self, seed: int, epoch: int, start: int) -> Iterator[tuple[int, Any]]:
        """Yield (number, indices) of the batches of an epoch from number `start` on. Reads no sample.

        Raises:
            StateMismatchError: The epoch has fewer batches than `start`.
        """
        streams = PrivateStreams(seed)
        iterator, first = streams.run(lambda: self._begin(epoch, start))
        at_once = all(type(sampler) in (BatchSampler, *_DRAW_AT_ONCE) for sampler in self._chain)
        self._offset = None
        if not first:
            return
        yield start, first[0]
        if at_once:
            yield from enumerate(iterator, start + 1)
            return
        number, size = start + 1, 1
        while piece := streams.run(lambda: list(itertools.islice(iterator, size))):  # noqa: B023 - run at once
            yield from enumerate(piece, number)
            number += len(piece)
            size = min(2 * size, _LARGEST_PIECE)

    def after(self, state: dict[str, Any], seed: int, epoch: int, batch: int) -> dict[str, Any]:
        """Return the state after exactly `batch` batches of the epoch that started at `state`; nothing moves.

        An epoch that is left early leaves a sampler's own generator where prefetching had got to, which depends on
        the number of workers. The next epoch starts from here instead.
        """
        if not self._generators and not self._stateful and not self._values.has_objects:
            return self.state() | {"offset": None}
        now = self.state()
        try:
            self.restore(state)
            streams = PrivateStreams(seed)
            streams.run(lambda: self._begin(epoch, max(batch - 1, 0)))
            return self.state() | {"offset": None}
        finally:
            self.restore(now)

    def _begin(self, epoch: int, start: int) -> tuple[Iterator[Any], list[Any]]:
        """Return the samplers' iterator behind batch number `start`, and that batch in a list (empty at the end)."""
        if type(self._sampler) is BatchSampler:
            # Counting single indices is far cheaper than making lists of them, and exact: every batch is full.
            size, drop_last = self._sampler.batch_size, self._sampler.drop_last
            samples = iter(self._sampler.sampler)
            self._draw_base_seed(epoch)
            first_batch, first_sample = self._offset or (0, 0)
            _consume(samples, first_sample)
            passed = _consume(samples, (start - first_batch) * size)
            reached = first_batch + (passed if drop_last else passed + size - 1) // size
            iterator = iter(BatchSampler(samples, size, drop_last))
        else:
            iterator = iter(self._sampler)
            self._draw_base_seed(epoch)
            reached = _consume(iterator, start)
        if reached < start:
            raise StateMismatchError(
                mismatches=[f"the position is batch {start} of epoch {epoch}, and its order ends after {reached}"]
            )
        first = list(itertools.islice(iterator, 1))
        self._warn_of_iterators()
        return iterator, first

    def _draw_base_seed(self, epoch: int) -> None:
        """Draw what a bare DataLoader draws from its `generator=` per iterator, so that the order is the same too."""
        if self._bare_generator is not None and (epoch == 0 or not self._persistent):
            torch.empty((), dtype=torch.int64).random_(generator=self._bare_generator)

    def _warn_of_iterators(self) -> None:
        if self._warned or not self._values.has_objects:
            return
        self._values.capture()
        if self._values.unsaved:
            self._warned = True
            warn_caller(
                f"how far {', '.join(self._values.unsaved)} has got cannot be saved: if the order depends on it, a "
                "resumed run sees another order. Give the sampler state_dict and load_state_dict, or derive the order "
                "from set_epoch(epoch).",
                UncapturedStateWarning,
            )
