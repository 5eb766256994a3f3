"""Both curves over each other, and how far they are apart."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from safeckpt.proof.leaves import flatten
from safeckpt.system.figures import new_figure, wants_log_scale

if TYPE_CHECKING:
    from safeckpt.proof.report import ResumeReport

__all__ = ["plot"]

_STRAIGHT, _RESUMED, _MARK = "#9aa7b5", "#1f5fa8", "#c62828"


def plot(report: ResumeReport, path: str | os.PathLike[str]) -> None:
    """Draw a report, see `ResumeReport.plot`."""
    figure = new_figure(8, 5.5, "plot()")
    shown = report.shown
    straight = [_first_number(loss) for loss in report.straight]
    resumed = [_first_number(loss) for loss in shown.resumed]
    first = shown.kill_at + 1
    index = shown.first_divergence
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))

    upper.plot(range(1, report.steps + 1), straight, color=_STRAIGHT, linewidth=5, label="uninterrupted")
    upper.plot(
        range(first, first + len(resumed)), resumed, color=_RESUMED, linewidth=1.5, marker="o", markersize=3.5,
        label="killed and resumed",
    )  # fmt: skip
    if index is not None and index < len(resumed):
        upper.plot(
            [first + index], [resumed[index]], "o", color=_MARK, markersize=11, fillstyle="none", markeredgewidth=2,
            label=f"first disagreement: step {first + index}",
        )  # fmt: skip
    for panel in (upper, lower):
        panel.axvline(shown.kill_at + 0.5, color="black", linewidth=1, linestyle=":")
        panel.grid(alpha=0.25)
    if wants_log_scale(straight + resumed):
        upper.set_yscale("log")
    upper.set_ylabel("loss")
    upper.set_title(_title(report), loc="left", fontsize=10)
    upper.legend(frameon=False)

    _relative(lower, first, shown.relative_differences)
    lower.set_xlabel(f"step (saved and killed after step {shown.kill_at}, dotted line)")
    lower.set_ylabel("relative difference")
    lower.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)


def _first_number(loss: Any) -> float:
    return next((float(value) for _, value in flatten(loss, "") if isinstance(value, int | float)), math.nan)


def _title(report: ResumeReport) -> str:
    shown = report.shown
    if shown.exact:
        return f"Exact: {shown.steps_compared} of {shown.steps_compared} resumed losses equal, bit for bit"
    part = f", first part that differs: {shown.diverged_component}" if shown.diverged_component else ""
    return f"Not exact: first disagreement at index {shown.first_divergence}{part}"


def _relative(panel: Any, first: int, differences: Sequence[float]) -> None:
    """Draw the differences on a log scale, which has no place for 0: equal steps stand on the lower edge."""
    steps = range(first, first + len(differences))
    finite = [value for value in differences if 0 < value < math.inf]
    bottom = math.floor(math.log10(min([*finite, 1e-6]))) - 1
    top = math.ceil(math.log10(max([*finite, 1e-1])))
    low, high = 10.0**bottom, 10.0**top
    panel.set_yscale("log")
    panel.set_ylim(low / 3, high * 3)
    powers = range(bottom + 1, top + 1, 1 + (top - bottom) // 6)
    panel.set_yticks([low, *(10.0**power for power in powers)], ["0", *(f"$10^{{{power}}}$" for power in powers)])
    panel.minorticks_off()
    equal = [step for step, value in zip(steps, differences, strict=True) if value == 0]
    if equal:
        panel.plot(equal, [low] * len(equal), "o", color=_RESUMED, markersize=5, label="equal, bit for bit")
    apart = [(step, min(value, high)) for step, value in zip(steps, differences, strict=True) if value > 0]
    if apart:
        panel.vlines([step for step, _ in apart], low / 3, [value for _, value in apart], color=_MARK, linewidth=2)
        panel.plot(*zip(*apart, strict=True), "o", color=_MARK, markersize=5, label="different")
    panel.legend(frameon=False, loc="best", ncols=2)
