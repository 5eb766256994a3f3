"""Restoring: find the checkpoint, check all of it, and only then change the first object.

A restore goes through three modules, and several processes go through it side by side: what one of them cannot do, none
does::

    finding.Search -> checking.check_step -> Restorer, which applies the plan
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch

from safeckpt.errors import (
    ComponentChangedWarning,
    EnvironmentChangedWarning,
    HyperparameterReplacedWarning,
    ImportedStateWarning,
    UncapturedStateWarning,
)
from safeckpt.run.arguments import note_changes
from safeckpt.run.capturing import MemoryCopy
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.checking import Wanted
from safeckpt.run.finding import Search
from safeckpt.run.run import Run
from safeckpt.state import Plan, copy_tree, plan
from safeckpt.state.random_streams import RngStreams
from safeckpt.system.warn import warn_caller

__all__ = ["Restored", "Restorer"]

_log = logging.getLogger("safeckpt")


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


class Restorer:
    """Puts checkpoints of a run into the live objects.

    Args:
        run: The run.
        on_restored: Called when a checkpoint was put into the objects, before anybody is told.
    """

    def __init__(self, run: Run, *, on_restored: Callable[[], None]) -> None:
        self._run = run
        self._on_restored = on_restored

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
        if restored.is_whole and run.is_rank_zero:
            run.first_draws.adopt(restored.header)
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
            and not restored.plan.imported
        )

    def adopt(self, restored: Restored) -> None:
        """Go on from a checkpoint: the directory's checkpoints are this run's, those above it will make way."""
        run, step = self._run, restored.checkpoint.step
        listed = run.directory.files.steps() if run.is_rank_zero else ()  # the others write nothing
        run.loss_limit.restore(restored.plan.recent_losses)
        known = {one for one in listed if one <= step or one in restored.steps_before}
        run.timeline.restored_to(restored.checkpoint, known, is_imported=bool(restored.plan.imported))

    def apply_newest(
        self, wanted: Wanted, note: Callable[[Restored], None], *, look_further: bool = False
    ) -> Restored | None:
        """Apply the step that is wanted, or the newest good one; None when there is no checkpoint.

        Args:
            wanted: What to restore.
            note: Called when it is applied, on every rank, to note it; what it raises on one is raised on all.
            look_further: Whether to look into the store behind the directory as well, where there is one.

        Raises:
            LoadError: See `Search.find`.
            RestoreError: See `Search.find`.
        """
        search = Search(self._run, wanted, look_further=look_further)
        with search.find() as good:
            if good is None:
                return None
            restored = Restored(
                good.checkpoint,
                good.plan,
                is_whole=good.is_whole,
                is_resized=good.is_resized,
                rejected=search.rejected,
                steps_before=search.steps_before,
                header=good.header,
            )
            self._apply_on_all(restored, note, good.mapped.check_unchanged, streams=wanted.streams)
            return restored

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
        path = run.directory.files.path_of(checkpoint.step)
        with group.section(f"checking the copy of step {saved}") as section:
            ready = plan(run.components, copy.payload, path=path)
        checkpoint = dataclasses.replace(checkpoint, path=path)
        restored = Restored(checkpoint, ready, source="memory", steps_before=steps_before)
        self._apply_on_all(restored, note)
        return restored

    def _apply_on_all(
        self,
        restored: Restored,
        note: Callable[[Restored], None],
        check_source: Callable[[], None] = lambda: None,
        *,
        streams: bool = True,
    ) -> None:
        """Apply a plan on every rank. Its objects count as a mixture until all ranks have noted where the run stands.

        Args:
            restored: What is applied.
            note: Notes it.
            check_source: Raises where the state that was applied is not the one that was checked.
            streams: Whether the random streams are set as well.
        """
        timeline, group, planned = self._run.timeline, self._run.group, restored.plan
        names = [component.name for component, _ in planned.pairs]
        try:
            with group.section(f"restoring step {restored.checkpoint.step}"):
                if group.size > 1:  # whatever this rank can put back, another one may have the new state
                    timeline.mixture.add(names)
                with torch.inference_mode(mode=False):  # in which nothing can be copied into ordinary tensors
                    planned.apply(timeline.mixture, streams=streams)
                # A copy: the plan may be mapped from the file.
                timeline.streams = None if streams or planned.rng is None else copy_tree(planned.rng)
                check_source()
                self._on_restored()
                note(restored)
        except BaseException:
            if group.size > 1:  # another rank may not have come so far
                timeline.mixture.add(names)
            raise

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

    def report(self, restored: Restored, kind: str, **data: Any) -> None:
        """Tell history and caller what a restore passed over and replaced."""
        directory, checkpoint, applied = self._run.directory, restored.checkpoint, restored.plan
        for path, reason in restored.rejected.items():
            directory.add_event("passed_over", None, file=path.name, reason=reason)
        directory.add_event(kind, checkpoint.step, replaced=applied.replaced, **data)
        if applied.imported:
            warn_caller(applied.imported, ImportedStateWarning)
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
        if applied.parted:
            text = "\n  ".join(applied.parted)
            warn_caller(
                "Components do not share what they shared in the run that saved, so what follows may be another run:\n"
                f"  {text}\nThe checkpoint has every value: once this is mended, a restart is exact.",
                UncapturedStateWarning,
            )
        if applied.environment:
            text = "\n  ".join(applied.environment)
            warn_caller(
                f"The environment differs from the one that saved {checkpoint.path.name} (saved -> now), so the next "
                f"losses may differ in their last bits:\n  {text}",
                EnvironmentChangedWarning,
            )
