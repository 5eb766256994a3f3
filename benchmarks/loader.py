"""P9: what does ResumableLoader add to a batch, how fast does it reach a position, and who else resumes exactly?

Exactness: an interrupted run is resumed in a fresh process, and order, augmentation (a draw from each stream) and a
draw of the training process for each batch are compared with the uninterrupted run's. Every peer gets the process's
random states back as they were when the position was saved. `python -m benchmarks.loader --json FILE` runs this alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.harness import FEWEST_REPEATS, Contestant, Options, Report, fresh, machine, race
from safeckpt.loader import ResumableLoader

BATCH_SIZE = 4
FAR = 100_000
COLUMNS = ("order", "random", "numpy", "torch", "training")
_BATCHES = {0: 3000, 2: 300}  # by number of workers, which cost up to a millisecond per batch on a small machine
_SAVED_AT = 5
_SAMPLES = 60


class Plain(Dataset[Any]):
    """Costs nothing and draws nothing, which the loader cannot know."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return index


class Augmented(Plain):
    """Draws from each stream that augmentations use."""

    def __getitem__(self, index: int) -> Any:
        return [float(index), random.random(), np.random.rand(), torch.rand(()).item()]


def run(options: Options) -> Iterator[Report]:
    """Measure time per batch and time to a position, then compare resumed runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
        length = (max(_BATCHES.values()) + 50) * BATCH_SIZE
        yield added("a dataset of torch's own, no workers", TensorDataset(torch.arange(length)), 0, options.repeats)
        yield added("any dataset, no workers", Plain(length), 0, options.repeats)
        yield added("any dataset, 2 workers", Plain(length), 2, options.repeats)
        yield reach(options)
        yield exactness(options)


# ------------------------------------------------------------------------------------------------ time per batch


def added(case: str, data: Dataset[Any], workers: int, repeats: int) -> Report:
    """Compare a bare DataLoader with a wrapped one."""

    def bare() -> Any:
        return DataLoader(data, BATCH_SIZE, num_workers=workers)

    rows = race(
        [
            Contestant("DataLoader", lambda: per_batch(bare(), _BATCHES[workers]), "no position"),
            Contestant("ResumableLoader", lambda: per_batch(ResumableLoader(bare()), _BATCHES[workers]), "exact"),
        ],
        repeats,
    )
    report = Report("loader", f"one batch of {BATCH_SIZE}: {case}", rows)
    more = (rows["ResumableLoader"].median - rows["DataLoader"].median) * 1e6
    report.target("P9 added to a batch", more, 10, unit="us")
    return report


def per_batch(loader: Any, batches: int) -> float:
    """Return the median over the batches: their mean would count what else the machine was doing."""
    iterator = iter(loader)
    next(iterator)
    times = []
    for _ in range(batches):
        begin = time.perf_counter()
        next(iterator)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------ peers


def streams() -> dict[str, Any]:
    """Return the process's random states."""
    return {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_streams(state: dict[str, Any]) -> None:
    """Set the process's random states."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


class Peer:
    """One way to interrupt and resume: `batches` iterates, `save` and `restore` keep the position in a folder."""

    def __init__(self, data: Dataset[Any], workers: int) -> None:
        self.loader: Any = self.make(DataLoader, data, workers)

    def make(self, cls: Any, data: Dataset[Any], workers: int) -> Any:
        """Return the loader that all peers have."""
        return cls(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=workers)

    def batches(self) -> Iterator[Any]:
        """Iterate the epoch, or the rest of it."""
        return iter(self.loader)

    def save(self, folder: Path, done: int) -> None:
        """Save after `done` batches."""
        torch.save({"loader": self.loader.state_dict(), "streams": streams()}, folder / "state.pt")

    def restore(self, folder: Path) -> None:
        """Go where `save` was."""
        state = torch.load(folder / "state.pt", weights_only=False)
        self.loader.load_state_dict(state["loader"])
        set_streams(state["streams"])


class Ours(Peer):
    """safeckpt."""

    def __init__(self, data: Dataset[Any], workers: int) -> None:
        self.loader = ResumableLoader(self.make(DataLoader, data, workers))


class Stateful(Peer):
    """torchdata."""

    def __init__(self, data: Dataset[Any], workers: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = self.make(StatefulDataLoader, data, workers)


class Accelerated(Peer):
    """Accelerate: its own save_state and load_state, then skip_first_batches."""

    seedable = False

    def __init__(self, data: Dataset[Any], workers: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        config = DataLoaderConfiguration(use_seedable_sampler=self.seedable)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.loader = self.rest = self.accelerator.prepare(self.make(DataLoader, data, workers))

    def batches(self) -> Iterator[Any]:
        return iter(self.rest)

    def save(self, folder: Path, done: int) -> None:
        self.accelerator.save_state(str(folder / "accelerate"))
        (folder / "done").write_text(str(done))

    def restore(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder / "accelerate"))
        self.rest = self.accelerator.skip_first_batches(self.loader, int((folder / "done").read_text()))


class AcceleratedSeedable(Accelerated):
    """The same with the sampler that Accelerate recommends for repeatable runs."""

    seedable = True


class FetchAndDiscard(Peer):
    """Puts the streams of the epoch's start back, reads every batch again, then puts the saved streams back."""

    saved: dict[str, Any] | None = None

    def batches(self) -> Iterator[Any]:
        self.start = streams()
        iterator = iter(self.loader)
        if self.saved is not None:
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


def installed(options: Options) -> tuple[list[str], list[str]]:
    """Return the peers to run, and a note on each that is missing."""
    wanted = {
        name: package
        for name, (_, package) in PEERS.items()
        if options.peers is None or package in options.peers or package in ("safeckpt", "torch")
    }
    found = [name for name, package in wanted.items() if importlib.util.find_spec(package)]
    return found, [f"{name}: not installed" for name in wanted if name not in found]


# ------------------------------------------------------------------------------------------------ time to a position


def reach(options: Options) -> Report:
    """Restore a position far in an epoch in new objects and take one batch."""
    names, notes = installed(options)
    with TemporaryDirectory(dir=options.disk) as folder:
        peers = {name: Far(name, Path(folder) / str(number)) for number, name in enumerate(names)}
        rows = race(
            [Contestant(name, peer.resume, before=peer.build) for name, peer in peers.items()], options.repeats, warm=0
        )
    for name, peer in peers.items():
        rows[name].extra["samples read"] = peer.data.reads
    report = Report(
        "loader", f"from a saved position at batch {FAR} of {BATCH_SIZE} to the next batch", rows, notes=notes
    )
    report.target("P9 reach batch 100,000", rows[names[0]].median, 1, unit="s")
    return report


class Far:
    """A position far in the epoch of one peer, and how to get there."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        folder.mkdir()
        self.build()
        iterator = self.peer.batches()
        for _ in range(FAR):
            next(iterator)
        self.peer.save(folder, FAR)

    def build(self) -> None:
        """Make new objects, as a fresh process would."""
        self.data = Plain((FAR + 10) * BATCH_SIZE)
        self.peer = PEERS[self.name][0](self.data, 0)

    def resume(self) -> None:
        """Do what is timed."""
        self.peer.restore(self.folder)
        next(iter(self.peer.batches()))


# ------------------------------------------------------------------------------------------------ exactness


def exactness(options: Options) -> Report:
    """Compare resumed with uninterrupted runs, each half in a process of its own."""
    names, notes = installed(options)
    table = [f"{'':32s}  workers  " + "  ".join(f"{column:>8s}" for column in COLUMNS)]
    report = Report("loader", "what is exact after a resume in the middle of an epoch", {}, notes=table)
    for name in names:
        for before, after in ((0, 0), (2, 2), (2, 1)):
            words = compared(name, before, after)
            table.append(f"{name:32s}  {f'{before} to {after}':7s}  " + "  ".join(f"{word:>8s}" for word in words))
            if name == names[0]:
                share = words.count("exact") / len(words)
                report.target(f"exact columns, {before} to {after} workers", share, 1, at_least=True)
    table += notes
    return report


def compared(name: str, before: int, after: int) -> list[str]:
    """Return for each column whether the resumed run is exact, differs, or is refused by the peer."""
    with TemporaryDirectory() as folder:
        straight = fresh("loader:half", mode="straight", name=name, workers=before, folder=folder)[_SAVED_AT:]
        try:
            resumed = fresh("loader:half", mode="resumed", name=name, workers=after, folder=folder)
        except RuntimeError:
            return ["refused"] * len(COLUMNS)
    columns: Callable[[Any], list[Any]] = lambda batches: list(zip(*batches, strict=True))  # noqa: E731
    return ["exact" if a == b else "differs" for a, b in zip(columns(straight), columns(resumed), strict=True)]


def half(mode: str, name: str, workers: int, folder: str) -> list[list[Any]]:
    """Run a peer in this process: `straight` saves on the way and goes on, `resumed` starts from what was saved."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    peer = PEERS[name][0](Augmented(_SAMPLES), workers)
    seen = []
    if mode == "resumed":
        peer.restore(Path(folder))
    for number, batch in enumerate(peer.batches(), start=1):
        seen.append([column.tolist() for column in batch] + [torch.rand(()).item()])
        if mode == "straight" and number == _SAVED_AT:
            peer.save(Path(folder), number)
    return seen


def main() -> None:
    """Run this question alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--repeats", type=int, default=FEWEST_REPEATS, help="timed runs of each contestant")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    options = Options((), (), chosen.repeats, None, Path(gettempdir()), None)
    reports = []
    for report in run(options):
        print(f"\n{report}", flush=True)
        reports.append(report.as_json())
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "reports": reports}, indent=1))


if __name__ == "__main__":
    main()
