"""The two forms of a checkpoint: one file that rank 0 writes, and a directory into which every rank writes shards.

What is alike in both: every rank calls `write`; then rank 0 calls `prepare` and `commit`.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple, Protocol

from safeckpt.distributed.plans import Places, Plans
from safeckpt.distributed.rank_state import pack_rank_state, rank_key, with_world
from safeckpt.distributed.shards import with_placeholders
from safeckpt.distributed.stages import united
from safeckpt.file import INDEX, METADATA, PreparedFile, ShardFile, Write, encode, open_file, prepare, shard_of_bytes
from safeckpt.run.capturing import Draft
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.run_directory import Place, RunDirectory
from safeckpt.state import RESERVED_KEY, Component, copy_tree, guarded_in, to_cpu
from safeckpt.system.threads import Progress

__all__ = [
    "Contributions",
    "FileWriter",
    "Job",
    "Output",
    "ShardedWriter",
    "World",
    "Writer",
    "both_contributions",
    "rewrite_header",
    "writer_of",
]


class World(NamedTuple):
    """The ranks that save together.

    Attributes:
        rank: This one.
        size: How many there are.
        own_gradients: Whether they have different gradients.
        stage: What rank 0 has of the model.
        has_new_stage: Whether this rank is the first one, after rank 0, with another stage of the model.
    """

    rank: int
    size: int
    own_gradients: bool
    stage: str
    has_new_stage: bool

    def added_to(self, payload: Any, rank_states: list[Any] | None) -> dict[str, Any]:
        """Return the payload of rank 0 with what is to be known of the others; as it is where there are none."""
        if self.size == 1:
            return payload  # type: ignore[no-any-return]
        return with_world(
            payload, self.size, own_gradients=self.own_gradients, stage=self.stage, rank_states=rank_states
        )


class Output(NamedTuple):
    """Where a run writes its checkpoints, and how.

    Attributes:
        directory: Where.
        components: The live objects: what of their state is guarded.
        write: Writes the content of a file.
        progress: Told how much of a checkpoint of one file is written.
        plans: What was planned for the save before, of shards.
    """

    directory: RunDirectory
    components: Mapping[str, Component]
    write: Write
    progress: Progress | None
    plans: Plans


class Job(NamedTuple):
    """One checkpoint to be written.

    Attributes:
        draft: This rank's part of it.
        place: What rank 0 has made in the directory.
        world: The ranks that save.
        noted: What else the header says.
    """

    draft: Draft
    place: Place
    world: World
    noted: Mapping[str, Any]


class Contributions(NamedTuple):
    """What rank 0 needs of all ranks to commit a checkpoint, in the order of the ranks.

    Attributes:
        files: The shards that were written.
        places: Where the parts of tensors are in them, as far as rank 0 does not know.
        rank_states: What ranks have otherwise than rank 0, where they do not write it.
        stages: What ranks have of the model that those before have not.
    """

    files: list[ShardFile] = []  # noqa: RUF012 - never changed
    places: Places = []  # noqa: RUF012
    rank_states: list[Any] = []  # noqa: RUF012
    stages: list[Any] = []  # noqa: RUF012


def both_contributions(one: Contributions, other: Contributions) -> Contributions:
    """Return the contributions of both, in the order of their ranks."""
    return Contributions(
        one.files + other.files,
        one.places + other.places,
        one.rank_states + other.rank_states,
        one.stages + other.stages,
    )


class Writer(Protocol):
    """Writes one checkpoint."""

    def write(self, rank_state: dict[str, Any] | None) -> Contributions:
        """Write what every rank writes by itself, and return what rank 0 needs of it. Called by all ranks.

        Args:
            rank_state: What this rank has otherwise than rank 0; None on rank 0.

        Raises:
            NonFiniteError: NaN or Inf came into the state after the guard had looked.
        """

    def prepare(self, contributions: Contributions) -> tuple[PreparedFile, int]:
        """Lay out the last file, which rank 0 writes, and return it and the size of the checkpoint. On rank 0.

        Args:
            contributions: What `write` has returned, of all ranks.
        """

    def commit(self, prepared: PreparedFile) -> None:
        """Write that file, and give the checkpoint its name. On rank 0.

        Raises:
            NonFiniteError: As `write`.
        """


def writer_of(job: Job, output: Output) -> Writer:
    """Return what writes a checkpoint."""
    return ShardedWriter(job, output) if job.draft.is_sharded else FileWriter(job, output)


class FileWriter:
    """Writes rank 0's payload, which holds what every rank has, as one file."""

    def __init__(self, job: Job, output: Output) -> None:
        self._job = job
        self._output = output

    def write(self, rank_state: dict[str, Any] | None) -> Contributions:
        """See `Writer`: only rank 0 writes, and what the others have of their own as well."""
        if rank_state is None:
            return Contributions()
        # A copy: a view would be sent with all of the memory around it.
        return Contributions(rank_states=[encode(copy_tree(to_cpu(rank_state)), root="payload")])

    def prepare(self, contributions: Contributions) -> tuple[PreparedFile, int]:
        """See `Writer`."""
        draft, world, noted = self._job.draft, self._job.world, self._job.noted
        payload = to_cpu(world.added_to(draft.payload, contributions.rank_states))
        prepared = prepare(
            payload,
            header=draft.checkpoint.header(guard=draft.guard, **noted),
            # Once more in what is written: training may have gone on in another thread since the guard has looked.
            finite=guarded_in(payload, self._output.components, draft.guard),
        )
        return prepared, prepared.size_bytes

    def commit(self, prepared: PreparedFile) -> None:
        """See `Writer`."""
        self._output.directory.files.commit_step(
            self._job.draft.checkpoint.step,
            lambda f: self._output.write(prepared, f, self._output.progress),
            check=prepared.check,
            size_bytes=prepared.size_bytes,
        )


