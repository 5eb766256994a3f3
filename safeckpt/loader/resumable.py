"""The wrapper around a DataLoader that keeps its position.

A position is where a run goes on: behind the batch whose step has ended, not behind the batch that was fetched.
How a loader gets to know of steps, which is all that a manager or a trainer's integration needs:

- `expect_end_step()`, once: from now on only `end_step` moves the position that is saved;
- `end_step(step)` when a step has ended: what was handed out until then is trained, less what is fetched ahead;
- `state_dict()`, `check_state(state)`, `load_state_dict(state)`: the position, at any time;
- `end_micro_step()` when a state is saved within a step, with the gradients of the batches handed out until then;
- `since_step`: how many batches were handed out since, so that an interrupted step can be told from an ended one;
- `before_next_batch(callback)`: the moment at which the body of a step is over;
- `last_batches(k)` and `leave_out(positions)`: for a rollback that passes over what failed.

Without `expect_end_step` every batch that was handed out counts as trained.

One epoch may be read several times. The pass that is trained on is the one in which steps end; a pass in which none
does (a look at one batch, an evaluation on the training set) leaves the position where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from safeckpt.errors import StateMismatchError
from safeckpt.loader.factory import make_source
from safeckpt.loader.inputs import CONVERTIBLE, compare, convert, length_of
from safeckpt.loader.map_source import MapSource
from safeckpt.loader.passes import BeforeNext, Enumeration
from safeckpt.loader.position import Position
from safeckpt.loader.source import logger
from safeckpt.state.component import class_name
from safeckpt.state.tree import copy_tree

__all__ = ["ResumableLoader"]

_VERSION = 2
_KEYS = {"version", "kind", "seed", "epoch", "batch", "inputs", "left_out", "snapshot"}


class ResumableLoader:
    """Iterate a DataLoader so that a run resumed in the middle of an epoch sees what the uninterrupted one saw.

    The same batches in the same order, and the same random numbers in `__getitem__` and `collate_fn` (`random`,
    `numpy.random`, torch on the CPU, and generators kept by dataset, transforms or collate_fn), for any number of
    workers before and after the resume. Both are functions of the seed, the epoch and the batch number.

    The wrapped DataLoader is not iterated itself and the training process's random streams are never moved.

    Registered with a `CheckpointManager`, the position in a checkpoint is that of the step that ended: a batch that
    was fetched and not trained comes again. A trainer of another kind calls `expect_end_step()` once and `end_step()`
    after every step. Without either, every batch handed out counts as trained.

    Looking at the loader moves nothing: a pass in which no step ends, such as `next(iter(loader))` before training or
    an evaluation on the training set, leaves the position where it was. In the body of `epochs` every pass reads the
    same epoch.

    Args:
        dataloader: A `torch.utils.data.DataLoader`, or any loader with `state_dict` and `load_state_dict` (torchdata's
            StatefulDataLoader), whose position is then its own affair.
        seed: What order and augmentation derive from, 0 to 2**63 - 1; drawn once from torch's global stream when it
            is not given. Saved with the position. Give all ranks of a distributed run the same one.
        convert: Inputs that may have changed at a resume: "batch_size", "world_size". The run then goes on at the
            same sample, which is said in a log line; what cannot be converted exactly is refused.
        ahead: How many batches a prefetcher around this loader fetches before the one that is trained; 1 for a CUDA
            prefetcher that holds the next batch. 0 says that there is none, and that a batch which is passed over was
            meant to be. Not given, a prefetcher is noticed at the first steps, and is an error.

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

    def __init__(
        self,
        dataloader: Any,
        *,
        seed: int | None = None,
        convert: Collection[str] = (),
        ahead: int | None = None,
    ) -> None:
        if isinstance(dataloader, ResumableLoader):
            raise TypeError("this is a ResumableLoader already: use it as it is")
        if isinstance(convert, str) or not set(convert) <= set(CONVERTIBLE):
            raise ValueError(f"convert takes names among {', '.join(CONVERTIBLE)}; got {convert!r}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"seed must be an int from 0 to 2**63 - 1; got {seed!r}")
        if ahead is not None and (type(ahead) is not int or ahead < 0):
            raise ValueError(f"ahead is a number of batches, 0 or more; got {ahead!r}")
        self._source = make_source(dataloader)
        self.dataloader = dataloader
        self._convert = tuple(convert)
        drawn = int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
        name = f"ResumableLoader over {class_name(getattr(dataloader, 'dataset', dataloader))}"
        self._position = Position(self._source, seed=drawn, ahead=ahead, length=length_of(dataloader), name=name)

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
        return self._position.seed

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated; between two, the one that comes next."""
        return self._position.reached()[0]

    @property
    def batch(self) -> int:
        """How many batches of this epoch are behind: handed out, or left out. In the body of the first it is 1."""
        return self._position.reached()[1]

    # -- iterating ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of this epoch after a restore, else over the next whole one."""
        return self._position.new_iteration()

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Iterate and yield (number, batch), where the number counts on in a resumed epoch.

        `enumerate(loader)` begins at 0 again after a resume, so what is done at every k-th batch would move.
        """
        return Enumeration(self._position.new_iteration())

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs up to `n`, beginning with the one in which the position is.

        After a resume that is the epoch of which the rest remains, also when nothing of it remains: what follows the
        inner loop still runs once. Leaving the body ends the epoch, however much of it was iterated; after a
        rollback in the body the next one is wherever the rewound position says. Every pass in a body reads the
        epoch of that body; passes outside of any body, in which no step ended, are not counted.

        Args:
            n: Number of epochs of the whole run.
        """
        return self._position.epochs(n)

    def end_epoch(self) -> None:
        """End this epoch where it is: the position is the beginning of the next one.

        For a loop that was left by `break` when the epoch is over all the same, and for a trainer that counts batches
        (`next` as many times as `len(loader)`) and never reads the iterator to its end. Where every batch was trained,
        the next `iter(loader)` begins the next epoch without this call, once the iterator is dropped. But until then a
        saved position is that of the last step: a resumed run goes on there, in an empty rest of this epoch.
        """
        self._position.end_epoch()

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Go to batch number `batch` of an epoch, for a run that comes from elsewhere: a checkpoint of `torch.save`.

        The order is that of this loader's seed. A sampler's own generator or state is taken as it is now. Of an
        iterable dataset, and of a loader that keeps its own position, the batches before are drawn and thrown away.

        Args:
            epoch: Number of the epoch, from 0.
            batch: How many of its batches are behind.

        Raises:
            ValueError: A number is negative, or none.
        """
        if any(type(number) is not int or number < 0 for number in (epoch, batch)):
            raise ValueError(f"seek takes the number of an epoch and of a batch, from 0; got {epoch!r}, {batch!r}")
        self._position.set(epoch, batch, self._position.between())
        self._position.history.clear()

    # -- steps -------------------------------------------------------------------------------------------------------

    def expect_end_step(self) -> None:
        """Count a batch as trained only when `end_step` says so. A `CheckpointManager` calls this."""
        self._position.expects_steps = True

    def end_step(self, step: int | None = None) -> None:
        """Note that a step has ended: what was handed out until now is trained, less what is fetched ahead.

        A `CheckpointManager` calls this at its `end_step`, and at a `save` of a new step.

        Args:
            step: Number of the step; the same one twice in a row counts once.

        Raises:
            RuntimeError: Something fetches batches ahead, or steps end in a second pass over an epoch.

        Warns:
            UncapturedStateWarning: Many steps have ended since this loader handed out a batch.
        """
        self._position.end_step(step)

    def end_micro_step(self) -> None:
        """Count what was handed out until now as trained, in the middle of a step: its gradients are saved as well.

        A `CheckpointManager` calls this when it saves between two micro-steps of gradient accumulation.
        """
        self._position.end_micro_step()

    @property
    def since_step(self) -> int:
        """How many batches were handed out since the last step ended, those that are fetched ahead included."""
        return self._position.since_step

    def before_next_batch(self, callback: BeforeNext | None) -> None:
        """Have a function called each time that a batch is asked for, before it is fetched; None for no longer.

        It is called as `callback(in_loop=...)`: True where a `for` that has handed out batches before is at its head
        again, so that its whole body is behind. A `CheckpointManager` compares the random streams there.
        """
        self._position.before_next = callback

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position and all it depends on, as plain values and tensors. Changes nothing.

        It is the position behind the last step that ended, also after a `break` or an exception; behind the batch at
        hand where nobody speaks of steps. A state saved in the body of the last batch resumes into an empty rest.
        After the loop it is the start of the next epoch.
        """
        epoch, batch, snapshot = self._position.saved()
        return {
            "version": _VERSION,
            "kind": self._source.kind,
            "seed": self.seed,
            "epoch": epoch,
            "batch": batch,
            "inputs": self._source.inputs(),
            "told_epoch": self._source.told,
            "left_out": [list(position) for position in self.left_out if position >= (epoch, batch)],
            "batches_per_step": list(self._position.batches_per_step),
            "ahead_known": self._position.ahead_known,
            "snapshot": copy_tree(snapshot),
        }

    def is_at_end_of(self, state: dict[str, Any]) -> bool:
        """Return whether `state` was saved behind the last batch of the epoch that has ended since, and nothing more.

        A run that goes on from it runs what follows the inner loop again, and is then here: of one step, either may be
        kept.
        """
        ended = self._position.ended()
        return (
            ended == (state["epoch"], state["batch"])
            and state["seed"] == self.seed
            and self.left_out == sorted((epoch, number) for epoch, number in state["left_out"])
        )

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
        if found and (told := state.get("told_epoch")) is not None:
            # Lengths may depend on the epoch that the sampler was told of.
            found = compare(state["inputs"], self._source.inputs(told), allowed)
        if not found:
            found = self._source.check(state["snapshot"])
        if not found:
            converted = self._converted(state)
            found = [converted] if isinstance(converted, str) else []
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position: the next iteration, or the one in progress, goes on from there.

        An iterator that exists already and has handed out nothing begins there. Where steps are counted and none has
        ended, one that has handed out batches is an error when it is used again: they are of another position.

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
        position = self._position
        if state["seed"] != position.seed:
            position.history.clear()
        position.seed = state["seed"]
        position.set(state["epoch"], state["batch"], copy_tree(state["snapshot"]))
        position.history.forget(state["epoch"], state["batch"])
        position.left_out = {(epoch, number) for epoch, number in state["left_out"]}
        position.batches_per_step.clear()
        position.batches_per_step.extend(state.get("batches_per_step", ()))
        position.ahead_known |= state.get("ahead_known", False)

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

    # -- batches that a rollback passes over -------------------------------------------------------------------------

    def last_batches(self, k: int) -> list[tuple[int, int]]:
        """Return (epoch, number) of the last `k` batches given to the training, oldest first, numbered from 0.

        May cross an epoch's border. Fewer when fewer were handed out in this process; a batch that a rewind has
        undone counts no more, and one that was only fetched ahead not yet.
        """
        ahead = self._position.fetched_ahead()
        last = self._position.history.last(k + ahead)
        return last[: len(last) - ahead] if k else []

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(epoch, number) of the batches that are not handed out, ascending."""
        return sorted(self._position.left_out)

    def leave_out(self, positions: Iterable[tuple[int, int]]) -> None:
        """Do not hand out these batches, given as (epoch, number). Kept in the state; `load_state_dict` replaces them.

        Indices are not fetched, except when a worker has them already; an iterable dataset has to draw them. A rollback
        calls this also with none: the step at hand is given up, and its loop goes on at the restored position.
        """
        self._position.go_on_in_the_loop()
        self._position.left_out.update((int(epoch), int(number)) for epoch, number in positions)
