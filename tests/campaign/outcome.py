"""What a class of faults reports, and how much of it is tried."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tests import children
from tests.crash.stories import WrongBitsError

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES: tuple[str, ...] = (
    "crash_points",
    "kills",
    "interrupts",
    "disk_errors",
    "writers_readers",
    "damage",
    "hostile",
    "fuzz",
    "machine",
    "changing",
    "failing",
    "chaos",
    "remote",
    "long_run",
)  # modules beside this one, in the order of the report

Scale = Literal["fast", "full"]  # fast: part of the test run, a minute at most; full: as many as README.md here says


class FoundError(Exception):
    """The first fault that was not survived, where one is enough to know."""


@dataclass
class Outcome:
    """How one class of faults ended.

    Attributes:
        fault: The class, in words for the table in README.md.
        tried: How many faults were made.
        lost: A checkpoint that should have been there was not, or the next save did not work: one line each.
        undetected: Something wrong was loaded, or passed for good: one line each.
        figures: What else was measured, name to value.
        skipped: Why nothing was tried here, when that is so.
        stop_at_first: Raise a `FoundError` instead of going on; for whoever has broken something on purpose.
    """

    stop_at_first: ClassVar[bool] = False

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

    def lose(self, text: str) -> None:
        """Note a checkpoint, or a save, that should have been there and was not."""
        self._note(self.lost, text)

    def let_in(self, text: str) -> None:
        """Note something wrong that was loaded, or passed for good."""
        self._note(self.undetected, text)

    @contextlib.contextmanager
    def judging(self, where: str) -> Iterator[None]:
        """Note what a look at the checkpoints raises: wrong bits were let in, anything else is a loss."""
        try:
            yield
        except WrongBitsError as error:
            self.let_in(f"{where}: {error}")
        except Exception as error:
            self.lose(f"{where}: {type(error).__name__}: {str(error)[:300]}")

    def _note(self, lines: list[str], text: str) -> None:
        lines.append(text)
        if self.stop_at_first:
            raise FoundError(text)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run(name: str, scale: Scale, seed: int) -> Outcome:
    """Run one class of faults."""
    outcome = importlib.import_module(f"tests.campaign.{name}").run(scale, seed)
    assert isinstance(outcome, Outcome)
    return outcome


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Give a folder whose syncs cost nothing, where there is one, and remove it afterwards."""
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="campaign-", dir=shared if os.access(shared, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the library logs, failures made on purpose, off the screen."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


_MOST_SECONDS = 3_600
_is_alone = False


def alone(function: Callable[..., Outcome], *arguments: Any) -> Outcome:
    """Run a function of a class in a process that nothing else has touched, for whoever forks, traces or counts."""
    if _is_alone:
        return function(*arguments)
    ended = children.run(_alone, function, arguments)
    if ended.error is not None:
        raise ended.error
    assert ended.signal is None
    assert isinstance(ended.value, Outcome)
    return ended.value


def _alone(function: Callable[..., Outcome], arguments: tuple[Any, ...]) -> Outcome:
    global _is_alone  # noqa: PLW0603 - one process, one class
    _is_alone = True
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(_MOST_SECONDS, exit=True)
    return function(*arguments)
