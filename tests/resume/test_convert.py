"""The loops on the page `.readme/convert.md`: each is killed, started again, and ends as the run that was not."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safeckpt
from tests import children
from tests.comparing import assert_same

PAGE = Path(__file__).parents[2] / ".readme" / "convert.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
LOOPS = re.findall(r"^def (train_\w+)\(directory\):$", "\n".join(BLOCKS), re.MULTILINE)
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def namespace_of(name: str) -> dict[str, Any]:
    """Run the block that defines a loop; of the blocks before it, the definitions alone."""
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        if f"def {name}(" in block:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(block, namespace)
            break
        tree = ast.parse(block)
        tree.body = [statement for statement in tree.body if isinstance(statement, _DEFINITIONS)]
        exec(compile(tree, str(PAGE), "exec"), namespace)
    return namespace


def train(name: str, directory: str, steps: int | None) -> Any:
    """Run a loop of the page, killed by SIGKILL when it has ended so many steps."""
    os.chdir(directory)
    random.seed(0)  # the loops draw from torch alone, and the state of the other streams is compared as well
    np.random.seed(0)
    loop = namespace_of(name)[name]
    end_step = safeckpt.CheckpointManager.end_step
    ended = itertools.count(1)

    def end_and_die(self: safeckpt.CheckpointManager, step: int, **options: Any) -> Any:
        checkpoint = end_step(self, step, **options)
        if next(ended) == steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return checkpoint

    safeckpt.CheckpointManager.end_step = end_and_die  # type: ignore[method-assign]
    return loop("run")


def finished(name: str, directory: Path, *kills: int) -> tuple[Any, dict[str, Any]]:
    """Run a loop to its end, through these kills; return what it returned, and its last checkpoint."""
    directory.mkdir()
    for steps in kills:
        assert children.run(train, name, str(directory), steps).signal == signal.SIGKILL
    ended = children.run(train, name, str(directory), None)
    if ended.error is not None:
        raise ended.error
    newest = safeckpt.latest(directory / "run")
    assert newest is not None
    return ended.value, safeckpt.load(newest.path)


@pytest.mark.parametrize("name", [LOOPS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LOOPS[1:])])
def test_loop_of_the_page_killed_twice_ends_bit_equal(name: str, memory_path: Path) -> None:
    """The last checkpoint, and what the loop returned, are those of the run that nothing stopped."""
    result, state = finished(name, memory_path / "straight")
    for kills in ((1, 6), (10, 1)):  # before the first checkpoint, inside an epoch, between two
        again, resumed = finished(name, memory_path / f"killed{kills[0]}", *kills)
        assert again == (result[-len(again) :] if isinstance(result, list) and again else result)
        state["safeckpt"].pop("run_id", None)
        resumed["safeckpt"].pop("run_id", None)
        assert_same(resumed, state)