class ShardedWriter:
    """Writes every rank's shards into a directory, then an index that says what belongs to it."""

    def __init__(self, job: Job, output: Output) -> None:
        self._job = job
        self._output = output
        assert job.place.name is not None
        self._folder = output.directory.path / job.place.name

    def write(self, rank_state: dict[str, Any] | None) -> Contributions:
        """See `Writer`: its shards, and what it has of its own."""
        from safeckpt.distributed.storage import write_shards  # noqa: PLC0415 - large, and only for shards

        draft, rank, own = self._job.draft, self._job.world.rank, {}
        if rank_state is not None:
            state = copy_tree(to_cpu(with_placeholders(rank_state, draft.shards)))
            own[rank_key(rank)] = pack_rank_state(state)
        files, places = write_shards(
            draft.shards,
            own,
            self._folder / f"__{rank}_0.distcp",
            self._output.directory.files.write_inside,
            self._output.plans,
            write=self._output.write,
            finite=_guarded_shards(draft, self._output.components),
        )
        stages = [copy_tree(to_cpu(draft.payload))] if self._job.world.has_new_stage else []
        return Contributions(files, places, stages=stages)

    def prepare(self, contributions: Contributions) -> tuple[PreparedFile, int]:
        """See `Writer`: writes the engine's metadata, and lays out the index, which says what belongs to all this."""
        draft, world, noted = self._job.draft, self._job.world, self._job.noted
        for name, length, _ in contributions.files:  # as this node sees them, before they are promised
            path = self._folder / name
            self._output.directory.wait_for(path)
            found = path.stat().st_size
            if found != length:
                raise OSError(errno.EIO, f"{name} has {found} bytes here, {length} were written", str(path))
        metadata = self._output.plans.describe(contributions.places)

        def write_metadata(file: BinaryIO) -> None:
            file.write(metadata)

        write_inside = self._output.directory.files.write_inside
        write_inside(self._folder / METADATA, write_metadata, size_bytes=len(metadata))
        written = [*contributions.files, shard_of_bytes(METADATA, metadata)]
        payload = {**to_cpu(world.added_to(united([draft.payload, *contributions.stages]), None))}
        payload[RESERVED_KEY] = {**payload[RESERVED_KEY], "files": [list(shard) for shard in written]}
        size_bytes = sum(length for _, length, _ in written)
        header = draft.checkpoint.header(guard=draft.guard, **noted, shards=len(written), shards_bytes=size_bytes)
        index = prepare(payload, header=header, finite=guarded_in(payload, self._output.components, draft.guard))
        return index, size_bytes + index.size_bytes

    def commit(self, prepared: PreparedFile) -> None:
        """See `Writer`: the index is written last, beside the shards."""
        files = self._output.directory.files
        files.write_inside(
            self._folder / INDEX, lambda f: self._output.write(prepared, f, None), size_bytes=prepared.size_bytes
        )
        files.commit_folder(self._job.draft.checkpoint.step, self._folder)


def rewrite_header(checkpoint: Checkpoint, directory: RunDirectory) -> None:
    """Write a committed checkpoint again with another loss and other metrics in its header, atomically."""
    path = checkpoint.path / INDEX if checkpoint.path.is_dir() else checkpoint.path
    with open_file(path) as file:
        header = {**(file.header() or {}), **checkpoint.header()}
        prepared = prepare(file.load(mmap=True), header=header)
        directory.files.rewrite_step(
            checkpoint.step, path, prepared.write, check=prepared.check, size_bytes=prepared.size_bytes
        )


def _guarded_shards(draft: Draft, components: Mapping[str, Component]) -> dict[str, str]:
    """Return key to name, for the tensors of a draft that the guard has found finite."""
    captured = draft.captured
    names = {id(tensor): name for name, tensor in guarded_in(captured, components, draft.guard)}
    return {key: names[id(tensor)] for key, tensor in draft.shards.items() if id(tensor) in names}
