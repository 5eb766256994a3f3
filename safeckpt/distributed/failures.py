"""Errors on their way to other ranks."""

from __future__ import annotations

import contextlib
import pickle
from typing import NamedTuple

from safeckpt import errors
from safeckpt.errors import RankFailedError, SafeckptError

__all__ = ["Failure", "error_of", "failure_of"]


class Failure(NamedTuple):
    """What was raised on a rank.

    Attributes:
        rank: The rank; None for what was decided from the answers of all.
        step: The step that was refused, if that is what happened.
        type_name: Its class.
        text: Its text.
        data: Itself, only when its class is known wherever safeckpt is.
    """

    rank: int | None
    step: int | None
    type_name: str
    text: str
    data: bytes | None

    @property
    def order(self) -> tuple[int, int]:
        """The smallest is raised on all ranks: the earliest refusal, else that of the lowest rank."""
        return (1 << 62 if self.step is None else self.step, -1 if self.rank is None else self.rank)


def failure_of(error: BaseException, rank: int | None) -> Failure:
    """Return an error as other ranks can be told of it."""
    data = None
    kind = type(error)
    if getattr(errors, kind.__name__, None) is kind or kind.__module__ == "builtins":
        with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
            data = pickle.dumps(error)
    step = error.step if isinstance(error, (*errors.REFUSALS, errors.ReplayMismatchError)) else None
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return Failure(rank, step, name, str(error), data)


def error_of(what: str, failure: Failure) -> BaseException:
    """Return an error of another rank as one of this rank: of the same class if possible, and with the rank in it."""
    rank, _, type_name, text, data = failure
    other = RankFailedError(what=what, rank=0 if rank is None else rank, type_name=type_name, reason=text or "no text")
    if data is None:
        return other
    try:
        error: BaseException = pickle.loads(data)  # from a process of this very job
    except (TypeError, AttributeError, ValueError, LookupError, pickle.UnpicklingError):
        return other  # made from other arguments than it keeps
    if rank is None:
        return error
    prefix = f"On rank {rank}: "
    if isinstance(error, SafeckptError):
        error.args = (prefix + text,)
        error.rank = rank
        return error
    if isinstance(error, OSError) and error.errno is not None:
        error.strerror = prefix + str(error.strerror)
        error.args = (error.errno, error.strerror)
        return error
    if type(error) in (ValueError, TypeError) or isinstance(error, errors.SafeckptWarning):
        return type(error)(prefix + text)
    return other
