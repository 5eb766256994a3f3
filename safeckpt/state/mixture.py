"""Which live objects may be half of one state and half of another, since a restore was begun and has not ended."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["Mixture"]


class Mixture:
    """The names of these objects. `Plan.apply` changes it, and whoever notes where the run stands then clears it."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()

    @property
    def names(self) -> Collection[str]:
        """Components that may hold a mixture of two states."""
        return self._names

    def add(self, names: Collection[str]) -> None:
        """Note that these components are about to be changed."""
        self._names = self._names.union(names)

    def back_to(self, names: Collection[str]) -> None:
        """Note that all others were given back the state that they had."""
        self._names = frozenset(names)

    def clear(self) -> None:
        """Note that all objects are of one state, and it is known which."""
        self._names = frozenset()

    def refuse(self) -> None:
        """Refuse to go on while there is a mixture.

        Raises:
            ValueError: There is one.
        """
        if self._names:
            raise ValueError(
                "the last restore stopped half-way, by an interrupt or an error in a component's load_state_dict: the "
                "objects may be a mixture of two states; call restore() or rollback() again before going on"
            )
