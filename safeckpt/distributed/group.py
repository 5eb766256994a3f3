"""Agreement between the processes of a run: what one of them cannot do, none of them does.

What several processes do together is cut into sections. In a section each rank does its own part and gives an answer;
at its end all of them learn how it went: either every rank goes on, or every rank raises::

    with group.section("counting", operator.add) as section:
        section.answer = 1  # what this rank has to say; an exception in the body is an answer, too
    assert section.result == group.size  # made of all answers, the same on every rank
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["Group", "Section", "group_of_this_process", "in_group", "itself", "lowest", "rank_of_this_process"]


class Section:
    """One part of something that all ranks do.

    Attributes:
        answer: What this rank has to say; set in the body of the `with` statement.
        same: What has to be the same on every rank, by name; set there, too.
        result: What was decided; there after the `with` statement, or after `finish` where it does not wait.
    """

    result: Any

    def __init__(self, finish: Callable[[Section], None] | None = None) -> None:
        self.answer: Any = None
        self.same: Mapping[str, Any] = {}
        self._finish = finish

    def finish(self) -> None:
        """Wait for the outcome of a section that was left without waiting for it.

        Raises:
            BaseException: What a section raises that waits.
        """
        if self._finish is not None:
            self._finish(self)


def lowest(one: Any, _: Any) -> Any:
    """Combine answers into that of the lowest rank."""
    return one


def itself(combined: Any) -> Any:
    """Decide nothing: the result is what all answers were combined into."""
    return combined


class Group:
    """The processes of a run; as it is, one by itself, which touches nothing of torch.distributed.

    Attributes:
        rank: Number of this process.
        size: How many there are.
    """

    rank = 0
    size = 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.rank == 0

    @contextlib.contextmanager
    def section(
        self,
        what: str,
        combine: Callable[[Any, Any], Any] = lowest,
        decide: Callable[[Any], Any] = itself,
        *,
        waits: bool = True,
    ) -> Iterator[Section]:
        """Do a part of something on every rank, and agree on the outcome.

        Args:
            what: The part, for the error text, such as "saving step 3"; the same on every rank.
            combine: Makes one answer of two, that of lower ranks first, whatever they were combined of. No answer
                should be larger than what it was made of: it goes over many ranks on its way to rank 0.
            decide: Makes the result of what all answers were combined into; called on rank 0.
            waits: Whether the `with` statement ends when all ranks have ended theirs. Otherwise it ends at once, and
                `Section.finish` waits.

        Raises:
            BaseException: What the body on this rank raised; or, when that of another rank did, an error of the same
                class that names the rank, if it is one of the library, of the system or of an argument. Of several
                refusals it is the earliest.
            RankFailedError: Another rank failed with something else.
            RanksDisagreeError: Another rank is doing something else.
            RankLostError: A rank is gone or hangs. This group is of no further use.
            GroupDestroyedError: This process has destroyed the process group.
        """
        section: Section = Section()
        yield section
        section.result = decide(section.answer)

    def for_background(self) -> Group:
        """Return this group for a second thread, whose messages do not mix with those of the first."""
        return self

    @property
    def current(self) -> bool:
        """Whether this is the group that this process belongs to now."""
        return not in_group()

    def close(self) -> None:
        """Give back what the group holds."""


def group_of_this_process(timeout_seconds: float, process_group: Any, on_lost: Callable[[], None]) -> Group:
    """Return the processes that this one belongs to: those of a process group, or only itself. See `RankGroup`."""
    if not in_group():
        return Group()
    from safeckpt.distributed.rank_group import RankGroup  # noqa: PLC0415 - connections, which one process has none of

    return RankGroup(timeout_seconds, process_group, on_lost)


def in_group() -> bool:
    """Return whether there is a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_of_this_process(process_group: Any) -> int:
    """Return the number of this process among those that it belongs to. Does not communicate."""
    return torch.distributed.get_rank(process_group) if in_group() else 0
