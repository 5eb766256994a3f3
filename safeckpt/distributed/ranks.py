"""What a caller says about the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from safeckpt.system.arguments import checked_choice, checked_int, checked_number

__all__ = ["DriftPolicy", "Ranks"]

DriftPolicy = Literal["warn", "error", "ignore"]


@dataclass(frozen=True)
class Ranks:
    """How a manager acts with the other processes of a run. Without a process group none of it is used.

    Attributes:
        timeout_seconds: How long to wait for a process that has not come to the call that others make. One that is at
            its part is waited for as long as it takes; one that has died is noticed at once.
        on_drift: What to do when the ranks' copies of what they train together are no longer equal: `"warn"` for a
            `ReplicaDriftWarning`, `"error"` for a `ReplicaDriftError`, `"ignore"`. With `"warn"`, too, copies that
            differ at the first save of a run are an error: nothing is lost yet. With `async_save` they are compared in
            the background, and the next `save` or the end of the run tells: what is an error is not committed.
        agree_every: The ranks agree on losses, signals and clocks at least every so many steps, and more often where
            steps are long. No rank waits for it: what they agree on is known the next time.
        process_group: The processes that save and restore together, of `torch.distributed`; None for all of them. No
            other process is waited for. Every process of it makes a manager; several groups have directories of their
            own.

    Raises:
        TypeError: A value is of a kind that is not accepted.
        ValueError: A value is out of range.
    """

    timeout_seconds: float = 600.0
    on_drift: DriftPolicy = "warn"
    agree_every: int = 10
    process_group: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        checked_number("Ranks: timeout_seconds", self.timeout_seconds, positive=True)
        checked_choice("Ranks: on_drift", self.on_drift, get_args(DriftPolicy))
        checked_int("Ranks: agree_every", self.agree_every, least=1)
