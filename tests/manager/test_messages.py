"""What the errors say: what happened with both values, what is still safe, what to call next; and they travel."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import safeckpt
from tests.faults import Fault, intercept
from tests.manager.helpers import flip, manager_of, newer_format, save_steps, step_path, truncate
from tests.training import Marked


def not_finite(path: Path) -> None:
    with manager_of(path, Marked()) as manager:
        manager.save(2, loss=math.nan)


def unsavable(path: Path) -> None:
    run = Marked()
    with manager_of(path, run) as manager:
        manager.restore()
        run.components["counters"]["f"] = print
        manager.save(2)


def step_exists(path: Path) -> None:
    run = Marked()
    with manager_of(path, run) as manager:
        manager.restore()
        run.step = 2
        manager.save(1)


def in_use(path: Path) -> None:
    with manager_of(path, Marked()) as manager:
        manager.save(2)


def not_found(path: Path) -> None:
    with manager_of(path, Marked()) as manager:
        manager.restore(7)


def damaged(path: Path) -> None:
    flip(step_path(path, 1))
    with manager_of(path, Marked()) as manager:
        manager.restore(1)


def newer(path: Path) -> None:
    newer_format(step_path(path, 1))
    safeckpt.latest(path)


def none_good(path: Path) -> None:
    truncate(step_path(path, 1))
    with manager_of(path, Marked()) as manager, pytest.warns(safeckpt.SkippedCheckpointWarning):
        manager.restore()


def untrusted(path: Path) -> None:
    torch.save({"x": print}, path / "model.pt")
    safeckpt.load(path / "model.pt")


def other_components(path: Path) -> None:
    run = Marked()
    run.components["other"] = run.components.pop("model")
    with manager_of(path, run) as manager:
        manager.restore()


def other_shape(path: Path) -> None:
    run = Marked()
    run.weight.register_buffer("value", torch.zeros(4))
    with manager_of(path, run) as manager:
        manager.restore()


def loop(path: Path) -> None:
    with manager_of(path, Marked()) as manager:
        manager.restore()
        for _ in range(2):
            manager.rollback(changed=True, max_rollbacks=1)


def locked(path: Path) -> None:
    with manager_of(path, Marked()) as one, manager_of(path, Marked()) as other:
        one.restore()
        other.restore()
        one.save(2)
        other._run.timeline._known_steps.add(2)  # it had seen the step
        other.save(3)


def durability(path: Path) -> None:
    # The first one is of the parent, for the name of the directory itself.
    with manager_of(path, Marked()) as manager, intercept(Fault(2, 5, {"sync_directory"})):
        manager.restore()
        manager.save(2)


CASES: list[tuple[Callable[[Path], None], type[safeckpt.SafeckptError], list[str]]] = [
    (not_finite, safeckpt.NonFiniteError, ["Step 2", "loss = nan"]),
    (unsavable, safeckpt.UnsavableStateError, ["['counters']['f']", "builtin_function"]),
    (
        step_exists,
        safeckpt.StepExistsError,
        ["Step 1 is already saved", "save=loader.batch < len(loader)", "manager.save(manager.step, metrics=metrics)"],
    ),
    (in_use, safeckpt.DirectoryInUseError, ["1 checkpoint(s) of another run", "newest steps: 1", "manager.restore()"]),
    (not_found, safeckpt.CheckpointNotFoundError, ["step 7", "newest: 1"]),
    (damaged, safeckpt.DamagedCheckpointError, ["step-00000001.pt is damaged", "data/0"]),
    (newer, safeckpt.FormatVersionError, ["format version 2", "reads 1", "newer safeckpt"]),
    (none_good, safeckpt.NoGoodCheckpointError, ["1 checkpoint(s), but no good one", "step-00000001.pt: "]),
    (untrusted, safeckpt.UntrustedTypeError, ["print", "add_safe_globals"]),
    (other_components, safeckpt.ComponentMismatchError, ["other", "model", "only="]),
    (other_shape, safeckpt.StateMismatchError, ["model.value", "[3]", "[4]"]),
    (loop, safeckpt.RollbackLoopError, ["max_rollbacks=1", "skip_batches=1"]),
    (locked, safeckpt.DirectoryLockedError, ["same process", "pid "]),
    (durability, safeckpt.DurabilityUnknownError, ["step-00000002.pt is saved, but its durability is unknown"]),
]


@pytest.mark.parametrize(("cause", "kind", "texts"), CASES, ids=[row[1].__name__ for row in CASES])
def test_error_has_three_parts_and_survives_pickling(
    tmp_path: Path, cause: Callable[[Path], None], kind: type[safeckpt.SafeckptError], texts: list[str]
) -> None:
    """Every error a manager can give says what happened, what is safe, what to do, and keeps its data in a pickle."""
    save_steps(tmp_path, 1)
    with pytest.raises(kind) as caught:
        cause(tmp_path)
    error = caught.value
    assert type(error) is kind
    if kind is safeckpt.UnsavableStateError:
        assert error.path is None  # it is about a value
    else:
        assert error.path is not None
        assert error.path.startswith(str(tmp_path))
    happened, safe, next_step = str(error).rsplit("\n", 2)
    for text in texts:
        assert text in str(error)
    assert happened
    assert safe.startswith("Still safe: ")
    assert next_step.startswith("Next: ")
    assert str(error).endswith(".")
    assert ".." not in str(error).replace("...", "")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.path == error.path
        assert getattr(again, "errno", None) == getattr(error, "errno", None)
        attributes = {name: value for name, value in vars(error).items() if name not in ("__notes__", "loss")}
        assert {name: getattr(again, name) for name in attributes} == attributes
