"""The wrapper around a DataLoader that keeps its position."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from safeckpt.errors import StateMismatchError
from safeckpt.loader.inputs import CONVERTIBLE, compare, convert
from safeckpt.loader.sources import INSIDE, LEFT, OUTSIDE, MapSource, logger, make_source
from safeckpt.state.tree import copy_tree

__all__ = ["ResumableLoader"]

_VERSION = 1
_KEYS = {"version", "kind", "seed", "epoch", "batch", "inputs", "left_out", "snapshot"}


class ResumableLoader:
    """Iterate a DataLoader so that a run resumed in the middle of an epoch sees what the uninterrupted one saw.

    The same batches in the same order, and the same random numbers in `__getitem__` and `collate_fn` (`random`,
    `numpy.random`, torch on the CPU, and generators kept by dataset, transforms or collate_fn), for any number of
    workers before and after the resume. Both are functions of the seed, the epoch and the batch number.

    The wrapped DataLoader is not iterated itself and the training process's random streams are never moved.

    Args:
        dataloader: A `torch.utils.data.DataLoader`, or any loader with `state_dict` and `load_state_dict` (torchdata's
            StatefulDataLoader), whose position is then its own affair.
        seed: What order and augmentation derive from, 0 to 2**63 - 1; drawn once from torch's global stream when it
            is not given. Saved with the position. Give all ranks of a distributed run the same one.
        convert: Inputs that may have changed at a resume: "batch_size", "world_size". The run then goes on at the
            same sample, which is said in a log line; what cannot be converted exactly is refused.

    Attributes:
        dataloader: What was wrapped. Its other attributes (`dataset`, `sampler`, `batch_size`) are found here too.

    Raises:
        TypeError: What is wrapped has no position that could be kept.
        ValueError: An argument is out of range, or `in_order=False`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = ResumableLoader(DataLoader(range(6), batch_size=2), seed=0)
        >>> for batch in loader:
        ...     state = loader.state_dict()
        ...     break
        >>> loader = ResumableLoader(DataLoader(range(6), batch_size=2))
        >>> loader.load_state_dict(state)
        >>> [batch.tolist() for batch in loader]
        [[2, 3], [4, 5]]
    """

    def __init__(self, dataloader: Any, *, seed: int | None = None, convert: Collection[str] = ()) -> None:
        if isinstance(dataloader, ResumableLoader):
            raise TypeError("this is a ResumableLoader already: use it as it is")
        if isinstance(convert, str) or not set(convert) <= set(CONVERTIBLE):
            raise ValueError(f"convert takes names among {', '.join(CONVERTIBLE)}; got {convert!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"seed must be an int from 0 to 2**63 - 1; got {seed!r}")
        self._source = make_source(dataloader)
        self.dataloader = dataloader
        self._convert = tuple(convert)
        self._seed = int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
        self._epoch = 0
        self._batch = 0
        # What the next iteration begins from when it does not just begin the next epoch; kept until a batch is out.
        self._resume: dict[str, Any] | None = None
        self._restores = 0
        self._restored = False  # the iteration in progress has not taken notice yet
        self._open = False  # a batch of this epoch was handed out by an iteration that has not come to its end
        self._live: weakref.ref[_Iteration] | None = None
        self._outer_exception = 0
        self._left_out: set[tuple[int, int]] = set()
        self._history: list[list[int]] = []  # runs of consecutive batches: epoch, first, last + 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "dataloader":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, wherever the position is."""
        return len(self.dataloader)

    @property
    def seed(self) -> int:
        """What order and augmentation derive from."""
        return self._seed

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated; between two, the one that comes next."""
        return self._position()[0]

    @property
    def batch(self) -> int:
        """How many batches of this epoch are behind: handed out, or left out. In the body of the first it is 1."""
        return self._position()[1]

    def _position(self) -> tuple[int, int, str]:
        """Return (epoch, batch, where).

        An iteration that was dropped before its end was left by `break`, which ends the epoch, or by an exception,
        which does not: a state saved while that exception is handled resumes where it struck.
        """
        if not self._open:
            return self._epoch, self._batch, OUTSIDE
        alive = self._live is not None and self._live() is not None
        if alive or self._exception() not in (0, self._outer_exception):
            return self._epoch, self._batch, INSIDE
        return self._epoch + 1, 0, LEFT

    @staticmethod
    def _exception() -> int:
        """Return an identity of the exception that is being handled, 0 for none."""
        error = sys.exception()
        # A generator around the loop is closed with GeneratorExit when its own loop is left by break.
        return 0 if error is None or isinstance(error, GeneratorExit) else id(error)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of this epoch after a restore, else over the next whole one."""
        self._leave()
        self._outer_exception = self._exception()
        iteration = _Iteration(self)
        self._live = weakref.ref(iteration)
        return iteration

    def _leave(self) -> None:
        """End an epoch that was not iterated to its end."""
        if self._open:
            self._resume = self._source.snapshot(LEFT, self._seed, self._epoch, self._batch)
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._batch = 0
        self._open = False

    def _begin(self) -> Iterator[tuple[int, Any]]:
        snapshot = self._resume
        if snapshot is None:
            # An iteration that ends before its first batch leaves no trace: the next one begins from here again.
            self._resume = self._source.snapshot(OUTSIDE, self._seed, self._epoch, self._batch)
        deliveries = self._source.begin(self._seed, self._epoch, self._batch, snapshot, self._left_out)
        self._restored = False
        return deliveries

    def _hand_out(self, number: int) -> None:
        self._batch = number + 1
        self._open = True
        self._resume = None
        last = self._history[-1] if self._history else None
        if last is not None and last[2] == number and last[0] == self._epoch:
            last[2] = number + 1
        else:
            self._history.append([self._epoch, number, number + 1])

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs up to `n`, beginning with the one in which the position is.

        After a resume that is the epoch of which the rest is left, also when nothing of it is left: what follows
        the inner loop still runs once. Leaving the body ends the epoch, however much of it was iterated; after a
        rollback in the body the next one is wherever the rewound position says.

        Args:
            n: Number of epochs of the whole run.
        """
        while self.epoch < n:
            epoch, restores = self.epoch, self._restores
            yield epoch
            if self._open:
                self._leave()
            elif self._restores == restores and self._epoch == epoch:
                self._resume = None
                self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and all it depends on, as plain values and tensors. Changes nothing.

        In the body of the loop it is the position after the batch at hand, so save after its step; a state saved in
        the body of the last batch resumes into an empty rest. After the loop it is the start of the next epoch.
        """
        epoch, batch, where = self._position()
        snapshot = self._resume
        if snapshot is None or where == LEFT:
            snapshot = self._source.snapshot(where, self._seed, self._epoch, self._batch)
        return {
            "version": _VERSION,
            "kind": self._source.kind,
            "seed": self._seed,
            "epoch": epoch,
            "batch": batch,
            "inputs": self._source.inputs(),
            "left_out": [list(position) for position in self.left_out if position >= (epoch, batch)],
            "snapshot": copy_tree(snapshot),
        }

    def check_state(self, state: dict[str, Any]) -> list[str]:
        """Return what keeps `state` from being loaded, one sentence for each difference. Changes nothing."""
        if not isinstance(state, dict) or not state.keys() >= _KEYS:
            return ["this is not a state of a ResumableLoader"]
        if state["version"] > _VERSION:
            return [f"the state has version {state['version']}, this safeckpt reads up to {_VERSION}"]
        if state["kind"] != self._source.kind:
            return [f"kind of loader: {state['kind']!r} in the saved state, {self._source.kind!r} now"]
        allowed = self._convert if isinstance(self._source, MapSource) else ()
        found = compare(state["inputs"], self._source.inputs(), allowed)
        if not found:
            found = self._source.check(state["snapshot"])
        if not found:
            converted = self._converted(state)
            found = [converted] if isinstance(converted, str) else []
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next iteration, or the one in progress, goes on from there.

        The state of a sampler's own generator is set when that iteration goes on, not here.

        Raises:
            StateMismatchError: Dataset length, batch size, drop_last, sampler, world size or kind differ; all are
                named and nothing has changed.
        """
        mismatches = self.check_state(state)
        if mismatches:
            raise StateMismatchError(mismatches=mismatches)
        converted = self._converted(state)
        if converted is not state and isinstance(converted, dict):
            logger.warning(
                "the saved position, batch %d of epoch %d, goes on as batch %d of this loader, at sample %d",
                state["batch"], state["epoch"], converted["batch"], converted["snapshot"]["offset"][1],
            )  # fmt: skip
            state = converted
        same_run = state["seed"] == self._seed
        self._seed, self._epoch, self._batch = state["seed"], state["epoch"], state["batch"]
        self._resume = copy_tree(state["snapshot"])
        self._left_out = {(epoch, number) for epoch, number in state["left_out"]}
        self._open = False
        self._restored = True
        self._restores += 1
        self._forget(same_run=same_run)

    def _converted(self, state: dict[str, Any]) -> dict[str, Any] | str:
        """Return `state` itself, the state for this batch size and world size, or why there is none."""
        saved, live = state["inputs"], self._source.inputs()
        if not isinstance(self._source, MapSource) or all(saved[key] == live[key] for key in CONVERTIBLE):
            return state
        here = (state["epoch"], state["batch"])
        if any(tuple(position) >= here for position in state["left_out"]):
            return "batch size or world size changed, and batches that are to be left out cannot be converted"
        offset = tuple(state["snapshot"]["offset"] or (0, 0))
        position = convert(saved, live, self._source.chain, state["batch"], offset)
        if isinstance(position, str):
            return position
        snapshot = state["snapshot"] | {"offset": list(position)}
        return state | {"batch": position[0], "snapshot": snapshot, "inputs": live}

    def _forget(self, *, same_run: bool) -> None:
        """Take out of the history what the new position has undone."""
        here = (self._epoch, self._batch)
        kept = [
            [epoch, first, min(last, self._batch) if epoch == self._epoch else last]
            for epoch, first, last in self._history
        ]
        self._history = [run for run in kept if same_run and tuple(run[:2]) < here and run[1] < run[2]]

    def last_batches(self, k: int) -> list[tuple[int, int]]:
        """Return (epoch, number) of the last `k` batches handed out, oldest first, numbered from 0 in each epoch.

        May cross an epoch's border. Fewer when fewer were handed out in this process; a batch that a rewind has
        undone counts no more.
        """
        found: list[tuple[int, int]] = []
        for epoch, first, last in reversed(self._history):
            wanted = k - len(found)
            found += [(epoch, number) for number in reversed(range(max(first, last - wanted), last))]
            if len(found) >= k:
                break
        return found[::-1]

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(epoch, number) of the batches that are not handed out, ascending."""
        return sorted(self._left_out)

    def leave_out(self, positions: Iterable[tuple[int, int]]) -> None:
        """Do not hand out these batches, given as (epoch, number). Kept in the state; `load_state_dict` replaces them.

        Indices are not fetched, except when a worker has them already; an iterable dataset has to draw them.
        """
        self._left_out.update((int(epoch), int(number)) for epoch, number in positions)


class _Iteration:
    """One `for` over the loader. It follows the loader's position when that is set from within the loop."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader
        self._deliveries: Iterator[tuple[int, Any]] | None = loader._begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._deliveries is None:
            raise StopIteration
        if loader._live is None or loader._live() is not self:
            raise RuntimeError("a newer iteration over this ResumableLoader has taken its position over")
        if loader._restored:
            self._deliveries = iter(())  # ends the old workers and what they had prefetched before new ones begin
            self._deliveries = loader._begin()
        while True:
            try:
                number, batch = next(self._deliveries)
            except StopIteration:
                loader._source.finish()
                self._deliveries = None
                loader._resume = None
                loader._next_epoch()
                raise
            if not loader._left_out or (loader._epoch, number) not in loader._left_out:
                loader._hand_out(number)
                return batch
