"""A request to stop that comes to the whole process group: the step in progress ends, and is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import safeckpt
from tests.children import Child


class Numbers(Dataset):
    """64 numbers, of which those from `hangs_at` on never come."""

    def __init__(self, hangs_at: int) -> None:
        self.hangs_at = hangs_at

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index >= self.hangs_at:
            time.sleep(3600)
        return index


def train_until_told(
    connection: Any, folder: Path, context: str, *, end: int = 40, hangs_at: int = 64, again: bool = False
) -> tuple[int, int]:
    """In a process group of its own, be told to stop in a step that ends with batch `end`; then save.

    Returns:
        The saved position, and the number of batches of another epoch if there is to be one.
    """
    os.setsid()
    warnings.simplefilter("ignore")
    dataloader = DataLoader(Numbers(hangs_at), batch_size=1, num_workers=2, multiprocessing_context=context)
    loader = safeckpt.ResumableLoader(dataloader, seed=0)
    stop = (signal.SIGTERM, signal.SIGUSR1)
    with safeckpt.CheckpointManager(folder, {"loader": loader}, stop_signals=stop) as manager:
        for number, _ in loader.enumerate():
            if number == 1:
                connection.send("ready")
                while not manager.stop_requested:
                    time.sleep(0.01)
            if number == end:
                manager.end_step(1, loss=1.0)
                position = loader.state_dict()["batch"]
                break
    return position, sum(1 for _ in loader) if again else 0


@pytest.mark.parametrize(
    ("number", "context"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGUSR1, "fork"),
        # Their workers import torch, four times each.
        pytest.param(signal.SIGTERM, "spawn", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "spawn", marks=pytest.mark.slow),
    ],
)
def test_stop_signal_to_the_group_lets_the_step_end(tmp_path: Path, number: signal.Signals, context: str) -> None:
    """Workers leave the signal to their parent, which trains the step to its end, saves it, and ends with them."""
    # The step ends far behind what workers have fetched ahead.
    with Child(train_until_told, tmp_path / "run", context, again=True) as child:
        assert child.receive() == "ready"
        os.killpg(child.pid, number)
        ended = child.ended()
    assert (ended.value, ended.error) == ((41, 64), None)
    saved = torch.load(tmp_path / "run" / "step-00000001.pt", weights_only=True)
    assert saved["loader"]["batch"] == 41


def test_worker_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    """A worker that outlives the signal does not keep its parent from ending."""
    with Child(train_until_told, tmp_path / "run", "fork", end=59, hangs_at=60) as child:
        assert child.receive() == "ready"
        os.killpg(child.pid, signal.SIGTERM)
        ended = child.ended()
        assert (ended.value, ended.error) == ((60, 0), None)
        with pytest.raises(ProcessLookupError):
            os.killpg(child.pid, 0)


SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.children import look_often_for_workers
from tests.loader.test_worker_signals import train_until_told

if __name__ == "__main__":
    look_often_for_workers()
    connection = SimpleNamespace(send=lambda word: print(word, flush=True))
    train_until_told(connection, Path(sys.argv[1]), "fork", end=59, hangs_at=60)
"""


@pytest.mark.slow
def test_worker_that_hangs_ends_with_a_script(tmp_path: Path) -> None:
    """The same where the parent is no child of multiprocessing."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.killpg(child.pid, signal.SIGTERM)
        _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
