"""Agreement between the processes of a run: what one of them cannot do, none of them does.

What several processes do together is cut into sections. In a section each rank does its own part and gives an answer;
at its end all of them learn how it went: either every rank goes on, or every rank raises::

    with group.section("counting", operator.add) as section:
        section.answer = 1  # what this rank has to say; an exception in the body is an answer, too
    assert section.result == group.size  # made of all answers, the same on every rank
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from safeckpt.distributed.agreement import Agreements, Combined, Lost, Side, reply_to, said
from safeckpt.distributed.failures import Failure, error_of, failure_of
from safeckpt.distributed.links import NotMetError, meet
from safeckpt.errors import GroupDestroyedError, RankLostError, SafeckptError, listed
from safeckpt.system.torch_private import lazy_gloo, store_below

__all__ = ["Group", "RankGroup", "Section", "group_of_this_process", "in_group", "lowest", "rank_of_this_process"]

_log = logging.getLogger("safeckpt")

_FRONT, _BACK = 0, 1  # channels of the training loop and of the thread that writes
_ENGINE_TIMES = 10
_meetings: dict[str, int] = {}  # how often ranks have met, by the name of their process group


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


def _itself(combined: Any) -> Any:
    return combined


class Group:
    """One process by itself. Nothing of torch.distributed is touched.

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

    @property
    def process_group(self) -> Any:
        """For the collectives of torch: a group for objects in host memory; None when there is one process only.

        All ranks ask for it for the first time at the same place of the training loop.
        """
        return None

    @contextlib.contextmanager
    def section(
        self,
        what: str,
        combine: Callable[[Any, Any], Any] = lowest,
        decide: Callable[[Any], Any] = _itself,
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

    def tell_of_loss(self, call: Callable[[], None]) -> None:
        """Have a function called, in another thread, when a process is lost."""

    def close(self) -> None:
        """Give back what the group holds."""


class RankGroup(Group):
    """The processes of a process group of torch.distributed, connected along a tree.

    A rank exchanges two small messages with each of its neighbours for a section, which are log2(size) + 1 at most.

    Args:
        timeout_seconds: How long a rank is waited for that does not come to a section.
        process_group: The process group; None for the default one.

    Raises:
        RankLostError: Ranks did not come to form the group.
        ValueError: This process does not belong to the process group.
    """

    def __init__(self, timeout_seconds: float, process_group: Any = None) -> None:
        self.rank = torch.distributed.get_rank(process_group)
        self.size = torch.distributed.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(
                f"rank {torch.distributed.get_rank()} is not in Ranks(process_group=...) of its manager: give it a "
                "manager of its own group, or none"
            )
        self._process_group = process_group
        self._channel = _FRONT
        self._world = torch.distributed.group.WORLD
        self._engine_group: list[Any] = []  # shared with the group for the background
        self._agreements = Agreements(self._meet(timeout_seconds), self.rank, self.size, timeout_seconds)

    def _meet(self, timeout_seconds: float) -> dict[int, Any]:
        group: Any = self._process_group or self._world
        name: str = group.group_name
        _meetings[name] = meeting = _meetings.get(name, 0) + 1
        # torchrun may start ranks again in the store of those before, whose addresses are there still.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = store_below(f"safeckpt/{start}/{name}/{meeting}")
        try:
            return meet(store, self.rank, self.size, timeout_seconds, _say_who_is_missing)
        except (NotMetError, RuntimeError) as error:  # the latter of a store that is gone
            missing = getattr(error, "missing", [])
            raise RankLostError(
                what="the ranks were meeting for the first time", lost=missing, timeout_seconds=timeout_seconds,
                reason=str(error).partition("\n")[0], late=bool(missing),
            ) from error  # fmt: skip

    @property
    def process_group(self) -> Any:
        """See `Group`."""
        if not self._engine_group:
            with lazy_gloo():  # else each rank would connect to all others
                # A rank is busy in a collective until the slowest has written its part.
                timeout = dt.timedelta(seconds=_ENGINE_TIMES * self._agreements.timeout_seconds)
                self._engine_group.append(
                    torch.distributed.new_group(
                        None if self._process_group is None else self._all_ranks(),
                        backend="gloo",
                        timeout=timeout,
                        use_local_synchronization=self._process_group is not None,
                    )
                )
        return self._engine_group[0]

    def _all_ranks(self) -> list[int]:
        """Return the ranks of the default process group that belong to this one."""
        return torch.distributed.get_process_group_ranks(self._process_group or self._world)

    @property
    def current(self) -> bool:
        """See `Group`."""
        return in_group() and self._world is torch.distributed.group.WORLD

    def tell_of_loss(self, call: Callable[[], None]) -> None:
        """See `Group`."""
        self._agreements.on_lost = call

    def close(self) -> None:
        """See `Group`: connections, descriptors and threads."""
        self._agreements.close(is_failing=sys.exception() is not None)
        self._forget_engine_group()

    def for_background(self) -> Group:
        """See `Group`."""
        other = object.__new__(RankGroup)
        other.__dict__.update(self.__dict__)
        other._channel = _BACK
        return other

    @contextlib.contextmanager
    def section(
        self,
        what: str,
        combine: Callable[[Any, Any], Any] = lowest,
        decide: Callable[[Any], Any] = _itself,
        *,
        waits: bool = True,
    ) -> Iterator[Section]:
        """See `Group`."""
        if not self.current:
            raise GroupDestroyedError(what=what)
        if self._agreements.lost is not None:
            raise self._lost(what, self._agreements.lost)
        side = self._agreements.begin(self._channel, what, combine, decide, is_waited_for=waits)
        raised: BaseException | None = None
        failure: Failure | None = None

        def finish(section: Section) -> None:
            section.result = self._outcome(side, raised, failure)

        section: Section = Section(finish)
        try:
            yield section
        except BaseException as error:  # noqa: BLE001 - raised again when every rank knows
            raised, failure = error, failure_of(error, self.rank)
        side.combined = said(self.rank, what, section.same, section.answer, failure)
        self._agreements.end(side)
        if waits:
            finish(section)

    def _outcome(self, side: Side, raised: BaseException | None, failure: Failure | None) -> Any:
        """Return the result of an agreement, or raise what came of it.

        Args:
            side: This rank's side of it.
            raised: What was raised in it.
            failure: The same, as the others know it.
        """
        try:
            news = side.replies.get()
            decision: BaseException | None = None
            if isinstance(news, Combined):
                reply, decision = reply_to(news, side.decide, self.rank)
                if isinstance(decision, SafeckptError) and reply.failure is not None and decision.rank is None:
                    decision.rank = reply.failure.rank
                news = self._agreements.reply(side, reply)
        except BaseException:
            self._agreements.give_up("it was interrupted while it waited for the others")
            raise
        if isinstance(news, Lost):
            self._forget_engine_group()
            if raised is not None and type(raised) is not RuntimeError:  # which a collective inside the part ended with
                raise raised
            raise self._lost(side.what, news) from raised
        if raised is not None and failure is not None:
            others = news.failure
            is_later = others is not None and None not in (others.step, failure.step) and others.order < failure.order
            if not is_later:
                if isinstance(raised, SafeckptError) and raised.rank is None:
                    raised.rank = self.rank
                raise raised
        if news.failure is not None:
            raise (error_of(side.what, news.failure) if decision is None else decision) from raised
        return news.result

    def _forget_engine_group(self) -> None:
        """Close this rank's connections of the engine's group, so that who waits for this rank there waits no more."""
        if self._engine_group and self.current:
            torch.distributed.destroy_process_group(self._engine_group.pop())

    def _lost(self, what: str, lost: Lost) -> RankLostError:
        return RankLostError(
            what=what,
            lost=[self._all_ranks()[rank] for rank in lost.ranks] if self.current else lost.ranks,
            timeout_seconds=self._agreements.timeout_seconds,
            reason=lost.reason,
            late=lost.late,
        )


def _say_who_is_missing(missing: list[int]) -> None:
    if missing:
        _log.warning(
            "waiting for rank(s) %s, which have not called their managers yet. Every rank has to make one and call it: "
            "not under `if rank == 0:`, as one does with torch.save",
            listed(missing),
        )


def group_of_this_process(timeout_seconds: float, process_group: Any = None) -> Group:
    """Return the processes that this one belongs to: those of a process group, by default of all, or only itself."""
    return RankGroup(timeout_seconds, process_group) if in_group() else Group()


def in_group() -> bool:
    """Return whether there is a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank_of_this_process(process_group: Any = None) -> int:
    """Return the number of this process among those that it belongs to. Does not communicate."""
    return torch.distributed.get_rank(process_group) if in_group() else 0
