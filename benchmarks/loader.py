"""What does ResumableLoader cost, how fast does it reach a position, and who else resumes exactly?

Three questions, peers measured side by side:

- time per batch on top of a bare DataLoader, runs alternating, with and without workers;
- time from a saved position at batch 100,000 of an epoch to the next batch, and how many samples are read for it;
- an interrupted run, resumed in a fresh process: are order, augmentation and the training process's own random
  stream those of the uninterrupted run? With torchdata's StatefulDataLoader, Accelerate's `skip_first_batches` after
  its own `load_state`, and a plain DataLoader that fetches and throws away (as Trainer does). All peers get the
  process's random states back as they were when the position was saved.

Usage: python benchmarks/loader.py [--json FILE] [--batches N] [--repeats N]; peers that are not installed are left out
(pip install torchdata accelerate).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from safeckpt.loader import ResumableLoader

warnings.filterwarnings("ignore")

BATCH_SIZE = 4
SAVED_AT = 5  # batch of the first epoch after which the interrupted run saves
SAMPLES = 60
FAR = 100_000


class Plain(Dataset):
    """Costs nothing and draws nothing, which the loader cannot know."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Augmented(Plain):
    """Draws from each stream that augmentations use."""

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), random.random(), np.random.rand(), torch.rand(()).item()]


# ---------------------------------------------------------------------------------------- time per batch


def seconds_per_batch(loader: Any, batches: int) -> float:
    iterator = iter(loader)
    next(iterator)
    begin = time.perf_counter()
    for _ in itertools.islice(iterator, batches):
        pass
    return (time.perf_counter() - begin) / batches


def overhead(batches: int, repeats: int) -> list[dict[str, Any]]:
    length = (batches + 50) * BATCH_SIZE
    cases: list[tuple[str, Any, int]] = [
        ("torch's own dataset, no workers", TensorDataset(torch.arange(length)), 0),
        ("any dataset, no workers", Plain(length), 0),
        ("any dataset with draws, no workers", Augmented(length), 0),
        ("any dataset, 2 workers", Plain(length), 2),
    ]
    rows = []
    for name, data, workers in cases:
        # torch's multiprocessing costs up to a millisecond per batch on a small machine.
        count = batches if workers == 0 else batches // 10
        bare, wrapped = [], []
        for _ in range(repeats):
            bare.append(seconds_per_batch(DataLoader(data, BATCH_SIZE, num_workers=workers), count))
            loader = ResumableLoader(DataLoader(data, BATCH_SIZE, num_workers=workers), seed=0)
            wrapped.append(seconds_per_batch(loader, count))
        base, ours = statistics.median(bare), statistics.median(wrapped)
        rows.append({"case": name, "bare_us": base * 1e6, "wrapped_us": ours * 1e6, "added_us": (ours - base) * 1e6})
        rows[-1]["added_us_least"] = (min(wrapped) - min(bare)) * 1e6
    return rows


# ---------------------------------------------------------------------------------------- peers


class Peer:
    """One way to interrupt and resume: `batches` iterates, `save` and `restore` keep the position in a folder."""

    def __init__(self, data: Dataset, workers: int) -> None:
        self.loader: Any = self.make(DataLoader, data, workers)

    def make(self, cls: Any, data: Dataset, workers: int) -> Any:
        return cls(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)

    def batches(self) -> Any:
        return iter(self.loader)

    def save(self, folder: Path, done: int) -> None:
        raise NotImplementedError

    def restore(self, folder: Path) -> None:
        raise NotImplementedError


def streams() -> dict[str, Any]:
    _, words, *rest = np.random.get_state()
    return {"python": random.getstate(), "numpy": [words.tolist(), *rest], "torch": torch.get_rng_state()}


