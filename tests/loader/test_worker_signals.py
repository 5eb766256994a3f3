"""A request to stop that comes to the whole process group: the step in progress ends, and is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = """
import signal, sys, time, warnings
import torch
from torch.utils.data import DataLoader
import safeckpt

warnings.simplefilter("ignore")

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return index

def main():
    folder, context, hangs = sys.argv[1], sys.argv[2], sys.argv[3]
    loader = safeckpt.ResumableLoader(
        DataLoader(Data(), batch_size=1, num_workers=2, multiprocessing_context=context), seed=0
    )
    stop = (signal.SIGTERM, signal.SIGUSR1)
    with safeckpt.CheckpointManager(folder, {"loader": loader}, stop_signals=stop) as manager:
        for number, batch in loader.enumerate():
            if number == 1:
                print("ready", flush=True)
                while not manager.stop_requested:
                    time.sleep(0.01)
            if number == 40:  # far more than workers have fetched ahead
                manager.end_step(1, loss=1.0)
                print("saved", loader.state_dict()["batch"], flush=True)
                break
    if hangs == "again":
        print("more", sum(1 for _ in loader), flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("number", "context"),
    [
        (signal.SIGTERM, "fork"),
        (signal.SIGUSR1, "fork"),
        (signal.SIGTERM, "spawn"),
        pytest.param(signal.SIGUSR1, "spawn", marks=pytest.mark.slow),  # its workers import torch four times
    ],
)
def test_stop_signal_to_the_group_lets_the_step_end(tmp_path, number, context):
    """Workers leave the signal to their parent, which trains the step to its end, saves it, and ends with them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), context, "again"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    os.killpg(child.pid, number)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, "saved 41\nmore 64\n"), err
    saved = torch.load(tmp_path / "run" / "step-00000001.pt", weights_only=True)
    assert saved["loader"]["batch"] == 41


def test_worker_that_hangs_ends_with_its_parent(tmp_path):
    """A worker that outlives the signal does not keep its parent from ending."""
    script = tmp_path / "script.py"
    body = SCRIPT.replace("return index", "return index if index < 60 else time.sleep(3600)")
    script.write_text(body.replace("if number == 40:", "if number == 59:"))
    child = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), "fork", "no"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    os.killpg(child.pid, signal.SIGTERM)
    out, err = child.communicate(timeout=120)
    assert (child.returncode, out) == (0, "saved 60\n"), err
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
