"""Which signals ask this process to stop at the next step, so that its worker processes do not die of them first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

__all__ = ["ignore_stop_requests", "listen_to_stop_requests", "stop_requests"]

_listeners: Counter[int] = Counter()


def listen_to_stop_requests(signals: Iterable[int]) -> None:
    """Note that somebody in this process saves when one of these signals comes."""
    _listeners.update(list(signals))


def ignore_stop_requests(signals: Iterable[int]) -> None:
    """Note that this listener is gone."""
    _listeners.subtract(list(signals))  # of a mapping a counter would take the values


def stop_requests() -> tuple[int, ...]:
    """Return the signals that somebody in this process listens to."""
    return tuple(sorted(number for number, count in _listeners.items() if count > 0))
