"""One run in one directory: where it stands, and how it is saved, restored and rolled back."""

from safeckpt.run.capturing import Capturer
from safeckpt.run.membership import Membership
from safeckpt.run.replay import Replay, ReplayPolicy, ReplayReport
from safeckpt.run.restoring import Restorer, Wanted
from safeckpt.run.rollback import Rollback
from safeckpt.run.run import Run
from safeckpt.run.run_directory import RunDirectory
from safeckpt.run.saving import Saver
from safeckpt.run.steps import Steps
from safeckpt.run.timeline import Timeline

__all__ = [
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
