"""The script on the page about many processes runs as it stands there, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import safeckpt

PAGE = Path(__file__).parents[2] / ".readme" / "distributed.md"


@pytest.mark.slow
def test_the_script_of_the_page_trains_and_resumes(tmp_path: Path) -> None:
    """Two ranks train, and a second start goes on and ends at the same step."""
    (block,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    script = block + "dist.destroy_process_group()\n"
    for epochs, step in ((4, 64), (6, 96)):
        (tmp_path / "train.py").write_text(script.replace("loader.epochs(4)", f"loader.epochs({epochs})"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        newest = safeckpt.latest(tmp_path / "run")
        assert newest is not None
        assert newest.step == step
        assert newest.path.name == f"step-{step:08d}"
