"""P6: what do many small tensors cost, where neither disk nor memory but the bookkeeping is the limit?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks.harness import DURABLE, NOTHING, Contestant, Options, Report, race, settle
from benchmarks.workloads import Bag, tiny

_TARGET_COUNT = 50_000
_LIVE = "torch.load + load_state_dict"


def run(options: Options) -> Iterator[Report]:
    """Save and load dicts of tiny tensors of each number."""
    for count in options.counts:
        yield from _races(options, count)


def _races(options: Options, count: int) -> Iterator[Report]:
    notes: list[str] = []
    tensors = tiny(count)
    bag = Bag(count)
    with TemporaryDirectory(dir=options.disk) as name:
        directory = Path(name)
        ours, theirs, flat = directory / "ours.pt", directory / "torch.pt", directory / "flat.safetensors"
        module = directory / "module.pt"
        torch.save(bag.state_dict(), module)
        manager = safeckpt.CheckpointManager(directory / "manager", {"model": bag}, keep_last=1)
        steps = itertools.count(1)
        savers: dict[str, tuple[Callable[[], Any], str]] = {
            "safeckpt.save": (lambda: safeckpt.save(tensors, ours), DURABLE),
            "CheckpointManager.save": (lambda: manager.save(next(steps)), DURABLE),
            "torch.save": (lambda: torch.save(tensors, theirs), NOTHING),
        }
        loaders: dict[str, tuple[Callable[[], Any], str]] = {
            "safeckpt.load": (lambda: safeckpt.load(ours), "every byte checked"),
            "CheckpointManager.restore": (manager.restore, "every byte checked, into the live tensors"),
            "torch.load": (lambda: torch.load(theirs), "nothing checked"),
            _LIVE: (lambda: bag.load_state_dict(torch.load(module)), "nothing checked, into the live tensors"),
            "torch.load of safeckpt's file": (lambda: torch.load(ours), "nothing checked"),
        }
        if options.peers is None or "safetensors" in options.peers:
            try:
                from safetensors.torch import load_file, save_file
            except ImportError:
                notes.append("skipped: safetensors (it is not installed)")
            else:
                savers["safetensors"] = (lambda: save_file(tensors, flat), NOTHING)
                loaders["safetensors"] = (lambda: load_file(flat), "nothing checked")
        saved = race(_contestants(savers), options.repeats)
        loaded = race(_contestants(loaders), options.repeats)
        manager.close()
    axis = ("tensors", count)
    yield Report("small_tensors", f"save, {count} tensors of 8 numbers", saved, axis=axis, notes=notes)
    report = Report("small_tensors", f"load, {count} tensors of 8 numbers", loaded, axis=axis)
    least = 5 if count >= _TARGET_COUNT else 1
    for name, save, load, peer in (
        ("save and load", "safeckpt.save", "safeckpt.load", "torch.load"),
        ("manager's save and restore", "CheckpointManager.save", "CheckpointManager.restore", _LIVE),
    ):
        own = saved[save].median + loaded[load].median
        cycle = saved["torch.save"].median + loaded[peer].median
        report.target(f"P6 torch's cycle / {name}, {count} tensors", cycle / own, least, at_least=True)
    yield report


def _contestants(table: dict[str, tuple[Callable[[], Any], str]]) -> list[Contestant]:
    return [
        Contestant(name, run, promises, before=settle) for name, (run, promises) in table.items()
    ]  # fmt: skip
