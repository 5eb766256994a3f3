"""Check what a pickle calls, and with which arguments.

``weights_only`` decides which functions may be called; some of them allocate whatever their arguments say. Here the
arguments are looked at as well: a tensor must lie inside its storage, memory must be paid for by bytes of the file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from safeckpt.system.torch_private import STORAGE_TO_DTYPE

__all__ = [
    "CHECKS",
    "CONTAINERS",
    "MOST_DEPTH",
    "MOST_REPEATED",
    "PARTS",
    "STRIDED",
    "Claim",
    "PickleError",
    "Value",
    "depth_of",
    "result_of",
    "storage_dtype",
]

MOST_DEPTH: Final = 1000  # of nesting; Python hashes and frees nested tuples by recursion on the C stack
MOST_REPEATED: Final = 1 << 24  # elements of a broadcast tensor from which another one is made
_MOST_ELEMENTS: Final = 1 << 63  # torch counts them in 64 bits


class PickleError(Exception):
    """A pickle that a safe load would refuse, or not survive."""


class Claim(NamedTuple):
    """A storage as a pickle describes it.

    Attributes:
        key: Name of the record, ``data/<key>``.
        dtype: Element type.
        numel: Number of elements.
        location: Device tag.
    """

    key: str
    dtype: torch.dtype
    numel: int
    location: str

    @property
    def nbytes(self) -> int:
        """Length that the record must have."""
        return self.numel * self.dtype.itemsize


class Value:
    """Stands for an object that would be built.

    Attributes:
        kind: "tuple", "list", "dict", "global", "storage", or the full name of what was called.
        depth: Levels of nesting in it.
        cost: Steps that hashing it takes; a shared part counts each time, since a hash is not remembered.
        items: Elements of a tuple or a list.
        of: The name of a global, the claim of a storage, of a tuple whether it holds nothing but numbers from 0 up,
            of a tensor the number of its elements when that is more than its storage has, the number of items of a
            dictionary, the value of bytes and of complex numbers.
    """

    __slots__ = ("cost", "depth", "items", "kind", "of")

    def __init__(self, kind: str, depth: int = 1, cost: int = 1, items: Any = (), of: Any = None) -> None:
        self.kind = kind
        self.depth = depth
        self.cost = cost
        self.items = items
        self.of = of


def depth_of(value: Any) -> int:
    """Return the levels of nesting of a value."""
    return value.depth if type(value) is Value else 0


@lru_cache(maxsize=256)
def storage_dtype(name: str) -> torch.dtype | None:
    """Return the element type of a storage class by its full name, None when it is no storage class."""
    module, _, kind = name.rpartition(".")
    if name == "torch.storage.UntypedStorage":
        return torch.uint8
    if module not in ("torch", "torch.cuda") or not kind.endswith("Storage"):
        return None
    return STORAGE_TO_DTYPE.get(kind)


def result_of(name: str, args: tuple[Any, ...], depth: int) -> Value:
    """Return what calling a global by its full name gives.

    Raises:
        PickleError: It would use more memory than the file has bytes, or read outside it.
    """
    check = CHECKS.get(name)
    if check is not None:
        return Value(name, depth, of=check(name, args))
    if args and name.endswith(("Storage", "Tensor")) and name.startswith("torch."):
        raise PickleError(f"it asks for a new {name} of a size that it chooses")
    if args and name in CONTAINERS and (len(args) > 1 or not _is_plain_container(args[0])):
        raise PickleError(f"it makes a {name} of something that is no list")
    return Value(name, depth)


def _is_plain_container(value: Any) -> bool:
    """Return whether going through a value takes no longer than reading it did; a tensor may have any length."""
    return type(value) is Value and value.kind in ("list", "tuple", "dict")


def _check_bytearray(name: str, args: tuple[Any, ...]) -> None:
    if not args:
        return
    plain = type(args[0]) is str or (type(args[0]) is Value and args[0].kind == "_codecs.encode")
    if not plain or len(args) > 2 or (len(args) == 2 and args[1] not in _LATIN1):
        raise PickleError("it makes a bytearray in a way that pickle does not")


def _check_encode(name: str, args: tuple[Any, ...]) -> str:
    if len(args) != 2 or type(args[0]) is not str or args[1] not in _LATIN1:
        raise PickleError("it holds bytes in an encoding that pickle does not use")
    return args[0]


def _check_complex(name: str, args: tuple[Any, ...]) -> complex:
    if not all(type(arg) in (int, float) for arg in args):
        raise PickleError("it makes a complex number in a way that pickle does not")
    try:
        return complex(*args)
    except (TypeError, OverflowError):
        raise PickleError("it makes a complex number of what is none") from None


def _check_size(name: str, args: tuple[Any, ...]) -> None:
    if args and (len(args) > 1 or _numbers(args[0]) is None):
        raise PickleError("it makes a torch.Size of something that is no shape")


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Return the elements of a tuple of whole numbers from 0 up, None for anything else."""
    if type(value) is not Value or value.kind != "tuple":
        return None
    if value.of is None:
        value.of = True
        for number in value.items:
            if type(number) is not int or number < 0:
                value.of = False
    return value.items if value.of else None


