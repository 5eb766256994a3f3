"""The processes of a process group, which agree over connections of their own."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from safeckpt.distributed.agreement import Agreements, Combined, Lost, Side, reply_to, said
from safeckpt.distributed.failures import Failure, error_of, failure_of
from safeckpt.distributed.group import Group, Section, in_group, itself, lowest
from safeckpt.distributed.links import Link, meet
from safeckpt.errors import GroupDestroyedError, RankLostError, SafeckptError
from safeckpt.system.torch_private import store_below

__all__ = ["RankGroup"]

_FRONT, _BACK = 0, 1  # channels of the training loop and of the thread that writes
_meetings: dict[str, int] = {}  # how often ranks have met, by the name of their process group


class RankGroup(Group):
    """The processes of a process group of torch.distributed, connected along a tree.

    A rank exchanges two small messages with each of its neighbours for a section, which are log2(size) + 1 at most.

    Args:
        timeout_seconds: How long a rank is waited for that does not come to a section.
        process_group: The process group; None for the default one.
        on_lost: Called, in another thread, when a process is lost.

    Raises:
        RankLostError: Ranks did not come to form the group.
        ValueError: This process does not belong to the process group.
    """

    def __init__(
        self, timeout_seconds: float, process_group: Any = None, on_lost: Callable[[], None] = lambda: None
    ) -> None:
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
        self._agreements = Agreements(self._meet(timeout_seconds), self.rank, self.size, timeout_seconds, on_lost)

    def _meet(self, timeout_seconds: float) -> dict[int, Link]:
        group: Any = self._process_group or self._world
        name: str = group.group_name
        _meetings[name] = meeting = _meetings.get(name, 0) + 1
        # torchrun may start ranks again in the store of those before, whose addresses are there still.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return meet(store_below(f"safeckpt/{start}/{name}/{meeting}"), self.rank, self.size, timeout_seconds)

    def _all_ranks(self) -> list[int]:
        """Return the ranks of the default process group that belong to this one."""
        return torch.distributed.get_process_group_ranks(self._process_group or self._world)

    @property
    def current(self) -> bool:
        """See `Group`."""
        return in_group() and self._world is torch.distributed.group.WORLD

    def close(self) -> None:
        """See `Group`: connections, descriptors and threads."""
        self._agreements.close(is_failing=sys.exception() is not None)

    def for_background(self) -> Group:
        """See `Group`."""
        other = copy.copy(self)
        other._channel = _BACK
        return other

    @contextlib.contextmanager
    def section(
        self,
        what: str,
        combine: Callable[[Any, Any], Any] = lowest,
        decide: Callable[[Any], Any] = itself,
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
            try:
                yield section
            except BaseException as error:  # noqa: BLE001 - raised again when every rank knows
                raised, failure = error, failure_of(error, self.rank)
            side.combined = said(self.rank, what, section.same, section.answer, failure)
            self._agreements.end(side)
        except BaseException:  # of a signal, in between
            self._agreements.give_up(f"it was interrupted while {what}")
            raise
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

    def _lost(self, what: str, lost: Lost) -> RankLostError:
        return RankLostError(
            what=what,
            lost=[self._all_ranks()[rank] for rank in lost.ranks] if self.current else lost.ranks,
            timeout_seconds=self._agreements.timeout_seconds,
            reason=lost.reason,
            late=lost.late,
        )
