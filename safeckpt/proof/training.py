"""A function that trains a whole run, watched from within its process: the loop is a trainer's, or the user's own.

The function is given a directory and makes its manager there itself, so the process is told what the run does. It ends
where the proof has seen enough: behind the last step that is compared, or, killed, behind the commit of a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from safeckpt.errors import SafeckptWarning
from safeckpt.proof.captured import captured_leaves
from safeckpt.proof.live import LiveObjects
from safeckpt.proof.runs import KILLED, RESUMED, Job, Moment, Record
from safeckpt.run.observing import observe
from safeckpt.run.run import Run
from safeckpt.state.environment import environment
from safeckpt.state.loss import Loss

__all__ = ["Train", "kill", "watch_training"]

Train = Callable[[Path], Any]


def kill() -> None:
    """End this process as a kill does."""
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # SIGTERM is as abrupt on Windows


def watch_training(job: Job, train: Train, record: Record, leave: Callable[[], None]) -> None:
    """Train, and write into `record` what happens. Returns where training has ended by itself.

    Args:
        job: What to do.
        train: Trains a run in a directory.
        record: Of this run.
        leave: Called when the record is complete and the process is about to end here.

    Raises:
        ValueError: What was trained is no run that could be proven.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SafeckptWarning)
        watch = _Watch(job, train, record, caught, leave)
        observe(watch)
        try:
            train(Path(job.directory))
        finally:
            observe(None)
        if job.kind == KILLED:
            raise ValueError(
                f"training was over, and no checkpoint of step {job.kill_at} or later was saved in {job.directory}. "
                "Let the function train in the directory that it is given, and choose a lower kill_at"
            )
        watch.complete()


class _Watch:
    """Is told what the run does; of several runs in a process, of the first one."""

    def __init__(
        self, job: Job, train: Train, record: Record, caught: list[warnings.WarningMessage], leave: Callable[[], None]
    ) -> None:
        self._job = job
        self._train = train
        self._record = record
        self._caught = caught
        self._leave = leave
        self._mutex = threading.Lock()
        self._losses: dict[int, Any] = {}
        self._run: Run | None = None
        self._has_others = False
        self._live = LiveObjects({}, (train,))

    def wants_checkpoint(self, step: int) -> bool:
        """Return whether this is the step after which the run is killed."""
        return self._job.kind == KILLED and step == self._job.kill_at

    def ended(self, run: Run, step: int, loss: Loss) -> None:
        """Note the loss and the state; behind the last step that is compared, end the process."""
        with self._mutex:
            if self._run is None:
                self._begin(run)
            if self._run is not run:
                self._has_others = True
                return
            self._losses[step] = loss.floats
            self._record.moments[step] = Moment(captured_leaves(run.components), self._live.leaves())
            if self._job.kind != KILLED and step >= self._job.steps:
                self.complete()
                self._leave()
                os._exit(0)  # nothing that comes behind this step is of interest

    def committed(self, run: Run, step: int) -> None:
        """Kill the process where its checkpoint is there."""
        with self._mutex:
            if self._run is run and self._job.kind == KILLED and step >= self._job.kill_at:
                self.complete()
                self._leave()
                kill()

    def _begin(self, run: Run) -> None:
        self._run = run
        self._record.components = list(run.components)
        self._record.environment = environment()
        modules = {name: one.obj for name, one in run.components.items() if isinstance(one.obj, nn.Module)}
        self._live = LiveObjects(modules, (self._train,))

    def complete(self) -> None:
        """Write the losses into the record.

        Raises:
            ValueError: They are not those of the steps that this run has to do.
        """
        steps = sorted(self._losses)
        first = self._job.kill_at + 1 if self._job.kind == RESUMED else 1
        if not steps:
            raise ValueError(
                "training has ended no step of a CheckpointManager: let the function train with one, or with a "
                "trainer's integration, in the directory that it is given"
            )
        if steps != list(range(first, first + len(steps))):
            raise ValueError(
                f"the steps of this run are {_shown(steps)}, and a proof needs {first}, {first + 1}, {first + 2} and "
                "so on: number steps by one, and restore before the first one"
            )
        self._record.losses = [self._losses[step] for step in steps]
        if self._has_others:
            self._record.warnings.append(
                "training has more than one CheckpointManager: only the run of the first one was compared"
            )
        self._record.warnings += [
            f"{one.category.__name__}: {one.message}"
            for one in self._caught
            if issubclass(one.category, SafeckptWarning)
        ]


def _shown(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:4])) + (" ..." if len(steps) > 4 else "")