def _check_strided(name: str, args: tuple[Any, ...]) -> int | None:
    """Check that a tensor lies in its storage; return its number of elements if it repeats some of them."""
    if len(args) < 4:
        raise PickleError(f"it calls {name} with {len(args)} arguments")
    storage, offset, size, stride = args[:4]
    extents, steps = _numbers(size), _numbers(stride)
    if type(storage) is not Value or storage.kind != "storage" or extents is None or steps is None:
        raise PickleError(f"it calls {name} with arguments that describe no tensor")
    if type(offset) is not int or offset < 0 or len(extents) != len(steps):
        raise PickleError("a tensor has an impossible shape")
    claim: Claim = storage.of
    itemsize = _v3_itemsize(args) if name == "torch._utils._rebuild_tensor_v3" else claim.dtype.itemsize
    have = claim.nbytes
    last, elements = offset, 1
    if 0 in extents:
        elements = 0
    else:
        for extent, step in zip(extents, steps, strict=True):
            last += (extent - 1) * step
            elements *= extent
            if elements > _MOST_ELEMENTS or last > _MOST_ELEMENTS:
                raise PickleError(f"a tensor in data/{claim.key} has an impossible shape")
    if elements and (last + 1) * itemsize > have:
        raise PickleError(f"a tensor needs {(last + 1) * itemsize} bytes of data/{claim.key}, which has {have}")
    repeats = elements * itemsize > have
    if repeats and name == "torch._utils._rebuild_qtensor":  # torch allocates all of its elements first
        raise PickleError(f"a quantized tensor has more elements than data/{claim.key}")
    return elements if repeats else None


def _v3_itemsize(args: tuple[Any, ...]) -> int:
    dtype = args[6] if len(args) > 6 else None
    name = dtype.of.rpartition(".")[2] if type(dtype) is Value and dtype.kind == "global" else ""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PickleError("a tensor has no known dtype")
    return found.itemsize


def _check_from_type(name: str, args: tuple[Any, ...]) -> Any:
    """A call inside a call: the first argument is called with the third."""
    function, inner = (args[0], args[2]) if len(args) == 4 else (None, None)
    if type(function) is not Value or function.kind != "global" or type(inner) is not Value or inner.kind != "tuple":
        raise PickleError(f"it calls {name} with arguments that describe no tensor")
    if function.of in _NO_TENSORS:
        raise PickleError(f"it calls {name} with {function.of}, which makes no tensor")
    return result_of(function.of, inner.items, 1).of


def _check_parts(name: str, args: tuple[Any, ...]) -> int | None:
    """Return how many elements torch goes through beyond those in the file, of the tensors that this is made from."""
    repeated = 0
    seen: set[int] = set()
    todo = list(args)
    while todo:
        arg = todo.pop()
        if type(arg) is not Value or id(arg) in seen:
            continue
        seen.add(id(arg))
        if arg.kind == "tuple":
            todo.extend(arg.items)
        elif type(arg.of) is int and arg.kind != "dict":
            repeated += arg.of
    if repeated > MOST_REPEATED:
        raise PickleError(f"it calls {name} with a tensor of {repeated} elements in a small storage")
    return repeated or None


STRIDED: Final = frozenset({
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_qtensor",
})  # fmt: skip
PARTS: Final = frozenset({
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
})  # fmt: skip
CONTAINERS = frozenset({"builtins.set", "collections.OrderedDict", "collections.Counter"})
_NO_TENSORS = CONTAINERS | {
    "builtins.bytearray", "builtins.complex", "_codecs.encode", "torch.Size", "torch._tensor._rebuild_from_type_v2"
}  # fmt: skip
_LATIN1 = ("latin1", "latin-1")
CHECKS = {
    **dict.fromkeys(STRIDED, _check_strided),
    **dict.fromkeys(PARTS, _check_parts),
    "builtins.bytearray": _check_bytearray,
    "builtins.complex": _check_complex,
    "_codecs.encode": _check_encode,
    "torch.Size": _check_size,
    "torch._tensor._rebuild_from_type_v2": _check_from_type,
}
