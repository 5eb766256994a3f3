"""P5: how long until a fresh process trains again, and how much memory does that take?

Every contestant runs in a process of its own that has built model and optimizer already. The clock runs from the first
look at the file to the end of the first optimizer step, since a state that is still mapped to its file is paid for
only then. The file is in the page cache, and everybody's library is imported: what that takes is a question of `start`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import peers
from benchmarks.harness import MB, Contestant, Options, Report, forget_peak, fresh, peak_bytes, race, resident_bytes
from benchmarks.workloads import Training
from safeckpt import CheckpointManager

MANAGER = "CheckpointManager.restore"
TORCH = "torch.load + load_state_dict"
_CHECKED = "every CRC checked, all or nothing, the same run"


def run(options: Options) -> Iterator[Report]:
    """Restore a training state of each size in fresh processes."""
    for size_mb in options.sizes_mb:
        yield _race(options, size_mb)


def _race(options: Options, size_mb: int) -> Report:
    notes: list[str] = []
    with TemporaryDirectory(dir=options.disk) as name:
        directory = Path(name)
        training = Training(size_mb)
        nbytes, described = training.nbytes, training.describe()
        with CheckpointManager(directory / "manager", training.components) as manager:
            manager.save(1)
        torch.save(training.state(), directory / "torch.pt")
        ways = {MANAGER: _CHECKED, TORCH: "nothing checked", f"{TORCH}, mmap": "nothing checked, state left mapped"}
        for peer, write in _WRITERS.items():
            if options.peers is not None and peer not in options.peers:
                continue
            try:
                ways[write(training, directory)] = "nothing checked"
            except ImportError as error:
                notes.append(f"skipped: {peer} ({error.name or error} is not installed)")
        del training
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        contestants = [_contestant(way, promises, size_mb, directory, found[way]) for way, promises in ways.items()]
        rows = race(contestants, options.repeats)
    for way, results in found.items():
        for key in ("restore s", "peak above live"):
            values = sorted(result[key] for result in results)
            rows[way].extra[key] = values[len(values) // 2]
        rows[way].extra["peak above live"] *= MB / nbytes
    report = Report("restore", f"restore through the first step in a fresh process, {described}", rows, notes=notes)
    report.notes.append("peak above live: as a share of the state, while restoring")
    report.axis = ("size_mb", size_mb)
    report.target("P5 torch.load / restore", report.ratio(TORCH, MANAGER), 3, at_least=True)
    report.target("P5 peak above live / state", rows[MANAGER].extra["peak above live"], 0.2)
    return report


def _contestant(
    way: str, promises: str, size_mb: int, directory: Path, found: list[dict[str, float]]
) -> Contestant:  # fmt: skip
    def child() -> float:
        found.append(fresh("restore:restored", way=way, size_mb=size_mb, directory=str(directory)))
        return found[-1]["seconds"]

    return Contestant(way, child, promises)


def restored(way: str, size_mb: float, directory: str) -> dict[str, float]:
    """Restore in this process, which has to be a fresh one, and return times and memory."""
    training = Training(size_mb, stepped=False)
    restore = _WAYS[way]
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file():
            _read(path)
    before = resident_bytes()
    forget_peak()
    start = time.perf_counter()
    restore(training, Path(directory))
    restored_at = time.perf_counter()
    peak = peak_bytes()
    training.step()
    end = time.perf_counter()
    new = sum(tensor.nbytes for slot in training.optimizer.state.values() for tensor in slot.values())
    return {
        "seconds": end - start,
        "restore s": restored_at - start,
        "peak above live": (peak - before - new) / MB,
    }


def _read(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.read(descriptor, 1 << 20):
            pass
    finally:
        os.close(descriptor)


def _with_manager(training: Training, directory: Path) -> None:
    with CheckpointManager(directory / "manager", training.components) as manager:
        manager.restore()


def _load(training: Training, state: dict[str, Any]) -> None:
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def _with_torch(training: Training, directory: Path) -> None:
    _load(training, torch.load(directory / "torch.pt"))


def _with_torch_mapped(training: Training, directory: Path) -> None:
    _load(training, torch.load(directory / "torch.pt", mmap=True))


def _write_dcp(training: Training, directory: Path) -> str:
    import torch.distributed.checkpoint as dcp

    with peers.quiet():
        dcp.save(training.state(), checkpoint_id=directory / "dcp", no_dist=True)
    return "DCP load"


def _with_dcp(training: Training, directory: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with peers.quiet():
        get_optimizer_state_dict(training.model, training.optimizer)  # makes the moments that are loaded into
        state = training.state()
        dcp.load(state, checkpoint_id=directory / "dcp", no_dist=True)
    _load(training, state)


def _write_accelerate(training: Training, directory: Path) -> str:
    _accelerator(training).save_state(str(directory / "accelerate"))
    return "Accelerate load_state"


def _with_accelerate(training: Training, directory: Path) -> None:
    _accelerator(training).load_state(str(directory / "accelerate"))


def _accelerator(training: Training) -> Any:
    from accelerate import Accelerator

    with peers.quiet():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(training.model, training.optimizer)
    return accelerator


_WRITERS: dict[str, Callable[[Training, Path], str]] = {"dcp": _write_dcp, "accelerate": _write_accelerate}
_WAYS: dict[str, Callable[[Training, Path], None]] = {
    MANAGER: _with_manager,
    TORCH: _with_torch,
    f"{TORCH}, mmap": _with_torch_mapped,
    "DCP load": _with_dcp,
    "Accelerate load_state": _with_accelerate,
}
