"""prove_resume: a run, the same run killed and resumed, and `==` between the two."""

from __future__ import annotations

import dataclasses
import operator
import random
import secrets
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from safeckpt.proof.compare import findings, first_difference, first_index, relative_difference, volatile
from safeckpt.proof.report import KillReport, ResumeReport
from safeckpt.proof.runs import KILLED, RESUMED, STRAIGHT, Build, Job, Record, Restore, TrainStep, run
from safeckpt.proof.training import Train
from safeckpt.proof.workers import Functions, Worker, importing
from safeckpt.state.random_streams import RngStreams
from safeckpt.system.arguments import checked_int

__all__ = ["prove_resume"]

_RNG = "rng"
_NO_STEP = "no such step"
_CONSTANT = (
    "the loss is the same at every step, so equal losses prove nothing: return the loss of the step, or give it to "
    "end_step"
)
_TORCH_SEED = 67280421310721  # of a new process, c10::detail::getNonDeterministicRandom's fixed fallback


@overload
def prove_resume(
    build: Build,
    train_step: TrainStep,
    *,
    steps: int = 20,
    kill_at: int | Sequence[int] = 10,
    repeats: int = 2,
    ablations: bool = False,
    restore: Restore | None = None,
    manager_options: Mapping[str, Any] | None = None,
    in_process: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> ResumeReport: ...


@overload
def prove_resume(
    train: Train,
    /,
    *,
    steps: int = 20,
    kill_at: int | Sequence[int] = 10,
    repeats: int = 2,
    progress: Callable[[str], None] | None = None,
) -> ResumeReport: ...


def prove_resume(
    build: Build | Train,
    train_step: TrainStep | None = None,
    *,
    steps: int = 20,
    kill_at: int | Sequence[int] = 10,
    repeats: int = 2,
    ablations: bool = False,
    restore: Restore | None = None,
    manager_options: Mapping[str, Any] | None = None,
    in_process: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> ResumeReport:
    """Run straight through, run again with a kill, resume, and compare every loss with `==`.

    Each run is a fresh process, so that nothing hides in memory: one runs straight through (twice, to see that the
    run is deterministic at all), one saves with a `CheckpointManager` after `kill_at` steps and dies of SIGKILL, one
    builds everything anew, restores and goes on. Besides the losses, everything that a checkpoint holds is compared
    after the restore and after every step, and what no checkpoint holds (plain attributes, non-persistent buffers,
    globals, closures) is looked at, so that the report can name the first part that differs and when.

    A fresh process finds `build` and `train_step` by their names. Closures, lambdas and functions of a notebook have
    none: then all runs are made in this process, one after the other, without a real kill, and the report says so.

    A run whose loop is a trainer's, or your own with a manager of its own, is given as one function,
    `prove_resume(train)`: `train(directory)` seeds, makes everything, and trains with its checkpoints in that
    directory, as your script does, with its own schedule, callbacks and evaluations. The losses that `end_step` gets
    are compared, and all that a checkpoint holds. Each process ends behind the last step that is compared, so the run
    itself may be much longer. A checkpoint is saved at `kill_at`, besides those that the run saves by itself.

    Args:
        build: Makes the components as at process start, seeds what it draws from, and returns them by name. Without
            `train_step`: `train(directory)`, which trains a whole run.
        train_step: Does one step with what `build` returned and returns its loss, a number or a dict or list of them.
        steps: Length of the run, 1 or more; of a whole run that is longer, what is looked at.
        kill_at: Steps completed at the save, 0 (for a whole run 1) to `steps` - 1; several for one kill each.
        repeats: How often the run is made straight through. 1 makes the proof cheaper and blind for a run that is
            not deterministic after `kill_at`.
        ablations: Also leave out one component at a time at the restore, and report at which step that first shows.
        restore: What your script does between the construction of the manager and the first step, called as
            `restore(manager, components)`; `manager.restore()` when it is not given.
        manager_options: More arguments for the `CheckpointManager`, such as `guard`.
        in_process: True for this process; False to insist on fresh ones; None for fresh ones where it is possible.
        progress: Called with a line before each run.

    Returns:
        The report. `report.assert_exact()` makes a test of it.

    Raises:
        ValueError: An argument is out of range, or fresh processes were insisted on and are not possible; a whole run
            always needs them.
        ProofError: A process died before its run was done.
        BaseException: What `build`, `train_step`, `restore` or a save raised.

    Cost:
        `repeats` + 1 runs and a restore for each kill, one restore for each ablation; a fresh process imports torch
        (a few seconds). Every tensor is read and hashed once a step.

    Example:
        >>> import torch, safeckpt
        >>> def build():
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(3, 1)
        ...     return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
        >>> def train_step(components):
        ...     loss = components["model"](torch.randn(8, 3)).square().mean()
        ...     components["optimizer"].zero_grad()
        ...     loss.backward()
        ...     components["optimizer"].step()
        ...     return loss
        >>> safeckpt.prove_resume(build, train_step, in_process=True).exact
        True
    """
    if (file := importing()) is not None:
        raise RuntimeError(
            f"prove_resume() was called while a new process of the proof imported {file}: put the call under "
            '`if __name__ == "__main__":`'
        )
    kills = _checked(steps, kill_at, repeats, least=0 if train_step else 1)
    if train_step is None:
        _refuse_of_steps(restore=restore, manager_options=manager_options, in_process=in_process, ablations=ablations)
        in_process = False
    functions = Functions.of((build, train_step, restore)) if in_process is not True else "it was asked for"
    if isinstance(functions, str) and in_process is False:
        raise ValueError(f"the runs need processes of their own, but {functions}")
    with tempfile.TemporaryDirectory(prefix="safeckpt-proof-") as folder:
        runner: _Runner
        if isinstance(functions, str):
            runner = _ThisProcess((build, train_step, restore))  # type: ignore[arg-type]  # a build, with a train_step
        else:
            runner = _FreshProcesses(functions, Path(folder))
        proof = _Proof(runner, Path(folder), steps, dict(manager_options or {}), progress or (lambda _: None))
        try:
            return proof.make(kills, repeats, functions if isinstance(functions, str) else None, ablations=ablations)
        finally:
            runner.close()


def _refuse_of_steps(**options: Any) -> None:
    """Refuse options that are of no meaning for a function that trains a whole run."""
    if given := [name for name, value in options.items() if value]:
        raise ValueError(
            f"{' and '.join(given)} cannot be had from prove_resume(train): the function makes its manager itself, in "
            "a process of its own. For these give build and train_step"
        )


def _checked(steps: int, kill_at: int | Sequence[int], repeats: int, *, least: int) -> list[int]:
    for name, value in (("steps", steps), ("repeats", repeats)):
        checked_int(name, value, least=1)
    kills = list(kill_at) if isinstance(kill_at, Sequence) else [kill_at]
    if not kills:
        raise ValueError("kill_at is empty: give at least one step")
    for kill in kills:
        if isinstance(kill, bool) or not hasattr(kill, "__index__") or not least <= kill < steps:
            raise ValueError(
                f"kill_at must be an int from {least} to steps - 1 = {steps - 1}, or several; got {kill!r}"
            )
    return [operator.index(kill) for kill in kills]


class _Runner:
    """Does the runs of a proof somewhere.

    Attributes:
        left: Runs still to come, as far as is known.
    """

    left = 0

    def do(self, job: Job, *, may_fail: bool = False) -> Record:
        """Do a run; one that may fail brings its error back in the record."""
        raise NotImplementedError

    def close(self) -> None:
        """End whatever still runs."""


class _FreshProcesses(_Runner):
    """One new process for each run. While one works, the next one imports torch."""

    def __init__(self, functions: Functions, folder: Path) -> None:
        self._functions = functions
        self._folder = folder
        self._count = 0
        self._spare: Worker | None = None

    def do(self, job: Job, *, may_fail: bool = False) -> Record:
        worker = self._spare or Worker()
        self._spare = None
        self.left -= 1
        self._count += 1
        try:
            if self.left > 0:
                self._spare = Worker()  # imports torch while this run works
            return worker.run(job, self._functions, self._folder / f"record-{self._count}", may_fail=may_fail)
        finally:
            worker.close()

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()


class _ThisProcess(_Runner):
    """Every run in this process, beginning with the random streams of a new one; the caller's are put back."""

    def __init__(self, functions: tuple[Build, TrainStep, Restore | None]) -> None:
        self._functions = functions

    def do(self, job: Job, *, may_fail: bool = False) -> Record:
        record = Record()
        with RngStreams.untouched():
            random.seed()
            np.random.seed(secrets.randbits(32))  # noqa: NPY002 - the process-wide stream
            torch.manual_seed(_TORCH_SEED)
            try:
                manager = run(job, *self._functions, record)
            except BaseException as error:
                if not may_fail or not isinstance(error, Exception):
                    error.add_note(f"In the proof's {job}.")
                    raise
                record.error = traceback.format_exception_only(error)[-1].strip()
                manager = None
            if manager is not None:
                manager.close()
        return record


class _Proof:
    def __init__(
        self, runner: _Runner, folder: Path, steps: int, options: dict[str, Any], progress: Callable[[str], None]
    ) -> None:
        self._runner = runner
        self._folder = folder
        self._steps = steps
        self._options = options
        self._progress = progress

    def make(self, kills: list[int], repeats: int, in_process: str | None, *, ablations: bool) -> ResumeReport:
        self._runner.left = repeats + 2 * len(kills)
        straight = [
            self._do(STRAIGHT, 0, f"straight run {number + 1} of {repeats}", folder=f"straight-{number}")
            for number in range(repeats)
        ]
        pairs = [(kill, self._do(KILLED, kill), self._do(RESUMED, kill)) for kill in kills]
        undisturbed = [*straight, *(killed for _, killed, _ in pairs)]
        skip = volatile(undisturbed)
        reports = [self._kill_report(straight[0], resumed, kill, skip) for kill, _, resumed in pairs]
        differences = _loss_differences(undisturbed)
        deterministic = not any(differences) and len({len(one.losses) for one in straight}) == 1
        first = straight[0]
        unimportant = sorted(name for name in skip if any(name in moment.captured for moment in first.moments.values()))
        report = ResumeReport(
            steps=len(first.losses),
            straight=first.losses,
            kills=reports,
            deterministic=deterministic,
            undetermined=[] if deterministic else first_difference(undisturbed),
            straight_differences=differences,
            repeats=repeats,
            in_process=in_process,
            components=first.components,
            not_compared=unimportant if deterministic else [],
            notes=[
                *_notes([*undisturbed, *(resumed for _, _, resumed in pairs)]),
                *([_CONSTANT] if _is_constant(first.losses) else []),
            ],
            environment=first.environment,
        )
        return self._with_ablations(report, kills[0]) if ablations else report

    def _do(
        self,
        kind: str,
        kill: int,
        what: str = "",
        leave_out: str | None = None,
        *,
        folder: str | None = None,
        may_fail: bool = False,
    ) -> Record:
        self._progress(
            what or {KILLED: f"run to be killed after step {kill}", RESUMED: f"resume after step {kill}"}[kind]
        )
        job = Job(kind, self._steps, kill, str(self._folder / (folder or f"kill-{kill}")), leave_out, self._options)
        return self._runner.do(job, may_fail=may_fail)

    def _kill_report(self, straight: Record, resumed: Record, kill: int, skip: set[str]) -> KillReport:
        tail, rest = _same_length(straight.losses[kill:], resumed.losses)
        found = findings(straight, resumed, kill, first_index(tail, rest), skip)
        return KillReport(kill, tail, rest, found)

    def _with_ablations(self, report: ResumeReport, kill: int) -> ResumeReport:
        """Leave out one component at a time; pointless when the whole is not exact already."""
        if not report.exact:
            note = "nothing was left out on trial, since the whole restore is not exact"
            return dataclasses.replace(report, notes=[*report.notes, note])
        names = [*report.components, _RNG]
        self._runner.left = len(names)
        shows: dict[str, int | None] = {}
        notes = list(report.notes)
        for name in names:
            record = self._do(RESUMED, kill, f"resume without {name}", name, may_fail=True)
            losses = record.losses
            index = first_index(report.straight[kill : kill + len(losses)], losses)
            if index is None and record.error is not None:
                index = len(losses)
                notes.append(f"without {name} the run ends in {record.error}")
            shows[name] = index
        return dataclasses.replace(report, ablations=shows, notes=notes)


def _same_length(straight: list[Any], resumed: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return both with a text, which no loss equals, for each step that one of them has not: whole runs may end."""
    most = max(len(straight), len(resumed))
    return [*straight, *[_NO_STEP] * (most - len(straight))], [*resumed, *[_NO_STEP] * (most - len(resumed))]


def _loss_differences(records: Sequence[Record]) -> list[float]:
    """Return how far each loss of the first run is from that of any other one that came so far."""
    first, *others = records
    return [
        max(
            (relative_difference(loss, other.losses[index]) for other in others if index < len(other.losses)),
            default=0.0,
        )
        for index, loss in enumerate(first.losses)
    ]


def _is_constant(losses: Sequence[Any]) -> bool:
    return len(losses) > 1 and all(first_index([losses[0]], [loss]) is None for loss in losses[1:])


def _notes(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(warning for record in records for warning in record.warnings))
