"""`safeckpt demo`: the main job, shown on a small training run with real kills. Needs the core packages only.

The run: 60 steps of a network with batch norm and dropout on made-up data, AdamW, a one-cycle schedule, a checkpoint
after every third step. Each part trains it, breaks it, resumes it, and compares losses with ``==``.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from safeckpt.errors import NonFiniteError, SkippedCheckpointWarning
from safeckpt.functional import load
from safeckpt.manager import CheckpointManager
from safeckpt.run.catalog import latest

__all__ = ["main"]

STEPS = 60
SAVE_EVERY = 3


class Run:
    """One training run: everything that a step depends on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data = torch.randn(512, 32)
        self.target = self.data.sin().sum(dim=1, keepdim=True)
        self.model = nn.Sequential(
            nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=1e-2, total_steps=STEPS + 40)

    def components(self) -> dict[str, Any]:
        """Return what the manager has to know."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, *, poison: bool = False) -> float:
        """Do one step and return its loss."""
        rows = torch.randint(0, len(self.data), (32,))
        target = self.target[rows] * (float("inf") if poison else 1.0)
        loss = nn.functional.mse_loss(self.model(self.data[rows]), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def train(directory: str) -> None:
    """Resume from the newest checkpoint, or start, and train to the end; in a process that may be killed anywhere."""
    torch.set_num_threads(1)
    run = Run()
    with (
        CheckpointManager(directory, run.components(), keep_last=3) as manager,
        _record(Path(directory)).open("a") as losses,
    ):
        manager.restore()
        for step in range(manager.step + 1, STEPS + 1):
            loss = run.step()
            losses.write(json.dumps([step, loss]) + "\n")
            losses.flush()
            if step % SAVE_EVERY == 0:
                manager.save(step, loss=loss)


def _record(runs: Path) -> Path:
    """Return the file of all losses computed, of steps computed twice as well."""
    return runs.with_name("losses.jsonl")


def straight() -> list[float]:
    """Return the losses of the run that nothing interrupts."""
    run = Run()
    return [run.step() for _ in range(STEPS)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return 0 when every comparison came out as it should."""
    parser = argparse.ArgumentParser(prog="safeckpt demo", description="The main job on a small run, with real kills.")
    parser.add_argument("--keep", metavar="DIR", help="work in DIR, which must not exist, and leave the files there")
    arguments = parser.parse_args(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same number everywhere: sums are added in the same order
    try:
        if arguments.keep is not None:
            directory = Path(arguments.keep)
            directory.mkdir(parents=True)
            results = _parts(directory)
        else:
            with tempfile.TemporaryDirectory(prefix="safeckpt-demo-") as temporary:
                results = _parts(Path(temporary))
    finally:
        torch.set_num_threads(threads)
    print()
    print("all as promised" if all(results) else "NOT as promised: see above")
    return 0 if all(results) else 1


def _parts(directory: Path) -> list[bool]:
    losses = straight()
    return [_kills(directory, losses), _silent_failures(losses), _poison(directory), _flipped_bit(directory)]


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


# -- 1. kills --------------------------------------------------------------------------------------------------------


def _kills(directory: Path, losses: list[float]) -> bool:
    _title("1. Killed with SIGKILL, between and during saves, and resumed")
    runs = directory / "killed"
    context = _context()
    for moment in ("between two saves, at step 11", "during a save", "between two saves, at step 31", "during a save"):
        process = context.Process(target=train, args=(str(runs),))
        process.start()
        found = _wait_and_kill(process, runs, moment)
        checkpoint = latest(runs)
        print(f"killed {moment}: {found}; newest good checkpoint: step {checkpoint.step if checkpoint else None}")
    process = context.Process(target=train, args=(str(runs),))
    process.start()
    process.join()
    recorded = [json.loads(line) for line in _record(runs).read_text().splitlines()]
    resumed = dict(map(tuple, recorded))  # the last value of each step
    first = next(i for i in range(1, len(recorded)) if recorded[i][0] <= recorded[i - 1][0])
    print(f"\n{'step':>6}  {'uninterrupted':>22}  {'killed and resumed':>22}")
    start = recorded[first][0]
    for step in (start, start + 1, start + 2, STEPS):
        print(f"{step:>6}  {losses[step - 1]!r:>22}  {resumed.get(step)!r:>22}")
    every = all(loss == losses[step - 1] for step, loss in recorded)
    equal = [resumed.get(step) for step in range(1, STEPS + 1)] == losses and every
    print(
        f"losses equal as a list, ==: {equal}  ({STEPS} steps compared, {len(recorded) - STEPS} of them computed twice)"
    )
    return equal


def _context() -> Any:
    """Return a way to start fresh processes: on POSIX they come from a server that has imported torch once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__ if __name__ != "__main__" else "safeckpt.demo"])
    return context


def _wait_and_kill(process: Any, runs: Path, moment: str) -> str:
    """Kill the process at the moment named, really, and say what it left."""
    during = moment.startswith("during")
    steps_before = _last_step(runs)
    while process.is_alive():
        if during:
            temporary = [name for name in _names(runs) if name.endswith(".tmp")]
            if temporary:
                os.kill(process.pid, signal.SIGKILL)
                break
        elif _last_step(runs) >= max(int(moment.rsplit(" ", 1)[1]), steps_before + 1):
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0 if during else 0.001)
    process.join()
    left = [name for name in _names(runs) if name.endswith(".tmp")]
    how = "finished before the kill" if process.exitcode == 0 else f"after step {_last_step(runs)}"
    return how + (f", {len(left)} half-written temporary file" if left else "")


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _last_step(runs: Path) -> int:
    path = _record(runs)
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])[0]) if lines else 0


# -- 2. what plain torch.save resumes leave out ----------------------------------------------------------------------


def _silent_failures(losses: list[float]) -> bool:
    _title("2. Two resumes by hand with torch.save that raise nothing and are wrong")
    half = STEPS // 2
    run = Run()
    for _ in range(half):
        run.step()
    state = copy.deepcopy({name: component.state_dict() for name, component in run.components().items()})
    state["rng"] = torch.get_rng_state()
    straight_on = losses[half:]
    good = True
    for label, eval_mode, with_optimizer, expected in (
        ("whole state", False, True, None),
        ("model left in eval mode", True, True, 0),
        ("optimizer left out", False, False, 1),
    ):
        resumed = Run()
        resumed.model.load_state_dict(state["model"])
        resumed.scheduler.load_state_dict(state["scheduler"])
        if with_optimizer:
            resumed.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        torch.set_rng_state(state["rng"])
        if eval_mode:
            resumed.model.eval()
        got = [resumed.step() for _ in range(STEPS - half)]
        differ = next((i for i, (a, b) in enumerate(zip(got, straight_on, strict=True)) if a != b), None)
        good &= differ == expected
        where = (
            "equal, " + str(len(got)) + " steps compared" if differ is None else _first(differ, half, got, straight_on)
        )
        print(f"{label:<24} {where}")
    return good


def _first(index: int, half: int, got: list[float], wanted: list[float]) -> str:
    return f"first disagreement at step {half + index + 1}: {got[index]:.6f} instead of {wanted[index]:.6f}"


# -- 3. poison -------------------------------------------------------------------------------------------------------


def _poison(directory: Path) -> bool:
    _title("3. One infinite target turns every weight into NaN")
    run = Run()
    with CheckpointManager(directory / "poisoned", run.components(), keep_last=2) as manager:
        for step in range(1, 11):
            manager.save(step, loss=run.step())
        before = sorted(name for name in _names(directory / "poisoned") if name.startswith("step-"))
        loss = run.step(poison=True)
        total = sum(parameter.numel() for parameter in run.model.parameters())
        bad = sum(int(parameter.isnan().sum()) for parameter in run.model.parameters())
        print(f"step 11: loss {loss}, {bad} of {total} weights are NaN; torch.save would write them")
        try:
            manager.save(11)
        except NonFiniteError as error:
            print(_indented(str(error)))
        else:
            return False
        kept = sorted(name for name in _names(directory / "poisoned") if name.startswith("step-")) == before
        checkpoint = manager.rollback(changed=True)  # the poison is not in the data this time
        after = [run.step() for _ in range(5)]
        finite = all(torch.isfinite(torch.tensor(after)))
        print(f"rolled back to step {checkpoint.step}; next losses: {', '.join(f'{loss:.4f}' for loss in after)}")
        print(f"directory unchanged by the refusal: {kept}; run finite again: {finite}")
        return kept and finite


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


# -- 4. a flipped bit ------------------------------------------------------------------------------------------------


def _flipped_bit(directory: Path) -> bool:
    _title("4. One bit flips on the disk")
    newest = latest(directory / "killed")
    if newest is None:
        return False
    data = bytearray(newest.path.read_bytes())
    weight = load(newest.path)["model"]["4.weight"]
    at = data.find(weight.numpy().tobytes())
    data[at + 4003] ^= 0x40  # the exponent of one weight
    with newest.path.open("r+b") as file:
        file.write(data)
    changed = (torch.load(newest.path)["model"]["4.weight"] != weight).sum()
    print(f"torch.load: no error, {changed} weight of step {newest.step} is another number")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        older = latest(directory / "killed")
    for message in _skips(caught):
        print(f"safeckpt:   {message}")
    print(f"safeckpt:   falls back to step {older.step if older else None}")
    return bool(changed == 1) and older is not None and older.step < newest.step


def _skips(caught: list[warnings.WarningMessage]) -> Iterator[str]:
    for warning in caught:
        if issubclass(warning.category, SkippedCheckpointWarning):
            path, _, rest = str(warning.message).partition(" was passed over: ")
            yield f"{Path(path).name} was passed over: {rest}"
