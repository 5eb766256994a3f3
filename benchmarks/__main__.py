"""`python -m benchmarks`: answer one question or all of them, as tables, JSON and a plot."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import FEWEST_REPEATS, Options, Report, machine
from benchmarks.peers import PEERS

NAMES = (
    "guard", "save", "async_save", "restore", "small_tensors", "rotation", "per_step", "loader", "memory",
    "start", "drift", "distributed", "mirror",
)  # fmt: skip
_MEMORY = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", help=f"questions: {', '.join(NAMES)}; all by default")
    add("--size-mb", type=int, nargs="+", default=[1024], help="sizes of the state, 10 to 4096 are usual")
    add("--tensors", type=int, nargs="+", default=[50_000], help="numbers of tensors, 10 to 50000 are usual")
    add("--repeats", type=int, default=FEWEST_REPEATS, help="timed runs of each contestant")
    add("--peers", nargs="*", help=f"of {', '.join(PEERS)}; all that are installed by default, none without a name")
    add("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a directory on a disk")
    memory = _MEMORY if _MEMORY.is_dir() else None
    add("--memory", type=Path, default=memory, help="a directory on a memory file system")
    add("--json", type=Path, help="write every figure to this file")
    add("--plot", type=Path, help="draw time against size and number of tensors into this file")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    options = Options(
        sizes_mb=chosen.size_mb,
        counts=chosen.tensors,
        repeats=chosen.repeats,
        peers=None if chosen.peers is None else frozenset(chosen.peers),
        disk=chosen.disk,
        memory=chosen.memory,
    )
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if chosen.repeats < FEWEST_REPEATS:
        print(f"fewer than {FEWEST_REPEATS} repeats: these figures are no evidence")
    reports: list[Report] = []
    for name in chosen.names or NAMES:
        for report in importlib.import_module(f"benchmarks.{name}").run(options):
            reports.append(report)
            print(f"\n{report}", flush=True)
            if chosen.json:  # after each one, so that an interrupted run leaves what it has
                chosen.json.write_text(
                    json.dumps({"machine": about, "reports": [one.as_json() for one in reports]}, indent=1)
                )
    if chosen.plot:
        plot(reports, chosen.plot)
    missed = [target for report in reports for target in report.targets if not target.met]
    print(f"\n{sum(len(report.targets) for report in reports) - len(missed)} targets met, {len(missed)} missed")
    return 1 if missed else 0


def plot(reports: Sequence[Report], path: Path) -> None:
    """Draw one panel for each question and axis: median time of each contestant against size or number."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'safeckpt[bench]'") from None
    panels: dict[tuple[str, str], list[Report]] = {}
    for report in reports:
        if report.axis is not None:
            panels.setdefault((report.title.partition(",")[0], report.axis[0]), []).append(report)
    columns = min(2, len(panels)) or 1
    rows = math.ceil(len(panels) / columns) or 1
    figure = Figure(figsize=(8 * columns, 5 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, ((title, unit), points) in zip(axes.flat, panels.items(), strict=False):
        for name in dict.fromkeys(name for report in points for name in report.rows):
            line = sorted((report.axis[1], report.rows[name].median) for report in points if name in report.rows)
            axis.loglog(*zip(*line, strict=True), marker="o", label=name)
        axis.set(title=title, xlabel={"size_mb": "MB", "tensors": "tensors"}[unit], ylabel="s")
        axis.legend(fontsize="x-small")
        axis.grid(which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot: {path}")


if __name__ == "__main__":
    sys.exit(main())
