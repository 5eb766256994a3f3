"""What a proof found."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from safeckpt.proof.compare import TOLERANCES, Difference, Findings, first_index, relative_difference
from safeckpt.proof.leaves import flatten
from safeckpt.proof.text import one_screen
from safeckpt.system.json_numbers import to_json
from safeckpt.system.notebooks import html_table

__all__ = ["KillReport", "ResumeReport"]


@dataclass(frozen=True)
class KillReport:
    """One kill and the resume after it.

    Attributes:
        kill_at: Steps completed at the save.
        straight: Losses of the uninterrupted run after it.
        resumed: Losses of the resumed run.
        findings: What of the state differs.
    """

    kill_at: int
    straight: list[Any]
    resumed: list[Any]
    findings: Findings

    @property
    def exact(self) -> bool:
        """Whether every loss, and everything a checkpoint holds, has the same bits at every step."""
        return self.first_divergence is None

    @property
    def first_divergence(self) -> int | None:
        """Index in the resumed window of the first step that is another one; None when exact.

        That of the first loss that differs. When all losses are equal and captured state is not (an average that the
        loss does not depend on, say), that of the first step that began or ended in another state.
        """
        index = first_index(self.straight, self.resumed)
        if index is not None or self.findings.state_step is None:
            return index
        return max(0, self.findings.state_step - self.kill_at - 1)

    @property
    def losses_equal(self) -> bool:
        """Whether the losses alone are equal."""
        return first_index(self.straight, self.resumed) is None

    @property
    def steps_compared(self) -> int:
        """Length of the resumed window."""
        return len(self.resumed)

    @property
    def relative_differences(self) -> list[float]:
        """|resumed - straight| / |straight| for each step."""
        return [relative_difference(a, b) for a, b in zip(self.straight, self.resumed, strict=True)]

    @property
    def largest_relative_difference(self) -> float:
        """The largest of them, 0 when all losses are equal."""
        return max(self.relative_differences, default=0.0)

    @property
    def tolerances_passed(self) -> list[float]:
        """Which relative tolerances of the ladder 1e-6 ... 1 a comparison with `allclose` would have let pass."""
        return [one for one in TOLERANCES if self.largest_relative_difference <= one]

    @property
    def culprit(self) -> Difference | None:
        """The first part that differs and when; None when exact, or when nothing that can be seen differs."""
        return None if self.exact else self.findings.culprit

    @property
    def diverged_component(self) -> str | None:
        """Name of that part's component, `rng`, `gradients`, or the full name of what nobody captured."""
        return None if self.culprit is None else self.culprit.component


