"""The two forms of a checkpoint: one file that rank 0 writes, and a directory into which every rank writes shards.

What is alike in both: every rank makes itself `ready`; `write` is done by all ranks, `prepare` and `commit` by rank 0,
`discard` by every rank that has something to remove.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from safeckpt.distributed import (
    Group,
    PlanCache,
    pack_rank_state,
    rank_key,
    united,
    with_placeholders,
    with_world,
    write_shards,
)
from safeckpt.errors import NonFiniteError
from safeckpt.file import INDEX, PreparedFile, ShardFile, Write, encode, open_file, prepare
from safeckpt.run.capturing import Draft
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.run_directory import Place, RunDirectory
from safeckpt.state import RESERVED_KEY, Component, copy_tree, guard_from_record, guarded_in, to_cpu
from safeckpt.system.threads import Progress

__all__ = [
    "Contributions",
    "FileWriter",
    "MemoryCopy",
    "ShardedWriter",
    "World",
    "Writer",
    "both_contributions",
    "rewrite_header",
    "writer_of",
]


Refuse: TypeAlias = Callable[[int, NonFiniteError], NonFiniteError]  # step, error -> the error to raise


class MemoryCopy(NamedTuple):
    """A copy of the whole state of this rank in memory, as an asynchronous save left it."""

    step: int
    payload: Mapping[str, Any]


class World(NamedTuple):
    """The ranks that save together.

    Attributes:
        rank: This one.
        size: How many there are.
        own_gradients: Whether they have different gradients.
        copies_differ: Whether ranks that ought to hold equal copies do not.
        stage: What rank 0 has of the model.
        has_new_stage: Whether this rank is the first one, after rank 0, with another stage of the model.
    """

    rank: int
    size: int
    own_gradients: bool
    copies_differ: bool
    stage: str
    has_new_stage: bool

    def added_to(self, payload: Any, rank_states: list[Any] | None) -> dict[str, Any]:
        """Return the payload of rank 0 with what is to be known of the others; as it is where there are none."""
        if self.size == 1:
            return payload  # type: ignore[no-any-return]
        return with_world(
            payload, self.size, own_gradients=self.own_gradients, stage=self.stage, rank_states=rank_states
        )


class Contributions(NamedTuple):
    """What rank 0 needs of all ranks to commit a checkpoint, in the order of the ranks.

    Attributes:
        files: The shards that were written.
        rank_states: What ranks have otherwise than rank 0, where they do not write it.
        stages: What ranks have of the model that those before have not.
    """

    files: list[ShardFile] = []  # noqa: RUF012 - never changed
    rank_states: list[Any] = []  # noqa: RUF012
    stages: list[Any] = []  # noqa: RUF012


def both_contributions(one: Contributions, other: Contributions) -> Contributions:
    """Return the contributions of both, in the order of their ranks."""
    return Contributions(one.files + other.files, one.rank_states + other.rank_states, one.stages + other.stages)


class Writer(Protocol):
    """Writes one checkpoint.

    Attributes:
        checkpoint: The checkpoint to be, whose size is not known yet.
    """

    checkpoint: Checkpoint

    def ready(self, rank_state: dict[str, Any] | None) -> None:
        """See that the directory is there, and take what this rank has otherwise than rank 0; None on rank 0."""

    def note_seen(self) -> None:
        """Note that every rank has seen the directory. On rank 0."""

    def write(self, group: Group) -> Contributions:
        """Write what every rank writes by itself, and return what rank 0 needs of it. Called by all ranks at once."""

    def prepare(self, contributions: Contributions) -> Checkpoint:
        """Lay out what rank 0 writes, write nothing, and return the checkpoint with its size. On rank 0.

        Args:
            contributions: What `write` has returned, of all ranks.
        """

    def commit(self) -> None:
        """Write it and give the checkpoint its name. On rank 0, after `prepare`."""

    def discard(self) -> None:
        """Remove what was written and not committed."""


def writer_of(
    draft: Draft,
    directory: RunDirectory,
    components: Mapping[str, Component],
    *,
    write: Write,
    progress: Progress | None,
    plans: PlanCache,
    refuse: Refuse,
    rules: Mapping[str, Any],
    place: Place,
    world: World,
) -> Writer:
    """Return the writer of a draft.

    Args:
        draft: This rank's part of the checkpoint.
        directory: Where it is written.
        components: The live objects: what of their state is guarded.
        write: Writes the content of a file.
        progress: Told how much of a file is written.
        plans: What was planned for the save before, of shards.
        refuse: Returns the error to raise for NaN or Inf that came into the state after the guard.
        rules: What is kept in the directory, for the header.
        place: What rank 0 has made there.
        world: The ranks that save.
    """
    if draft.is_sharded:
        return ShardedWriter(
            draft, directory, components, plans, write=write, refuse=refuse, rules=rules, place=place, world=world
        )
    return FileWriter(
        draft,
        directory,
        components,
        write=write,
        progress=progress,
        refuse=refuse,
        rules=rules,
        place=place,
        world=world,
    )


class FileWriter:
    """Writes rank 0's payload, which holds what every rank has, as one file."""

    def __init__(
        self,
        draft: Draft,
        directory: RunDirectory,
        components: Mapping[str, Component],
        *,
        write: Write,
        progress: Progress | None,
        refuse: Refuse,
        rules: Mapping[str, Any],
        place: Place,
        world: World,
    ) -> None:
        self.checkpoint = draft.checkpoint
        self._directory = directory
        self._refuse = refuse
        self._place = place
        self._world = world
        self._rank_states: list[Any] = []
        self._payload = draft.payload
        self._guard = draft.guard
        self._components = components
        self._files = directory.files
        self._rules = rules
        self._write = write
        self._progress = progress
        self._prepared: PreparedFile | None = None

    def ready(self, rank_state: dict[str, Any] | None) -> None:
        """See `Writer`."""
        self._directory.see(self._place)
        if rank_state is not None:  # a copy: a view would be sent with all of the memory around it
            self._rank_states = [encode(copy_tree(to_cpu(rank_state)), root="payload")]

    def note_seen(self) -> None:
        """See `Writer`."""
        self._directory.note_shared(self._place)

    def write(self, group: Group) -> Contributions:
        """See `Writer`: only rank 0 writes, and what the others have of their own as well."""
        return Contributions(rank_states=self._rank_states)

    def prepare(self, contributions: Contributions) -> Checkpoint:
        """See `Writer`."""
        payload = to_cpu(self._world.added_to(self._payload, contributions.rank_states))
        self._prepared = prepare(
            payload,
            header=self.checkpoint.header(guard=self._guard, **self._rules),
            # Once more in what is written: training may have gone on in another thread since the guard has looked.
            finite=guarded_in(payload, payload[RESERVED_KEY], self._components, guard_from_record(self._guard)),
        )
        return dataclasses.replace(self.checkpoint, size_bytes=self._prepared.size_bytes)

    def commit(self) -> None:
        """See `Writer`."""
        prepared = self._prepared
        assert prepared is not None
        with _refusing(self._refuse, self.checkpoint.step):
            self._files.commit_step(
                self.checkpoint.step,
                lambda f: self._write(prepared, f, self._progress),
                check=prepared.check,
                size_bytes=prepared.size_bytes,
            )

    def discard(self) -> None:
        """See `Writer`: the commit removes its own temporary file."""


