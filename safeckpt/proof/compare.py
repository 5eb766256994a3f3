"""Two runs side by side: losses, and which part of the state differs first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safeckpt.proof.captured import CAPTURED, FIRST_TO_BLAME, GRADIENT, SOFT
from safeckpt.proof.leaves import Leaf, flatten, leaf
from safeckpt.proof.live import BUFFER
from safeckpt.proof.runs import Record

__all__ = [
    "TOLERANCES", "Difference", "Findings", "findings", "first_difference", "first_index", "relative_difference",
    "same_loss", "volatile",
]  # fmt: skip

TOLERANCES = tuple(10.0**-power for power in range(6, -1, -1))
_MODES = frozenset({"mode", "flag"})
_MOVED = frozenset({"buffer", GRADIENT, "weight", "moment"})  # by the loss of a step


@dataclass(frozen=True)
class Difference:
    """One value that two runs do not share.

    Attributes:
        name: Dotted name, beginning with the component; `rng.torch` for a random stream of the process.
        kind: Its role: mode, flag, position, random stream, weight, attribute, global and so on.
        step: Steps completed when it first differs.
        straight: The value in the uninterrupted run, for a tensor its dtype and shape; None when it is not there.
        resumed: The value in the resumed run.
        detail: For a tensor right after the restore: which elements differ, and by how much.
    """

    name: str
    kind: str
    step: int
    straight: str | None
    resumed: str | None
    detail: str = ""

    @property
    def component(self) -> str:
        """The component's name; `rng` for the process's random streams; for what is not captured the whole name."""
        if self.kind == GRADIENT:
            return "gradients"
        return self.name.partition(".")[0] if self.kind in CAPTURED else self.name

    def __str__(self) -> str:
        if self.detail:
            return f"{self.name}: {self.detail}"
        if self.straight == self.resumed:
            return f"{self.name} differs ({self.kind}, {self.straight})"
        return f"{self.name}: {_shown(self.straight)} != {_shown(self.resumed)}"


def _shown(value: str | None) -> str:
    return "absent" if value is None else value


def _numbers(loss: Any) -> list[float]:
    return [float(value) for _, value in flatten(loss, "") if isinstance(value, int | float)]


def same_loss(a: Any, b: Any) -> bool:
    """Tell whether two losses have the same bits; NaN equals NaN."""
    return [(name, leaf("", one).key) for name, one in flatten(a, "")] == [
        (name, leaf("", one).key) for name, one in flatten(b, "")
    ]


def first_index(straight: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Return the index of the first loss that differs, None when all are equal."""
    pairs = enumerate(zip(straight, other, strict=True))
    return next((index for index, (a, b) in pairs if not same_loss(a, b)), None)


def relative_difference(straight: Any, other: Any) -> float:
    """Return |other - straight| / |straight|, the largest of a loss with several values.

    0 for the same bits, infinite where it has no meaning (NaN or infinity on one side, or a straight loss of 0).
    """
    if same_loss(straight, other):
        return 0.0
    a, b = _numbers(straight), _numbers(other)
    if len(a) != len(b):
        return math.inf
    return max((_relative(x, y) for x, y in zip(a, b, strict=True)), default=math.inf)


def _relative(straight: float, other: float) -> float:
    if straight == other or (math.isnan(straight) and math.isnan(other)):
        return 0.0
    if straight == 0 or not math.isfinite(straight) or not math.isfinite(other):
        return math.inf
    return abs(other - straight) / abs(straight)


def volatile(records: Sequence[Record]) -> set[str]:
    """Return the names of what differs between runs that nothing interrupted: timers, caches, what is not seeded."""
    return {name for *_, different in _pairwise(records) for name in different}


def first_difference(records: Sequence[Record]) -> list[Difference]:
    """Return what differs between runs that nothing interrupted, at the first moment at which anything does."""
    steps = [step for step, *_ in _pairwise(records)]
    found: dict[str, Difference] = {}
    for step, straight, other, different in _pairwise(records):
        if step == min(steps):
            found |= {name: _difference(name, straight, other, step) for name in different}
    return sorted(found.values(), key=_rank)


