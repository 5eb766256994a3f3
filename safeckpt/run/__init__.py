"""One run in one directory: where it stands, and how it is saved, restored and rolled back."""

from typing import TYPE_CHECKING

from safeckpt.system.lazy import module_getattr

if TYPE_CHECKING:
    from safeckpt.run.capturing import Capturer
    from safeckpt.run.checking import Wanted
    from safeckpt.run.membership import Membership
    from safeckpt.run.replay import Replay, ReplayPolicy, ReplayReport
    from safeckpt.run.restoring import Restorer
    from safeckpt.run.rollback import Rollback
    from safeckpt.run.run import Run
    from safeckpt.run.run_directory import RunDirectory
    from safeckpt.run.saving import AsyncSave, Saver
    from safeckpt.run.steps import Steps
    from safeckpt.run.timeline import Timeline
else:
    # Imported when first used: the catalog of a directory is read without torch, which the others need.
    __getattr__ = module_getattr(
        __name__,
        {
            "AsyncSave": "safeckpt.run.saving",
            "Capturer": "safeckpt.run.capturing",
            "Membership": "safeckpt.run.membership",
            "Replay": "safeckpt.run.replay",
            "ReplayPolicy": "safeckpt.run.replay",
            "ReplayReport": "safeckpt.run.replay",
            "Restorer": "safeckpt.run.restoring",
            "Rollback": "safeckpt.run.rollback",
            "Run": "safeckpt.run.run",
            "RunDirectory": "safeckpt.run.run_directory",
            "Saver": "safeckpt.run.saving",
            "Steps": "safeckpt.run.steps",
            "Timeline": "safeckpt.run.timeline",
            "Wanted": "safeckpt.run.checking",
        },
    )

__all__ = [
    "AsyncSave",
    "Capturer",
    "Membership",
    "Replay",
    "ReplayPolicy",
    "ReplayReport",
    "Restorer",
    "Rollback",
    "Run",
    "RunDirectory",
    "Saver",
    "Steps",
    "Timeline",
    "Wanted",
]
