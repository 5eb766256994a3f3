"""Checkpoints that come back as the same run: finite, whole, verified, and proven equal."""

from safeckpt import errors
from safeckpt.distributed import Ranks
from safeckpt.errors import *  # noqa: F403 - listed there, and nowhere else
from safeckpt.file import FileReport
from safeckpt.functional import load, save, verify
from safeckpt.loader import ResumableLoader
from safeckpt.manager import CheckpointManager
from safeckpt.proof import ResumeReport, prove_resume
from safeckpt.run.catalog import Checkpoint, latest
from safeckpt.run.replay import ReplayReport
from safeckpt.state import Guard, check_gradients, find_nonfinite
from safeckpt.store import Best

__version__ = "0.1.0"

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "FileReport",
    "Guard",
    "Ranks",
    "ReplayReport",
    "ResumableLoader",
    "ResumeReport",
    "check_gradients",
    "find_nonfinite",
    "latest",
    "load",
    "prove_resume",
    "save",
    "verify",
]
__all__ += errors.__all__
__all__.sort()
