"""Restoring: find the checkpoint, check all of it, and only then change the first object.

Several processes restore the same step: the newest one that every one of them can read.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from safeckpt.distributed import Held, in_group, laid_out, payload_for, read_shards, same_on_all, shards_of, with_places
from safeckpt.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DirectoryNotSharedError,
    EnvironmentChangedWarning,
    FormatVersionError,
    HyperparameterReplacedWarning,
    LoadError,
    NoGoodCheckpointError,
)
from safeckpt.run.catalog import Checkpoint, Opened, reason_of, skipped
from safeckpt.run.timeline import Timeline
from safeckpt.state import RESERVED_KEY, Baseline, Component, Guard, Plan, guard_from_record, plan

__all__ = ["Restorer"]


class _Wanted(NamedTuple):
    """What a caller asked for; see `CheckpointManager.restore`."""

    step: int | None
    only: Collection[str] | None
    keep_live: Collection[str]


class _Ready(NamedTuple):
    """A restore that has passed every check.

    Attributes:
        plan: What will be applied.
        held: Tensors of it that the shards have to fill.
        shards: Names of the files they are in.
        guard: What has to be finite.
        resized: Whether the run had another number of processes.
        looked_at: To be told of memory that is not needed again before it is copied.
    """

    plan: Plan
    held: Held
    shards: Collection[str]
    guard: Guard
    resized: bool
    looked_at: Callable[[torch.Tensor], None]


class Restorer:
    """Puts checkpoints of a run into the live objects; `CheckpointManager.restore` says what it promises.

    Args:
        run: The run.
        components: The live objects.
    """

    def __init__(self, run: Timeline, components: Mapping[str, Component]) -> None:
        self._run = run
        self._components = components

    def restored(
        self,
        step: int | None,
        only: Collection[str] | None,
        keep_live: Collection[str],
        rejected: dict[Path, str],
    ) -> tuple[Checkpoint, Plan, bool] | None:
        """Restore a step, or the newest good one; what was passed over on the way is added to `rejected`.

        Returns:
            The checkpoint, what was applied, and whether the run had another number of processes; None when there is
            no checkpoint.
        """
        together = self._run.group.size > 1
        found = (self._restored_by_all if together else self._restored)(_Wanted(step, only, keep_live), rejected)
        if found is None and rejected:
            raise NoGoodCheckpointError(
                directory=self._run.files.path, rejected=[(str(path), reason) for path, reason in rejected.items()]
            )
        return found

    def _restored(self, wanted: _Wanted, rejected: dict[Path, str]) -> tuple[Checkpoint, Plan, bool] | None:
        run, step = self._run, wanted.step
        if step is not None and step not in run.files.steps():
            raise CheckpointNotFoundError(directory=run.files.path, step=step, available_steps=run.files.steps())
        candidates = run.catalog.good(rejected) if step is None else run.catalog.one(step)
        for file, checkpoint in candidates:
            try:
                ready = self._ready(file, wanted)
                self._fill(ready, checkpoint.path)
            except LoadError as error:
                if step is not None:
                    raise
                reason = reason_of(error)
            else:
                self._apply(ready.plan)
                return checkpoint, ready.plan, ready.resized
            rejected[checkpoint.path] = reason
            skipped(checkpoint.path, reason)
        return None

    def _restored_by_all(self, wanted: _Wanted, rejected: dict[Path, str]) -> tuple[Checkpoint, Plan, bool] | None:
        """Do the same on all ranks: what one of them cannot read, none of them takes."""
        run, step = self._run, wanted.step
        group = run.group
        tried: set[int] = set()

        def asked() -> tuple[list[int], dict[str, Any]]:
            only = None if wanted.only is None else sorted(wanted.only)
            steps = run.files.steps() if group.leads else []
            return steps, {"step": step, "only": only, "keep_live": sorted(wanted.keep_live)}

        def next_one(answers: list[tuple[list[int], dict[str, Any]]]) -> tuple[int, str] | None:
            same_on_all([answer for _, answer in answers])
            lists = [steps for steps, _ in answers]
            if step is not None and step not in lists[0]:
                raise CheckpointNotFoundError(directory=run.files.path, step=step, available_steps=lists[0])
            left = [one for one in lists[0] if one not in tried] if step is None else [step]
            return (left[-1], run.files.path_of(left[-1]).name) if left else None

        while True:
            target = group.together("looking for a checkpoint", asked, next_one)
            if target is None:
                return None
            number, name = target
            path = run.files.path / name
            tried.add(number)
            with contextlib.ExitStack() as opened:
                found: list[tuple[Checkpoint, _Ready]] = []
                reason = self._read_by_all(path, number, wanted, opened, found)
                if reason is None:
                    checkpoint, ready = found[0]
                    run.catalog.judged(number)  # every part of it was read by some rank
                    group.together(f"restoring step {number}", partial(self._apply, ready.plan))
                    return checkpoint, ready.plan, ready.resized
            rejected[path] = reason
            # Together, for whom a warning is an error.
            group.together(f"passing over step {number}", partial(_passed_over, path, reason, told=group.leads))

    def _read_by_all(
        self,
        path: Path,
        step: int,
        wanted: _Wanted,
        opened: contextlib.ExitStack,
        found: list[tuple[Checkpoint, _Ready]],
    ) -> str | None:
        """Read a checkpoint on every rank; return why it is not good, or None and what was read in `found`."""
        run = self._run
        group = run.group
        what = f"reading step {step}"
        named = wanted.step is not None

        def first(answers: list[str | None]) -> str | None:
            return next((f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer is not None), None)

        def read() -> tuple[str | None, str]:
            run.look_for(path)
            root = ""
            with _reasons(named=named) as reasons:
                file, checkpoint = opened.enter_context(run.catalog.opened(path, step, group.rank, group.size))
                root = str(file.root)
                found.append((checkpoint, self._ready(file, wanted)))
            return (reasons[0] if reasons else None), root

        def all_read(answers: list[tuple[str | None, str]]) -> str | None:
            for rank, (reason, root) in enumerate(answers):
                if reason is None and answers[0][0] is None and root != answers[0][1]:
                    raise DirectoryNotSharedError(directory=run.files.path, rank=rank, name=path.name, differs=True)
            return first([reason for reason, _ in answers])

        def filled() -> str | None:
            with _reasons(named=named) as reasons:
                self._fill(found[0][1], path)
            return reasons[0] if reasons else None

        return group.together(what, read, all_read) or group.together(f"{what}: its shards", filled, first)

    def _ready(self, file: Opened, wanted: _Wanted) -> _Ready:
        """Check everything about a restore; of shards, all but their values.

        Raises:
            LoadError: What is in the file is not what a manager saves.
            RestoreError: It does not fit the live objects.
        """
        with torch.inference_mode(mode=False):
            return self._checked(file, wanted)

    def _checked(self, file: Opened, wanted: _Wanted) -> _Ready:
        payload, mapped = file.load_mapped()
        if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
            raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
        try:
            guard = guard_from_record((file.header() or {})["guard"])
        except (KeyError, TypeError) as error:
            raise DamagedCheckpointError(path=file.path, reason="its header does not say what was guarded") from error
        group = self._run.group
        names_of_shards = shards_of(payload)
        payload, changes = payload_for(payload, self._components, group.rank, group.size, file.path)
        held: Held = {}
        if names_of_shards:
            payload, held = with_places(payload, self._components, file.path)
            if wanted.only is not None:
                held = {key: one for key, one in held.items() if key.partition(".")[0] in {*wanted.only, RESERVED_KEY}}
        elif in_group():
            payload = laid_out(payload, self._components)
        ready = plan(
            self._components, payload, only=wanted.only, keep_live=wanted.keep_live, path=file.path, read=mapped.read
        )
        if ready.rng is not None:
            ready.environment.extend(changes)
        return _Ready(ready, held, names_of_shards, guard, bool(changes), mapped.forget)

    def _fill(self, ready: _Ready, path: Path) -> None:
        """Read the shards, and let the guard that the state passed when it was saved judge it again.

        Raises:
            LoadError: They cannot be read, or the state is not finite.
        """
        if ready.held:
            read_shards(ready.held, path, self._run.group, ready.shards)
        bad = Baseline({}).judge(ready.plan.parts, ready.guard, ready.looked_at).bad
        if bad:
            raise DamagedCheckpointError(path=path, reason=f"it is not finite ({bad[0]})")

    def _apply(self, ready: Plan) -> None:
        self._run.half_restored = True  # until the caller has noted where the run is now
        with torch.inference_mode(mode=False):  # in which nothing can be copied into ordinary tensors
            ready.apply()

    def restored_from_memory(self, copied: tuple[int, dict[str, Any]] | None) -> tuple[Checkpoint, Plan, bool] | None:
        """Restore the copy that an asynchronous save left, when it is of the newest checkpoint and that is on disk."""
        run = self._run
        if copied is None or run.group.size > 1 or copied[0] != run.saved or not run.catalog.is_good(run.saved):
            return None
        checkpoint = run.catalog.peek(run.saved)
        ready = plan(self._components, copied[1], path=checkpoint.path)
        self._apply(ready)
        return checkpoint, ready, False

    def report(self, checkpoint: Checkpoint, ready: Plan, rejected: Mapping[Path, str], kind: str, **data: Any) -> None:
        """Tell history and caller what a restore passed over and replaced."""
        for path, reason in rejected.items():
            self._run.event("passed_over", None, file=path.name, reason=reason)
        self._run.event(kind, checkpoint.step, replaced=ready.replaced, **data)
        if ready.replaced:
            text = "\n  ".join(ready.replaced)
            warnings.warn(
                f"The checkpoint's hyper-parameters replaced those of the script (live -> saved):\n  {text}\n"
                + (
                    "Set them again before you go on, if that is what you changed."
                    if kind == "rolled_back"
                    else "Keep the live ones with restore(keep_live=('component.name', ...))."
                ),
                HyperparameterReplacedWarning,
                stacklevel=3,
            )
        if ready.environment:
            text = "\n  ".join(ready.environment)
            warnings.warn(
                f"The environment differs from the one that saved {checkpoint.path.name} (saved -> now), so the next "
                f"losses may differ in their last bits:\n  {text}",
                EnvironmentChangedWarning,
                stacklevel=3,
            )


def _passed_over(path: Path, reason: str, *, told: bool) -> None:
    if told:
        skipped(path, reason)


@contextlib.contextmanager
def _reasons(*, named: bool) -> Iterator[list[str]]:
    """Turn what makes a file not good into a reason, so that an older one is tried; not when it was asked for."""
    found: list[str] = []
    try:
        yield found
    except FormatVersionError:
        raise
    except LoadError as error:
        if named:
            raise
        found.append(reason_of(error))
    except FileNotFoundError as error:
        if named:
            raise
        found.append(f"it is gone ({error})")
    except OSError as error:
        if named or error.errno != errno.EIO:
            raise
        found.append(str(error))
