"""Arguments that the integrations have in common."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from safeckpt import LossSpikeError, NonFiniteError

__all__ = ["REFUSALS", "OnNonfinite", "Refusal", "check_on_nonfinite", "stop_signals_or_default", "with_components"]

OnNonfinite: TypeAlias = Literal["raise", "rollback"]
Refusal: TypeAlias = NonFiniteError | LossSpikeError
REFUSALS = (NonFiniteError, LossSpikeError)  # what a rollback undoes


def check_on_nonfinite(value: Any) -> None:
    """Refuse what is no way to treat NaN and Inf.

    Raises:
        ValueError: It is neither "raise" nor "rollback".
    """
    if value not in ("raise", "rollback"):
        raise ValueError(f'on_nonfinite is "raise" or "rollback"; got {value!r}')


def stop_signals_or_default(given: Iterable[int] | None) -> tuple[int, ...]:
    """Return the signals that were given; None for SIGTERM, in the main thread, where alone Python allows handlers."""
    if given is not None:
        return tuple(given)
    return (signal.SIGTERM,) if threading.current_thread() is threading.main_thread() else ()


def with_components(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the components that an integration registers, with those of the user.

    Raises:
        ValueError: A name is in both.
    """
    if clashes := sorted(own.keys() & given.keys()):
        raise ValueError(f"components has names that are taken: {', '.join(clashes)}")
    return {**own, **given}
