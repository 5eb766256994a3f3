"""The public tool `ckpt-chaos` over a loop of ours: it kills the loop at its file events, resumes it and compares.

What the tool cannot see is read from its own result files: where un-synced data is thrown away at an event, the resume
starts no earlier than where the process was only killed at that event. What was committed was synced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.campaign.outcome import Outcome, Scale

MODES = ("before", "torn", "term", "unsynced")


def run(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("ckpt-chaos 0.1.8: killed, torn, terminated, un-synced at each file event")
    if importlib.util.find_spec("ckpt_chaos") is None:
        outcome.skipped = "ckpt-chaos is not installed (pip install ckpt-chaos==0.1.8)"
        return outcome
    if scale == "fast":
        outcome.skipped = "every kill starts two processes; python -m tests.campaign chaos"
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_chaos", "run", "--work", f"{folder}/work", "--modes", ",".join(MODES),
             "--max-points", "120", "--jobs", "2", "--timeout", "120", "--step-regex", r"resumed from step (\d+)",
             "--result-file", "{out}/final.txt", "--checkpoint-glob", "{out}/run/step-*.pt",
             "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL",
             "--", sys.executable, "-m", "tests.campaign.chaos_loop", "{out}"],
            cwd=root, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        results = [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("result.json"))]
    points = {tuple(result["point"]): result for result in results if result.get("point")}
    outcome.tried = len(points)
    if done.returncode or not points:
        outcome.lost.append(f"ckpt-chaos ended with {done.returncode}: {done.stdout[-1500:]} {done.stderr[-500:]}")
    compared = 0
    for (event, mode), result in points.items():
        killed = points.get((event, "before"))
        if mode == "unsynced" and killed is not None:
            compared += 1
            if step_of(result) < step_of(killed):
                outcome.lost.append(f"event {event} un-synced resumed from {step_of(result)}, not {step_of(killed)}")
    outcome.figures = {"unsynced compared": compared, **Counter(mode for _, mode in points)}
    return outcome


def step_of(result: dict[str, object]) -> int:
    """Return the step from which a resume started, as the tool read it."""
    found = result["outcome"]
    assert isinstance(found, dict)
    return int(found["resumed_from_step"] or 0)
