"""How long does a process wait for the library: its import, a manager, the first save, a command line that lists?

Everything runs in fresh processes, after one that is not counted: bytecode is there, as it is behind an installation.
What torch itself takes to import is no part of it.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import ROOT, Contestant, Options, Report, Row, fresh, installed_environment, race

_SIZE_MB = 10
_LATER = 10
_PHASES = ("import on top of torch", "construct a manager", "first save", "a later save")


def run(options: Options) -> Iterator[Report]:
    """Start a process that saves, and a command line."""
    rows: dict[str, Row] = {name: Row([]) for name in _PHASES}
    with TemporaryDirectory(dir=options.disk) as name:
        for number in range(1 + options.repeats):
            for phase, seconds in fresh("start:started", directory=f"{name}/{number}").items():
                rows[phase].seconds.append(seconds)
        for row in rows.values():
            row.seconds.pop(0)
        report = Report("start", f"the first save of a process, {_SIZE_MB} MB in 576 tensors", rows)
        report.target("S6 import on top of torch", rows["import on top of torch"].median, 0.05, unit="s")
        report.target("S6 construct", rows["construct a manager"].median, 0.005, unit="s")
        report.target("S6 first save / a later one", report.ratio("first save", "a later save"), 1.5)
        yield report
        yield _command_line(options, Path(name) / "0")


def started(directory: str) -> dict[str, float]:
    """Import, construct and save in this process, which has to be a fresh one that has imported torch alone."""
    from benchmarks.workloads import Training

    training = Training(_SIZE_MB)
    start = time.perf_counter()
    from safeckpt import CheckpointManager

    imported = time.perf_counter()
    manager = CheckpointManager(directory, training.components, keep_last=2)
    constructed = time.perf_counter()
    steps = itertools.count(1)
    saves = []
    for _ in range(1 + _LATER):
        begun = time.perf_counter()
        manager.save(next(steps))
        saves.append(time.perf_counter() - begun)
    manager.close()
    seconds = (imported - start, constructed - imported, saves[0], statistics.median(saves[1:]))
    return dict(zip(_PHASES, seconds, strict=True))


def _command_line(options: Options, directory: Path) -> Report:
    def command(*arguments: str) -> Contestant:
        line = [sys.executable, "-m", "safeckpt", *arguments]
        name = " ".join(["safeckpt", arguments[0]])
        return Contestant(
            name, lambda: subprocess.run(line, cwd=ROOT, env=installed_environment(), check=True, capture_output=True)
        )

    torch = [sys.executable, "-c", "import torch"]
    alone = Contestant("import of torch alone", lambda: subprocess.run(torch, check=True))
    rows = race([command("--help"), command("list", str(directory)), alone], options.repeats)
    report = Report("start", "the command line, whole process", rows)
    for name in ("safeckpt --help", "safeckpt list"):
        report.target(f"S6b {name}", rows[name].median, 0.4, unit="s")
    return report
