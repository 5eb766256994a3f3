"""One run of the proof: straight through, up to its end by a kill, or resumed. What happened comes back as a record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from safeckpt.errors import SafeckptWarning
from safeckpt.file import open_file
from safeckpt.manager import CheckpointManager
from safeckpt.proof.captured import captured_leaves, named_values
from safeckpt.proof.leaves import Leaf, leaf
from safeckpt.proof.live import LiveObjects
from safeckpt.state import register
from safeckpt.state.component import Captured, has_attribute
from safeckpt.state.environment import environment
from safeckpt.state.loss import Loss
from safeckpt.state.run_state import RESERVED_KEY
from safeckpt.state.wrappers import unwrapped

__all__ = ["KILLED", "RESUMED", "STRAIGHT", "Build", "Job", "Moment", "Record", "Restore", "TrainStep", "run"]

STRAIGHT = "straight"
KILLED = "killed"
RESUMED = "resumed"

Build = Callable[[], Mapping[str, Any]]
TrainStep = Callable[[Any], Any]
Restore = Callable[[CheckpointManager, Any], Any]


@dataclass(frozen=True)
class Job:
    """What one run has to do, as plain values.

    Attributes:
        kind: `STRAIGHT`, `KILLED` (stops after the save) or `RESUMED`.
        steps: Steps of the whole run.
        kill_at: Steps completed at the save; of no meaning in a straight run.
        directory: Where the checkpoint is or will be, for each straight run another one.
        leave_out: Component, or "rng", that is not restored.
        options: Arguments of the manager.
    """

    kind: str
    steps: int
    kill_at: int = 0
    directory: str = ""
    leave_out: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == STRAIGHT:
            return "straight run"
        what = "run to be killed" if self.kind == KILLED else "resumed run"
        return f"{what} (kill at step {self.kill_at}{f', without {self.leave_out}' if self.leave_out else ''})"


@dataclass(frozen=True)
class Moment:
    """The state of a run between two steps.

    Attributes:
        captured: What a checkpoint holds, by name.
        live: What it does not hold.
    """

    captured: dict[str, Leaf]
    live: dict[str, Leaf]


@dataclass
class Record:
    """What happened in a run.

    Attributes:
        losses: As floats, or dicts and lists of floats, one a step.
        moments: The state by steps completed.
        details: For tensors that differ from the file right after the restore: which elements, and by how much.
        warnings: What safeckpt warned of.
        components: Names of the components.
        environment: What the run computed in.
        error: What the run raised when it was allowed to fail, as text.
    """

    losses: list[Any] = field(default_factory=list)
    moments: dict[int, Moment] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    components: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def run(
    job: Job, build: Build, train_step: TrainStep, restore: Restore | None, record: Record
) -> CheckpointManager | None:
    """Do one run in this process and write into `record` what happens.

    Warnings of safeckpt are kept for the report; all others go where warnings go.

    Returns:
        The manager as it is at the moment of the kill; None for a run that comes to its end.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SafeckptWarning)
        manager = _Run(job, train_step, record, build).do(restore)
    for one in caught:
        if issubclass(one.category, SafeckptWarning):
            record.warnings.append(f"{one.category.__name__}: {one.message}")
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return manager


class _Run:
    def __init__(self, job: Job, train_step: TrainStep, record: Record, build: Build) -> None:
        self._job = job
        self._train_step = train_step
        self._record = record
        self._given = build()
        self._components = register(self._given)
        objects = unwrapped(self._given)
        self._loaders = [obj for obj in objects.values() if has_attribute(obj, "expect_end_step")]
        self._live = LiveObjects(objects, (build, train_step))
        record.components = list(self._components)

    def do(self, restore: Restore | None) -> CheckpointManager | None:
        job = self._job
        self._record.environment = environment()
        if job.kind == STRAIGHT:
            self._train(0, job.steps)
            return None
        manager = CheckpointManager(job.directory, dict(self._given), **{"keep_last": 1, **job.options})
        if job.kind == KILLED:
            self._train(0, job.kill_at)
            manager.save(job.kill_at)
            return manager
        with manager:
            self._restore(manager, restore)
            self._train(job.kill_at, job.steps)
        return None

    def _train(self, start: int, stop: int) -> None:
        self._note(start)
        for step in range(start, stop):
            self._record.losses.append(Loss.read(self._train_step(self._given)).floats)
            for loader in self._loaders:
                loader.end_step(step + 1)
            self._note(step + 1)

    def _note(self, step: int) -> None:
        self._record.moments[step] = Moment(captured_leaves(self._components), self._live.leaves())

    def _restore(self, manager: CheckpointManager, restore: Restore | None) -> None:
        if self._job.leave_out == "rng":
            manager.restore(only=tuple(self._components))
        elif self._job.leave_out is not None:
            manager.restore(fresh=(self._job.leave_out,))
        elif restore is None:
            manager.restore()
        else:
            restore(manager, self._given)
        for checkpoint in manager.checkpoints():
            if checkpoint.step == self._job.kill_at:
                self._record.details = self._compare_with_file(checkpoint.path)

    def _compare_with_file(self, path: Path) -> dict[str, str]:
        """Return, for each tensor that is not as in the checkpoint, which elements differ."""
        with open_file(path) as file:
            payload = file.load(map_location="cpu", mmap=True)
            records = payload[RESERVED_KEY]["components"]
            saved = {
                name: value
                for name, _, value in named_values(
                    [(one, Captured(payload[name], records[name])) for name, one in self._components.items()]
                )
            }
            live = named_values([(one, one.capture()) for one in self._components.values()])
            return {
                name: text
                for name, _, value in live
                if isinstance(value, torch.Tensor) and (text := _elements(saved.get(name), value)) is not None
            }


def _elements(saved: Any, live: torch.Tensor) -> str | None:
    """Return how a live tensor differs from the saved one; None when it does not, or when no element can be shown."""
    if not isinstance(saved, torch.Tensor) or saved.size() != live.size() or saved.dtype != live.dtype:
        return None
    if leaf("", saved).key == leaf("", live).key or live.layout is not torch.strided or live.is_quantized:
        return None
    a, b = saved.detach().reshape(-1), live.detach().cpu().reshape(-1)
    width = a.element_size()
    differ = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).view(-1, width).any(dim=1)
    first = int(differ.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), live.size())] if live.dim() else []
    text = (
        f"{int(differ.sum())} of {live.numel()} elements, first at {index}: {a[first].item()!r} != {b[first].item()!r}"
    )
    ulps = _ulps(a[first], b[first])
    return text if ulps is None else f"{text} ({ulps} ulp)"


_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16}
_INTEGERS[torch.bfloat16] = torch.int16


def _ulps(a: torch.Tensor, b: torch.Tensor) -> int | None:
    """Return how many floating-point numbers lie between two values of the same sign; None for others."""
    integer = _INTEGERS.get(a.dtype)
    if integer is None or not bool(torch.isfinite(a) & torch.isfinite(b)) or bool(torch.signbit(a) ^ torch.signbit(b)):
        return None
    return abs(int(a.view(integer)) - int(b.view(integer)))
