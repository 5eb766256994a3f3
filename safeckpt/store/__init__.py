"""Files in one directory: their names, how they appear, how they go, and who may do it. Knows nothing of tensors."""

from safeckpt.store.commit import commit, commit_several
from safeckpt.store.directory import Aside, CheckpointDirectory
from safeckpt.store.events import EventLog
from safeckpt.store.lock import WriterLock
from safeckpt.store.losses import LossLog, Timelines, timelines_of
from safeckpt.store.names import expand_user
from safeckpt.store.retention import (
    Best,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPeriod,
    Policy,
    asides_to_prune,
    to_prune,
)

__all__ = [
    "Aside",
    "Best",
    "CheckpointDirectory",
    "EventLog",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPeriod",
    "LossLog",
    "Policy",
    "Timelines",
    "WriterLock",
    "asides_to_prune",
    "commit",
    "commit_several",
    "expand_user",
    "timelines_of",
    "to_prune",
]
