"""Read a pickle without executing any of it.

One pass over the opcodes, on values that only stand for what would be built. It follows the rules of torch's
``weights_only`` reader, so that what passes here is read there, and it refuses what that reader would accept and not
survive: a million nested tuples (hashing them overflows the C stack), arguments that ask for memory or read outside it
(:mod:`safeckpt.file.pickle_calls`), and values that take forever (:mod:`safeckpt.file.pickle_budget`).

Two callers: before a file is loaded, and on what was pickled before it is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from safeckpt.file.pickle_budget import Budget
from safeckpt.file.pickle_calls import CHECKS, MOST_DEPTH, Claim, PickleError, Value, depth_of, result_of, storage_dtype
from safeckpt.system.torch_private import (
    BLOCKED_MODULES,
    IMPORT_MAPPING,
    NAME_MAPPING,
    allowed_globals,
    registered_globals,
)

__all__ = ["PickleError", "Scan", "UntrustedGlobalError", "python3_name", "scan_pickle"]

_HASH_MODULUS: Final = (1 << 61) - 1  # a cost beyond it need not be told from another

_SETTABLE = frozenset({"dict", "collections.OrderedDict", "collections.Counter"})
_PLAIN = frozenset({"tuple", "list", "dict", "set", "global", "storage"})
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_EMPTY = Value("tuple")


class UntrustedGlobalError(Exception):
    """A pickle asks for a class or function that is not allowed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass
