"""Restoring: find the checkpoint, check all of it, and only then change the first object.

Several processes restore the same step: the newest one that every one of them can read. Each of these is a section that
all ranks pass, or none does::

    looking for a checkpoint -> reading it -> reading its shards -> applying it
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch

from safeckpt.distributed import (
    Group,
    Names,
    ShardTensors,
    allocate_placeholders,
    as_local_shards,
    first_answer,
    holds_same,
    in_group,
    payload_of_rank,
    read_shards,
    refuse_differences,
    refuse_left_over,
    shards_of,
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
from safeckpt.file import CheckpointFolder, Mapped
from safeckpt.remote import RemotePath
from safeckpt.run.arguments import note_changes
from safeckpt.run.catalog import Bad, Checkpoint, Gone, OpenCheckpoint, fault_of, warn_skipped
from safeckpt.run.run import Run
from safeckpt.run.writers import MemoryCopy
from safeckpt.state import RESERVED_KEY, Baseline, Guard, Plan, copy_tree, guard_from_record, plan
from safeckpt.state.random_streams import RngStreams
from safeckpt.system.warn import warn_caller

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
        shards: Tensors of it that the shards have to fill.
        shard_files: Names of the files they are in.
        guard: What has to be finite.
        header: That of the file.
        is_whole: Whether all components of the checkpoint are in the plan.
        is_resized: Whether the run had another number of processes.
        left_out: What this rank has not, and others may have.
        mapped: The file that the plan reads from.
    """

    checkpoint: Checkpoint
    digest: str
    plan: Plan
    shards: ShardTensors
    shard_files: Collection[str]
    guard: Guard
    header: Mapping[str, Any]
    is_whole: bool
    is_resized: bool
    left_out: Names
    mapped: Mapped


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


class _Search(NamedTuple):
    """One rank's answer while a checkpoint is looked for.

    Attributes:
        steps: Those in the directory that were not tried.
        remote: Those in the store that were not fetched.
        arguments: What was asked for.
    """

    steps: list[int]
    remote: list[int]
    arguments: dict[str, Any]


def _search_of_rank_zero(answers: list[_Search]) -> _Search:
    refuse_differences([answer.arguments for answer in answers])
    return answers[0]


def _same_file(path: Path, answers: list[Gone | Bad | str]) -> Gone | Bad | None:
    """Return what is wrong on some rank, of which each answers that or the digest it has read.

    Raises:
        DirectoryNotSharedError: Two ranks have read different files.
    """
    first = answers[0]
    for rank, answer in enumerate(answers):
        if isinstance(first, str) and isinstance(answer, str) and answer != first:
            raise DirectoryNotSharedError(directory=path.parent, rank=rank, name=path.name, differs=True)
    return _first_fault([None if isinstance(answer, str) else answer for answer in answers])


def _first_fault(answers: list[Gone | Bad | None]) -> Gone | Bad | None:
    """Return what is wrong on the first rank that has found something, with its number where there are several."""
    for rank, answer in enumerate(answers):
        if isinstance(answer, Bad) and len(answers) > 1:
            return Bad(f"rank {rank}: {answer.reason}")
        if answer is not None:
            return answer
    return None


def _first_fault_or_rest(path: Path, answers: list[tuple[Gone | Bad | None, Names]]) -> Gone | Bad | None:
    """Return what is wrong on the first rank that has found something; refuse what every rank has left out."""
    fault = _first_fault([one for one, _ in answers])
    if fault is None:
        refuse_left_over(frozenset.intersection(*(names for _, names in answers)), path)
    return fault


