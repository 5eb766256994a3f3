"""Many processes as one run: agreement between ranks, the state that each rank has for itself, and shards."""

from safeckpt.distributed.fingerprint import holds_same
from safeckpt.distributed.group import Group, first_answer, group_of_this_process, in_group, refuse_differences
from safeckpt.distributed.plan_cache import PlanCache
from safeckpt.distributed.rank_state import (
    differing_names,
    digests_of,
    drifted_ranks,
    have_own_gradients,
    pack_rank_state,
    payload_of_rank,
    rank_key,
    rank_state_of,
    ranks_hold_parts,
    refuse_parts,
    replica_fingerprints,
    replica_layouts,
    with_world,
)
from safeckpt.distributed.ranks import Ranks
from safeckpt.distributed.shards import (
    ShardTensors,
    allocate_placeholders,
    as_local_shards,
    extract_shards,
    is_sharded,
    local_parts,
    read_shards,
    replace_local_parts,
    shards_of,
    write_shards,
)

__all__ = [
    "Group",
    "PlanCache",
    "Ranks",
    "ShardTensors",
    "allocate_placeholders",
    "as_local_shards",
    "differing_names",
    "digests_of",
    "drifted_ranks",
    "extract_shards",
    "first_answer",
    "group_of_this_process",
    "have_own_gradients",
    "holds_same",
    "in_group",
    "is_sharded",
    "local_parts",
    "pack_rank_state",
    "payload_of_rank",
    "rank_key",
    "rank_state_of",
    "ranks_hold_parts",
    "read_shards",
    "refuse_differences",
    "refuse_parts",
    "replace_local_parts",
    "replica_fingerprints",
    "replica_layouts",
    "shards_of",
    "with_world",
    "write_shards",
]
