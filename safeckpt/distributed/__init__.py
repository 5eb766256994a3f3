"""Many processes as one run: agreement between ranks, the state that each rank has for itself, and shards."""

from safeckpt.distributed.comparison import Digests, Texts, both_digests, both_texts, texts_of
from safeckpt.distributed.fingerprint import holds_same
from safeckpt.distributed.group import Group, Section, group_of_this_process, in_group, lowest, rank_of_this_process
from safeckpt.distributed.plan_cache import PlanCache
from safeckpt.distributed.rank_state import (
    compared_digests,
    digests_of,
    first_of_stages,
    have_own_gradients,
    layout_digests_of,
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
    as_local_shards,
    extract_shards,
    is_sharded,
    open_shards,
    place_shards,
    with_placeholders,
    write_shards,
)
from safeckpt.distributed.stages import Names, refuse_left_over, united

__all__ = [
    "Digests",
    "Group",
    "Names",
    "PlanCache",
    "Ranks",
    "Section",
    "ShardTensors",
    "Texts",
    "as_local_shards",
    "both_digests",
    "both_texts",
    "compared_digests",
    "digests_of",
    "extract_shards",
    "first_of_stages",
    "group_of_this_process",
    "have_own_gradients",
    "holds_same",
    "in_group",
    "is_sharded",
    "layout_digests_of",
    "lowest",
    "open_shards",
    "pack_rank_state",
    "payload_of_rank",
    "place_shards",
    "rank_key",
    "rank_of_this_process",
    "rank_state_of",
    "ranks_hold_parts",
    "refuse_left_over",
    "refuse_parts",
    "replica_fingerprints",
    "replica_layouts",
    "texts_of",
    "united",
    "with_placeholders",
    "with_world",
    "write_shards",
]
