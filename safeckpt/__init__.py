"""Checkpoints that come back as the same run: finite, whole, verified, and proven equal."""

from typing import TYPE_CHECKING

from safeckpt import errors
from safeckpt.errors import *  # noqa: F403 - listed there, and nowhere else
from safeckpt.system.lazy import module_getattr

if TYPE_CHECKING:
    from safeckpt.distributed.ranks import Ranks
    from safeckpt.exporting import export
    from safeckpt.file import FileReport
    from safeckpt.functional import load, save, verify
    from safeckpt.importing import ImportReport, import_checkpoint
    from safeckpt.loader import ResumableLoader
    from safeckpt.manager import CheckpointManager
    from safeckpt.proof import ResumeReport, prove_resume
    from safeckpt.remote import Mirror
    from safeckpt.run.catalog import Checkpoint, latest
    from safeckpt.run.replay import ReplayReport
    from safeckpt.state import Guard, TimesMedian, check_gradients, find_nonfinite
    from safeckpt.state.wrappers import register_wrapper
    from safeckpt.store import Best
    from safeckpt.warm_starting import WarmStartReport, warm_start
else:
    # Imported when first used: the command line lists and verifies checkpoints without torch, which takes seconds to
    # import, and a training script pays for no part that it does not use.
    _MODULES = {
        "Best": "safeckpt.store",
        "Checkpoint": "safeckpt.run.catalog",
        "CheckpointManager": "safeckpt.manager",
        "FileReport": "safeckpt.file",
        "Guard": "safeckpt.state",
        "ImportReport": "safeckpt.importing",
        "Mirror": "safeckpt.remote",
        "Ranks": "safeckpt.distributed.ranks",
        "ReplayReport": "safeckpt.run.replay",
        "ResumableLoader": "safeckpt.loader",
        "ResumeReport": "safeckpt.proof",
        "TimesMedian": "safeckpt.state",
        "check_gradients": "safeckpt.state",
        "export": "safeckpt.exporting",
        "find_nonfinite": "safeckpt.state",
        "import_checkpoint": "safeckpt.importing",
        "latest": "safeckpt.run.catalog",
        "load": "safeckpt.functional",
        "prove_resume": "safeckpt.proof",
        "register_wrapper": "safeckpt.state.wrappers",
        "save": "safeckpt.functional",
        "WarmStartReport": "safeckpt.warm_starting",
        "verify": "safeckpt.functional",
        "warm_start": "safeckpt.warm_starting",
    }
    __getattr__ = module_getattr(__name__, _MODULES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})


__version__ = "0.1.0"

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointManager",
    "FileReport",
    "Guard",
    "ImportReport",
    "Mirror",
    "Ranks",
    "ReplayReport",
    "ResumableLoader",
    "ResumeReport",
    "TimesMedian",
    "WarmStartReport",
    "check_gradients",
    "export",
    "find_nonfinite",
    "import_checkpoint",
    "latest",
    "load",
    "prove_resume",
    "register_wrapper",
    "save",
    "verify",
    "warm_start",
]
__all__ += errors.__all__
__all__.sort()
