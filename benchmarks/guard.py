"""P1: what does it cost to know that every number is finite?"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import safeckpt
from benchmarks.harness import LIMIT, Contestant, Options, Report, Row, race
from benchmarks.workloads import Training, tiny

_SLOW_REPEATS = 3  # of what takes twenty times as long


def run(options: Options) -> Iterator[Report]:
    """Guard a whole training state of each size, in float32 and bfloat16, and many tiny tensors."""
    for size_mb in options.sizes_mb:
        training = Training(size_mb)
        tensors = training.tensors()
        yield _race(options, f"guard, {training.describe()}, float32", tensors, float(size_mb))
        del training
        halves = [tensor.bfloat16() for tensor in tensors]
        del tensors
        yield _race(options, f"guard, the same in bfloat16 ({size_mb / 2:g} MB)", halves, None)
        del halves
    for count in options.counts:
        yield _tiny(options, count)


def _race(options: Options, title: str, tensors: list[torch.Tensor], size_mb: float | None) -> Report:
    contestants = [
        Contestant("torch.aminmax of each", lambda: [torch.aminmax(t) for t in tensors], LIMIT),
        Contestant("safeckpt.find_nonfinite", lambda: _none(safeckpt.find_nonfinite(tensors)), "every NaN and Inf"),
        Contestant(
            "isfinite(t).all() of each", lambda: all(bool(torch.isfinite(t).all()) for t in tensors),
            "every NaN and Inf",
        ),
    ]  # fmt: skip
    rows = race(contestants, options.repeats)
    report = Report("guard", title, rows, axis=None if size_mb is None else ("size_mb", size_mb))
    report.target("P1 guard / aminmax", report.ratio("safeckpt.find_nonfinite", "torch.aminmax of each"), 1.3)
    faster = report.ratio("isfinite(t).all() of each", "safeckpt.find_nonfinite")
    report.target("P1 isfinite / guard", faster, 15, at_least=True)
    return report


def _tiny(options: Options, count: int) -> Report:
    tensors = tiny(count)
    rows: dict[str, Row] = race(
        [
            Contestant("safeckpt.find_nonfinite", lambda: _none(safeckpt.find_nonfinite(tensors)), "every NaN and Inf"),
            Contestant("torch.aminmax of each", lambda: [torch.aminmax(t) for t in tensors.values()], "nothing yet"),
        ],
        options.repeats,
    )
    report = Report("guard", f"guard, {count} tensors of 8 numbers", rows, axis=("tensors", count))
    if count >= 50_000:
        report.target(f"P1 {count} tiny tensors", rows["safeckpt.find_nonfinite"].median, 1, unit="s")
    return report


def _none(found: list[safeckpt.NonFiniteTensor]) -> None:
    if found:
        raise AssertionError(found)
