"""What every benchmark shares: contestants in turn, medians with their spread, fresh processes, tables and JSON.

Absolute figures move from machine to machine and from minute to minute. So every target is a ratio between
contestants of one race, and the machine's own limit (a plain write and fsync, a copy into warm memory, one pass over
the numbers) is a contestant like the others.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
MB = 1_000_000
MIB = 1 << 20
FEWEST_REPEATS = 5
_ANSWER = "answer: "

LIMIT = "the machine's limit"
NOTHING = "nothing"
DURABLE = "durable, atomic, checked, guarded"


@dataclass(frozen=True)
class Options:
    """What the command line chose.

    Attributes:
        sizes_mb: Sizes of the state, in units of a million bytes.
        counts: Numbers of tensors.
        repeats: Timed runs of each contestant.
        peers: Names of the peers to run; None for all that are installed.
        disk: A directory on a disk.
        memory: A directory on a memory file system, None where there is none.
    """

    sizes_mb: Sequence[int]
    counts: Sequence[int]
    repeats: int
    peers: frozenset[str] | None
    disk: Path
    memory: Path | None


@dataclass
class Contestant:
    """One way of doing the work.

    Attributes:
        name: What to call it.
        run: The work. What it returns, when it is a float, is taken for its time instead of the time it took.
        promises: What is true when it has returned; nobody wins by promising less.
        before: Done before each run, outside the timing.
        after: Done after each run, outside the timing.
        close: Done once at the end.
    """

    name: str
    run: Callable[[], object]
    promises: str = NOTHING
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None


@dataclass
class Row:
    """What a contestant needed.

    Attributes:
        seconds: Every timed run.
        promises: As the contestant's.
        extra: Other figures by name, for the table.
    """

    seconds: list[float]
    promises: str = NOTHING
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


@dataclass(frozen=True)
class Target:
    """A figure that has to stay on one side of a bound.

    Attributes:
        name: Number and words.
        value: What was measured.
        bound: The bound.
        at_least: Whether the bound is the smallest value allowed, not the largest.
        unit: Of both.
    """

    name: str
    value: float
    bound: float
    at_least: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool:
        """Whether the value is on the right side."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{self.name}: {self.value:.3g} {self.unit} ({sign} {self.bound:g} {self.unit}) {verdict}"


@dataclass
class Report:
    """Result of one race.

    Attributes:
        benchmark: Name of the file that ran it.
        title: What was measured, on how much.
        rows: By contestant.
        targets: What it has to show.
        axis: For the plot: ("size_mb" or "tensors", value); None when it is no point of a curve.
        notes: What was left out, and why.
    """

    benchmark: str
    title: str
    rows: dict[str, Row]
    targets: list[Target] = field(default_factory=list)
    axis: tuple[str, float] | None = None
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str, other: str) -> float:
        """Return how much longer one contestant took than another, medians compared."""
        return self.rows[name].median / self.rows[other].median

    def target(self, name: str, value: float, bound: float, *, at_least: bool = False, unit: str = "x") -> None:
        """Add a target."""
        self.targets.append(Target(name, value, bound, at_least, unit))

    def __str__(self) -> str:
        columns = list(dict.fromkeys(key for row in self.rows.values() for key in row.extra))
        head = ["", "median", "spread", *columns, "promises"]
        lines = [
            [name, _seconds(row.median), f"{row.spread:.0%}", *(_figure(row.extra.get(key)) for key in columns),
             row.promises]
            for name, row in self.rows.items()
        ]  # fmt: skip
        widths = [max(len(line[index]) for line in [head, *lines]) for index in range(len(head))]
        text = [f"{self.title}"]
        for line in [head, *lines]:
            cells = [line[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)]
            text.append("  " + "  ".join([*cells, line[-1]]).rstrip())
        text += [f"  {note}" for note in self.notes]
        text += [f"  {target}" for target in self.targets]
        return "\n".join(text)

    def as_json(self) -> dict[str, Any]:
        """Return everything, with plain values."""
        return {
            "benchmark": self.benchmark,
            "title": self.title,
            "axis": self.axis,
            "rows": {
                name: {
                    "seconds": row.seconds,
                    "median": row.median,
                    "spread": row.spread,
                    "promises": row.promises,
                    **row.extra,
                }
                for name, row in self.rows.items()
            },
            "targets": [
                {
                    "name": one.name,
                    "value": one.value,
                    "bound": one.bound,
                    "at_least": one.at_least,
                    "unit": one.unit,
                    "met": one.met,
                }
                for one in self.targets
            ],
            "notes": self.notes,
        }


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def race(contestants: Sequence[Contestant], repeats: int, *, warm: int = 1) -> dict[str, Row]:
    """Run the contestants in turn, each round starting with another one, and return their times.

    Args:
        contestants: Who runs.
        repeats: Timed rounds.
        warm: Rounds before them that are not timed.
    """
    rows = {one.name: Row([], one.promises) for one in contestants}
    try:
        for number in range(warm + repeats):
            shift = number % len(contestants)
            for one in [*contestants[shift:], *contestants[:shift]]:
                seconds = _timed(one)
                if number >= warm:
                    rows[one.name].seconds.append(seconds)
    finally:
        for one in contestants:
            one.close()
    return rows


def _timed(one: Contestant) -> float:
    one.before()
    gc.collect()
    start = time.perf_counter()
    result = one.run()
    seconds = time.perf_counter() - start
    one.after()
    return result if isinstance(result, float) else seconds


def settle() -> None:
    """Write back what others left unwritten, so that nobody pays for it."""
    os.sync()


def installed_environment() -> dict[str, str]:
    """Return the environment for a process in which bytecode is kept, as an installer leaves it beside the source."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def fresh(function: str, *, timeout_seconds: float = 1800, **arguments: Any) -> Any:
    """Call `module:function` of this package in a fresh process and return what it returns, by way of JSON."""
    command = [sys.executable, "-m", "benchmarks.harness", function, json.dumps(arguments)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=installed_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        raise RuntimeError(f"{function} failed in a fresh process:\n{done.stdout}{done.stderr}")
    return json.loads(answers[-1].removeprefix(_ANSWER))


def resident_bytes(field_name: str = "VmRSS") -> int:
    """Return how much memory this process has resident now; `VmHWM` for the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field_name}")


def peak_bytes() -> int:
    """Return the most memory that was resident since `forget_peak`."""
    return resident_bytes("VmHWM")


def forget_peak() -> None:
    """Make `peak_bytes` start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def machine() -> dict[str, Any]:
    """Return on what the figures were taken."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    _module, _, _name = sys.argv[1].partition(":")
    _result = getattr(importlib.import_module(f"benchmarks.{_module}"), _name)(**json.loads(sys.argv[2]))
    print(_ANSWER + json.dumps(_result))
