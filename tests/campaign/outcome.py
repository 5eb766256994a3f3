"""What a class of faults reports, and how much of it is tried."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

CLASSES: tuple[str, ...] = ("damage", "hostile", "fuzz", "machine", "chaos")  # modules beside this one, in report order

Scale = Literal[
    "fast", "full"
]  # fast: part of the test run, a minute at most; full: as many as the README's table says


@dataclass
class Outcome:
    """How one class of faults ended.

    Attributes:
        fault: The class, in words for the table of the README.
        tried: How many faults were made.
        lost: A checkpoint that should have been there was not, or the next save did not work: one line each.
        undetected: Something wrong was loaded, or passed for good: one line each.
        figures: What else was measured, name to value.
        skipped: Why nothing was tried here, when that is so.
    """

    fault: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    undetected: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing was lost and nothing wrong let in."""
        return not self.lost and not self.undetected

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run(name: str, scale: Scale, seed: int) -> Outcome:
    """Run one class of faults."""
    outcome = importlib.import_module(f"tests.campaign.{name}").run(scale, seed)
    assert isinstance(outcome, Outcome)
    return outcome