class Restorer:
    """Puts checkpoints of a run into the live objects.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def restore(self, wanted: Wanted) -> Restored | None:
        """Put a checkpoint into the live objects and note where the run stands; see `CheckpointManager.restore`."""
        run = self._run
        restored = self.apply_newest(wanted, look_further=True)
        if restored is None:
            if run.is_rank_zero:
                run.directory.catalog.warn_if_emptied()
            return None
        checkpoint, only = restored.checkpoint, wanted.only
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
        _log.info("restored step %d from %s", checkpoint.step, checkpoint.path)
        return restored

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
        group = self._run.group
        with contextlib.ExitStack() as opened:
            try:
                found = self._read(group, step, Wanted(step), opened)
            except RestoreError:
                return False  # not even of the same form
            with group.section(f"comparing step {step}", all) as section:
                section.answer = isinstance(found, Good) and _is_equal(found.plan, captured)
        return section.result

    def adopt(self, restored: Restored) -> None:
        """Go on from a checkpoint: the directory's checkpoints are this run's, those above it will make way."""
        run, step = self._run, restored.checkpoint.step
        listed = run.directory.files.steps() if run.is_rank_zero else ()  # the others write nothing
        run.timeline.restored_to(
            restored.checkpoint, {one for one in listed if one <= step or one in restored.steps_before}
        )

    def apply_newest(self, wanted: Wanted, *, look_further: bool = False) -> Restored | None:
        """Apply the step that is wanted, or the newest good one; None when there is no checkpoint.

        Args:
            wanted: What to apply.
            look_further: Whether to look into the store behind the directory as well, where there is one.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the wanted step.
            NoGoodCheckpointError: There are checkpoints, and none is good.
            LoadError: The wanted step is not good.
            RestoreError: It does not fit the live objects.
        """
        run, group = self._run, self._run.group
        steps_before = run.directory.files.steps() if group.is_rank_zero else []
        rejected: dict[PurePath, str] = {}
        tried: set[int] = set()
        remote = self._look_further(group) if look_further else set()
        while (candidate := self._find_candidate(group, wanted, tried, remote)) is not None:
            step, is_remote = candidate
            if is_remote:
                remote.discard(step)
                fault, url = self._fetch(group, step, wanted)
                if isinstance(fault, Bad):
                    self._pass_over(group, step, RemotePath(url), fault.reason, rejected)
                elif fault is None:
                    tried.discard(step)  # what was bad under this name has made way
                continue
            tried.add(step)
            with contextlib.ExitStack() as opened:
                found = self._read(group, step, wanted, opened)
                if isinstance(found, Good):
                    with group.section(f"restoring step {step}"):
                        self._apply(found.plan, streams=wanted.streams)
                        found.mapped.check_unchanged()  # else the objects count as a mixture
                    return Restored(
                        found.checkpoint,
                        found.plan,
                        is_whole=found.is_whole,
                        is_resized=found.is_resized,
                        rejected=rejected,
                        steps_before=steps_before,
                        header=found.header,
                    )
            if isinstance(found, Bad):
                self._pass_over(group, step, run.directory.files.path_of(step), found.reason, rejected)
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
        with group.section("looking into the store", first_answer) as section:
            if group.is_rank_zero:
                section.answer = sorted(mirror.look())
        return set(section.result)

    def _fetch(self, group: Group, step: int, wanted: Wanted) -> tuple[Bad | Gone | None, str]:
        """Bring a checkpoint into the directory, on rank 0; return what is wrong with it in the store, and where."""
        mirror = self._run.directory.mirror
        assert mirror is not None
        with group.section(f"fetching step {step}", first_answer) as section:
            if group.is_rank_zero:
                fault: Bad | Gone | None = None
                try:
                    mirror.fetch(step)
                except (LoadError, FileNotFoundError) as error:
                    fault = fault_of(error, is_named=wanted.step is not None)
                section.answer = fault, mirror.name_of(step)
        found: tuple[Bad | Gone | None, str] = section.result
        return found

    def _find_candidate(
        self, group: Group, wanted: Wanted, tried: Collection[int], remote: Collection[int]
    ) -> tuple[int, bool] | None:
        """Return the step to try next, and whether it has to be fetched first; the same on every rank."""
        files = self._run.directory.files
        with group.section("looking for a checkpoint", _search_of_rank_zero) as section:
            only = None if wanted.only is None else sorted(wanted.only)
            section.answer = _Search(
                steps=[step for step in files.steps() if step not in tried] if group.is_rank_zero else [],
                remote=sorted(remote),
                arguments={
                    "step": wanted.step,
                    "only": only,
                    "keep_live": sorted(wanted.keep_live),
                    "fresh": sorted(wanted.fresh),
                    "streams": wanted.streams,
                },
            )
        search = section.result
        both = sorted({*search.steps, *search.remote})
        if wanted.step is not None and wanted.step not in both:
            raise CheckpointNotFoundError(directory=files.path, step=wanted.step, available_steps=both)
        step = wanted.step if wanted.step is not None else max(both, default=None)
        return None if step is None else (step, step not in search.steps)

    def _read(self, group: Group, step: int, wanted: Wanted, opened: contextlib.ExitStack) -> Good | Bad | Gone:
        """Read and check a checkpoint on every rank: it is good for all of them, or for none."""
        path = self._run.directory.files.path_of(step)
        with group.section(f"reading step {step}", functools.partial(_same_file, path)) as reading:
            if group.size > 1:
                self._run.directory.wait_for(path)
            found = self._read_here(step, wanted, opened)
            reading.answer = found.digest if isinstance(found, Good) else found
        if reading.result is not None:
            return reading.result
        assert isinstance(found, Good)  # nothing is wrong on any rank
        with group.section(
            f"reading the shards of step {step}", functools.partial(_first_fault_or_rest, path)
        ) as filling:
            filling.answer = self._fill(found, path, is_named=wanted.step is not None), found.left_out
        if filling.result is not None:
            return filling.result
        self._run.directory.catalog.remember_verdict(step)  # every share of it was read by some rank
        return found

    def _read_here(self, step: int, wanted: Wanted, opened: contextlib.ExitStack) -> Good | Bad | Gone:
        """Read and check a checkpoint on this rank; of shards, all but their values."""
        catalog, group = self._run.directory.catalog, self._run.group
        is_named = wanted.step is not None
        try:
            file, checkpoint = opened.enter_context(catalog.open_step(step, share=group.rank, shares=group.size))
        except (LoadError, OSError) as error:
            return fault_of(error, is_named=is_named)
        try:
            return self._validate(file, checkpoint, wanted)
        except LoadError as error:  # an OSError is one of the user's own code, which runs here as well
            return fault_of(error, is_named=is_named)

    def _validate(self, file: OpenCheckpoint, checkpoint: Checkpoint, wanted: Wanted) -> Good:
        """Check everything about a restore; of shards, all but their values.

        Raises:
            LoadError: What is in the file is not what a manager saves.
            RestoreError: It does not fit the live objects.
        """
        run, group = self._run, self._run.group
        with torch.inference_mode(mode=False):
            payload, mapped = file.load_mapped()
            if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
                raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
            try:
                header = file.header() or {}
                guard = guard_from_record(header["guard"])
            except (KeyError, TypeError) as error:
                reason = "its header does not say what was guarded"
                raise DamagedCheckpointError(path=file.path, reason=reason) from error
            shard_files = shards_of(payload)
            read = (
                functools.partial(file.read_tensor, dtype=torch.uint8) if isinstance(file, CheckpointFolder) else None
            )
            payload, changes, left_out = payload_of_rank(
                payload, run.components, group.rank, group.size, path=file.path, read=read
            )
            shards: ShardTensors = {}
            if shard_files:
                payload, shards = allocate_placeholders(payload, run.components, file.path)
                shards = _only_of(shards, wanted.only)
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
            shards=shards,
            shard_files=shard_files,
            guard=guard,
            header=header,
            is_whole=is_whole,
            is_resized=bool(changes),
            left_out=left_out,
            mapped=mapped,
        )

    def _fill(self, good: Good, path: Path, *, is_named: bool) -> Gone | Bad | None:
        """Read the shards and judge the whole state; return what is wrong with it."""
        try:
            self._read_and_judge(good, path)
        except (LoadError, OSError) as error:
            return fault_of(error, is_named=is_named)
        return None

    def _read_and_judge(self, good: Good, path: Path) -> None:
        """Read the shards, and let the guard that the state passed when it was saved judge it again.

        Raises:
            LoadError: They cannot be read, or the state is not finite.
        """
        good.mapped.check_unchanged()
        if good.shards:
            read_shards(good.shards, path, self._run.group, good.shard_files)
        bad = Baseline({}).check(good.plan.parts, good.guard, good.mapped.forget).bad
        if bad:
            raise DamagedCheckpointError(path=path, reason=f"it is not finite ({bad[0]})")
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

    def apply_memory(self, copy: MemoryCopy | None) -> Restored | None:
        """Apply the copy that an asynchronous save left, when it is of the newest checkpoint and that is on disk."""
        run = self._run
        saved, catalog = run.timeline.saved_step, run.directory.catalog
        if copy is None or run.group.size > 1 or copy.step != saved or not catalog.is_good(saved):
            return None
        steps_before = run.directory.files.steps()
        checkpoint = catalog.peek(saved)
        ready = plan(run.components, copy.payload, path=checkpoint.path)
        self._apply(ready)
        return Restored(checkpoint, ready, source="memory", steps_before=steps_before)

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
    is_at_end_of = getattr(obj, "is_at_end_of", None)
    return is_at_end_of is not None and bool(is_at_end_of(state))


def _only_of(shards: ShardTensors, only: Collection[str] | None) -> ShardTensors:
    """Return the tensors of the components that are wanted, by the first part of their key."""
    if only is None:
        return shards
    return {key: tensor for key, tensor in shards.items() if key.partition(".")[0] in {*only, RESERVED_KEY}}
