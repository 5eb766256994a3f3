"""Many processes as one run: agreement between ranks, the state that each rank has for itself, and shards."""

from typing import TYPE_CHECKING

from safeckpt.system.lazy import module_getattr

if TYPE_CHECKING:
    from safeckpt.distributed.comparison import Digests, Texts, both_digests, both_texts, texts_of
    from safeckpt.distributed.fingerprint import holds_same
    from safeckpt.distributed.group import Group, Section, group_of_this_process, in_group, lowest, rank_of_this_process
    from safeckpt.distributed.plans import Decision, Places, Plans, Proposals
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
        place_shards,
        with_placeholders,
    )
    from safeckpt.distributed.stages import Names, refuse_left_over, united
else:
    # Imported when first used: one process by itself needs little of it.
    __getattr__ = module_getattr(
        __name__,
        {
            "Digests": "safeckpt.distributed.comparison",
            "Group": "safeckpt.distributed.group",
            "Names": "safeckpt.distributed.stages",
            "Decision": "safeckpt.distributed.plans",
            "Places": "safeckpt.distributed.plans",
            "Plans": "safeckpt.distributed.plans",
            "Proposals": "safeckpt.distributed.plans",
            "Ranks": "safeckpt.distributed.ranks",
            "Section": "safeckpt.distributed.group",
            "ShardTensors": "safeckpt.distributed.shards",
            "Texts": "safeckpt.distributed.comparison",
            "as_local_shards": "safeckpt.distributed.shards",
            "both_digests": "safeckpt.distributed.comparison",
            "both_texts": "safeckpt.distributed.comparison",
            "compared_digests": "safeckpt.distributed.rank_state",
            "digests_of": "safeckpt.distributed.rank_state",
            "extract_shards": "safeckpt.distributed.shards",
            "first_of_stages": "safeckpt.distributed.rank_state",
            "group_of_this_process": "safeckpt.distributed.group",
            "have_own_gradients": "safeckpt.distributed.rank_state",
            "holds_same": "safeckpt.distributed.fingerprint",
            "in_group": "safeckpt.distributed.group",
            "is_sharded": "safeckpt.distributed.shards",
            "layout_digests_of": "safeckpt.distributed.rank_state",
            "lowest": "safeckpt.distributed.group",
            "pack_rank_state": "safeckpt.distributed.rank_state",
            "payload_of_rank": "safeckpt.distributed.rank_state",
            "place_shards": "safeckpt.distributed.shards",
            "rank_key": "safeckpt.distributed.rank_state",
            "rank_of_this_process": "safeckpt.distributed.group",
            "rank_state_of": "safeckpt.distributed.rank_state",
            "ranks_hold_parts": "safeckpt.distributed.rank_state",
            "refuse_left_over": "safeckpt.distributed.stages",
            "refuse_parts": "safeckpt.distributed.rank_state",
            "replica_fingerprints": "safeckpt.distributed.rank_state",
            "replica_layouts": "safeckpt.distributed.rank_state",
            "texts_of": "safeckpt.distributed.comparison",
            "united": "safeckpt.distributed.stages",
            "with_placeholders": "safeckpt.distributed.shards",
            "with_world": "safeckpt.distributed.rank_state",
        },
    )

__all__ = [
    "Decision",
    "Digests",
    "Group",
    "Names",
    "Places",
    "Plans",
    "Proposals",
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
]