def set_streams(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    words, *rest = state["numpy"]
    np.random.set_state(("MT19937", words, *rest))
    torch.set_rng_state(state["torch"])


class Ours(Peer):
    def __init__(self, data: Dataset, workers: int) -> None:
        self.loader = ResumableLoader(self.make(DataLoader, data, workers))

    def save(self, folder: Path, done: int) -> None:
        torch.save({"loader": self.loader.state_dict(), "streams": streams()}, folder / "state.pt")

    def restore(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=False)
        self.loader.load_state_dict(state["loader"])
        set_streams(state["streams"])


class Stateful(Ours):
    def __init__(self, data: Dataset, workers: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = self.make(StatefulDataLoader, data, workers)


class Accelerated(Peer):
    seedable = False

    def __init__(self, data: Dataset, workers: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        config = DataLoaderConfiguration(use_seedable_sampler=self.seedable)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.loader = self.accelerator.prepare(self.make(DataLoader, data, workers))
        self.rest = self.loader

    def batches(self) -> Any:
        return iter(self.rest)

    def save(self, folder: Path, done: int) -> None:
        self.accelerator.save_state(str(folder / "accelerate"))
        (folder / "done").write_text(str(done))

    def restore(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "accelerate"))
        self.rest = self.accelerator.skip_first_batches(self.loader, int((folder / "done").read_text()))


class AcceleratedSeedable(Accelerated):
    seedable = True


class FetchAndDiscard(Peer):
    """Puts the streams of the epoch's start back, reads every batch again, then puts the saved streams back."""

    def batches(self) -> Any:
        self.start = streams()
        iterator = iter(self.loader)
        if hasattr(self, "saved"):
            for _ in range(self.saved["done"]):
                next(iterator)
            set_streams(self.saved["streams"])
        return iterator

    def save(self, folder: Path, done: int) -> None:
        torch.save({"done": done, "start": self.start, "streams": streams()}, folder / "state.pt")

    def restore(self, folder: Path) -> None:
        self.saved = torch.load(folder / "state.pt", weights_only=False)
        set_streams(self.saved["start"])


PEERS: dict[str, tuple[type[Peer], str]] = {
    "safeckpt ResumableLoader": (Ours, "safeckpt"),
    "torchdata StatefulDataLoader": (Stateful, "torchdata"),
    "Accelerate skip_first_batches": (Accelerated, "accelerate"),
    "Accelerate, use_seedable_sampler": (AcceleratedSeedable, "accelerate"),
    "DataLoader, fetch and discard": (FetchAndDiscard, "torch"),
}


def installed() -> list[str]:
    return [name for name, (_, package) in PEERS.items() if importlib.util.find_spec(package)]


# ---------------------------------------------------------------------------------------- exactness


def child(mode: str, name: str, workers: int, folder: Path) -> None:
    """Run a peer in this process: `straight` saves on the way and goes on, `resumed` starts from what was saved."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    peer = PEERS[name][0](Augmented(SAMPLES), workers)
    seen = []
    if mode == "resumed":
        peer.restore(folder)
    for number, batch in enumerate(peer.batches(), start=1):
        seen.append([column.tolist() for column in batch] + [torch.rand(()).item()])
        if mode == "straight" and number == SAVED_AT:
            peer.save(folder, number)
    (folder / f"{mode}.json").write_text(json.dumps(seen))


COLUMNS = ("order", "python", "numpy", "torch", "training stream")


def exactness() -> list[dict[str, Any]]:
    rows = []
    for name in installed():
        for before, after in ((0, 0), (2, 2), (2, 1)):
            with tempfile.TemporaryDirectory() as folder:
                run_child("straight", name, before, folder).check_returncode()
                refused = run_child("resumed", name, after, folder).returncode != 0
                straight = json.loads((Path(folder) / "straight.json").read_text())[SAVED_AT:]
                resumed = [] if refused else json.loads((Path(folder) / "resumed.json").read_text())
            row = {"peer": name, "workers": f"{before} to {after}"}
            for number, column in enumerate(COLUMNS):
                same = [batch[number] for batch in straight] == [batch[number] for batch in resumed]
                row[column] = "refused" if refused else "exact" if same else "differs"
            rows.append(row)
    return rows


def run_child(mode: str, name: str, workers: int, folder: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, __file__, "--child", mode, name, str(workers), folder]
    return subprocess.run(command, check=False, capture_output=True)


# ---------------------------------------------------------------------------------------- time to a position


def reach(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in installed():
        seconds, reads = [], 0
        with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(None):
            folder = Path(temporary)
            peer = PEERS[name][0](Plain((FAR + 10) * BATCH_SIZE), 0)
            iterator = peer.batches()
            for _ in range(FAR):
                next(iterator)
            peer.save(folder, FAR)
            for _ in range(repeats):
                data = Plain((FAR + 10) * BATCH_SIZE)
                peer = PEERS[name][0](data, 0)
                begin = time.perf_counter()
                peer.restore(folder)
                next(iter(peer.batches()))
                seconds.append(time.perf_counter() - begin)
                reads = data.reads
        rows.append({"peer": name, "seconds": statistics.median(seconds), "samples_read": reads})
    return rows


# ---------------------------------------------------------------------------------------- report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--batches", type=int, default=5000, help="batches per run of the overhead measurement")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each kind, of which the median counts")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mode, name, workers, folder = options.child
        child(mode, name, int(workers), Path(folder))
        return
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "torch": torch.__version__,
    }
    machine = figures["machine"]
    print(f"python {machine['python']}, torch {torch.__version__}, {machine['cpus']} CPUs, load {machine['load']:.1f}")
    print(
        f"\nPer batch of {BATCH_SIZE}, medians of {options.repeats} alternating runs (and between the fastest of each)"
    )
    figures["overhead"] = overhead(options.batches, options.repeats)
    for row in figures["overhead"]:
        print(
            f"  {row['case']:36s} bare {row['bare_us']:7.1f} us   wrapped {row['wrapped_us']:7.1f} us   "
            f"added {row['added_us']:6.1f} us ({row['added_us_least']:.1f})"
        )
    print(f"\nFrom a saved position at batch {FAR:,} to the next batch, no workers")
    figures["reach"] = reach(3)
    for row in figures["reach"]:
        print(f"  {row['peer']:36s} {row['seconds']:8.3f} s   {row['samples_read']:>8,} samples read")
    print("\nInterrupted run against the uninterrupted one, resumed in a fresh process")
    print(f"  {'':36s} {'workers':8s} " + " ".join(f"{column:>15s}" for column in COLUMNS))
    figures["exactness"] = exactness()
    for row in figures["exactness"]:
        marks = " ".join(f"{row[column]:>15s}" for column in COLUMNS)
        print(f"  {row['peer']:36s} {row['workers']:8s} {marks}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
