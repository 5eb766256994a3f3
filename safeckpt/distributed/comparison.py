"""What many ranks have, compared on its way along the tree.

What two parts of the tree have found becomes one finding, as large as there are different things, not ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from safeckpt.errors import UnsavableStateError, listed

__all__ = ["STAGE", "Digests", "both_digests", "digests_on"]

STAGE = "stage"
_GRADIENTS = "gradients"

_Runs = tuple[tuple[int, int], ...]  # of ranks: first and last of each


class Digests(NamedTuple):
    """The digests of several ranks, by name.

    The first letter of a name says what it is of: `=` a replica and `~` a copy of a shard, both to be equal on all
    ranks that have the name; `#` which tensors there are.

    Attributes:
        ranks: How many ranks there are.
        first: The digests of the lowest rank.
        holders: By name, then by digest: the ranks that have it.
    """

    ranks: int
    first: Mapping[str, str]
    holders: Mapping[str, Mapping[str, _Runs]]

    def drifted(self) -> list[int]:
        """Return the ranks whose replicas differ from those of the first rank that has them."""
        found: set[int] = set()
        for name, holders in self.holders.items():
            if name[0] in "=~":
                right = min(holders, key=lambda digest: holders[digest][0])
                found.update(_ranks(runs for digest, runs in holders.items() if digest != right))
        return sorted(found)

    def hold_parts(self) -> bool:
        """Tell whether ranks have different tensors in what is replicated: no copies, but parts of something."""
        return any(name[0] == "#" and len(holders) > 1 for name, holders in self.holders.items())

    def own_gradients(self) -> bool:
        """Tell whether ranks have different gradients, as between two micro-steps without synchronization."""
        return len(self.holders.get(_GRADIENTS, ())) > 1

    def stages(self) -> list[int]:
        """Return, of each stage that ranks hold, the first rank that holds it, ascending."""
        return sorted(runs[0][0] for runs in self.holders.get(STAGE, {}).values())

    def differing(self) -> list[str]:
        """Return the names under which ranks have different digests, or which some ranks do not have."""
        return sorted(
            name for name, holders in self.holders.items()
            # Local parts are named by where they are in the mesh, so that each is known to some ranks only.
            if len(holders) > 1 or ("@" not in name and len(list(_ranks(holders.values()))) < self.ranks)
        )  # fmt: skip

    def refuse_parts(self) -> None:
        """Refuse to save what is a different part of a model on each rank: only that of rank 0 would be kept."""
        names = [name.partition(" @")[0] for name in self.differing()] or ["a sharded tensor"]
        raise UnsavableStateError(
            location=names[0],
            type_name="part of a model that is another on each rank",
            reason="of plain tensors that ranks hold together, the checkpoint has one copy, and not every rank has "
            + listed(names),
            cure="shard the model with DTensor (fully_shard, parallelize_module); or wrap each rank's part, such as a "
            "stage of a pipeline, and its optimizer in an object with state_dict and load_state_dict, which is saved "
            "for every rank.",
        )


def digests_on(rank: int, digests: Mapping[str, str], *, everything: bool = False) -> Digests:
    """Return the digests of one rank. What each rank may have of its own is left out, unless `everything` is wanted."""
    compared = [name for name in digests if everything or name[0] in "=~#" or name in (_GRADIENTS, STAGE)]
    return Digests(1, digests, {name: {digests[name]: ((rank, rank),)} for name in compared})


def both_digests(one: Digests, other: Digests) -> Digests:
    """Return the digests of both, the lower ranks first."""
    holders = {name: dict(found) for name, found in one.holders.items()}
    for name, found in other.holders.items():
        mine = holders.setdefault(name, {})
        for digest, runs in found.items():
            mine[digest] = _joined(mine.get(digest, ()), runs)
    return Digests(one.ranks + other.ranks, one.first, holders)


def _joined(one: _Runs, other: _Runs) -> _Runs:
    if one and other and one[-1][1] + 1 == other[0][0]:
        return (*one[:-1], (one[-1][0], other[0][1]), *other[1:])
    return one + other


def _ranks(all_runs: Iterable[_Runs]) -> Iterable[int]:
    return (rank for runs in all_runs for first, last in runs for rank in range(first, last + 1))
