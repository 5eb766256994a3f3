"""Saving: capture, guard, write, commit, and only then prune.

With several processes each of these is a section that all ranks pass, or none does::

    capturing -> [refusing parts, comparing copies] -> collecting rank states -> [verifying older] -> [copying]
        -> writing -> committing

What is in brackets happens only when it is needed. The newest step saved again is compared with its checkpoint and
described anew, and nothing else is written.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from safeckpt.distributed import (
    Group,
    PlanCache,
    differing_names,
    drifted_ranks,
    first_answer,
    first_of_stages,
    have_own_gradients,
    pack_rank_state,
    rank_key,
    rank_state_of,
    ranks_hold_parts,
    refuse_parts,
    replica_fingerprints,
    replica_layouts,
    united,
    with_placeholders,
    with_world,
)
from safeckpt.errors import NonFiniteError, ReplicaDriftError, ReplicaDriftWarning, StepExistsError, drift_text
from safeckpt.file import encode
from safeckpt.run.background import BackgroundWriter
from safeckpt.run.capturing import Capturer, Draft
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.pruning import Pruning
from safeckpt.run.restoring import Restorer
from safeckpt.run.run import Run
from safeckpt.run.writers import MemoryCopy, Writer, rewrite_header, writer_of
from safeckpt.state import Staging, capture, copy_tree, to_cpu
from safeckpt.state.loss import Loss
from safeckpt.system.threads import Progress
from safeckpt.system.warn import warn_caller

__all__ = ["Saver"]


class _Summary(NamedTuple):
    """What the ranks learn from each other when all have captured their part.

    Attributes:
        checkpoint: As rank 0 has it.
        digests: Those of rank 0.
        drifted: Ranks whose copies differ from those of the first rank that has them.
        hold_parts: Whether the ranks hold different tensors instead of copies.
        own_gradients: Whether the ranks have different gradients.
        stages: The first rank of each stage of a model; rank 0 alone where all ranks hold the same.
    """

    checkpoint: Checkpoint
    digests: dict[str, str]
    drifted: list[int]
    hold_parts: bool
    own_gradients: bool
    stages: list[int]


def _summarize(answers: list[tuple[Checkpoint, dict[str, str]]]) -> _Summary:
    checkpoint, first = answers[0]
    digests = [answer for _, answer in answers]
    if len(answers) == 1:
        return _Summary(checkpoint, first, [], hold_parts=False, own_gradients=False, stages=[0])
    return _Summary(
        checkpoint,
        first,
        drifted_ranks(digests),
        hold_parts=ranks_hold_parts(digests),
        own_gradients=have_own_gradients(digests),
        stages=first_of_stages(digests),
    )


class _RankState(NamedTuple):
    """One rank's answer when states are collected.

    Attributes:
        state: What it has otherwise than rank 0, encoded.
        unread: On rank 0: older steps that have to be read before they count as good.
        stage: Of the first rank of another stage than rank 0's: what it has of the model.
    """

    state: dict[str, Any]
    unread: list[int]
    stage: dict[str, Any] | None


def _unread_by_rank_zero(answers: list[_RankState]) -> list[int]:
    return answers[0].unread


class _Written(NamedTuple):
    """Rank 0's answer after the commit, and whether something failed after it."""

    checkpoint: Checkpoint
    failed_late: bool


def _what_was_written(answers: list[_Written]) -> _Written:
    return answers[0]


