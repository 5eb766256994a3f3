"""The two forms of a checkpoint: one file that rank 0 writes, and a directory into which every rank writes shards.

`stage` is called in the training loop, and only when a thread is going to write. The rest is alike in both: `write` is
done by all ranks, `prepare` and `commit` by rank 0, `discard` by every rank that has something to remove.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from safeckpt.distributed import Group, PlanCache, first_answer, local_parts, replace_local_parts, write_shards
from safeckpt.errors import NonFiniteError
from safeckpt.file import INDEX, PreparedFile, ShardFile, open_file, prepare
from safeckpt.run.capturing import Draft
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.run_directory import RunDirectory
from safeckpt.state import RESERVED_KEY, Component, Staging, guard_from_record, guarded_in, to_cpu
from safeckpt.system.threads import Progress

__all__ = ["FileWriter", "MemoryCopy", "ShardedWriter", "Writer", "rewrite_header", "writer_of"]

Refuse: TypeAlias = Callable[[int, NonFiniteError], NonFiniteError]  # step, error -> the error to raise


class MemoryCopy(NamedTuple):
    """A copy of the whole state in memory, as an asynchronous save left it."""

    step: int
    payload: dict[str, Any]


class Writer(Protocol):
    """Writes one checkpoint.

    Attributes:
        checkpoint: The checkpoint to be, whose size is not known yet.
    """

    checkpoint: Checkpoint

    def stage(self, staging: Staging, *, is_rank_zero: bool) -> dict[str, Any] | None:
        """Copy what is written, and return the copy where it is the whole state."""

    def write(self, group: Group, what: str) -> None:
        """Write what every rank writes by itself. Called by all ranks at once."""

    def prepare(self) -> Checkpoint:
        """Lay out what rank 0 writes, write nothing, and return the checkpoint with its size. On rank 0."""

    def commit(self) -> None:
        """Write it and give the checkpoint its name. On rank 0, after `prepare`."""

    def discard(self) -> None:
        """Remove what was written and not committed."""


def writer_of(
    draft: Draft,
    directory: RunDirectory,
    components: Mapping[str, Component],
    progress: Progress | None,
    plans: PlanCache,
    *,
    rules: Mapping[str, Any],
    refuse: Refuse,
    copies_differ: bool,
) -> Writer:
    """Return the writer of a draft.

    Args:
        draft: This rank's part of the checkpoint.
        directory: Where it is written.
        components: The live objects: what of their state is guarded.
        progress: Told how much of a file is written.
        plans: What was planned for the save before, of shards.
        rules: What is kept in the directory, for the header.
        refuse: Notes NaN or Inf that came into the state after the guard, and returns the error to raise.
        copies_differ: Whether ranks that ought to hold equal copies do not.
    """
    if draft.is_sharded:
        return ShardedWriter(draft, directory, rules, components, plans, refuse=refuse, copies_differ=copies_differ)
    return FileWriter(draft, directory, rules, components, progress, refuse=refuse)


class FileWriter:
    """Writes rank 0's payload, which holds what every rank has, as one file."""

    def __init__(
        self,
        draft: Draft,
        directory: RunDirectory,
        rules: Mapping[str, Any],
        components: Mapping[str, Component],
        progress: Progress | None,
        *,
        refuse: Refuse,
    ) -> None:
        self.checkpoint = draft.checkpoint
        self._payload = draft.payload
        self._guard = draft.guard
        self._components = components
        self._files = directory.files
        self._rules = rules
        self._progress = progress
        self._refuse = refuse
        self._prepared: PreparedFile | None = None

    def stage(self, staging: Staging, *, is_rank_zero: bool) -> dict[str, Any] | None:
        """See `Writer`."""
        payload: dict[str, Any] | None = staging.copy(self._payload) if is_rank_zero else None
        self._payload = payload
        return payload

    def write(self, group: Group, what: str) -> None:
        """See `Writer`: only rank 0 writes."""

    def prepare(self) -> Checkpoint:
        """See `Writer`."""
        payload = to_cpu(self._payload)
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
                functools.partial(prepared.write, progress=self._progress),
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
        rules: Mapping[str, Any],
        components: Mapping[str, Component],
        plans: PlanCache,
        *,
        refuse: Refuse,
        copies_differ: bool,
    ) -> None:
        self.checkpoint = draft.checkpoint
        self._rules = rules
        self._components = components
        self._refuse = refuse
        self._finite = _guarded_shards(draft, components)
        self._plans = plans
        self._copies_differ = copies_differ
        self._payload = draft.payload
        self._shards = draft.shards
        self._guard = draft.guard
        self._directory = directory
        self._temp: Path | None = None  # on rank 0
        self._written: list[ShardFile] = []
        self._index: PreparedFile | None = None

    def stage(self, staging: Staging, *, is_rank_zero: bool) -> dict[str, Any] | None:
        """See `Writer`: a rank has no copy of the whole state."""
        payload = self._payload if is_rank_zero else None
        self._payload, parts = staging.copy((payload, local_parts(self._shards)))
        self._shards = replace_local_parts(self._shards, parts)
        return None

    def write(self, group: Group, what: str) -> None:
        """See `Writer`."""
        files = self._directory.files
        with group.section(f"{what}: making its directory", first_answer) as section:
            if group.is_rank_zero:
                self._temp = files.begin_folder(self.checkpoint.step)
                section.answer = self._temp.name
        place = files.path / section.result
        # By itself: a rank that does not see the directory must not leave the others in a collective of the engine.
        with group.section(f"{what}: looking for its directory"):
            self._directory.wait_for(place)
        with (
            group.section(f"{what}: writing shards", _all_files) as shards,
            _refusing(self._refuse, self.checkpoint.step),
        ):
            shards.answer = write_shards(
                self._shards,
                place,
                group,
                files.write_inside,
                self._plans,
                finite=self._finite,
                drifted=self._copies_differ,
            )
        self._written = shards.result

    def prepare(self) -> Checkpoint:
        """See `Writer`: the index, which says what belongs to the checkpoint."""
        assert self._temp is not None
        size = sum(length for _, length, _ in self._written)
        for name, length, _ in self._written:  # as this node sees them, before they are promised
            self._directory.wait_for(self._temp / name)
            found = (self._temp / name).stat().st_size
            if found != length:
                raise OSError(
                    errno.EIO, f"{name} has {found} bytes here, {length} were written", str(self._temp / name)
                )
        payload = {**to_cpu(self._payload)}
        own = payload[RESERVED_KEY] = {**payload[RESERVED_KEY], "files": [list(shard) for shard in self._written]}
        header = self.checkpoint.header(guard=self._guard, **self._rules, shards=len(self._written), shards_bytes=size)
        finite = guarded_in(payload, own, self._components, guard_from_record(self._guard))
        self._index = prepare(payload, header=header, finite=finite)
        return dataclasses.replace(self.checkpoint, size_bytes=size + self._index.size_bytes)

    def commit(self) -> None:
        """See `Writer`: the index is written last, beside the shards."""
        index = self._index
        assert self._temp is not None
        assert index is not None
        with _refusing(self._refuse, self.checkpoint.step):
            self._directory.files.write_inside(self._temp / INDEX, index.write, size_bytes=index.size_bytes)
        self._directory.files.commit_folder(self.checkpoint.step, self._temp)

    def discard(self) -> None:
        """See `Writer`."""
        if self._temp is not None and self._temp.exists():
            self._directory.files.drop_folder(self._temp)


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


def _all_files(answers: list[list[ShardFile]]) -> list[ShardFile]:
    return [shard for files in answers for shard in files]
