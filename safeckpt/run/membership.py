"""The processes of a run: met when they are first needed, and asked the same things."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safeckpt.distributed.group import Group, group_of_this_process, in_group, rank_of_this_process
from safeckpt.distributed.ranks import Ranks
from safeckpt.errors import GroupDestroyedError

__all__ = ["Membership"]


class Membership:
    """The group that this process saves and restores with.

    Args:
        ranks: How to act with the other processes.
        settings: What has to be the same on every rank, by the name of the argument.
        path: The directory of the run, for error texts.

    Attributes:
        on_lost: Called, in another thread, when a process of the group is lost.
    """

    def __init__(self, ranks: Ranks, settings: Mapping[str, Any], path: Path) -> None:
        self.ranks = ranks
        self.on_lost: Callable[[], None] = lambda: None
        self._settings = settings
        self._path = path
        self._group: Group | None = None
        self._compared = False

    @property
    def group(self) -> Group:
        """The processes of this run. All of them form the group at the same call.

        Raises:
            GroupDestroyedError: There was a group of several processes, and this process has destroyed it.
            RanksDisagreeError: The managers of the ranks were made with different arguments.
        """
        if self._group is None or not self._group.current:
            if self._group is not None and not in_group():
                raise GroupDestroyedError(what="coming back to it", path=self._path)
            ranks = self.ranks
            self._group = group_of_this_process(ranks.timeout_seconds, ranks.process_group, self.on_lost)
            self._compared = False
        if not self._compared:
            if self._group.size > 1:
                with self._group.section("making managers") as section:
                    section.same = self._settings
            self._compared = True
        return self._group

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes what is written once. Does not communicate."""
        return rank_of_this_process(self.ranks.process_group) == 0 if in_group() else self.was_rank_zero

    @property
    def was_rank_zero(self) -> bool:
        """Whether this process was rank 0 when the group was last formed. Does not communicate."""
        return self._group is None or self._group.is_rank_zero

    def close(self) -> None:
        """Give back the connections of the group."""
        if self._group is not None:
            self._group.close()