class ShardedWriter:
    """Writes every rank's shards into a directory, then an index that says what belongs to it."""

    def __init__(
        self,
        draft: Draft,
        directory: RunDirectory,
        components: Mapping[str, Component],
        plans: PlanCache,
        *,
        write: Write,
        refuse: Refuse,
        rules: Mapping[str, Any],
        place: Place,
        world: World,
    ) -> None:
        self.checkpoint = draft.checkpoint
        self._rules = rules
        self._stages: list[Any] = []
        self._components = components
        self._refuse = refuse
        self._finite = _guarded_shards(draft, components)
        self._index: PreparedFile | None = None
        self._write = write
        self._plans = plans
        self._place = place
        self._world = world
        self._payload = draft.payload
        self._shards = {**draft.shards}
        self._guard = draft.guard
        self._directory = directory
        assert place.name is not None
        self._temp = directory.path / place.name

    def ready(self, rank_state: dict[str, Any] | None) -> None:
        """See `Writer`."""
        # By itself: a rank that does not see the directory must not leave the others in a collective of the engine.
        self._directory.see(self._place)
        if rank_state is not None:
            state = copy_tree(to_cpu(with_placeholders(rank_state, self._shards)))
            self._shards[rank_key(self._world.rank)] = pack_rank_state(state)
        if self._world.has_new_stage:
            self._stages = [copy_tree(to_cpu(self._payload))]

    def note_seen(self) -> None:
        """See `Writer`: each save has a directory of its own."""

    def write(self, group: Group) -> Contributions:
        """See `Writer`."""
        with _refusing(self._refuse, self.checkpoint.step):
            files = write_shards(
                self._shards,
                self._temp,
                group,
                self._directory.files.write_inside,
                self._plans,
                write=self._write,
                finite=self._finite,
                drifted=self._world.copies_differ,
            )
        return Contributions(files, stages=self._stages)

    def prepare(self, contributions: Contributions) -> Checkpoint:
        """See `Writer`: the index, which says what belongs to the checkpoint."""
        written = contributions.files
        size = sum(length for _, length, _ in written)
        for name, length, _ in written:  # as this node sees them, before they are promised
            self._directory.wait_for(self._temp / name)
            found = (self._temp / name).stat().st_size
            if found != length:
                raise OSError(
                    errno.EIO, f"{name} has {found} bytes here, {length} were written", str(self._temp / name)
                )
        payload = {**to_cpu(self._world.added_to(united([self._payload, *contributions.stages]), None))}
        own = payload[RESERVED_KEY] = {**payload[RESERVED_KEY], "files": [list(shard) for shard in written]}
        header = self.checkpoint.header(guard=self._guard, **self._rules, shards=len(written), shards_bytes=size)
        finite = guarded_in(payload, own, self._components, guard_from_record(self._guard))
        self._index = prepare(payload, header=header, finite=finite)
        return dataclasses.replace(self.checkpoint, size_bytes=size + self._index.size_bytes)

    def commit(self) -> None:
        """See `Writer`: the index is written last, beside the shards."""
        index = self._index
        assert index is not None
        with _refusing(self._refuse, self.checkpoint.step):
            self._directory.files.write_inside(
                self._temp / INDEX, lambda f: self._write(index, f, None), size_bytes=index.size_bytes
            )
        self._directory.files.commit_folder(self.checkpoint.step, self._temp)

    def discard(self) -> None:
        """See `Writer`."""
        self._directory.drop(self._place)


