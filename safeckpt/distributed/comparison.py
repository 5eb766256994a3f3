"""What many ranks have, compared on its way along the tree.

What two parts of the tree have found becomes one finding, as large as there are different things, not ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["Digests", "Texts", "both_digests", "both_texts", "digests_on", "texts_of"]

_Runs = tuple[tuple[int, int], ...]  # of ranks: first and last of each


class Digests(NamedTuple):
    """The digests of several ranks.

    Attributes:
        first: Those of the lowest rank, by name.
        holders: By name, then by digest: the ranks that have it.
    """

    first: Mapping[str, str]
    holders: Mapping[str, Mapping[str, _Runs]]

    def are_equal(self, name: str) -> bool:
        """Tell whether all ranks have the same digest under a name."""
        return len(self.holders.get(name, ())) <= 1

    def first_holders(self, name: str) -> list[int]:
        """Return the first rank that has each digest of a name, ascending."""
        return sorted(runs[0][0] for runs in self.holders.get(name, {}).values())

    def drifted(self) -> list[int]:
        """Return the ranks whose replicas differ from those of the first rank that has them."""
        found: set[int] = set()
        for name, holders in self.holders.items():
            if name[0] in "=~":
                right = min(holders, key=lambda digest: holders[digest][0])
                found.update(_ranks(runs for digest, runs in holders.items() if digest != right))
        return sorted(found)


def digests_on(rank: int, digests: Mapping[str, str], compared: Iterable[str]) -> Digests:
    """Return the digests of one rank, of which some are compared with those of the others."""
    return Digests(digests, {name: {digests[name]: ((rank, rank),)} for name in compared})


def both_digests(one: Digests, other: Digests) -> Digests:
    """Return the digests of both, the lower ranks first."""
    holders = {name: dict(found) for name, found in one.holders.items()}
    for name, found in other.holders.items():
        mine = holders.setdefault(name, {})
        for digest, runs in found.items():
            mine[digest] = _joined(mine.get(digest, ()), runs)
    return Digests(one.first, holders)


def _joined(one: _Runs, other: _Runs) -> _Runs:
    if one and other and one[-1][1] + 1 == other[0][0]:
        return (*one[:-1], (one[-1][0], other[0][1]), *other[1:])
    return one + other


def _ranks(all_runs: Iterable[_Runs]) -> Iterable[int]:
    return (rank for runs in all_runs for first, last in runs for rank in range(first, last + 1))


class Texts(NamedTuple):
    """The texts of several ranks, by name.

    Attributes:
        ranks: How many.
        counts: How many of them have a text of this name.
        texts: The text; None where they differ.
    """

    ranks: int
    counts: Mapping[str, int]
    texts: Mapping[str, str | None]

    def differing(self) -> list[str]:
        """Return the names under which ranks have different texts, or which some ranks do not have."""
        # Local parts are named by where they are in the mesh, so that each is known to some ranks only.
        missing = {name for name, count in self.counts.items() if count < self.ranks and "@" not in name}
        return sorted(missing | {name for name, text in self.texts.items() if text is None})


def texts_of(texts: Mapping[str, str]) -> Texts:
    """Return the texts of one rank."""
    return Texts(1, dict.fromkeys(texts, 1), texts)


def both_texts(one: Texts, other: Texts) -> Texts:
    """Return the texts of both."""
    counts, texts = dict(one.counts), dict(one.texts)
    for name, text in other.texts.items():
        counts[name] = counts.get(name, 0) + other.counts[name]
        texts[name] = text if texts.get(name, text) == text else None
    return Texts(one.ranks + other.ranks, counts, texts)
