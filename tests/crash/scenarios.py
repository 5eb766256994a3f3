"""What a run does to its directory when it is killed, and what may be found there afterwards."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import safeckpt
from safeckpt import CheckpointManager
from safeckpt.store import names
from tests.comparing import bits
from tests.faults import Operation, intercept
from tests.manager.helpers import flip, manager_of, step_path, steps_in
from tests.training import Marked

NEXT = 70


_NOISE = 2_000  # elements, so that a checkpoint has some pages


def set_state(run: Marked, step: int, timeline: int = 0) -> None:
    """Give the run the state of a step: every bit of it, the random stream too, depends on step and timeline."""
    seed = 1_000_003 * step + timeline
    torch.manual_seed(seed)
    run.step = step
    run.weight.timeline.fill_(timeline)
    run.weight.noise.copy_(torch.randn(_NOISE, generator=torch.Generator().manual_seed(seed)))


def new_state(run: Marked, step: int) -> None:
    """Give the run a state of this step that can be told from the old timeline's of the same step."""
    set_state(run, step, 1)


def new_run() -> Marked:
    run = Marked()
    run.weight.register_buffer("timeline", torch.zeros(()))
    run.weight.register_buffer("noise", torch.zeros(_NOISE))
    return run


def state_in(run: Marked) -> tuple[int, int]:
    """Return (step, timeline) of a run's state, all of which has to be theirs, bit for bit; (0, 0) of a new run."""
    found = run.step, int(run.weight.timeline)
    if found != (0, 0):
        expected, rng = _expected(*found)
        assert bits(run.weight.noise) == expected, f"not the bits of step {found[0]} on timeline {found[1]}"
        assert bits(torch.get_rng_state()) == rng, f"not the random stream of step {found[0]}"
    return found


@functools.lru_cache(maxsize=50)
def _expected(step: int, timeline: int) -> tuple[Any, Any]:
    run, rng = new_run(), torch.get_rng_state()
    set_state(run, step, timeline)
    found = bits(run.weight.noise), bits(torch.get_rng_state())
    torch.set_rng_state(rng)
    return found


def _prepare(path: Path, *steps: int) -> None:
    run = new_run()
    with manager_of(path, run, keep_last=9) as manager:
        for step in steps:
            set_state(run, step)
            manager.save(step)


@dataclass(frozen=True)
class Scenario:
    """Something that is done to a directory.

    Attributes:
        steps: Checkpoints that are there before.
        ready: Brings a manager to where the operation begins.
        run: The operation itself.
        allowed: (step, timeline) that a restore may give afterwards.
        done: What it gives when the operation came to its end.
    """

    name: str
    steps: tuple[int, ...]
    ready: Callable[[CheckpointManager, Marked], None]
    run: Callable[[CheckpointManager, Marked], None]
    allowed: frozenset[tuple[int, int]]
    done: tuple[int, int]

    def prepare(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        if self.steps:
            _prepare(path, *self.steps)

    def manager(self, path: Path) -> tuple[CheckpointManager, Marked]:
        run = new_run()
        return manager_of(path, run, keep_last=2), run

    def operations(self, path: Path) -> list[tuple[str, bool]]:
        """Return the kind of each of the store's operations, in order, and whether it succeeds."""
        found = []

        def note(operation: Operation, call: Callable[[], Any]) -> Any:
            found.append((operation.kind, False))
            result = call()
            found[-1] = (operation.kind, True)
            return result

        self.prepare(path)
        manager, run = self.manager(path)
        with manager:
            self.ready(manager, run)
            with intercept(note):
                self.run(manager, run)
        return found


def _restore(manager: CheckpointManager, run: Marked) -> None:
    manager.restore()


def _save_and_prune(manager: CheckpointManager, run: Marked) -> None:
    new_state(run, 4)
    manager.save(4)


def _damage_the_newest(manager: CheckpointManager, run: Marked) -> None:
    manager.restore()
    flip(step_path(manager.directory, 3))


def _roll_back_and_save(manager: CheckpointManager, run: Marked) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
        manager.rollback(changed=True)
    new_state(run, 3)
    manager.save(3)


def _go_back(manager: CheckpointManager, run: Marked) -> None:
    manager.restore(1)


def _save_on_another_timeline(manager: CheckpointManager, run: Marked) -> None:
    new_state(run, 2)
    manager.save(2)


def _first(manager: CheckpointManager, run: Marked) -> None:
    new_state(run, 1)
    manager.save(1)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first", (), _restore, _first, frozenset({(0, 0), (1, 1)}), (1, 1)),
        Scenario("save and prune", (1, 2, 3), _restore, _save_and_prune, frozenset({(3, 0), (4, 1)}), (4, 1)),
        Scenario("rollback", (1, 2, 3), _damage_the_newest, _roll_back_and_save, frozenset({(2, 0), (3, 1)}), (3, 1)),
        # Highest first: what a crash leaves of the old timeline are steps that were saved one after the other.
        Scenario(
            "rewind", (1, 2, 3), _go_back, _save_on_another_timeline,
            frozenset({(3, 0), (2, 0), (1, 0), (2, 1)}), (2, 1),
        ),
    )
}  # fmt: skip


def check_afterwards(path: Path, scenario: Scenario) -> tuple[int, int]:
    """Restore what a fresh process finds, save on top of it, and return (step, timeline) of what was found."""
    run = new_run()
    with manager_of(path, run, keep_last=2) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
        restored = manager.restore()
        found = state_in(run)
        assert found in scenario.allowed
        assert (0 if restored is None else restored.step) == found[0]
        run.step = NEXT
        manager.save(NEXT)
        assert safeckpt.load(step_path(path, NEXT))["counters"] == {"step": NEXT}
        assert manager.latest() == manager.checkpoints()[-1]
    assert steps_in(path)[-1] == NEXT
    assert not [file.name for file in path.iterdir() if names.temp_final(file.name) is not None]
    return found


def fresh(path: Path, scenario: Scenario, number: int) -> Path:
    """Return a directory as it is before the operation; the first call makes it, later ones copy it."""
    template = path / f"{scenario.name} before"
    if not template.exists():
        scenario.prepare(template)
    target = path / f"{scenario.name} {number}"
    if template.exists():
        shutil.copytree(template, target)
    return target
