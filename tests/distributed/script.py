"""A training script as a user would write it, for torchrun: trains, may kill itself, writes its losses down.

Arguments: directory, kind, last step, and a plan of kills as JSON: for each restart of the group
{"rank": r or null for all, "step": s, "at": operation of the store or null for the loop, "number": which of them}. In
place of "at", "agent": a signal to the agent; what becomes of that, the ranks wait for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.distributed.training import Run, manager_of
from tests.faults import Kill, intercept


def main() -> None:
    warnings.simplefilter("error")
    path, kind, stop, plan = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    options = json.loads(sys.argv[5]) if len(sys.argv) > 5 else {}
    torch.distributed.init_process_group("gloo")
    rank, agent = torch.distributed.get_rank(), os.getppid()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill: dict[str, Any] = plan[attempt] if attempt < len(plan) else {}
    mine = kill.get("rank", -1) in (rank, None)
    run = Run(kind)  # type: ignore[arg-type]
    with manager_of(run, path / "run", save_every=5, **options) as manager:
        manager.restore()
        with (path / f"losses-{rank}.jsonl").open("a") as losses:
            for number in range(manager.step + 1, stop + 1):
                loss = run.step(number)
                losses.write(json.dumps({"step": number, "loss": loss.hex(), "attempt": attempt}) + "\n")
                losses.flush()
                if mine and kill["step"] == number:
                    if "agent" in kill:
                        if rank == 0:
                            os.kill(agent, kill["agent"])
                        while not (manager._stop_request.is_heeded or (path / "go on").exists()):
                            time.sleep(0.01)
                        manager.end_step(number, loss=loss)
                        if manager.stop_requested:
                            break
                        continue
                    if kill.get("at") is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    with intercept(Kill(kill.get("number", 1), "before", {kill["at"]})):
                        manager.end_step(number, loss=loss)
                        manager.wait()
                else:
                    manager.end_step(number, loss=loss)
        state = run.full_state()
    if manager.stop_requested:
        return
    if rank == 0:
        torch.save(state, path / "final.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
