"""Many processes as one run: agreement between ranks, what each rank has of its own, and shards."""

from safeckpt.distributed.group import Group, Ranks, group_of_this_process, in_group
from safeckpt.distributed.own import (
    differing,
    digests_of,
    drifted,
    foreign,
    merged,
    own_of,
    payload_for,
    refuse_parts,
    replica_fingerprints,
    replica_layouts,
)
from safeckpt.distributed.shards import (
    Held,
    is_sharded,
    local_parts,
    read_shards,
    rejoined,
    shards_of,
    split,
    whole,
    with_places,
    write_shards,
)

__all__ = [
    "Group",
    "Held",
    "Ranks",
    "differing",
    "digests_of",
    "drifted",
    "foreign",
    "group_of_this_process",
    "in_group",
    "is_sharded",
    "local_parts",
    "merged",
    "own_of",
    "payload_for",
    "read_shards",
    "refuse_parts",
    "rejoined",
    "replica_fingerprints",
    "replica_layouts",
    "shards_of",
    "split",
    "whole",
    "with_places",
    "write_shards",
]
