"""The loop that `ckpt-chaos` kills: `python -m tests.campaign.chaos_loop FOLDER` trains on from what it finds there."""

import hashlib
import sys
import warnings
from pathlib import Path

import safeckpt
from tests.training import Run

STEPS = 4


def main() -> None:
    """Train to the last step, saving at each, and write down the whole state that this ends in."""
    warnings.simplefilter("ignore", safeckpt.SkippedCheckpointWarning)
    folder = Path(sys.argv[1])
    run = Run()
    with safeckpt.CheckpointManager(folder / "run", run.components, keep_last=STEPS) as manager:
        checkpoint = manager.restore()
        print(f"resumed from step {checkpoint.step if checkpoint else 0}", flush=True)
        for step in range(manager.step + 1, STEPS + 1):
            manager.save(step, loss=run.step())
    run.optimizer.zero_grad()  # a restore leaves no gradients
    state = hashlib.sha256(repr(run.state).encode()).hexdigest()
    (folder / "final.txt").write_text(state, "ascii")


if __name__ == "__main__":
    main()