def _pairwise(records: Sequence[Record]) -> Iterator[tuple[int, Mapping[str, Leaf], Mapping[str, Leaf], list[str]]]:
    """Yield (step, state of the first run, that of another, what differs) wherever something does."""
    first, *others = records
    for other in others:
        for step in sorted(first.moments.keys() & other.moments.keys()):
            for side in ("captured", "live"):
                a, b = (getattr(record.moments[step], side) for record in (first, other))
                different = _different(a, b)
                if different:
                    yield step, a, b, different


def _different(straight: Mapping[str, Leaf], other: Mapping[str, Leaf]) -> list[str]:
    names = [*straight, *(name for name in other if name not in straight)]
    return [
        name for name in names if name not in straight or name not in other or straight[name].key != other[name].key
    ]


def _difference(
    name: str, straight: Mapping[str, Leaf], other: Mapping[str, Leaf], step: int, detail: str = ""
) -> Difference:
    a, b = straight.get(name), other.get(name)
    kind = a.kind if a is not None else other[name].kind
    return Difference(name, kind, step, a and a.shown, b and b.shown, detail)


def _rank(one: Difference) -> int:
    """Return the place in the order of blame; what is not captured comes last, buffers among it first."""
    if one.kind in FIRST_TO_BLAME:
        return FIRST_TO_BLAME.index(one.kind)
    return len(FIRST_TO_BLAME) + (0 if one.kind in SOFT else 1 if one.kind == BUFFER else 2)


@dataclass(frozen=True)
class Findings:
    """What is to blame for a resume that is another run.

    Attributes:
        kill_at: Steps completed at the save.
        index: Index of the first resumed loss that differs, None when all are equal.
        captured: What of the checkpoint's content differs, at the first moment at which any of it does: the cause
            first, what merely shows it last.
        uncaptured: What no checkpoint holds and differs before any loss does, the likeliest first.
        state_step: Steps completed when state that has to be equal first differs; None when it never does.
    """

    kill_at: int
    index: int | None
    captured: list[Difference]
    uncaptured: list[Difference]
    state_step: int | None

    @property
    def culprit(self) -> Difference | None:
        """The first part that differs; None when nothing that can be seen does."""
        first = self.captured[0] if self.captured else None
        if first is not None and (first.step == self.kill_at or first.kind in _MODES):
            return first
        # What differs only later was made to differ: by something that nobody captured, if there is such a thing.
        if self.uncaptured:
            return self.uncaptured[0]
        # A weight that differs after the first loss that does was moved by it.
        moved = first is not None and first.kind in _MOVED
        late = first is not None and self.index is not None and first.step > self.kill_at + self.index
        return None if moved and late else first


def findings(straight: Record, resumed: Record, kill_at: int, index: int | None, skip: Collection[str]) -> Findings:
    """Compare a resumed run with the straight one, moment by moment.

    Args:
        straight: The uninterrupted run.
        resumed: The resumed one.
        kill_at: Steps completed at the save.
        index: First loss of the resumed run that differs.
        skip: Names that differ between straight runs as well, and so say nothing.
    """

    def at(step: int, side: str, details: Mapping[str, str] = {}) -> list[Difference]:
        if step not in straight.moments or step not in resumed.moments:
            return []  # a whole run is looked at behind its steps, and not at the restore
        a, b = (getattr(record.moments[step], side) for record in (straight, resumed))
        different = [name for name in _different(a, b) if name not in skip]
        return sorted((_difference(name, a, b, step, details.get(name, "")) for name in different), key=_rank)

    # Gradients that nobody needs any more are gone after a restore; those that are needed show after the next step.
    captured = [one for one in at(kill_at, "captured", resumed.details) if one.kind != GRADIENT]
    step: int | None = kill_at
    if all(one.kind in SOFT for one in captured):
        later = ((step, at(step, "captured")) for step in sorted(resumed.moments) if step > kill_at)
        step, found = next(((s, found) for s, found in later if any(one.kind not in SOFT for one in found)), (None, []))
        captured = captured or found
    uncaptured = at(kill_at, "live")
    if not uncaptured and index is not None:
        before = kill_at + index
        # A whole run was not looked at before its first step: what has changed then is seen after it.
        uncaptured = at(before if before in resumed.moments else before + 1, "live")
    return Findings(kill_at, index, captured, uncaptured, step)