class Scan:
    """The storages and names in a pickle.

    Attributes:
        claims: Storages by record key, in the order in which they are first referred to.
        globals: Full names of the classes and functions it asks for.
        protocol: Of the pickle.
        builds: Whether it sets the state of objects, apart from attributes of an OrderedDict.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)
    protocol: int = 0
    builds: bool = False


def python3_name(module: str, name: str) -> tuple[str, str]:
    """Return module and name as Python 3 has them; protocol 2 uses those of Python 2."""
    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


def scan_pickle(data: bytes) -> Scan:
    """Scan one pickle.

    Raises:
        PickleError: A safe load would refuse it, or not survive it, or it is cut.
        UntrustedGlobalError: It asks for a class or function that a safe load does not allow.

    Cost:
        About 0.3 us per opcode; a tensor is some 25 of them.
    """
    scanner = _Scanner(data)
    try:
        scanner.run()
    except (IndexError, KeyError, ValueError, struct.error):
        raise PickleError(f"its pickle is cut or inconsistent near byte {scanner.at}") from None
    return scanner.scan


class _Scanner:
    def __init__(self, data: bytes) -> None:
        self.scan = Scan()
        self.at = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Value] = {}
        self._references: dict[int, tuple[Any, Value]] = {}
        self._budget = Budget(len(data))
        self._allowed = allowed_globals()
        self._registered = registered_globals()

    def run(self) -> None:
        """Follow the opcodes until the pickle ends."""
        data, memo, stack = self._data, self._memo, self._stack
        most = len(data)
        at = 0
        try:
            while True:
                code = data[at]
                at += 1
                if code == 0x72:  # LONG_BINPUT
                    index = int.from_bytes(data[at : at + 4], "little")
                    if index > most:  # Python's own reader would allocate a table of that size
                        raise PickleError(f"it numbers an object {index}, and has fewer")
                    memo[index] = stack[-1]
                    at += 4
                elif code == 0x68:  # BINGET
                    stack.append(memo[data[at]])
                    at += 1
                elif code == 0x4B:  # BININT1
                    stack.append(data[at])
                    at += 1
                elif code == 0x6A:  # LONG_BINGET
                    stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                    at += 4
                elif code == 0x28:  # MARK
                    self._marks.append(stack)
                    stack = self._stack = []
                elif code == 0x74:  # TUPLE
                    items = tuple(stack)
                    stack = self._stack = self._marks.pop()
                    stack.append(_tuple_of(items))
                elif code == 0x85:  # TUPLE1
                    stack[-1] = _tuple_of((stack[-1],))
                elif code == 0x86:  # TUPLE2
                    stack[-2:] = [_tuple_of((stack[-2], stack[-1]))]
                elif code == 0x87:  # TUPLE3
                    stack[-3:] = [_tuple_of((stack[-3], stack[-2], stack[-1]))]
                elif code == 0x29:  # EMPTY_TUPLE
                    stack.append(_EMPTY)
                elif code == 0x58:  # BINUNICODE
                    length = int.from_bytes(data[at : at + 4], "little")
                    at += 4 + length
                    if at > most:
                        raise IndexError
                    stack.append(data[at - length : at].decode("utf-8", "surrogatepass"))
                elif code == 0x51:  # BINPERSID
                    stack[-1] = self._storage(stack[-1])
                elif code == 0x52:  # REDUCE
                    args = stack.pop()
                    stack[-1] = self._call(stack[-1], args)
                elif code == 0x89:  # NEWFALSE
                    stack.append(False)
                elif code == 0x71:  # BINPUT
                    memo[data[at]] = stack[-1]
                    at += 1
                elif code == 0x88:  # NEWTRUE
                    stack.append(True)
                elif code == 0x4E:  # NONE
                    stack.append(None)
                elif code == 0x4D:  # BININT2
                    stack.append(data[at] | data[at + 1] << 8)
                    at += 2
                elif code == 0x4A:  # BININT
                    stack.append(int.from_bytes(data[at : at + 4], "little", signed=True))
                    at += 4
                elif code == 0x47:  # BINFLOAT
                    stack.append(struct.unpack_from(">d", data, at)[0])
                    at += 8
                elif code == 0x2E:  # STOP
                    if self._marks or len(stack) != 1:
                        raise PickleError("its pickle ends with values left over")
                    return
                else:
                    self.at = at
                    at = self._rare(code, at)
                    stack = self._stack
        finally:
            self.at = at

    def _rare(self, code: int, at: int) -> int:
        """Follow one of the opcodes that a pickle of tensors has fewer of; return where the next one is."""
        data, stack = self._data, self._stack
        if code == 0x7D:  # EMPTY_DICT
            stack.append(Value("dict"))
        elif code == 0x5D:  # EMPTY_LIST
            stack.append(Value("list", items=[]))
        elif code == 0x8F:  # EMPTY_SET
            stack.append(Value("set"))
        elif code in (0x75, 0x73):  # SETITEMS, SETITEM
            items = self._marked() if code == 0x75 else [stack.pop(-2), stack.pop()]
            self._set_items(self._stack[-1], items)
        elif code in (0x65, 0x61):  # APPENDS, APPEND
            items = self._marked() if code == 0x65 else [stack.pop()]
            self._append(self._stack[-1], items)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            self._build(stack[-1], state)
        elif code == 0x81:  # NEWOBJ
            args = stack.pop()
            stack[-1] = self._new(stack[-1], args)
        elif code == 0x63:  # GLOBAL
            end = data.index(b"\n", data.index(b"\n", at) + 1)
            module, name = data[at:end].decode("utf-8").split("\n")
            stack.append(self._global(module, name))
            return end + 1
        elif code == 0x8A:  # LONG1
            end = at + 1 + data[at]
            stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
            return end
        elif code == 0x55:  # SHORT_BINSTRING
            end = at + 1 + data[at]
            stack.append(data[at + 1 : end].decode("utf-8"))
            return end
        elif code == 0x80:  # PROTO
            self.scan.protocol = data[at]
            return at + 1
        else:
            raise PickleError(f"its pickle uses opcode {code} at byte {at - 1}, which a safe load does not know")
        return at

    def _marked(self) -> list[Any]:
        items = self._stack
        self._stack = self._marks.pop()
        return items

    def _global(self, module: str, name: str) -> Value:
        module, name = python3_name(module, name)
        full = f"{module}.{name}"
        found = self._globals.get(full)
        if found is None:
            if module in BLOCKED_MODULES or not (full in self._allowed or full in self._registered):
                raise UntrustedGlobalError(full)
            value = self._allowed[full] if full in self._allowed else self._registered[full]
            found = self._globals[full] = Value("global", items=callable(value), of=full)
            self.scan.globals.add(full)
        return found

    def _storage(self, persistent_id: Any) -> Value:
        known = self._references.get(id(persistent_id))
        if known is not None:
            return known[1]
        found = self._claimed(persistent_id)
        self._references[id(persistent_id)] = persistent_id, found  # held, so that no other value gets its id
        return found

    def _claimed(self, persistent_id: Any) -> Value:
        items: tuple[Any, ...] = ()
        if type(persistent_id) is Value and persistent_id.kind == "tuple":
            items = persistent_id.items
        if len(items) != 5:
            raise PickleError("it refers to something that is no storage")
        word, kind, key, location, numel = items
        dtype = storage_dtype(kind.of) if type(kind) is Value and kind.kind == "global" else None
        if word != "storage" or dtype is None or type(key) is not str or type(location) is not str:
            raise PickleError("it refers to something that is no storage")
        if type(numel) is not int or numel < 0:
            raise PickleError(f"storage data/{key} has {numel!r} elements")
        known = self.scan.claims.setdefault(key, Claim(key, dtype, numel, location))
        if known.numel != numel or known.dtype != dtype:
            raise PickleError(
                f"storage data/{key} is {known.numel} elements of {known.dtype} and then {numel} of {dtype}"
            )
        return Value("storage", of=known)

    def _call(self, function: Any, args: Any) -> Value:
        if type(function) is not Value or function.kind != "global" or type(args) is not Value or args.kind != "tuple":
            raise PickleError("it calls something that is no function")
        name: str = function.of
        if not function.items:
            raise PickleError(f"it calls {name}, which is no function")
        if not args.items and name not in CHECKS:  # OrderedDict(), the hooks of each tensor
            return Value(name, _deeper(args.depth))
        result = result_of(name, args.items, _deeper(args.depth))
        items = args.items
        if name == _FROM_TYPE:  # a call inside a call
            name, items = items[0].of, items[2].items
        self._budget.count_call(name, items, result)
        return result

    def _new(self, kind: Any, args: Any) -> Value:
        if type(kind) is not Value or kind.kind != "global" or type(args) is not Value or args.kind != "tuple":
            raise PickleError("it makes an object of something that is no class")
        name: str = kind.of
        if name not in self._registered and name != "torch.nn.parameter.Parameter" and args.items:
            raise PickleError(f"it makes a {name} in a way that torch does not")
        return Value(name, _deeper(args.depth))

    def _build(self, target: Any, state: Any) -> None:
        if type(target) is not Value or target.kind in _PLAIN:
            raise PickleError("it sets the state of something that has none")
        if target.kind == "collections.OrderedDict" and not _is_attributes(state):
            raise PickleError("it sets the attributes of an OrderedDict to something that is no dict")
        if target.kind not in self._registered and target.kind.startswith("torch."):
            # Tensor.set_ would take any shape; torch has not written such files since it writes zip archives.
            raise PickleError(f"it sets the state of a {target.kind}, which torch does not")
        self.scan.builds = self.scan.builds or target.kind != "collections.OrderedDict"
        target.depth = max(target.depth, _deeper(depth_of(state)))

    def _append(self, target: Any, items: list[Any]) -> None:
        if type(target) is not Value or target.kind != "list":
            raise PickleError("it appends to something that is no list")
        target.items.extend(items)
        target.depth = max(target.depth, _deeper(_deepest(items)))

    def _set_items(self, target: Any, items: list[Any]) -> None:
        if type(target) is not Value or target.kind not in _SETTABLE or len(items) % 2:
            kind = target.kind if type(target) is Value else type(target).__name__
            raise PickleError(f"it puts items into a {kind}, which a safe load does not do")
        target.cost += self._budget.count_keys(items[::2])
        target.of = (target.of or 0) + len(items) // 2
        target.depth = max(target.depth, _deeper(_deepest(items)))


def _is_attributes(state: Any) -> bool:
    """Return whether a state is attributes by name; a pair would set slots, which may be anything."""
    return type(state) is Value and state.kind == "dict"


def _tuple_of(items: tuple[Any, ...]) -> Value:
    depth, cost = 0, 1 + len(items)
    for item in items:
        if type(item) is Value:
            cost += item.cost - 1
            depth = max(depth, item.depth)
    return Value("tuple", _deeper(depth), min(_HASH_MODULUS, cost), items)


def _deepest(items: Iterable[Any]) -> int:
    """Return the levels of nesting of the deepest of some values."""
    depth = 0
    for item in items:
        if type(item) is Value and item.depth > depth:
            depth = item.depth
    return depth


def _deeper(depth: int) -> int:
    if depth >= MOST_DEPTH:
        raise PickleError(f"it is nested more than {MOST_DEPTH} levels deep")
    return depth + 1