@dataclass(frozen=True)
class ResumeReport:
    """The resumed losses of a run against the uninterrupted ones.

    What is said about one kill is that of the first one that is not exact, else of the first; `kills` has them all.

    Attributes:
        steps: Steps of the whole run.
        straight: All losses of the uninterrupted run: floats, or dicts and lists of floats.
        kills: One report for each kill.
        deterministic: Whether the runs that nothing interrupted were equal; if not, no resume can be judged.
        undetermined: What differed between them first, empty when they were equal.
        straight_differences: Relative difference of each loss between them, the largest of all repeats.
        repeats: How many of them there were.
        in_process: Why no fresh process was used; None when each run had one and the killed one died of SIGKILL.
        components: Names of the components.
        ablations: Component left out of the restore (and `rng`) to the index of the first loss that shows it; None
            when `steps` steps never show it. Empty when they were not asked for.
        not_compared: What differs between straight runs and plays no part in their losses.
        notes: Warnings that safeckpt gave in the runs, and what else there is to say.
        environment: What the runs computed in.
    """

    steps: int
    straight: list[Any]
    kills: list[KillReport]
    deterministic: bool = True
    undetermined: list[Difference] = field(default_factory=list)
    straight_differences: list[float] = field(default_factory=list)
    repeats: int = 1
    in_process: str | None = None
    components: list[str] = field(default_factory=list)
    ablations: Mapping[str, int | None] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> KillReport:
        """The kill that the report speaks of."""
        return next((kill for kill in self.kills if not kill.exact), self.kills[0])

    @property
    def exact(self) -> bool:
        """Whether every resume is the same run, bit for bit."""
        return self.deterministic and all(kill.exact for kill in self.kills)

    @property
    def kill_at(self) -> int:
        """Steps completed at the save."""
        return self.shown.kill_at

    @property
    def resumed(self) -> list[Any]:
        """The losses after the restore, to be compared with `straight[kill_at:]`."""
        return self.shown.resumed

    @property
    def first_divergence(self) -> int | None:
        """Index in the resumed window of the first disagreement (0: the first resumed loss), None when exact."""
        return self.shown.first_divergence

    @property
    def steps_compared(self) -> int:
        """How many resumed losses were compared."""
        return self.shown.steps_compared

    @property
    def largest_relative_difference(self) -> float:
        """The largest |resumed - straight| / |straight|, 0 when all losses are equal."""
        return self.shown.largest_relative_difference

    @property
    def tolerances_passed(self) -> list[float]:
        """Which relative tolerances of the ladder 1e-6 ... 1 would have called this resume the same run."""
        return self.shown.tolerances_passed

    @property
    def diverged_component(self) -> str | None:
        """The first part that differs: a component, `rng`, `gradients`, or the name of what nobody captured."""
        return self.shown.diverged_component

    @property
    def culprit(self) -> Difference | None:
        """The value in that part that differs first."""
        return self.shown.culprit

    @property
    def differences(self) -> list[Difference]:
        """Everything that differs at that moment, captured or not; empty when exact."""
        shown = self.shown
        return [] if shown.exact else [*shown.findings.captured, *shown.findings.uncaptured]

    @property
    def unseen(self) -> list[str]:
        """Components whose omission no loss shows: this window cannot tell whether they were restored."""
        return [name for name, index in self.ablations.items() if index is None]

    def assert_exact(self) -> None:
        """Raise AssertionError, with the one-screen text, unless every resume is exact."""
        if not self.exact:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        return one_screen(self)

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text = str(self)
        differs = not self.exact and self.deterministic
        rows = [
            ("steps", self.steps),
            ("killed after step", ", ".join(str(kill.kill_at) for kill in self.kills)),
            ("losses compared", sum(kill.steps_compared for kill in self.kills)),
            ("first that differs", self.diverged_component if differs else None),
            ("largest relative difference", f"{self.largest_relative_difference:.3g}" if differs else None),
            ("components", ", ".join(self.components)),
        ]
        return html_table(text.partition("\n")[0], rows, good=self.exact, details=text)

    def to_json(self) -> str:
        """Return everything as JSON. Losses are there as numbers and, bit for bit, in hexadecimal."""
        shown = self.shown
        report = {
            "exact": self.exact,
            "deterministic": self.deterministic,
            "steps": self.steps,
            "kill_at": self.kill_at,
            "steps_compared": self.steps_compared,
            "first_divergence": self.first_divergence,
            "diverged_component": self.diverged_component,
            "culprit": _difference(self.culprit) if self.culprit else None,
            "differences": [_difference(one) for one in self.differences],
            "largest_relative_difference": self.largest_relative_difference,
            "tolerances_passed": self.tolerances_passed,
            "in_process": self.in_process,
            "repeats": self.repeats,
            "components": self.components,
            "ablations": dict(self.ablations),
            "undetermined": [_difference(one) for one in self.undetermined],
            "not_compared": self.not_compared,
            "notes": self.notes,
            "environment": dict(self.environment),
            "straight": self.straight,
            "straight_hex": _hex(self.straight),
            "resumed": shown.resumed,
            "resumed_hex": _hex(shown.resumed),
            "kills": [
                {
                    "kill_at": kill.kill_at,
                    "exact": kill.exact,
                    "first_divergence": kill.first_divergence,
                    "diverged_component": kill.diverged_component,
                    "resumed": kill.resumed,
                }
                for kill in self.kills
            ],
        }
        return json.dumps(to_json(report), indent=2, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw both curves over each other and their relative difference below, into a file (PNG, SVG, PDF).

        Raises:
            ImportError: matplotlib is not installed; the text says how to get it.
        """
        from safeckpt.proof.plot import plot  # noqa: PLC0415 - an extra

        plot(self, path)


def _difference(one: Difference) -> dict[str, Any]:
    fields = ("name", "component", "kind", "step", "straight", "resumed", "detail")
    return {name: getattr(one, name) for name in fields}


def _hex(losses: list[Any]) -> list[list[str]]:
    return [[float(value).hex() for _, value in flatten(loss, "") if isinstance(value, int | float)] for loss in losses]
