"""Saving: capture, guard, write, commit, and only then prune.

With several processes each of these is done on all ranks, or on rank 0 for all, and none of them goes on before it is
known that it has succeeded everywhere.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import errno
import math
import os
import secrets
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from safeckpt.distributed import (
    Group,
    Held,
    differing,
    digests_of,
    drifted,
    foreign,
    in_group,
    is_sharded,
    local_parts,
    merged,
    own_of,
    refuse_parts,
    rejoined,
    replica_fingerprints,
    replica_layouts,
    split,
    write_shards,
)
from safeckpt.errors import (
    NonFiniteError,
    ReplayMismatchError,
    ReplayMismatchWarning,
    ReplicaDriftError,
    ReplicaDriftWarning,
    StepExistsError,
    drift_text,
)
from safeckpt.file import INDEX, PreparedFile, ShardFile, encode, prepare
from safeckpt.run.arguments import checked_metrics, checked_step
from safeckpt.run.background import BackgroundWriter
from safeckpt.run.catalog import Checkpoint
from safeckpt.run.pruning import Pruning
from safeckpt.run.replay import Replay
from safeckpt.run.timeline import Timeline
from safeckpt.state import (
    RESERVED_KEY,
    Baseline,
    Component,
    Gradients,
    Guard,
    Staging,
    Verdict,
    capture,
    copy_tree,
    nonfinite_loss,
    refuse_unreduced,
    to_cpu,
)
from safeckpt.state.loss import as_floats, as_numbers
from safeckpt.system.threads import Progress

__all__ = ["Saver"]

T = TypeVar("T")
D = TypeVar("D")


@dataclasses.dataclass
class _Draft:
    """What one rank has captured for a checkpoint.

    Attributes:
        checkpoint: What it will be.
        captured: The payload as it was captured.
        payload: The payload as it is written: encoded, and with place holders where there are shards.
        held: The shards.
        sharded: Whether it will be a directory.
        guard: What the guard let pass.
        digests: To compare the ranks by.
        drifted: Whether copies differ between ranks.
    """

    checkpoint: Checkpoint
    captured: dict[str, Any]
    payload: Any
    held: Held
    sharded: bool
    guard: dict[str, Any]
    digests: dict[str, str]
    drifted: bool = False

    def header(self, **more: Any) -> dict[str, Any]:
        """Return the header of the file."""
        return self.checkpoint.header(guard=self.guard, **more)


class Saver:
    """Saves the checkpoints of a run; `CheckpointManager.save` and `end_step` say what it promises.

    Args:
        run: The run.
        components: What is captured.
        guard: What has to be finite.
        grads: Which gradients are part of the state.
        pruning: Deletes what is no longer needed.
        replay: Records the losses.
        asynchronous: Whether a thread writes.
        drift: What it is when replicas differ: `"warn"`, `"error"` or `"ignore"`.
        agree_every: After how many steps the ranks agree on their losses at the latest.
        progress: Told how much of a file is written.

    Attributes:
        writer: The thread.
        copied: Step and payload that the staging memory holds.
        gradients: Watches the optimizers.
        handed_out: For steps that ended lately, the last batch that each loader had handed out by then.
        stop_agreed: Whether all ranks know that one of them was asked to stop.
    """

    def __init__(
        self,
        run: Timeline,
        components: Mapping[str, Component],
        *,
        guard: Guard,
        grads: bool | None,
        pruning: Pruning,
        replay: Replay,
        asynchronous: bool,
        drift: str,
        agree_every: int,
        progress: Progress | None = None,
    ) -> None:
        self._run = run
        self._components = components
        self._guard = guard
        self._grads = grads
        self._pruning = pruning
        self._replay = replay
        self._drift = drift
        self._agree_every = agree_every
        self._progress = progress
        self._staging = Staging() if asynchronous else None
        self._warmed = False
        self.writer = BackgroundWriter()
        self.copied: tuple[int, dict[str, Any]] | None = None
        self.stop_agreed = False
        self.handed_out: deque[tuple[int, dict[str, Any]]] = deque(maxlen=agree_every + 1)
        self._refused: BaseException | None = None  # of a step that is over, and not told to the other ranks yet
        self._baseline = Baseline(components)
        self.gradients = Gradients(components)
        self._loaders = {name: one.obj for name, one in components.items() if hasattr(one.obj, "expect_end_step")}
        for loader in self._loaders.values():
            loader.expect_end_step()

    def restored(self) -> None:
        """Forget what was between the restored step and the moment of the restore."""
        self.handed_out.clear()
        self._refused = None

    @property
    def untold(self) -> BaseException | None:
        """What was refused on this rank and is not known to the others, since they have not met again."""
        return self._refused

    # -- one checkpoint ----------------------------------------------------------------------------------------------

    def save(self, step: int, *, loss: Any = None, metrics: Mapping[str, Any] | None = None) -> Checkpoint:
        """Save everything as the checkpoint of a step."""
        if self._run.group.size > 1:
            self._meet(f"saving step {step}", lambda: None, lambda _: None)
        return self._save(step, loss, metrics)

    def _save(self, step: int, loss: Any, metrics: Mapping[str, Any] | None) -> Checkpoint:
        run = self._run
        if self.writer.busy:
            run.event("waited", step, reason="the save before is still being written")
        self.writer.wait()
        group = run.group
        what = f"saving step {step}"
        draft, first, drifting, parts = self._drafted(group, what, step, loss, metrics)
        if parts:
            names = group.together(f"{what}: comparing parts", lambda: replica_layouts(draft.captured), differing)
            group.together(f"{what}: refusing parts", lambda: refuse_parts(names))
        draft.drifted = bool(drifting)
        if drifting:
            self._say_drift(group, what, draft, drifting)
        owns: list[dict[str, Any]] = []

        def collected(answers: list[tuple[dict[str, Any], list[int]]]) -> list[int]:
            owns.extend(own for own, _ in answers)
            return answers[0][1]

        def entered() -> tuple[dict[str, Any], list[int]]:
            if group.leads:
                run.enter_directory()
            # A copy: a view would be sent with all of the memory around it.
            own = {} if group.leads else copy_tree(to_cpu(own_of(draft.captured, draft.digests, first)))
            return encode(own, root="payload"), self._pruning.unread(step) if group.leads and draft.sharded else []

        older = group.together(f"{what}: collecting what ranks have of their own", entered, collected)
        if draft.sharded:
            self._verify(group, what, older)
        run.refuse_unshared(what)
        if group.leads and group.size > 1:
            draft.payload = merged(draft.payload, owns)
        return self._write_sharded(group, what, draft) if draft.sharded else self._write_file(group, what, draft)

    def _verify(self, group: Group, what: str, steps: list[int]) -> None:
        """Read older checkpoints whose state decides what may be deleted: all ranks together, since they are large."""
        run = self._run
        for step in steps:
            good = group.together(
                f"{what}: verifying step {step}",
                lambda step=step: run.catalog.is_good_part(step, group.rank, group.size),  # type: ignore[misc]
                all,
            )
            if group.leads:
                run.catalog.judged(step, good=good)

    def _drafted(
        self, group: Group, what: str, step: int, loss: Any, metrics: Mapping[str, Any] | None
    ) -> tuple[_Draft, dict[str, str], list[int], bool]:
        """Capture and judge on every rank, and agree.

        Returns:
            This rank's draft, rank 0's digests, the ranks that drifted, and whether ranks hold parts and no copies.
        """
        drafts: list[_Draft] = []

        def part() -> tuple[Checkpoint, dict[str, str]]:
            with torch.inference_mode(mode=False):  # in which tensors have no versions, and DTensors no parts
                draft = self._capture(step, loss, metrics, compared=group.size > 1)
            drafts.append(draft)
            return draft.checkpoint, draft.digests

        def decide(
            answers: list[tuple[Checkpoint, dict[str, str]]],
        ) -> tuple[Checkpoint, dict[str, str], list[int], bool]:
            digests = [one for _, one in answers]
            together = len(answers) > 1
            return answers[0][0], digests[0], drifted(digests), together and foreign(digests)

        try:
            checkpoint, first, drifting, parts = group.together(f"{what}: capturing", part, decide)
        except NonFiniteError as error:
            self._note_refusal(error)
            raise
        draft = drafts[0]
        draft.checkpoint = dataclasses.replace(checkpoint, path=draft.checkpoint.path)
        return draft, first, drifting, parts

    def _capture(self, step: int, loss: Any, metrics: Mapping[str, Any] | None, *, compared: bool) -> _Draft:
        """Capture and judge what this process has."""
        run = self._run
        step = run.next_step(step)
        metrics = checked_metrics(metrics)
        bad_loss = nonfinite_loss(loss)
        gradients = self._gradients_of(step)
        snapshot = capture(self._components, gradients=gradients)
        verdict = self._baseline.judge(snapshot.parts, self._guard)
        verdict.bad.extend(self.gradients.judge(gradients, self._guard))
        if bad_loss is not None or verdict.bad:
            raise self._refusal(step, loss, bad_loss, verdict)
        sharded = is_sharded(snapshot.payload)
        payload, held = split(snapshot.payload, leads=run.leads) if sharded else (snapshot.payload, {})
        checkpoint = Checkpoint(
            step=step,
            path=run.files.folder_of(step) if sharded else run.files.path_of(step),
            loss=as_floats(loss),
            metrics=metrics,
            created_at=dt.datetime.now(dt.UTC),
            size_bytes=0,
            run_id=run.run_id or secrets.token_hex(8),  # the system's entropy: no random stream is touched
        )
        return _Draft(
            checkpoint,
            captured=snapshot.payload,
            payload=encode(payload, root="payload"),
            held=held,
            sharded=sharded,
            guard=verdict.record(self._guard),
            digests=digests_of(snapshot.payload) if compared else {},
        )

    def _say_drift(self, group: Group, what: str, draft: _Draft, ranks: list[int]) -> None:
        """Name what differs between replicas, and warn or refuse."""
        if self._drift == "ignore":
            return

        names = group.together(f"{what}: comparing copies", lambda: replica_fingerprints(draft.captured), differing)
        step = draft.checkpoint.step
        self._run.event("replicas_differ", step, ranks=ranks, names=names[:20], names_total=len(names))
        first = self._run.saved is None
        if self._drift == "error" or first:
            raise ReplicaDriftError(step=step, ranks=ranks, names=names, first=first, path=self._run.files.path)
        # Together, for whom a warning is an error.
        group.together(f"{what}: telling of drift", lambda: _warn(drift_text(step, ranks, names), told=group.leads))

    # -- one file ----------------------------------------------------------------------------------------------------

    def _write_file(self, group: Group, what: str, draft: _Draft) -> Checkpoint:
        """Write rank 0's payload, which holds what every rank has, as one file."""
        checkpoint = draft.checkpoint
        staging = self._staging
        if staging is None:
            return self._on_all(
                group,
                what,
                checkpoint,
                lambda: self._write(checkpoint, prepare(to_cpu(draft.payload), header=draft.header())),
            )

        copied: list[dict[str, Any]] = []

        def staged() -> None:
            if group.leads:
                self.copied = None
                copied.append(staging.copy(draft.payload))
                self.copied = (checkpoint.step, copied[0])
            draft.captured, draft.payload = {}, None  # what is written is the copy; a device has its memory back

        def write() -> Checkpoint:
            return self._write(checkpoint, prepare(copied[0], header=draft.header()))

        group.together(f"{what}: copying", staged)
        self._start(checkpoint, lambda: self._on_all(group.for_background(), what, checkpoint, write))
        return checkpoint

    def _start(self, checkpoint: Checkpoint, job: Callable[[], object]) -> None:
        """Write in the background."""
        run = self._run
        run.due.saved(checkpoint.step)  # so that the next steps do not ask for it again while it is written
        self.writer.start(job, f"the save of step {checkpoint.step}")
        run.step = checkpoint.step
        run.begun = True

    def _on_all(self, group: Group, what: str, checkpoint: Checkpoint, write: Callable[[], Checkpoint]) -> Checkpoint:
        """Write on rank 0, and let the others know what has become of it.

        What goes wrong after the commit, such as a sync of the directory, is raised when all ranks know that the
        checkpoint is there: otherwise they would not agree on when the next one is due.
        """
        late: list[BaseException] = []

        def part() -> tuple[Checkpoint, bool]:
            if not group.leads:
                return checkpoint, False
            try:
                return write(), False
            except BaseException as error:
                if self._run.saved != checkpoint.step:
                    raise
                late.append(error)
                return checkpoint, True

        def raised() -> None:
            for error in late:
                raise error

        written, failed = group.together(f"{what}: committing it", part, lambda answers: answers[0])
        written = dataclasses.replace(written, path=checkpoint.path)
        if not group.leads:
            self._run.committed(written)
        if failed:
            group.together(f"{what}: after the commit", raised)
        return written

    def _write(self, checkpoint: Checkpoint, prepared: PreparedFile) -> Checkpoint:
        """Commit a file, and only then forget what is no longer needed."""
        checkpoint = dataclasses.replace(checkpoint, size_bytes=prepared.size_bytes)
        files = self._run.files
        return self._commit(
            checkpoint,
            lambda: files.commit_step(
                checkpoint.step, lambda f: prepared.write(f, self._progress), size_bytes=prepared.size_bytes
            ),
        )

    def _commit(self, checkpoint: Checkpoint, commit: Callable[[], object]) -> Checkpoint:
        run = self._run
        try:
            with self._replay.committing(checkpoint.step):
                commit()
            run.committed(checkpoint)
        except StepExistsError:
            raise
        except BaseException:
            if os.path.lexists(checkpoint.path):  # interrupted after the rename, or not known to be durable: saved
                run.committed(checkpoint)
                run.note_saved(checkpoint)
            raise
        run.note_saved(checkpoint)
        self._pruning.prune(checkpoint.step)
        return checkpoint

    # -- shards ------------------------------------------------------------------------------------------------------

    def _write_sharded(self, group: Group, what: str, draft: _Draft) -> Checkpoint:
        """Write every rank's shards into a directory, and commit that."""
        staging = self._staging
        if staging is None:
            return self._write_shards(group, what, draft)

        def staged() -> None:
            payload = draft.payload if group.leads else None
            payload, parts = staging.copy((payload, local_parts(draft.held)))
            draft.payload, draft.held, draft.captured = payload, rejoined(draft.held, parts), {}

        group.together(f"{what}: copying", staged)
        self._start(draft.checkpoint, lambda: self._write_shards(group.for_background(), what, draft))
        return draft.checkpoint

    def _write_shards(self, group: Group, what: str, draft: _Draft) -> Checkpoint:
        files = self._run.files
        checkpoint = draft.checkpoint
        temps: list[Path] = []
        shards: list[ShardFile] = []

        def begun() -> str:
            if group.leads:
                temps.append(files.begin_folder(checkpoint.step))
            return temps[0].name if temps else ""

        def written() -> list[ShardFile]:
            return write_shards(draft.held, files.path / name, group, files.write_inside, drifted=draft.drifted)

        try:
            name = group.together(f"{what}: making its directory", begun, lambda names: names[0])
            # By itself: a rank that does not see the directory must not leave the others in a collective of the engine.
            group.together(f"{what}: looking for its directory", lambda: self._run.look_for(files.path / name))
            group.together(
                f"{what}: writing shards", written, lambda lists: shards.extend(shard for one in lists for shard in one)
            )
            return self._on_all(group, what, checkpoint, lambda: self._commit_shards(draft, temps[0], shards))
        except BaseException:
            if temps and temps[0].exists():
                files.drop_folder(temps[0])
            raise

    def _commit_shards(self, draft: _Draft, temp: Path, shards: list[ShardFile]) -> Checkpoint:
        """Write the index, which says what belongs to the checkpoint, and commit the directory."""
        run, files = self._run, self._run.files
        size = sum(one for _, one, _ in shards)
        for name, length, _ in shards:  # as this node sees them, before they are promised
            run.look_for(temp / name)
            found = (temp / name).stat().st_size
            if found != length:
                raise OSError(errno.EIO, f"{name} has {found} bytes here, {length} were written", str(temp / name))
        payload = {**draft.payload}
        payload[RESERVED_KEY] = {**payload[RESERVED_KEY], "files": [list(shard) for shard in shards]}
        index = prepare(to_cpu(payload), header=draft.header(shards=len(shards), shards_bytes=size))
        files.write_inside(temp / INDEX, index.write, size_bytes=index.size_bytes)
        checkpoint = dataclasses.replace(draft.checkpoint, size_bytes=size + index.size_bytes)
        return self._commit(checkpoint, lambda: files.commit_folder(checkpoint.step, temp))

    # -- every step --------------------------------------------------------------------------------------------------

    def end_step(
        self, step: int, *, loss: Any, metrics: Mapping[str, Any] | None, stop_requested: Callable[[], bool]
    ) -> Checkpoint | None:
        """Guard and record a loss, and save when it is due or a stop was requested."""
        run = self._run
        step = checked_step(step)
        checked_metrics(metrics)
        run.refuse_closed()
        run.refuse_mixture()
        if step <= run.step and run.begun:
            raise ValueError(f"step {step} is not higher than step {run.step}, the last one ended, saved or restored")
        self._end_loader_step(step)
        loss = as_numbers(loss)  # read from the device once
        if run.group.size > 1:
            due = self._end_step_together(step, loss, stop_requested)
        else:
            self._refuse_loss(step, loss)
            self._replay.ended(step, loss)
            due = run.due.at(step) or stop_requested()
        if due:
            try:
                return self._save(step, loss, metrics)
            except OSError:
                run.step = step  # it was trained, whatever the disk says; the next one tries to save again
                run.begun = True
                raise
        run.step = step
        run.begun = True
        if self._refused is None:
            run.failed = None  # the caller went on without a rollback
        if self._staging is not None and not self._warmed:
            self._warm(self._staging)
        return None

    def _warm(self, staging: Staging) -> None:
        """Have memory for the copy made ready while training goes on: after a step, the optimizer's state is there."""
        self._warmed = True
        if not in_group():  # a state_dict may be something that all ranks have to do at once
            large = {name: one for name, one in self._components.items() if one.kind in ("module", "optimizer")}
            staging.warm(capture(large).payload)

    def _end_step_together(self, step: int, loss: Any, stop_requested: Callable[[], bool]) -> bool:
        """Return whether to save. A refusal is kept until all ranks meet: alone, a rank would leave the others waiting.

        They meet when a number of steps says that a save is due, which all of them know by themselves, and at every
        multiple of `agree_every`. What else can make a save due, a clock or a signal, is rank 0's or anybody's there.
        """
        run = self._run
        loaders = {name: one.obj for name, one in self._components.items() if hasattr(one.obj, "leave_out")}
        self.handed_out.append((step, {name: loader.last_batches(1) for name, loader in loaders.items()}))
        if self._refused is None:
            try:
                self._refuse_loss(step, loss)
                if run.leads:
                    self._replay.ended(step, loss)
            except (NonFiniteError, ReplayMismatchError, ReplayMismatchWarning) as error:
                self._refused = error
        by_count = run.due.counts and run.due.at(step)
        if not by_count and step % self._agree_every:
            return False

        def decide(answers: list[tuple[bool, bool]]) -> tuple[bool, bool]:
            return answers[0][0], any(stop for _, stop in answers)

        due, stop = self._meet(f"ending step {step}", lambda: (run.due.at(step), stop_requested()), decide)
        self.stop_agreed = stop
        return due or stop

    def _meet(self, what: str, part: Callable[[], T], decide: Callable[[list[T]], D]) -> D:
        """Agree on something, and on what ranks have refused since the last time: all raise the earliest refusal."""
        group = self._run.group
        refused, self._refused = self._refused, None

        def at() -> tuple[int | None, T]:
            return None if refused is None else getattr(refused, "step", None) or 0, part()

        def first(answers: list[tuple[int | None, T]]) -> tuple[int | None, D | None]:
            steps = [(step, rank) for rank, (step, _) in enumerate(answers) if step is not None]
            return (min(steps)[1], None) if steps else (None, decide([answer for _, answer in answers]))

        def raised() -> None:
            if refused is not None and group.rank == rank:
                raise refused

        try:
            rank, decision = group.together(what, at, first)
        except BaseException:
            self._refused = refused  # they have not met
            raise
        if rank is not None:
            try:
                group.together(f"{what}: refusing", raised)
            except NonFiniteError as error:
                self._note_refusal(error)
                raise
        return cast("D", decision)

    def _note_refusal(self, error: NonFiniteError) -> None:
        """Remember what another rank has refused."""
        if error.step is not None and (self._run.failed is None or self._run.failed[0] != error.step):
            self._run.failed = (error.step, str(error).partition("\n")[0])

    def _refuse_loss(self, step: int, loss: Any) -> None:
        if type(loss) is float and math.isfinite(loss):
            return  # most of the time a step of training takes of ours
        bad_loss = nonfinite_loss(loss)
        if bad_loss is not None:
            raise self._refusal(step, loss, bad_loss, Verdict([], []))

    def _gradients_of(self, step: int) -> Mapping[str, torch.Tensor]:
        """Return the gradients to save with a step, and let the loaders know which of their batches belong to it."""
        run = self._run
        gradients = self._captured_gradients()
        if step > run.step or not run.begun:
            self._end_loader_step(step)
        elif sys.exception() is not None and any(loader.since_step for loader in self._loaders.values()):
            return {}  # an interrupted step: its batches come again, and their gradients with them
        elif gradients:
            self._end_loader_step(None)  # between two micro-steps: the batches of these gradients are behind
        return gradients

    def _end_loader_step(self, step: int | None) -> None:
        for loader in self._loaders.values():
            loader.end_step(step)

    def _captured_gradients(self) -> Mapping[str, torch.Tensor]:
        if self._grads is False:
            return {}
        refuse_unreduced(self._components)
        return self.gradients.pending() if self._grads is None else self.gradients.all()

    def _refusal(self, step: int, loss: Any, bad_loss: str | None, verdict: Verdict) -> NonFiniteError:
        """Note a refusal and return the error to raise."""
        names = [tensor.name for tensor in verdict.bad]
        found = ([] if bad_loss is None else [f"loss = {bad_loss}"]) + [str(tensor) for tensor in verdict.bad[:1]]
        self._run.failed = (step, "; ".join(found))
        self._run.event("refused", step, loss=bad_loss, tensors=names[:20], tensors_total=len(names))
        good, next_step = self._way_out()
        return NonFiniteError(
            step=step,
            loss=None if bad_loss is None else as_numbers(loss),
            loss_text=bad_loss,
            tensors=verdict.bad,
            good=good,
            next_step=next_step,
            path=self._run.files.path,
        )

    def _way_out(self) -> tuple[str, str]:
        """Return what is still safe after a refusal, and what to call."""
        if self._run.saved is None:
            return (
                "nothing was written; this run has no checkpoint yet.",
                "stop, and start again from a lower learning rate or cleaner data.",
            )
        if any(hasattr(component.obj, "leave_out") for component in self._components.values()):
            call = f"manager.rollback(skip_batches=1) goes back to step {self._run.saved} without the last batch."
        else:
            call = (
                f"manager.rollback(changed=True) goes back to step {self._run.saved}; change what led here (the batch, "
                "the learning rate) before you go on, since an exact replay fails again."
            )
        return (
            f"nothing was written or rotated; step {self._run.saved} is in {self._run.files.path_of(self._run.saved)}.",
            call,
        )


def _warn(text: str, *, told: bool) -> None:
    if told:
        warnings.warn(text, ReplicaDriftWarning, stacklevel=8)
