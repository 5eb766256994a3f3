"""A report in words, on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from safeckpt.errors import listed
from safeckpt.proof.leaves import flatten

if TYPE_CHECKING:
    from safeckpt.proof.compare import Difference
    from safeckpt.proof.report import KillReport, ResumeReport

__all__ = ["one_screen"]

_WIDTH = 79
_SHOWN = 4  # of a list
_DETERMINISM = (
    "Set, where a kernel may be the cause: torch.use_deterministic_algorithms(True), "
    "torch.backends.cudnn.benchmark = False, CUBLAS_WORKSPACE_CONFIG=:4096:8, the same number of threads."
)


def one_screen(report: ResumeReport) -> str:
    """Return the whole report in at most about twenty lines of 79 characters."""
    lines = list(_verdict(report))
    if not report.deterministic:
        lines += _undetermined(report)
    shown = report.shown
    if not shown.exact:
        lines += _losses(shown)
        lines += _blame(report)
    lines += _made(report)
    lines += _ablations(report)
    lines += [line for note in report.notes[:_SHOWN] for line in _wrapped(f"Note: {note}", 2)]
    return "\n".join(lines)


def _verdict(report: ResumeReport) -> Iterator[str]:
    shown = report.shown
    window = f"steps {shown.kill_at + 1} to {report.steps}"
    if not report.deterministic:
        yield "Resume: CANNOT BE JUDGED, the run itself is not deterministic."
    elif report.exact and len(report.kills) == 1:
        yield f"Resume: EXACT. {shown.steps_compared} of {shown.steps_compared} resumed losses equal ({window})."
    elif report.exact:
        points = ", ".join(str(kill.kill_at) for kill in report.kills)
        compared = sum(kill.steps_compared for kill in report.kills)
        yield f"Resume: EXACT after each of {len(report.kills)} kills (at steps {points}), {compared} losses equal."
    else:
        yield (
            f"Resume: NOT EXACT. First disagreement at index {shown.first_divergence} of {shown.steps_compared} "
            f"({window})."
        )
    if len(report.kills) > 1 and not report.exact:
        yield "  " + ", ".join(
            f"kill at {kill.kill_at}: {'exact' if kill.exact else f'index {kill.first_divergence}'}"
            for kill in report.kills
        )


def _undetermined(report: ResumeReport) -> Iterator[str]:
    differing = [index for index, value in enumerate(report.straight_differences) if value]
    if differing:
        largest = max(report.straight_differences)
        yield f"  Two uninterrupted runs differ from step {differing[0] + 1} on, by up to {largest:.3g} of the loss."
    first = report.undetermined[:_SHOWN]
    if first:
        step = first[0].step
        when = "right after build()" if step == 0 else f"after step {step}"
        for one in first:
            yield from _wrapped(f"differs {when}: {one}", 2)
        if step <= 1 and report.in_process is None:
            what = "build()" if step == 0 else "build() or train()"
            yield f"  {what} has to seed what it draws from: random, numpy.random, torch.manual_seed."
        elif step == 0:
            yield from _wrapped("What a run leaves in this process changes the next one: make it in build().", 2)
    yield from _wrapped(_DETERMINISM, 2)


def _losses(shown: KillReport) -> Iterator[str]:
    index = shown.first_divergence
    assert index is not None
    if shown.losses_equal:
        yield from _wrapped("The losses of this window are equal; state that later ones depend on is not.", 2)
        return
    step = shown.kill_at + index + 1
    yield f"  step {step}, uninterrupted: {_value(shown.straight[index])}"
    yield f"  step {step}, resumed:       {_value(shown.resumed[index])}"
    differences = shown.relative_differences
    largest = max(differences)
    passed = [one for one in shown.tolerances_passed if one < 1]  # 1 is as large as the losses themselves
    worst = shown.kill_at + 1 + differences.index(largest)
    ladder = f"a tolerance of {passed[0]:g} would have let it pass" if passed else "no tolerance below 1 lets it pass"
    yield from _wrapped(f"Largest relative difference {largest:.3g} (step {worst}); {ladder}.", 2)


def _value(loss: Any) -> str:
    if isinstance(loss, float):
        return f"{loss!r} ({loss.hex()})"
    text = ", ".join(f"{name}: {value!r}" if name else repr(value) for name, value in flatten(loss, ""))
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _blame(report: ResumeReport) -> Iterator[str]:
    shown = report.shown
    findings, culprit = shown.findings, shown.culprit
    if culprit is None:
        yield from _wrapped(
            "Nothing that is captured, and nothing else that can be seen in the live objects, differs before the "
            "loss does. Left to suspect: nondeterministic kernels, threads, files and other processes.", 2,
        )  # fmt: skip
        yield from _wrapped(_DETERMINISM, 2)
        return
    yield "First part that differs:"
    yield from _wrapped(_when(culprit, shown.kill_at), 2)
    rest = [one for one in findings.captured if one is not culprit]
    if rest:
        yield from _wrapped(f"also {_when_only(rest[0], shown.kill_at)}: {_some(rest)}", 2)
    others = [one for one in findings.uncaptured if one is not culprit]
    if others:
        yield from _wrapped(
            f"in no checkpoint and different, {_when_only(others[0], shown.kill_at)}: {_some(others)}", 2
        )


def _when(one: Difference, kill_at: int) -> str:
    captured = one.component != one.name or one.kind == "random stream"
    what = "" if captured else f"not captured by any component ({one.kind}), and "
    if one.step == kill_at:
        return f"{one.component}: {what}different at the restore. {one}"
    if one.kind == "gradient":
        return f"gradients: different after step {one.step}. {one}"
    return f"{one.component}: {what}equal until step {one.step - 1}, different after step {one.step}. {one}"


def _when_only(one: Difference, kill_at: int) -> str:
    return "at the restore" if one.step == kill_at else f"after step {one.step}"


def _some(differences: list[Difference]) -> str:
    return listed(differences, "; ", _SHOWN)


def _made(report: ResumeReport) -> Iterator[str]:
    repeats = f"straight run made {report.repeats} times" if report.repeats > 1 else "straight run made once"
    if report.repeats > 1 and report.deterministic:
        repeats += ", equal each time"
    if report.in_process is None:
        yield from _wrapped(f"{repeats}; killed with SIGKILL after the save, resumed in a fresh process.", 2)
    else:
        yield from _wrapped(
            f"{repeats}. All in this process, with no real kill, because {report.in_process}: what hides in its "
            "memory is not seen.", 2,
        )  # fmt: skip
    if report.exact:
        yield from _wrapped(f"Equal at the restore and after every step: {', '.join([*report.components, 'rng'])}.", 2)
    if report.not_compared:
        names = ", ".join(report.not_compared[:_SHOWN])
        yield from _wrapped(f"Not compared, since straight runs differ in it without consequence: {names}.", 2)


def _ablations(report: ResumeReport) -> Iterator[str]:
    if not report.ablations:
        return
    seen = [f"{name} at index {index}" for name, index in report.ablations.items() if index is not None]
    if seen:
        yield from _wrapped(f"Left out of the restore, shows first: {', '.join(seen)}.", 2)
    if report.unseen:
        yield from _wrapped(
            f"Left out and never shows in {report.steps_compared} steps: {', '.join(report.unseen)}. This window "
            "cannot tell whether they are restored.", 2,
        )  # fmt: skip


def _wrapped(text: str, indent: int) -> list[str]:
    lines = [
        line for part in text.splitlines() for line in textwrap.wrap(part, _WIDTH - indent - 2, break_on_hyphens=False)
    ]
    return [" " * (indent if number == 0 else indent + 2) + line for number, line in enumerate(lines[:6])]
