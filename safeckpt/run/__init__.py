"""One run in one directory: where it stands, and how it is saved, restored and rolled back."""

from safeckpt.run.restoring import Restorer
from safeckpt.run.rollback import Rollbacks
from safeckpt.run.saving import Saver
from safeckpt.run.timeline import Timeline

__all__ = ["Restorer", "Rollbacks", "Saver", "Timeline"]