class Saver:
    """Saves the checkpoints of a run; `CheckpointManager.save` says what it promises.

    Args:
        run: The run.
        capturer: Captures this rank's part.
        restorer: Compares the state with what is on disk.
        pruning: Deletes what is no longer needed.
        asynchronous: Whether a thread writes.
        progress: Told how much of a file is written.

    Attributes:
        committed: Called with each checkpoint after its commit, on rank 0.
    """

    def __init__(
        self,
        run: Run,
        capturer: Capturer,
        restorer: Restorer,
        pruning: Pruning,
        *,
        asynchronous: bool,
        progress: Progress | None = None,
    ) -> None:
        self._run = run
        self._capturer = capturer
        self._restorer = restorer
        self._pruning = pruning
        self._progress = progress
        self._staging = Staging() if asynchronous else None
        self._is_checked = False
        self._is_warm = False
        self._background = BackgroundWriter()
        self.committed: list[Callable[[Checkpoint], object]] = []
        self._memory: MemoryCopy | None = None
        self._plans = PlanCache()

    @property
    def memory(self) -> MemoryCopy | None:
        """The copy of the newest state that was saved asynchronously; None when there is none."""
        return self._memory

    def wait(self) -> None:
        """Return when nothing is being written in the background.

        Raises:
            BaseException: What the write has raised, once.
        """
        self._background.wait()

    def save(self, step: int, loss: Loss, metrics: Mapping[str, Any] | None) -> Checkpoint:
        """Save everything as the checkpoint of a step. Called by all ranks at once."""
        run, group = self._run, self._run.group
        if self._background.busy:
            run.directory.add_event("waited", step, reason="the save before is still being written")
        self._background.wait()
        what = f"saving step {step}"
        draft, summary = self._capture(group, what, step, loss, metrics)
        if step == run.timeline.saved_step and self._is_on_disk(group, what, step):
            return self._save_again(group, what, draft)
        if summary.hold_parts:
            self._refuse_parts(group, what, draft)
        if summary.drifted:
            self._report_drift(group, what, draft, summary.drifted)
        draft = self._with_rank_states(group, what, draft, summary)
        self._is_checked = True  # the state was encoded, and the directory taken
        run.directory.refuse_unshared(what)
        writer = writer_of(
            draft,
            run.directory,
            run.components,
            self._progress,
            self._plans,
            rules=self._pruning.rules,
            refuse=self._capturer.refuse_written,
            copies_differ=bool(summary.drifted),
        )
        if self._staging is None:
            return self._write(group, what, writer)
        return self._start_write(group, what, writer, self._staging)

    # -- what is saved -----------------------------------------------------------------------------------------------

    def _capture(
        self, group: Group, what: str, step: int, loss: Loss, metrics: Mapping[str, Any] | None
    ) -> tuple[Draft, _Summary]:
        """Capture and guard on every rank, and take rank 0's idea of the checkpoint."""
        try:
            with group.section(f"{what}: capturing", _summarize) as section:
                draft = self._capturer.capture(step, loss, metrics)
                section.answer = draft.checkpoint, draft.digests
        except NonFiniteError as error:
            self.note_refusal(error)
            raise
        checkpoint = dataclasses.replace(section.result.checkpoint, path=draft.checkpoint.path)
        return dataclasses.replace(draft, checkpoint=checkpoint), section.result

    def _is_on_disk(self, group: Group, what: str, step: int) -> bool:
        """Return whether a step that was saved has a checkpoint still; rank 0 knows, others may see old listings."""
        with group.section(f"{what}: looking for it", first_answer) as section:
            section.answer = group.is_rank_zero and os.path.lexists(self._run.directory.files.path_of(step))
        return bool(section.result)

    def _save_again(self, group: Group, what: str, draft: Draft) -> Checkpoint:
        """Return the newest checkpoint, with a new loss or new metrics in it, if it holds what the objects hold.

        Raises:
            StepExistsError: They hold a different state.
            LoadError: It cannot be compared, since it is damaged.
        """
        run, step = self._run, draft.checkpoint.step
        if not self._restorer.holds(step, draft.captured):
            raise StepExistsError(step=step, path=run.directory.files.path_of(step))
        with group.section(f"{what}: describing it", first_answer) as section:
            if group.is_rank_zero:
                section.answer = self._update_header(draft.checkpoint)
        checkpoint: Checkpoint = section.result
        return dataclasses.replace(checkpoint, path=run.directory.files.path_of(step))

    def _update_header(self, new: Checkpoint) -> Checkpoint:
        """Put a new loss and new metrics into the header of the newest checkpoint. On rank 0."""
        run = self._run
        current = run.directory.catalog.peek(new.step)
        updated = dataclasses.replace(
            current,
            loss=current.loss if new.loss is None else new.loss,
            metrics={**current.metrics, **new.metrics},
        )
        if updated == current:
            return current
        run.directory.enter()
        rewrite_header(updated, run.directory)
        run.directory.catalog.remember_verdict(new.step)
        run.directory.add_event("described", new.step, loss=updated.loss, metrics=dict(updated.metrics))
        self._pruning.prune(new.step)
        if run.directory.mirror is not None:
            run.directory.mirror.described(new.step)
        return run.directory.catalog.peek(new.step)

    def note_refusal(self, error: NonFiniteError) -> None:
        """Note a refusal that is not noted yet, such as another rank's."""
        refusal = self._run.timeline.refusal
        if error.step is not None and (refusal is None or refusal.step != error.step):
            self._run.timeline.refuse(error.step, str(error).partition("\n")[0])

    def _refuse_parts(self, group: Group, what: str, draft: Draft) -> None:
        with group.section(f"{what}: comparing parts", differing_names) as section:
            section.answer = replica_layouts(draft.captured, draft.digests["stage"])
        with group.section(f"{what}: refusing parts"):
            refuse_parts(section.result)

    def _report_drift(self, group: Group, what: str, draft: Draft, ranks: list[int]) -> None:
        """Name what differs between replicas, and warn or refuse."""
        run = self._run
        policy = run.membership.ranks.on_drift
        if policy == "ignore":
            return
        with group.section(f"{what}: comparing copies", differing_names) as section:
            section.answer = replica_fingerprints(draft.captured)
        step, names = draft.checkpoint.step, section.result
        run.directory.add_event("replicas_differ", step, ranks=ranks, names=names[:20], names_total=len(names))
        is_first = run.timeline.saved_step is None
        if policy == "error" or is_first:
            raise ReplicaDriftError(step=step, ranks=ranks, names=names, first=is_first, path=run.directory.path)
        with group.section(f"{what}: warning of drift"):  # where warnings are errors, on all ranks
            if group.is_rank_zero:
                warn_caller(drift_text(step, ranks, names), ReplicaDriftWarning)

    def _with_rank_states(self, group: Group, what: str, draft: Draft, summary: _Summary) -> Draft:
        """Take the directory, and return the draft with what each rank has otherwise than rank 0 in it.

        Into a file rank 0 writes it for all; into a directory each rank writes its own.
        """
        run = self._run
        with group.section(f"{what}: collecting rank states", _unread_by_rank_zero) as section:
            unread: list[int] = []
            state: dict[str, Any] = {}
            is_first_of_stage = draft.is_sharded and group.rank in summary.stages[1:]
            if group.is_rank_zero:
                run.directory.enter()
                self._pruning.announce()
                if draft.is_sharded:
                    unread = self._pruning.unread(draft.checkpoint.step)
            else:  # a copy: a view would be sent with all of the memory around it
                state = rank_state_of(draft.captured, draft.digests, summary.digests)
                if draft.is_sharded:
                    state = with_placeholders(state, draft.shards)
                state = copy_tree(to_cpu(state))
                if draft.is_sharded:
                    own_item = {rank_key(group.rank): pack_rank_state(state)}
                    draft, state = dataclasses.replace(draft, shards={**draft.shards, **own_item}), {}
            stage = draft.payload if is_first_of_stage else None
            section.answer = _RankState(encode(state, root="payload"), unread, stage)
        if draft.is_sharded:
            self._verify_older(group, what, section.result)
        if group.size == 1 or not group.is_rank_zero:
            return draft
        stages = [answer.stage for answer in section.answers if answer.stage is not None]
        payload = with_world(
            united([draft.payload, *stages]),
            group.size,
            own_gradients=summary.own_gradients,
            stage=draft.digests["stage"],
            rank_states=None if draft.is_sharded else [answer.state for answer in section.answers],
        )
        return dataclasses.replace(draft, payload=payload)

    def _verify_older(self, group: Group, what: str, steps: list[int]) -> None:
        """Read older checkpoints whose state decides what may be deleted: all ranks together, since they are large."""
        catalog = self._run.directory.catalog
        for step in steps:
            with group.section(f"{what}: verifying step {step}", all) as section:
                section.answer = catalog.is_good_share(step, group.rank, group.size)
            if group.is_rank_zero:
                catalog.remember_verdict(step, good=section.result)

    # -- how it is written -------------------------------------------------------------------------------------------

    def _start_write(self, group: Group, what: str, writer: Writer, staging: Staging) -> Checkpoint:
        """Copy what training is about to change, and write in the background."""
        with group.section(f"{what}: copying"):
            self._memory = None
            payload = writer.stage(staging, is_rank_zero=group.is_rank_zero)
            if payload is not None:
                self._memory = MemoryCopy(writer.checkpoint.step, payload)
        background = group.for_background()
        checkpoint = writer.checkpoint
        timeline = self._run.timeline
        timeline.expect_save(checkpoint.step)
        job = functools.partial(self._write_in_background, background, what, writer)
        try:
            self._background.start(job, f"the save of step {checkpoint.step}")
        except BaseException:
            if not self._background.busy:  # interrupted before the thread began
                timeline.fail_save()
            raise
        timeline.end(checkpoint.step)
        return checkpoint

    def _write_in_background(self, group: Group, what: str, writer: Writer) -> None:
        try:
            self._write(group, what, writer)
        except BaseException:
            if group.size == 1:  # ranks would learn of it before different steps
                self._run.timeline.fail_save()
            raise

    def _write(self, group: Group, what: str, writer: Writer) -> Checkpoint:
        """Write on all ranks, commit on rank 0, and let every rank know what has become of it.

        What goes wrong after the commit, such as a sync of the directory, is raised when all ranks know that the
        checkpoint is there: otherwise they would not agree on when the next one is due.
        """
        late: BaseException | None = None
        try:
            writer.write(group, what)
            with group.section(f"{what}: committing it", _what_was_written) as section:
                written = writer.checkpoint
                if group.is_rank_zero:
                    try:
                        written = self._commit(writer)
                        self._mirror(written, group)
                    except BaseException as error:
                        if self._run.timeline.saved_step != written.step:
                            raise
                        late = error
                section.answer = _Written(written, late is not None)
        except BaseException as error:
            writer.discard()
            if isinstance(error, NonFiniteError):
                self.note_refusal(error)
            raise
        written = dataclasses.replace(section.result.checkpoint, path=writer.checkpoint.path)
        if not group.is_rank_zero:
            self._run.timeline.record(written)
            self._mirror(written, group)
        if section.result.failed_late:
            with group.section(f"{what}: after the commit"):
                if late is not None:
                    raise late
        return written

    def _commit(self, writer: Writer) -> Checkpoint:
        """Commit a checkpoint, and only then forget what is no longer needed. On rank 0."""
        run = self._run
        checkpoint = writer.prepare()
        try:
            with run.replay.committing(checkpoint.step):
                writer.commit()
            self._record(checkpoint)
        except (NonFiniteError, StepExistsError):
            raise
        except BaseException:
            if os.path.lexists(checkpoint.path):  # interrupted after the rename, or not known to be durable: saved
                self._record(checkpoint)
                run.directory.add_saved_event(checkpoint)
            raise
        run.directory.add_saved_event(checkpoint)
        self._pruning.prune(checkpoint.step)
        for call in self.committed:
            call(checkpoint)
        return checkpoint

    def _mirror(self, checkpoint: Checkpoint, group: Group) -> None:
        if self._run.directory.mirror is not None:
            self._run.directory.mirror.committed(checkpoint.step, rank=group.rank, size=group.size)

    def _record(self, checkpoint: Checkpoint) -> None:
        self._run.timeline.record(checkpoint)
        self._run.directory.catalog.remember_verdict(checkpoint.step)

    def check_first(self, step: int) -> None:
        """Find out at the first step what would otherwise fail at the first save, many steps later."""
        if self._is_checked or not self._run.timeline.saves_by_itself:
            return
        with self._run.group.section(f"checking the first step, {step}"):
            if self._run.is_rank_zero:
                self._run.directory.enter()
            self._capturer.check_savable()
        self._is_checked = True

    def warm(self) -> None:
        """Have memory for the copy made ready while training goes on: after a step, the optimizer's state is there."""
        if self._staging is None or self._is_warm:
            return
        self._is_warm = True
        if self._run.group.size == 1:  # a state_dict may be something that all ranks have to do at once
            components = self._run.components.items()
            large = {name: component for name, component in components if component.kind in ("module", "optimizer")}
            with torch.inference_mode(mode=False):  # in which tensors have no versions, and DTensors no parts
                self._staging.warm(capture(large).payload)
