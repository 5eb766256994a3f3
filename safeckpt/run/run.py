"""What saving, restoring and rolling back share: one run in one directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from safeckpt.distributed.group import Group
from safeckpt.run.first_draws import FirstDraws
from safeckpt.run.membership import Membership
from safeckpt.run.replay import Replay
from safeckpt.run.run_directory import RunDirectory
from safeckpt.run.timeline import Timeline
from safeckpt.state import Component, LossLimit

__all__ = ["Run"]


class Run(NamedTuple):
    """One run in one directory.

    Attributes:
        components: The live objects, by name.
        timeline: Where the run stands.
        directory: Where its checkpoints are.
        membership: The processes that train it.
        replay: The record of its losses.
        notes: What else the script wants to have in each checkpoint.
        loss_limit: Judges the losses of this process.
        first_draws: What was drawn before the run began.
    """

    components: Mapping[str, Component]
    timeline: Timeline
    directory: RunDirectory
    membership: Membership
    replay: Replay
    notes: Mapping[str, Any]
    loss_limit: LossLimit
    first_draws: FirstDraws

    @property
    def group(self) -> Group:
        """The processes of this run; see `Membership.group`."""
        return self.membership.group

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process writes what is written once."""
        return self.membership.is_rank_zero

    def close(self) -> None:
        """Give back the lock of the directory and the connections of the group."""
        self.timeline.close()
        try:
            self.directory.close()
        finally:
            self.membership.close()
