"""Restoring: find the checkpoint, check all of it, and only then change the first object.

Several processes restore the same step: the newest one that every one of them can read. Each of these is a section that
all ranks pass, or none does::

    reading a checkpoint -> applying it
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from safeckpt.distributed import (
    Group,
    Names,
    as_local_shards,
    holds_same,
    in_group,
    open_shards,
    payload_of_rank,
    place_shards,
    refuse_left_over,
)
from safeckpt.errors import (
    CheckpointNotFoundError,
    ComponentChangedWarning,
    DamagedCheckpointError,
    DirectoryNotSharedError,
    EnvironmentChangedWarning,
    HyperparameterReplacedWarning,
    LoadError,
    NoGoodCheckpointError,
    RestoreError,
)
from safeckpt.file import CheckpointFolder, MappedFiles
from safeckpt.remote import RemotePath
from safeckpt.run.arguments import note_changes
from safeckpt.run.catalog import Bad, Checkpoint, Gone, OpenCheckpoint, fault_of, warn_skipped
from safeckpt.run.run import Run
from safeckpt.run.writers import MemoryCopy
from safeckpt.state import RESERVED_KEY, Baseline, Guard, Plan, copy_tree, guard_from_record, plan
from safeckpt.state.component import has_attribute
from safeckpt.state.random_streams import RngStreams
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from safeckpt.distributed.storage import ShardReader

__all__ = ["Restored", "Restorer", "Wanted"]

_log = logging.getLogger("safeckpt")


class Wanted(NamedTuple):
    """What a caller asked for; see `CheckpointManager.restore`."""

    step: int | None = None
    only: Collection[str] | None = None
    keep_live: Collection[str] = ()
    fresh: Collection[str] = ()
    streams: bool = True


@dataclass(frozen=True)
class Good:
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

    def restored(self, rejected: dict[PurePath, str], steps_before: Collection[int]) -> Restored:
        """Return what is known of the restore that applies it."""
        return Restored(
            self.checkpoint,
            self.plan,
            is_whole=self.is_whole,
            is_resized=self.is_resized,
            rejected=rejected,
            steps_before=steps_before,
            header=self.header,
        )


class _Found(NamedTuple):
    """What was found in the directory.

    Attributes:
        step: The step; None where there is none.
        what: What it is, the same kind on every rank; None where there is none.
        listed: The steps that this rank has seen.
        is_remote: Whether it has to be fetched first.
        is_apart: Whether ranks have seen different steps.
        agrees: Whether it is what was looked for, on every rank.
    """

    step: int | None
    what: Good | Bad | Gone | None
    listed: Collection[int]
    is_remote: bool
    is_apart: bool
    agrees: bool


@dataclass
class Restored:
    """A restore that was applied.

    Attributes:
        checkpoint: The checkpoint.
        plan: What was applied.
        is_whole: Whether all components of the checkpoint were restored.
        is_resized: Whether the run had another number of processes.
        source: Where the state came from, `"disk"` or `"memory"`.
        rejected: Newer checkpoints that were passed over, path to reason.
        steps_before: Steps in the directory before the search; a higher one that came meanwhile is another writer's.
        header: That of the file; empty where the state came from memory.
    """

    checkpoint: Checkpoint
    plan: Plan
    is_whole: bool = True
    is_resized: bool = False
    source: str = "disk"
    rejected: dict[PurePath, str] = field(default_factory=dict)
    steps_before: Collection[int] = ()
    header: Mapping[str, Any] = field(default_factory=dict)


class _Contents(NamedTuple):
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


class _Read(NamedTuple):
    """What ranks have read.

    Attributes:
        rank: The lowest of them.
        step: The step that it has read; None where there is none.
        digest: Of the file, as the lowest rank has read it that could.
        other: A rank that has read another file of this name.
        left_out: What all that could read it have left out.
        fault: What is wrong, on the lowest rank that has found something.
        is_remote: Whether it has to be fetched first, and is not read yet.
        is_apart: Whether they have read different steps.
        agrees: Whether all of them found what they were looking for.
    """

    rank: int
    step: int | None
    digest: str | None = None
    other: int | None = None
    left_out: Names | None = None
    fault: Gone | Bad | None = None
    is_remote: bool = False
    is_apart: bool = False
    agrees: bool = True


def _both_read(one: _Read, other: _Read) -> _Read:
    differs = None not in (one.digest, other.digest) and one.digest != other.digest
    return _Read(
        one.rank,
        one.step,
        digest=one.digest or other.digest,
        other=one.other or (other.rank if differs else other.other),
        left_out=_in_both(one.left_out, other.left_out),
        fault=one.fault or other.fault,
        is_remote=one.is_remote,
        is_apart=one.is_apart or other.is_apart or (one.step, one.is_remote) != (other.step, other.is_remote),
        agrees=one.agrees and other.agrees,
    )


def _in_both(one: Names | None, other: Names | None) -> Names | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


class Restorer:
    """Puts checkpoints of a run into the live objects.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def restore(self, wanted: Wanted) -> Restored | None:
        """Put a checkpoint into the live objects and note where the run stands; see `CheckpointManager.restore`."""

        def note(restored: Restored) -> None:
            self._note_restored(restored, wanted)

        restored = self.apply_newest(wanted, note, look_further=True)
        if restored is not None:
            _log.info("restored step %d from %s", restored.checkpoint.step, restored.checkpoint.path)
            return restored
        with self._run.group.section("looking at an empty directory"):
            if self._run.is_rank_zero:
                self._run.directory.catalog.warn_if_emptied()
        return None

    def _note_restored(self, restored: Restored, wanted: Wanted) -> None:
        """Note where the run stands, and tell history and caller."""
        run, checkpoint, only = self._run, restored.checkpoint, wanted.only
        if restored.is_whole:
            self.adopt(restored)
            if run.is_rank_zero:
                run.replay.on_restored(
                    checkpoint.step,
                    same=self._is_same_run(wanted, restored),
                    changed=[*restored.plan.environment, *self._note_changes(checkpoint)],
                )
        else:
            if run.is_rank_zero:
                run.replay.on_diverged(run.timeline.saved_step)
            run.timeline.restored_in_part(sorted(only or ()))
        self.report(restored, "restored", only=None if only is None else list(only))
        if restored.is_whole and (changes := self._note_changes(checkpoint)):
            text = "\n  ".join(changes)
            warn_caller(
                f"The notes differ from those of the run that saved {checkpoint.path.name} (saved -> now):\n  {text}\n"
                "What was restored is that run. To start another one, give it a directory of its own.",
                EnvironmentChangedWarning,
            )

    def _note_changes(self, checkpoint: Checkpoint) -> list[str]:
        return note_changes(checkpoint.notes, self._run.notes)

    def _is_same_run(self, wanted: Wanted, restored: Restored) -> bool:
        """Return whether the losses that follow are those on record."""
        return (
            not wanted.keep_live
            and not wanted.fresh
            and (wanted.step is None or not self._run.timeline.superseded_steps)
            and (wanted.only is None or "rng" in wanted.only)
            and not restored.is_resized
        )

    def holds(self, step: int, captured: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint holds exactly what was captured, on every rank. Called by all ranks at once.

        Cost:
            Reads the checkpoint, and two passes of SHA-256 over the state.
        """
        with contextlib.ExitStack() as opened:
            try:
                found = self._read(Wanted(step), (), opened, lambda good: _is_equal(good.plan, captured))
            except RestoreError:
                return False  # not even of the same form
        return isinstance(found.what, Good) and found.agrees

    def adopt(self, restored: Restored) -> None:
        """Go on from a checkpoint: the directory's checkpoints are this run's, those above it will make way."""
        run, step = self._run, restored.checkpoint.step
        listed = run.directory.files.steps() if run.is_rank_zero else ()  # the others write nothing
        run.loss_limit.restore(restored.plan.recent_losses)
        run.timeline.restored_to(
            restored.checkpoint, {one for one in listed if one <= step or one in restored.steps_before}
        )

    def apply_newest(
        self, wanted: Wanted, note: Callable[[Restored], None], *, look_further: bool = False
    ) -> Restored | None:
        """Apply the step that is wanted, or the newest good one; None when there is no checkpoint.

        Args:
            wanted: What to restore.
            note: Called when it is applied, on every rank, to note it; what it raises on one is raised on all.
            look_further: Whether to look into the store behind the directory as well, where there is one.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the wanted step.
            NoGoodCheckpointError: There are checkpoints, and none is good.
            LoadError: The wanted step is not good.
            RestoreError: It does not fit the live objects.
        """
        run, group = self._run, self._run.group
        rejected: dict[PurePath, str] = {}
        remote = self._look_further(group) if look_further else set()
        tried: list[int] = []
        steps_before: Collection[int] | None = None
        while True:
            with contextlib.ExitStack() as opened:
                found = self._read(wanted, tried, opened, remote=remote)
                steps_before = found.listed if steps_before is None else steps_before
                if found.step is None:
                    break
                if found.is_remote:
                    self._fetch(group, found.step, wanted, tried=tried, remote=remote, rejected=rejected)
                    continue
                tried.append(found.step)
                if isinstance(found.what, Good):
                    restored = found.what.restored(rejected, steps_before)
                    self._apply_on_all(found.what, wanted, restored, note)
                    return restored
            if isinstance(found.what, Bad):
                self._pass_over(group, found.step, run.directory.files.path_of(found.step), found.what.reason, rejected)
        if rejected:
            raise NoGoodCheckpointError(
                directory=run.directory.path, rejected=[(str(path), reason) for path, reason in rejected.items()]
            )
        return None

    def _pass_over(self, group: Group, step: int, path: PurePath, reason: str, rejected: dict[PurePath, str]) -> None:
        rejected[path] = reason
        with group.section(f"passing over step {step}"):  # where warnings are errors, on all ranks
            if group.is_rank_zero:
                warn_skipped(path, reason)

    def _look_further(self, group: Group) -> set[int]:
        """Return the steps in the store behind the directory. Rank 0 looks."""
        mirror = self._run.directory.mirror
        if mirror is None:
            return set()
        with group.section("looking into the store") as section:
            if group.is_rank_zero:
                section.answer = sorted(mirror.look())
        return set(section.result)

    def _fetch(
        self,
        group: Group,
        step: int,
        wanted: Wanted,
        *,
        tried: list[int],
        remote: set[int],
        rejected: dict[PurePath, str],
    ) -> None:
        """Bring a checkpoint from the store into the directory, on rank 0, or pass over it."""
        mirror = self._run.directory.mirror
        assert mirror is not None
        with group.section(f"fetching step {step}") as section:
            if group.is_rank_zero:
                fault: Bad | Gone | None = None
                try:
                    mirror.fetch(step)
                except (LoadError, FileNotFoundError) as error:
                    fault = fault_of(error, is_named=wanted.step is not None)
                section.answer = fault, mirror.name_of(step)
        found, url = section.result
        remote.discard(step)
        if isinstance(found, Bad):
            self._pass_over(group, step, RemotePath(url), found.reason, rejected)
        elif found is None and step in tried:
            tried.remove(step)  # what was bad under this name has made way

    def _apply_on_all(self, good: Good, wanted: Wanted, restored: Restored, note: Callable[[Restored], None]) -> None:
        group = self._run.group
        names = [component.name for component, _ in good.plan.parts]
        try:
            with group.section(f"restoring step {good.checkpoint.step}"):
                self._apply(good.plan, streams=wanted.streams)
                good.mapped.check_unchanged()  # else the objects count as a mixture
                note(restored)
        except BaseException:
            if group.size > 1:  # another rank may not have come so far
                self._run.timeline.mixture.add(names)
            raise

    def _read(
        self,
        wanted: Wanted,
        tried: Collection[int],
        opened: contextlib.ExitStack,
        judge: Callable[[Good], bool] = lambda _: True,
        *,
        remote: Collection[int] = (),
    ) -> _Found:
        """Find a checkpoint, read and check it on every rank: it is good for all of them, or for none.

        Each rank looks by itself, and nearly always they see the same. Where one does not, all read what rank 0 has
        seen, and wait until they see it, too.

        Args:
            wanted: What to restore.
            tried: Steps that are not good.
            opened: Keeps the files open.
            judge: Looks at what was read.
            remote: Steps in the store behind the directory.
        """
        found = self._read_together(wanted, tried, opened, judge, remote=remote)
        if found.is_apart and not found.is_remote:
            return self._read_together(wanted, tried, opened, judge, remote=remote, told=[found.step])
        return found

    def _read_together(
        self,
        wanted: Wanted,
        tried: Collection[int],
        opened: contextlib.ExitStack,
        judge: Callable[[Good], bool],
        *,
        remote: Collection[int],
        told: Sequence[int | None] = (),
    ) -> _Found:
        run, group = self._run, self._run.group
        good: Good | None = None
        listed: Collection[int] = ()
        what = "reading what rank 0 sees" if told else "reading a checkpoint"
        with group.section(what, _both_read, self._decide_read) as section:
            section.same = {
                "step": wanted.step,
                "only": None if wanted.only is None else sorted(wanted.only),
                "keep_live": sorted(wanted.keep_live),
                "fresh": sorted(wanted.fresh),
                "streams": wanted.streams,
            }
            listed = run.directory.files.steps()
            here = [step for step in listed if step not in tried]
            step = told[0] if told else self._candidate({*here, *remote}, wanted)
            if step is None:
                section.answer = _Read(group.rank, None)
            elif not told and step not in here:
                section.answer = _Read(group.rank, step, is_remote=True)
            else:
                if told:
                    run.directory.wait_for(run.directory.files.path_of(step))
                section.answer, good = self._read_here(step, wanted, opened, judge)
        read: _Read = section.result
        what_is_there = good if read.fault is None else read.fault
        if isinstance(what_is_there, Good) and read.step is not None and not read.is_apart:
            run.directory.catalog.remember_verdict(read.step)  # every share of it was read by some rank
        return _Found(
            read.step, what_is_there, listed, is_remote=read.is_remote, is_apart=read.is_apart, agrees=read.agrees
        )

    def _candidate(self, steps: Collection[int], wanted: Wanted) -> int | None:
        """Return the step that this rank would read.

        Raises:
            CheckpointNotFoundError: On rank 0: there is no checkpoint of the wanted step.
        """
        if wanted.step is None:
            return max(steps, default=None)
        if wanted.step in steps:
            return wanted.step
        if self._run.group.is_rank_zero:
            files = self._run.directory.files
            raise CheckpointNotFoundError(directory=files.path, step=wanted.step, available_steps=sorted(steps))
        return None

    def _decide_read(self, read: _Read) -> _Read:
        """Refuse what is not the same file for every rank, and what has more in it than all ranks together.

        Raises:
            DirectoryNotSharedError: Two ranks have read different files.
            StateMismatchError: No rank has a place for something in it.
        """
        if read.step is None or read.is_apart or read.is_remote:
            return read
        path = self._run.directory.files.path_of(read.step)
        if read.other is not None:
            raise DirectoryNotSharedError(directory=path.parent, rank=read.other, name=path.name, differs=True)
        if read.fault is None:
            refuse_left_over(read.left_out or frozenset(), path)
        return read

    def _read_here(
        self, step: int, wanted: Wanted, opened: contextlib.ExitStack, judge: Callable[[Good], bool]
    ) -> tuple[_Read, Good | None]:
        """Read and check a checkpoint on this rank, shards included."""
        group = self._run.group
        found = self._checked(step, wanted, opened)
        if isinstance(found, Good):
            return _Read(group.rank, step, found.digest, left_out=found.left_out, agrees=judge(found)), found
        if isinstance(found, Bad) and group.size > 1:
            found = Bad(f"rank {group.rank}: {found.reason}")
        return _Read(group.rank, step, fault=found), None

    def _checked(self, step: int, wanted: Wanted, opened: contextlib.ExitStack) -> Good | Bad | Gone:
        catalog, group = self._run.directory.catalog, self._run.group
        is_named = wanted.step is not None
        reader: ShardReader | None = None
        try:
            file, checkpoint = opened.enter_context(catalog.open_step(step, share=group.rank, shares=group.size))
            payload, index = file.load_mapped()
            mapped = MappedFiles(index)
            if isinstance(file, CheckpointFolder):
                reader = open_shards(Path(file.path), [name for name, *_ in file.shards()], file.verified, mapped)
                opened.callback(reader.close)
        except (LoadError, OSError) as error:
            return fault_of(error, is_named=is_named)
        try:
            found = self._validate(_Contents(file, checkpoint, payload, mapped, reader), wanted)
            self._judge(found)
        except LoadError as error:
            return fault_of(error, is_named=is_named)
        except OSError as error:  # any other is one of the user's own code, which runs here as well
            if reader is None or error is not reader.failure:
                raise
            return fault_of(error, is_named=is_named)
        return found

    def _validate(self, contents: _Contents, wanted: Wanted) -> Good:
        """Check everything about a restore but that the state is finite.

        Raises:
            LoadError: What is in the file is not what a manager saves.
            RestoreError: It does not fit the live objects.
        """
        run, group = self._run, self._run.group
        file, checkpoint, payload, mapped, reader = contents
        if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
            raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
        try:
            header = file.header() or {}
            guard = guard_from_record(header["guard"])
        except (KeyError, TypeError) as error:
            reason = "its header does not say what was guarded"
            raise DamagedCheckpointError(path=file.path, reason=reason) from error
        with torch.inference_mode(mode=False):
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
                fresh=wanted.fresh,
                path=file.path,
                read=mapped.read,
            )
        if planned.rng is not None:
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

    def _judge(self, good: Good) -> None:
        """Let the guard that the state passed when it was saved judge it again.

        Raises:
            LoadError: It is not finite, or somebody has written into a file.
        """
        bad = Baseline({}).check(good.plan.parts, good.guard, good.mapped.forget).bad
        if bad:
            raise DamagedCheckpointError(path=good.checkpoint.path, reason=f"it is not finite ({bad[0]})")
        good.mapped.check_unchanged()

    def restore_streams(self) -> None:
        """Set the random streams that the last restore has left for later.

        Raises:
            RuntimeError: It has left none.
        """
        timeline = self._run.timeline
        if timeline.streams is None:
            raise RuntimeError(
                "there are no random streams to restore: they wait only behind a restore(streams=False) that has found "
                "a checkpoint, until they are set once. Nothing was changed"
            )
        RngStreams.apply(timeline.streams)
        timeline.streams = None

    def _apply(self, ready: Plan, *, streams: bool = True) -> None:
        """Apply a plan. Its objects count as a mixture until the timeline knows where the run stands."""
        mixture = self._run.timeline.mixture
        if self._run.group.size > 1:  # whatever this rank can put back, another one may have the new state
            mixture.add([component.name for component, _ in ready.parts])
        with torch.inference_mode(mode=False):  # in which nothing can be copied into ordinary tensors
            ready.apply(mixture, streams=streams)
        # A copy: the plan may be mapped from the file.
        self._run.timeline.streams = None if streams or ready.rng is None else copy_tree(ready.rng)

    def apply_memory(self, copy: MemoryCopy | None, note: Callable[[Restored], None]) -> Restored | None:
        """Apply the copy that an asynchronous save left, when it is of the newest checkpoint and that is on disk.

        Args:
            copy: This rank's copy.
            note: See `apply_newest`.
        """
        run, group = self._run, self._run.group
        saved, catalog = run.timeline.saved_step, run.directory.catalog

        def look(all_have: bool) -> tuple[Checkpoint, Collection[int]] | None:
            if not all_have or saved is None or not catalog.is_good(saved):
                return None
            return catalog.peek(saved), run.directory.files.steps()

        with group.section("looking into memory", operator.and_, look) as section:
            section.answer = copy is not None and copy.step == saved
        if section.result is None or copy is None:
            return None
        checkpoint, steps_before = section.result
        with group.section(f"restoring step {saved} from memory"):
            path = run.directory.files.path_of(checkpoint.step)
            ready = plan(run.components, copy.payload, path=path)
            self._apply(ready)
            checkpoint = dataclasses.replace(checkpoint, path=path)
            restored = Restored(checkpoint, ready, source="memory", steps_before=steps_before)
            note(restored)
        return restored

    def report(self, restored: Restored, kind: str, **data: Any) -> None:
        """Tell history and caller what a restore passed over and replaced."""
        directory, checkpoint, applied = self._run.directory, restored.checkpoint, restored.plan
        for path, reason in restored.rejected.items():
            directory.add_event("passed_over", None, file=path.name, reason=reason)
        directory.add_event(kind, checkpoint.step, replaced=applied.replaced, **data)
        if applied.replaced:
            text = "\n  ".join(applied.replaced)
            advice = (
                "Set them again before you go on, if that is what you changed."
                if kind == "rolled_back"
                else "Keep the live ones with restore(keep_live=('component.name', ...))."
            )
            warn_caller(
                f"The checkpoint's hyper-parameters replaced those of the script (live -> saved):\n  {text}\n{advice}",
                HyperparameterReplacedWarning,
            )
        if applied.notices:
            text = "\n  ".join(applied.notices)
            warn_caller(
                f"The objects are built differently than in the run that saved:\n  {text}", ComponentChangedWarning
            )
        if applied.environment:
            text = "\n  ".join(applied.environment)
            warn_caller(
                f"The environment differs from the one that saved {checkpoint.path.name} (saved -> now), so the next "
                f"losses may differ in their last bits:\n  {text}",
                EnvironmentChangedWarning,
            )


def _is_equal(saved: Plan, captured: Mapping[str, Any]) -> bool:
    """Return whether a state that was read is the captured one, bit for bit."""
    reserved = captured[RESERVED_KEY]
    before = {component.name: (part.state, part.record) for component, part in saved.parts}
    ended = {component.name for component, part in saved.parts if _has_ended_epoch(component.obj, part.state)}
    records = {
        name: {key: value for key, value in record.items() if key != "kind"}
        for name, record in reserved["components"].items()
    }
    now = {name: (captured[name], records[name]) for name in records}
    return before.keys() == now.keys() and all(
        holds_same(one, other)
        for one, other in (
            *((before[name], now[name]) for name in now if name not in ended),
            (saved.rng, reserved["rng"]),
            (saved.gradients, reserved["gradients"]),
        )
    )


def _has_ended_epoch(obj: Any, state: Any) -> bool:
    """Return whether a loader has done no more since this state than end its epoch, as it does after the inner loop."""
    return has_attribute(obj, "is_at_end_of") and bool(obj.is_at_end_of(state))
