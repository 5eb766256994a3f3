"""Bound what a pickle may cost to load, beyond its own length.

A pickle that asks for nothing forbidden can still be made so that loading it never ends, or takes all memory:

* a tuple that holds the same tuple twice, sixty levels deep, is 120 opcodes and 2**60 steps to hash as a key;
* twenty thousand keys that share one hash take as long as two hundred million different ones;
* a text of 100 kB that is copied into five thousand values is half a gigabyte, from opcodes of a few bytes;
* a tensor of 2**40 elements over four bytes is a view, until something is made from it that copies its elements.

``torch.load`` has no bound for any of these. Here each is counted while the pickle is scanned, on values that only
stand for what would be built; honest states stay far below every limit.
"""

from __future__ import annotations

from typing import Any, Final

from safeckpt.file.pickle_calls import MOST_REPEATED, PARTS, STRIDED, PickleError, Value

__all__ = ["Budget"]

MOST_HASH_STEPS: Final = 1_000_000  # beyond the length of the pickle
MOST_COLLISIONS: Final = 256  # different keys of one file with the same hash
MOST_COPIED: Final = 1_000_000  # elements that calls may copy beyond the length of the pickle

_USUAL_DIMENSIONS: Final = 64  # a shape with more is counted as copied each time it is used
_HASH_MODULUS: Final = (1 << 61) - 1  # integers below are their own hash in CPython
_UNHASHABLE: Final = frozenset(
    {"list", "dict", "set", "builtins.set", "collections.OrderedDict", "collections.Counter", "builtins.bytearray"}
)
_HASHING: Final = frozenset({"builtins.set", "collections.OrderedDict", "collections.Counter"})
_COPYING: Final = _HASHING | {"torch.Size", "builtins.bytearray", "_codecs.encode"}
_TUPLES: Final = ("tuple", "torch.Size")


class _Hashed(int):
    """A number that is its own hash, whatever its size."""

    __slots__ = ()

    def __hash__(self) -> int:
        return int(self)


class Budget:
    """The use that one pickle has made of each limit so far.

    Args:
        length: Of the pickle.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._hash_steps = 0
        self._copied = 0
        self._repeated = 0
        self._identities: dict[int, str] = {}
        self._collisions: dict[int, set[str]] = {}
        self._others: dict[int, Value] = {}

    def count_call(self, name: str, items: tuple[Any, ...], result: Value) -> None:
        """Count what a call copies, and the keys that it hashes.

        Raises:
            PickleError: It is too much.
        """
        if name in STRIDED:
            dimensions = len(items[2].items)
            if dimensions > _USUAL_DIMENSIONS:
                self._count_copied(dimensions)
        elif name in _COPYING and items:
            self._count_copy(result, items[0])
        elif name in PARTS and result.of:
            self._repeated += result.of
            if self._repeated > MOST_REPEATED:
                raise PickleError(f"it calls {name} with tensors of {self._repeated} elements in small storages")

    def count_keys(self, keys: list[Any]) -> int:
        """Count the keys that a dictionary gets, and return the steps that hashing them takes.

        Raises:
            PickleError: It is too much, they are made to collide, or one of them cannot be a key.
        """
        before = self._hash_steps
        for key in keys:
            if type(key) is not str:
                self._hash(key)
        return self._hash_steps - before

    def _count_copy(self, result: Value, source: Any) -> None:
        """Look at a value that is made out of another one."""
        items = source.items if type(source) is Value else ()
        if type(source) is str:
            self._count_copied(len(source))
        elif source.kind == "_codecs.encode":
            self._count_copied(len(source.of))
        elif source.kind == "dict":
            self._count_copied(source.of or 0)
            self._count_hashed(source.cost)  # each of its keys once more
        else:
            self._count_copied(len(items))
        if result.kind in _HASHING:
            for item in items:
                pair = result.kind == "collections.OrderedDict" and type(item) is Value and item.kind == "tuple"
                self._hash(item.items[0] if pair and item.items else item)
        elif result.kind == "torch.Size":
            result.items, result.cost = tuple(items), 1 + len(items)

    def _count_copied(self, elements: int) -> None:
        self._copied += elements
        if self._copied > MOST_COPIED + self._length:
            raise PickleError("it makes large values out of the same few again and again")

    def _count_hashed(self, steps: int) -> None:
        self._hash_steps += steps
        if self._hash_steps > MOST_HASH_STEPS + self._length:
            raise PickleError("its keys share themselves so often that hashing them would take for ever")

    def _hash(self, key: Any) -> None:
        """Count what hashing a key will cost, and how many others have the same hash."""
        if type(key) is Value:
            if key.kind in _UNHASHABLE:
                raise PickleError(f"it uses a {key.kind} as a key")
            self._count_hashed(key.cost)
            if key.kind not in _TUPLES and key.kind != "builtins.complex":
                return  # its hash is its address, or a secret of this process
        elif type(key) not in (int, float) or -_HASH_MODULUS < key < _HASH_MODULUS:
            return
        number, identity = self._hash_of(key)
        known = self._identities.setdefault(number, identity)
        if known != identity:
            others = self._collisions.setdefault(number, set())
            others.add(identity)
            if len(others) >= MOST_COLLISIONS:
                raise PickleError("its keys are made to collide")

    def _hash_of(self, key: Any) -> tuple[int, str]:
        """Return the hash that Python will give to a key, and a text that no other key has.

        A tuple is gone through without recursion.
        """
        done: dict[int, tuple[int, str]] = {}
        todo = [key]
        while todo:
            value = todo[-1]
            if type(value) is Value and value.kind in _TUPLES:
                inside = [item for item in value.items if type(item) is Value and item.kind in _TUPLES]
                waiting = [item for item in inside if id(item) not in done]
                if waiting:
                    todo.extend(waiting)
                    continue
                parts = [done[id(item)] if id(item) in done else self._leaf(item) for item in value.items]
                number = hash(tuple(_Hashed(part[0]) for part in parts))
                done[id(value)] = number, f"({hash(','.join(part[1] for part in parts))})"
            else:
                done[id(value)] = self._leaf(value)
            todo.pop()
        return done[id(key)]

    def _leaf(self, item: Any) -> tuple[int, str]:
        kind, plain = (item.kind, item.of) if type(item) is Value else (type(item).__name__, item)
        if kind in ("str", "_codecs.encode"):  # may be long; its hash is kept
            return hash(plain), f"{kind} {hash(plain)}"
        if type(item) is not Value or kind == "builtins.complex":
            return hash(plain), f"{kind} {plain!r}"
        self._others[id(item)] = item  # held, so that no other value gets its id
        return hash(id(item)), f"{item.kind} {id(item)}"
