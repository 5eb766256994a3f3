"""Checking one checkpoint: read it, compare all of it with the live objects, and change none of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from safeckpt.distributed.group import in_group
from safeckpt.distributed.rank_state import payload_of_rank
from safeckpt.distributed.shards import as_local_shards, place_shards
from safeckpt.distributed.stages import Names
from safeckpt.errors import DamagedCheckpointError, LoadError, StateMismatchError
from safeckpt.file import CheckpointFolder, MappedFiles
from safeckpt.run.catalog import Bad, Checkpoint, Gone, OpenCheckpoint, fault_of
from safeckpt.run.run import Run
from safeckpt.state import RESERVED_KEY, Baseline, Guard, Plan, guard_from_record, plan
from safeckpt.state.imported import complete

if TYPE_CHECKING:
    from safeckpt.distributed.storage import ShardReader

__all__ = ["Good", "Wanted", "check_step"]


class Wanted(NamedTuple):
    """What a caller asked for; see `CheckpointManager.restore`."""

    step: int | None = None
    only: Collection[str] | None = None
    keep_live: Collection[str] = ()
    fresh: Collection[str] = ()
    streams: bool = True


class Good(NamedTuple):
    """A checkpoint that has passed every check: all of it can be applied.

    Attributes:
        checkpoint: The checkpoint.
        digest: That of the file, the same for every rank.
        plan: What will be applied.
        guard: What has to be finite.
        header: That of the file.
        is_whole: Whether all components of the checkpoint are in the plan.
        is_resized: Whether the run had another number of processes.
        left_out: What this rank has not, and others may have.
        mapped: The files that the plan reads from.
    """

    checkpoint: Checkpoint
    digest: str
    plan: Plan
    guard: Guard
    header: Mapping[str, Any]
    is_whole: bool
    is_resized: bool
    left_out: Names
    mapped: MappedFiles


class _Opened(NamedTuple):
    """A checkpoint that was opened, its index or the whole of it read.

    Attributes:
        file: The file or directory.
        checkpoint: What its header says.
        payload: What is in the file, or in the index.
        mapped: The files that are mapped.
        reader: Reads the shards of a directory.
    """

    file: OpenCheckpoint
    checkpoint: Checkpoint
    payload: Any
    mapped: MappedFiles
    reader: ShardReader | None


def check_step(run: Run, step: int, wanted: Wanted, opened: contextlib.ExitStack) -> Good | Bad | Gone:
    """Read and check the checkpoint of a step on this rank: its file, or its share of the shards.

    Args:
        run: The run, whose objects it is compared with.
        step: The step.
        wanted: What to restore of it.
        opened: Keeps the files open, from which the state is read when it is applied.

    Raises:
        LoadError: It is not good, and was asked for by its number.
        RestoreError: It does not fit the live objects.
        OSError: The system refused to read it.
    """
    catalog, group = run.directory.catalog, run.group
    is_named = wanted.step is not None
    reader: ShardReader | None = None
    try:
        file, checkpoint = opened.enter_context(catalog.open_step(step, share=group.rank, shares=group.size))
        payload, index = file.load_mapped()
        mapped = MappedFiles(index)
        if isinstance(file, CheckpointFolder):
            from safeckpt.distributed.storage import ShardReader  # noqa: PLC0415 - large, and only for shards

            reader = ShardReader(Path(file.path), [name for name, *_ in file.shards()], file.verified, mapped)
            opened.callback(reader.close)
    except (LoadError, OSError) as error:
        return fault_of(error, is_named=is_named)
    try:
        found = _compare(run, _Opened(file, checkpoint, payload, mapped, reader), wanted)
        _check_finite(found)
    except LoadError as error:
        return fault_of(error, is_named=is_named)
    except OSError as error:  # any other is one of the user's own code, which runs here as well
        if reader is None or error is not reader.failure:
            raise
        return fault_of(error, is_named=is_named)
    return found


def _compare(run: Run, opened: _Opened, wanted: Wanted) -> Good:
    """Check everything about a restore but that the state is finite.

    Raises:
        LoadError: What is in the file is not what a manager saves.
        RestoreError: It does not fit the live objects.
    """
    group = run.group
    file, checkpoint, payload, mapped, reader = opened
    if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
        raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
    try:
        header = file.header() or {}
        guard = guard_from_record(header["guard"])
    except (KeyError, TypeError) as error:
        reason = "its header does not say what was guarded"
        raise DamagedCheckpointError(path=file.path, reason=reason) from error
    fresh, imported = list(wanted.fresh), ""
    faults: list[str] = []
    with torch.inference_mode(mode=False):
        if (completed := complete(payload, run.components, PurePath(file.path).name, fresh)) is not None:
            payload, faults, imported = completed.payload, completed.faults, completed.text
            fresh += [one for one in completed.live if one not in fresh]
            allowed = (*guard.allow_nonfinite, *(f"{one}.*" for one in completed.partial))
            guard = dataclasses.replace(guard, allow_nonfinite=allowed)
        payload, changes, left_out = payload_of_rank(
            payload,
            run.components,
            group.rank,
            group.size,
            path=file.path,
            read=None if reader is None else functools.partial(reader.whole, dtype=torch.uint8),
        )
        if reader is not None:
            payload = place_shards(payload, run.components, reader, wanted.only)
        elif in_group():
            payload = as_local_shards(payload, run.components)
        planned = plan(
            run.components,
            payload,
            only=wanted.only,
            keep_live=wanted.keep_live,
            fresh=fresh,
            faults=faults,
            path=file.path,
            read=mapped.read,
        )
    planned.imported = imported
    if planned.rng is not None and not imported:  # of how many ranks a source was, nothing is known
        planned.environment.extend(changes)
    is_whole = wanted.only is None or set(payload[RESERVED_KEY]["components"]) <= set(wanted.only)
    return Good(
        checkpoint=checkpoint,
        digest=str(file.digest),
        plan=planned,
        guard=guard,
        header=header,
        is_whole=is_whole,
        is_resized=bool(changes),
        left_out=left_out,
        mapped=mapped,
    )


def _check_finite(good: Good) -> None:
    """Let the guard that the state passed when it was saved judge it again.

    Raises:
        LoadError: It is not finite, or somebody has written into a file.
        StateMismatchError: It is not finite, and was imported like that.
    """
    bad = Baseline({}).check(good.plan.pairs, good.guard, good.mapped.forget).bad
    if bad and good.plan.imported:  # what it is of is known only here, with the objects
        raise StateMismatchError(
            mismatches=[f"{one}, in the source" for one in bad],
            path=good.checkpoint.path,
            cure="import an earlier checkpoint of that run, or leave out of the mapping what is not finite, into a "
            "directory of its own; or let those components stay as this script has made them: restore(fresh=(...,)).",
        )
    if bad:
        raise DamagedCheckpointError(path=good.checkpoint.path, reason=f"it is not finite ({bad[0]})")
    good.mapped.check_unchanged()
