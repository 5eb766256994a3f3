"""Restoring: find the checkpoint, check all of it, and only then change the first object."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safeckpt.catalog import Checkpoint, reason_of, skipped
from safeckpt.errors import (
    DamagedCheckpointError,
    EnvironmentChangedWarning,
    HyperparameterReplacedWarning,
    LoadError,
    NoGoodCheckpointError,
)
from safeckpt.file import CheckpointFile
from safeckpt.run.timeline import Timeline
from safeckpt.state import RESERVED_KEY, Baseline, Component, Plan, guard_from_record, plan

__all__ = ["Restorer"]


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
    ) -> tuple[Checkpoint, Plan] | None:
        """Restore a step, or the newest good one; what was passed over on the way is added to `rejected`."""
        candidates = self._run.catalog.good(rejected) if step is None else self._run.catalog.one(step)
        for file, checkpoint in candidates:
            try:
                ready = self._plan(file, only, keep_live)
            except LoadError as error:
                if step is not None:
                    raise
                reason = reason_of(error)
            else:
                ready.apply()
                return checkpoint, ready
            rejected[checkpoint.path] = reason
            skipped(checkpoint.path, reason)
        if rejected:
            raise NoGoodCheckpointError(
                directory=self._run.files.path, rejected=[(str(path), reason) for path, reason in rejected.items()]
            )
        return None

    def restored_from_memory(self, copied: tuple[int, dict[str, Any]] | None) -> tuple[Checkpoint, Plan] | None:
        """Restore the copy that an asynchronous save left, when it is of the newest checkpoint and that is on disk."""
        if copied is None or copied[0] != self._run.saved or not self._run.catalog.is_good(self._run.saved):
            return None
        checkpoint = self._run.catalog.peek(self._run.saved)
        ready = plan(self._components, copied[1], path=checkpoint.path)
        ready.apply()
        return checkpoint, ready

    def _plan(self, file: CheckpointFile, only: Collection[str] | None, keep_live: Collection[str]) -> Plan:
        """Check everything about a restore.

        Raises:
            LoadError: What is in the file is not what a manager saves, or not finite.
            RestoreError: It does not fit the live objects.
        """
        payload, mapped = file.load_mapped()
        if not isinstance(payload, dict) or not isinstance(payload.get(RESERVED_KEY), dict):
            raise DamagedCheckpointError(path=file.path, reason="it holds no state of a run")
        try:
            guard = guard_from_record((file.header() or {})["guard"])
        except (KeyError, TypeError) as error:
            raise DamagedCheckpointError(path=file.path, reason="its header does not say what was guarded") from error
        ready = plan(self._components, payload, only=only, keep_live=keep_live, path=file.path, read=mapped.read)
        # The guard that it passed when it was saved judges it again.
        bad = Baseline({}).judge(ready.parts, guard, mapped.forget).bad
        if bad:
            raise DamagedCheckpointError(path=file.path, reason=f"it is not finite ({bad[0]})")
        return ready

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