def rewrite_header(checkpoint: Checkpoint, directory: RunDirectory) -> None:
    """Write a committed checkpoint again with another loss and other metrics in its header, atomically."""
    path = checkpoint.path / INDEX if checkpoint.path.is_dir() else checkpoint.path
    with open_file(path) as file:
        header = {**(file.header() or {}), **checkpoint.header()}
        prepared = prepare(file.load(mmap=True), header=header)
        directory.files.rewrite_step(
            checkpoint.step, path, prepared.write, check=prepared.check, size_bytes=prepared.size_bytes
        )


@contextlib.contextmanager
def _refusing(refuse: Refuse, step: int) -> Iterator[None]:
    """Have NaN or Inf that is found in what is written refused as the guard refuses it."""
    try:
        yield
    except NonFiniteError as error:
        raise refuse(step, error) from error


def _guarded_shards(draft: Draft, components: Mapping[str, Component]) -> dict[str, str]:
    """Return key to name, for the tensors of a draft that the guard has found finite."""
    captured = draft.captured
    guarded = guarded_in(captured, captured[RESERVED_KEY], components, guard_from_record(draft.guard))
    names = {id(tensor): name for name, tensor in guarded}
    return {key: names[id(tensor)] for key, tensor in draft.shards.items() if id(tensor) in names}
