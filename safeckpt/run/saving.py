"""Saving: capture, guard, write, commit, and only then prune.

With several processes each of these is a section that all ranks pass, or none does::

    capturing -> [comparing what differs] -> [verifying older] -> writing and committing -> [sending]

Where it is written in the background, training waits until the older ones are verified, and copies; what follows is::

    comparing copies -> writing and committing -> [sending]

What is in brackets happens only when it is needed. Between two of them no rank waits for another: one that fails tells
the others at the end of the one it is in. The newest step saved again is compared with its checkpoint and described
anew, and nothing else is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from safeckpt.distributed.comparison import Digests, both_digests, digests_on
from safeckpt.distributed.group import Group
from safeckpt.distributed.plans import Decision, Plans, Proposals
from safeckpt.distributed.rank_state import digests_of, rank_state_of, replica_fingerprints, replica_layouts
from safeckpt.errors import (
    REFUSALS,
    CheckpointNotFoundError,
    LossSpikeError,
    NonFiniteError,
    ReplicaDriftError,
    ReplicaDriftWarning,
    RestoreError,
    StepExistsError,
    drift_text,
)
from safeckpt.file import PreparedFile, Write, write_here
from safeckpt.run.background import BackgroundWriter
from safeckpt.run.capturing import Capturer, Draft, MemoryCopy
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.checking import Wanted
from safeckpt.run.comparing import is_equal
from safeckpt.run.finding import Search
from safeckpt.run.observing import tell_committed
from safeckpt.run.pruning import Pruning
from safeckpt.run.run import Run
from safeckpt.run.run_directory import Place
from safeckpt.run.writers import (
    Contributions,
    Job,
    Output,
    World,
    Writer,
    both_contributions,
    rewrite_header,
    writer_of,
)
from safeckpt.state import Staging, capture
from safeckpt.state.loss import Loss
from safeckpt.system.threads import Progress
from safeckpt.system.warn import warn_caller

if TYPE_CHECKING:
    from safeckpt.run.writing_process import WritingProcess

__all__ = ["AsyncSave", "Saver"]

AsyncSave: TypeAlias = bool | Literal["process"]


class _RankAnswer(NamedTuple):
    """What ranks have captured, as they tell each other.

    Attributes:
        checkpoint: As the lowest rank has it.
        is_sharded: Whether it is a directory.
        digests: What they are compared by.
        proposals: Which rank could write which shards, where that has changed.
    """

    checkpoint: Checkpoint
    is_sharded: bool
    digests: Digests
    proposals: Proposals


def _both_answers(one: _RankAnswer, other: _RankAnswer) -> _RankAnswer:
    proposals = {**one.proposals, **other.proposals}
    return one._replace(digests=both_digests(one.digests, other.digests), proposals=proposals)


class _Entered(NamedTuple):
    """What rank 0 has made and found in the directory, when it has taken it for a save.

    Attributes:
        place: What it has made: the ranks look for it.
        unread: Older steps that have to be read before they count as good.
    """

    place: Place
    unread: list[int]


class _Summary(NamedTuple):
    """What the ranks learn from each other when all have captured their part.

    Attributes:
        checkpoint: As rank 0 has it.
        digests: Those of rank 0.
        drifted: Ranks whose copies differ from those of the first rank that has them.
        hold_parts: Whether the ranks hold different tensors instead of copies.
        own_gradients: Whether the ranks have different gradients.
        stages: The first rank of each stage of a model; rank 0 alone where all ranks hold the same.
        decision: Which rank writes which shards; None where all do as the time before.
        is_again: Whether the newest checkpoint is of this step.
        entered: The directory, taken for the save; None where that waits for something.
    """

    checkpoint: Checkpoint
    digests: dict[str, str]
    drifted: list[int]
    hold_parts: bool
    own_gradients: bool
    stages: list[int]
    decision: Decision | None
    is_again: bool = False
    entered: _Entered | None = None


class _Copied(NamedTuple):
    """A save that goes on in the background.

    Attributes:
        draft: This rank's part, over a copy.
        place: What rank 0 has made in the directory.
        failure: Why there is no copy.
        is_first: Whether the run has no checkpoint yet.
        began: When the save began.
    """

    draft: Draft
    place: Place
    failure: BaseException | None
    is_first: bool
    began: float


class _Written(NamedTuple):
    """What rank 0 has committed, and whether something failed after that."""

    checkpoint: Checkpoint
    failed_late: bool


def _writing_process() -> WritingProcess:
    from safeckpt.run.writing_process import WritingProcess  # noqa: PLC0415 - few write by a process

    return WritingProcess()


class Saver:
    """Saves the checkpoints of a run; `CheckpointManager.save` says what it promises.

    Args:
        run: The run.
        capturer: Captures this rank's part.
        pruning: Deletes what is no longer needed.
        async_save: Whether a thread writes, or has a process write.
        progress: Told how much of a file is written.
        on_commit: Called with each checkpoint after its commit, on rank 0.

    Attributes:
        longest_seconds: The longest time that a save has taken until it was durable, in the background as well.
    """

    def __init__(
        self,
        run: Run,
        capturer: Capturer,
        pruning: Pruning,
        *,
        async_save: AsyncSave,
        progress: Progress | None = None,
        on_commit: Callable[[Checkpoint], object] | None = None,
    ) -> None:
        self._run = run
        self._capturer = capturer
        self._pruning = pruning
        self._process = _writing_process() if async_save == "process" else None
        write: Write = write_here if self._process is None else self._process.write
        self._output = Output(run.directory, run.components, write, progress, Plans())
        self._staging = Staging(shared=self._process is not None) if async_save else None
        self._is_checked = False
        self._is_warm = False
        self._background = BackgroundWriter()
        self._on_commit = on_commit
        self._memory: MemoryCopy | None = None
        self._drift: str | None = None  # what the save before has found, and nobody was told
        self.longest_seconds = 0.0

    @property
    def memory(self) -> MemoryCopy | None:
        """The copy of the newest state that was saved asynchronously; None when there is none."""
        return self._memory

    def wait(self) -> None:
        """Return when nothing is being written in the background.

        Raises:
            BaseException: What the write has raised, once.
        """
        try:
            self._background.wait()
        except NonFiniteError as error:
            self.note_refusal(error)
            raise

    def close(self) -> None:
        """Let the writing process end; one that is still at work ends with this process."""
        if self._process is not None and not self._background.busy:
            self._process.close()

    def save(
        self, step: int, loss: Any, metrics: Mapping[str, Any] | None, refusal: BaseException | None = None
    ) -> Checkpoint:
        """Save everything as the checkpoint of a step. Called by all ranks at once.

        Args:
            step: The step.
            loss: Its loss.
            metrics: Its metrics.
            refusal: What this rank has refused since the ranks met last: raised on all of them.
        """
        began = time.monotonic()
        try:
            return self._save(step, loss, metrics, refusal, began)
        finally:
            self._note_seconds(began)

    def _note_seconds(self, began: float) -> None:
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)

    def _save(
        self, step: int, loss: Any, metrics: Mapping[str, Any] | None, refusal: BaseException | None, began: float
    ) -> Checkpoint:
        run, group = self._run, self._run.group
        if self._background.busy:
            run.directory.add_event("waited", step, reason="the save before is still being written")
        self.wait()
        self.tell_drift()
        self._output.plans.use_for(group)
        what = f"saving step {step}"
        try:
            draft, summary = self._capture(what, step, loss, metrics, refusal)
            if summary.is_again:
                return self._save_again(group, what, draft)
            entered = summary.entered or self._settle_differences(group, what, draft, summary)
            try:
                self._verify_older(group, what, entered.unread)
                self._is_checked = True  # the state was encoded, and the directory taken
                if self._staging is None:
                    return self._write(group, what, draft, summary, entered.place)
                return self._copy(what, draft, summary, entered.place, began)
            except BaseException:
                if not self._background.busy:  # or what writes there drops it
                    run.directory.drop(entered.place)
                raise
        except BaseException as error:
            if not self._background.busy:  # or what writes there does it
                self._output.plans.clear()
            if isinstance(error, REFUSALS):
                self.note_refusal(error)
            raise

    # -- what is saved -----------------------------------------------------------------------------------------------

    def _capture(
        self, what: str, step: int, loss: Any, metrics: Mapping[str, Any] | None, refusal: BaseException | None
    ) -> tuple[Draft, _Summary]:
        """Capture and guard on every rank, and take rank 0's idea of the checkpoint."""
        group = self._run.group
        with group.section(what, _both_answers, self._summarize_and_enter) as section:
            draft = self._draft_of_rank(step, loss, metrics, refusal)
            section.answer = self._answer(group, draft, proposes=self._staging is None)
        self._output.plans.follow(section.result.decision, group.rank)
        checkpoint = dataclasses.replace(section.result.checkpoint, path=draft.checkpoint.path)
        return draft._replace(checkpoint=checkpoint), section.result

    def _answer(self, group: Group, draft: Draft, *, proposes: bool) -> _RankAnswer:
        """Return what the other ranks have to know of what this one has captured."""
        proposals = self._output.plans.propose(draft.shards, group.rank) if draft.is_sharded and proposes else {}
        digests = digests_on(group.rank, draft.digests)
        return _RankAnswer(draft.checkpoint, draft.is_sharded, digests, proposals)

    def _draft_of_rank(
        self, step: int, loss: Any, metrics: Mapping[str, Any] | None, refusal: BaseException | None
    ) -> Draft:
        """Capture on this rank; its loaders count their batches whatever is refused here, since those of others do."""
        try:
            if refusal is not None:
                raise refusal  # noqa: TRY301 - one place for what is done then
            return self._capturer.capture(step, Loss.read(loss), metrics)
        except BaseException:
            if self._run.group.size > 1:
                self._capturer.count_batches(step)
            raise

    def _summarize_and_enter(self, captured: _RankAnswer) -> _Summary:
        """Sum up what all ranks have captured, and take the directory where nothing speaks against that. On rank 0."""
        step = captured.checkpoint.step
        summary = self._summarize(captured, decides=self._staging is None)._replace(is_again=self._is_newest(step))
        is_in_doubt = summary.hold_parts or (summary.drifted and self._run.membership.ranks.on_drift != "ignore")
        if summary.is_again or is_in_doubt:
            return summary
        return summary._replace(entered=self._enter(step, is_sharded=captured.is_sharded))

    def _summarize(self, captured: _RankAnswer, *, decides: bool) -> _Summary:
        """Say how what the ranks have compares, and decide which of them writes which shards. On rank 0."""
        found = captured.digests
        drifted, hold_parts, decision = found.drifted(), found.hold_parts(), None
        if decides and captured.is_sharded and not hold_parts:
            decision = self._output.plans.decide(captured.proposals, self._run.group.size, drifted=bool(drifted))
        return _Summary(
            captured.checkpoint,
            dict(found.first),
            drifted,
            hold_parts,
            own_gradients=found.own_gradients(),
            stages=found.stages(),
            decision=decision,
        )

    def _is_newest(self, step: int) -> bool:
        """Return whether a step is the one saved last, and its checkpoint is there still. On rank 0."""
        return step == self._run.timeline.saved_step and os.path.lexists(self._run.directory.files.path_of(step))

    def _enter(self, step: int, *, is_sharded: bool) -> _Entered:
        """Take the directory for a save, and make there what the ranks look for. On rank 0."""
        directory = self._run.directory
        directory.enter()
        self._pruning.announce()
        unread = self._pruning.unread(step) if is_sharded else []
        return _Entered(directory.make_place(step, is_folder=is_sharded), unread)

    def _save_again(self, group: Group, what: str, draft: Draft) -> Checkpoint:
        """Return the newest checkpoint, with a new loss or new metrics in it, if it holds what the objects hold.

        Raises:
            StepExistsError: They hold a different state.
            LoadError: It cannot be compared, since it is damaged.
        """
        run, step = self._run, draft.checkpoint.step

        def describe(is_same: bool) -> Checkpoint | None:
            return self._update_header(draft.checkpoint) if is_same else None

        checkpoint: Checkpoint | None = None
        # It is gone, or not even of the same form.
        with contextlib.suppress(CheckpointNotFoundError, RestoreError), Search(run, Wanted(step)).find() as good:
            with group.section(f"{what}: describing it", operator.and_, describe) as section:
                section.answer = good is not None and is_equal(good.plan, draft.captured)
            checkpoint = section.result
        path = run.directory.files.path_of(step)
        if checkpoint is None:
            raise StepExistsError(step=step, path=path)
        return dataclasses.replace(checkpoint, path=path)

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
        if run.directory.mirror is not None:
            run.directory.mirror.described(new.step)
        self._pruning.prune(new.step)
        return run.directory.catalog.peek(new.step)

    def note_refusal(self, error: NonFiniteError | LossSpikeError) -> None:
        """Note a refusal that is not noted yet, such as another rank's."""
        refusal = self._run.timeline.refusal
        if error.step is not None and (refusal is None or refusal.step != error.step):
            self._run.timeline.refuse(error.step, str(error).partition("\n")[0])

    def _settle_differences(self, group: Group, what: str, draft: Draft, summary: _Summary) -> _Entered:
        """Name what differs between ranks, and refuse it; or warn of it, and take the directory."""
        run, step = self._run, draft.checkpoint.step
        if summary.hold_parts:
            with group.section(f"{what}: comparing parts", both_digests, Digests.refuse_parts) as section:
                layouts = replica_layouts(draft.captured, draft.digests["stage"])
                section.answer = digests_on(group.rank, layouts, everything=True)
        text = self._refuse_drift(group, what, draft, summary, is_first=run.timeline.saved_step is None)
        with group.section(f"{what}: warning of drift") as section:  # where warnings are errors, on all ranks
            if group.is_rank_zero:
                warn_caller(text, ReplicaDriftWarning)
                section.answer = self._enter(step, is_sharded=draft.is_sharded)
        entered: _Entered = section.result
        return entered

    def _refuse_drift(self, group: Group, what: str, draft: Draft, summary: _Summary, *, is_first: bool) -> str:
        """Name what differs between copies, and refuse it, or return the warning.

        Raises:
            ReplicaDriftError: The policy asks for it, or there is no checkpoint yet.
        """
        run, step, ranks = self._run, draft.checkpoint.step, summary.drifted
        with group.section(f"{what}: naming what differs", both_digests, Digests.differing) as section:
            section.answer = digests_on(group.rank, replica_fingerprints(draft.captured), everything=True)
        names = section.result
        run.directory.add_event("replicas_differ", step, ranks=ranks, names=names[:20], names_total=len(names))
        if run.membership.ranks.on_drift == "error" or is_first:
            raise ReplicaDriftError(step=step, ranks=ranks, names=names, first=is_first, path=run.directory.path)
        return drift_text(step, ranks, names)

    def tell_drift(self) -> None:
        """Warn of copies that were found to differ while they were written. Called by all ranks at once."""
        text, self._drift = self._drift, None
        if text is not None:
            with self._run.group.section("warning of drift"):  # where warnings are errors, on all ranks
                if self._run.is_rank_zero:
                    warn_caller(text, ReplicaDriftWarning)

    def _verify_older(self, group: Group, what: str, steps: list[int]) -> None:
        """Read older checkpoints whose state decides what may be deleted: all ranks together, since they are large."""
        if not steps:
            return
        catalog = self._run.directory.catalog
        with group.section(f"{what}: verifying older ones", _all_of_each) as section:
            section.answer = [catalog.is_good_share(step, group.rank, group.size) for step in steps]
        if group.is_rank_zero:
            for step, good in zip(steps, section.result, strict=True):
                catalog.remember_verdict(step, good=good)

    # -- how it is written -------------------------------------------------------------------------------------------

    def _copy(self, what: str, draft: Draft, summary: _Summary, place: Place, began: float) -> Checkpoint:
        """Copy the state, and have the copy written in the background.

        The ranks do not wait for each other here. What one of several could not copy, all of them are told where they
        ask how the write has gone, so that none goes on while another has left.
        """
        group, failure = self._run.group, None
        self._memory = None
        assert self._staging is not None
        try:
            draft = draft.staged(self._staging, is_rank_zero=group.is_rank_zero)
        except BaseException as error:
            if group.size == 1:
                raise
            failure = error
        copied = _Copied(draft, place, failure, is_first=self._run.timeline.saved_step is None, began=began)
        checkpoint = self._start_write(what, summary, copied)
        if isinstance(failure, KeyboardInterrupt):  # it is meant for the caller
            raise failure
        return checkpoint

    def _start_write(self, what: str, summary: _Summary, copied: _Copied) -> Checkpoint:
        """Compare the copies of the ranks and write them, in the background."""
        checkpoint, timeline = copied.draft.checkpoint, self._run.timeline
        timeline.expect_save(checkpoint.step)
        job = functools.partial(self._write_in_background, self._run.group.for_background(), what, summary, copied)
        if copied.failure is None:
            self._memory = MemoryCopy(checkpoint.step, copied.draft.captured)
        try:
            self._background.start(job, f"the save of step {checkpoint.step}")
        except BaseException:
            if not self._background.busy:  # interrupted before the thread began
                timeline.fail_save()
            raise
        timeline.end(checkpoint.step)
        return checkpoint

    def _write_in_background(self, group: Group, what: str, summary: _Summary, copied: _Copied) -> None:
        draft, place = copied.draft, copied.place
        try:
            if group.size > 1 or draft.is_sharded:
                draft, summary = self._compare_copies(group, what, copied)
            self._write(group, what, draft, summary, place)
        except BaseException:
            self._memory = None
            self._output.plans.clear()
            self._run.directory.drop(place)
            self._run.timeline.fail_save()
            raise
        finally:
            self._note_seconds(copied.began)

    def _compare_copies(self, group: Group, what: str, copied: _Copied) -> tuple[Draft, _Summary]:
        """Compare what the ranks have copied; what differs is refused here, or told at the next save."""
        decide = functools.partial(self._summarize, decides=True)
        with group.section(f"{what}: comparing copies", _both_answers, decide) as section:
            if copied.failure is not None:
                raise copied.failure
            self._run.directory.see(copied.place)
            draft = copied.draft
            if group.size > 1:
                draft = draft._replace(digests=digests_of(draft.captured))
            section.answer = self._answer(group, draft, proposes=True)
        self._output.plans.follow(section.result.decision, group.rank)
        summary = section.result
        if summary.drifted:
            self._memory = None  # of a rank whose copy is not the one that is saved
            if self._run.membership.ranks.on_drift != "ignore":
                self._drift = self._refuse_drift(group, what, draft, summary, is_first=copied.is_first)
        return draft, summary

    def _write(self, group: Group, what: str, draft: Draft, summary: _Summary, place: Place) -> Checkpoint:
        """Write on all ranks, commit on rank 0, and let every rank know what has become of it.

        What goes wrong after the commit, such as a sync of the directory, is raised when all ranks know that the
        checkpoint is there: otherwise they would not agree on when the next one is due.
        """
        run, step = self._run, draft.checkpoint.step
        late: list[BaseException] = []

        def commit_on_rank_zero(contributions: Contributions) -> _Written:
            run.directory.note_shared(place)
            prepared, size_bytes = writer.prepare(contributions)
            checkpoint = dataclasses.replace(draft.checkpoint, size_bytes=size_bytes)
            try:
                self._commit(writer, prepared, checkpoint)
            except BaseException as error:
                if run.timeline.saved_step != step:
                    raise
                late.append(error)
            return _Written(checkpoint, failed_late=bool(late))

        with group.section(f"{what}: writing", both_contributions, commit_on_rank_zero) as section:
            run.directory.see(place)
            noted = {**self._pruning.rules, **run.first_draws.noted}
            writer = writer_of(Job(draft, place, _world(group, summary), noted), self._output)
            own = None if group.is_rank_zero else rank_state_of(draft.captured, draft.digests, summary.digests)
            with self._capturer.refusing_late(step):
                section.answer = writer.write(own)
        written: Checkpoint = dataclasses.replace(section.result.checkpoint, path=draft.checkpoint.path)
        if not group.is_rank_zero:
            run.timeline.record(written)
        if section.result.failed_late:
            with group.section(f"{what}: after the commit"):
                if late:
                    raise late.pop()  # kept in a list of this frame, its traceback would keep files open
        self._mirror(group, what, step)
        return written

    def _commit(self, writer: Writer, prepared: PreparedFile, checkpoint: Checkpoint) -> None:
        """Commit a checkpoint, and only then forget what is no longer needed. On rank 0."""
        run, step = self._run, checkpoint.step
        try:
            with run.replay.committing(step), self._capturer.refusing_late(step):
                writer.commit(prepared)
            self._record(checkpoint)
        except (NonFiniteError, StepExistsError):
            raise
        except BaseException:
            if os.path.lexists(checkpoint.path):  # interrupted after the rename, or not known to be durable: saved
                self._record(checkpoint)
                run.directory.add_saved_event(checkpoint)
            raise
        run.directory.add_saved_event(checkpoint)
        self._pruning.prune(step)
        if self._on_commit is not None:
            self._on_commit(checkpoint)
        tell_committed(run, step)

    def _mirror(self, group: Group, what: str, step: int) -> None:
        """Have a committed checkpoint copied, on every rank what is its own, and wait where the caller wants that."""
        mirror = self._run.directory.mirror
        if mirror is None:
            return
        mirror.committed(step, rank=group.rank, size=group.size)
        if mirror.waits_at_saves:
            with group.section(f"{what}: sending it to the store"):
                if group.is_rank_zero:
                    mirror.wait()

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


def _world(group: Group, summary: _Summary) -> World:
    """Return the ranks that save, as they know each other."""
    return World(
        group.rank,
        group.size,
        own_gradients=summary.own_gradients,
        stage=summary.digests.get("stage", ""),
        has_new_stage=group.rank in summary.stages[1:],
    )


def _all_of_each(one: list[bool], other: list[bool]) -> list[bool]:
    return list(map(operator.and_, one, other))
