"""A payload as torch pickles it, and the records its storages become.

The pickle is torch's own, byte for byte, wherever every storage is needed as a whole. It differs where
:mod:`safeckpt.file.writing.views` says that a tensor finds its elements at another place than in its storage.
"""

from __future__ import annotations

import io
import pickle
import types
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _rebuild_parameter, _rebuild_qtensor, _rebuild_tensor, _rebuild_tensor_v2, _rebuild_tensor_v3
from torch._weights_only_unpickler import _get_allowed_globals
from torch.serialization import location_tag, normalize_storage_type

from safeckpt.file.writing.convert import EMPTY_BYTES
from safeckpt.file.writing.storages import UsedStorages
from safeckpt.file.writing.views import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safeckpt.file.writing.record_content import Content
    from safeckpt.file.writing.storages import WholeStorage
    from safeckpt.file.writing.views import Segment

__all__ = ["Pickled", "pickle_payload", "stored_dtype", "use_of", "used_storages"]

# Types whose elements the format calls bytes: tensors of them carry their dtype beside the storage.
_BYTES_DTYPES: frozenset[torch.dtype] = frozenset(torch.storage._new_dtypes())
_PLAIN_DTYPES: frozenset[torch.dtype] = frozenset(
    dtype
    for dtype in torch.storage._dtype_to_storage_type_map()
    if "qint" not in str(dtype) and "quint" not in str(dtype)
)
_STRIDED = torch.strided
_CALLABLE = (type, types.FunctionType, types.BuiltinFunctionType)
_KNOWN_CALLABLES = frozenset(
    [value for value in _get_allowed_globals().values() if isinstance(value, _CALLABLE)] + list(torch._storage_classes)
)
_KNOWN_KINDS = frozenset(
    {
        type(EMPTY_BYTES),
        OrderedDict,
        Counter,
        set,
        complex,
        bytearray,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
    }
)
_NOTHING = (int, ())  # what the first pass puts in the place of a tensor


@dataclass(frozen=True)
class Pickled:
    """A payload in two parts.

    Attributes:
        data: The record ``data.pkl``.
        contents: Bytes of the records ``data/0``, ``data/1``, ...
        packed: Indices of those that hold many small tensors.
        plain: Whether every class and function in it is one that torch itself allows a safe load to use.
    """

    data: bytes
    contents: Sequence[Content]
    packed: Sequence[int]
    plain: bool


def pickle_payload(payload: object, protocol: int = 2, *, pack: bool = True) -> Pickled:
    """Pickle a payload; no tensor is copied.

    Args:
        payload: Anything that :func:`safeckpt.file.writing.encoding.encode` lets pass.
        protocol: 2, or 3. What protocol 3 adds are opcodes for bytes that a safe load does not know, so that a
            file of protocol 3 uses none of them.
        pack: Put many small storages together into one record.
    """
    first = _Collector()
    first.dump(payload)
    first.storages.plan(pack=pack)
    buffer = io.BytesIO()
    second = _Pickler(buffer, first, fix_imports=protocol < 3)
    second.dump(payload)
    data = buffer.getvalue()
    if protocol == 3:
        data = b"\x80\x03" + data[2:]
    packed = [index for index, segment in enumerate(second.segments) if segment.packed]
    return Pickled(data, [segment.content for segment in second.segments], packed, second.plain)


def used_storages(payload: object) -> UsedStorages:
    """Find every storage that a payload refers to, and the views of it."""
    collector = _Collector()
    collector.dump(payload)
    return collector.storages


def stored_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the element type by which the file calls the storage of a tensor; None for bytes."""
    return None if tensor.dtype in _BYTES_DTYPES else tensor.dtype


def use_of(tensor: torch.Tensor) -> Use:
    """Describe a strided tensor as a view of its storage."""
    dtype = stored_dtype(tensor)
    return Use.of(dtype, tensor.element_size(), int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether torch reduces a tensor to storage, offset, size and stride and nothing else."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and not tensor.__dict__
        and tensor.dtype in _PLAIN_DTYPES
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor._backward_hooks
    )


def _of_storage(storage: torch.TypedStorage | torch.UntypedStorage) -> tuple[torch.UntypedStorage, Use]:
    if isinstance(storage, torch.UntypedStorage):
        return storage, Use.of(None, 1, 0, (storage.nbytes(),), (1,))
    untyped = storage._untyped_storage
    itemsize = storage.dtype.itemsize
    return untyped, Use.of(storage.dtype, itemsize, 0, (untyped.nbytes() // itemsize,), (1,))


def _rewrite(reduced: Any, change: Callable[[Any, Use], tuple[Any, int, tuple[int, ...]]]) -> Any:
    """Let ``change`` replace storage, offset and stride in what a tensor reduces to, where they are in it."""
    if type(reduced) is not tuple or len(reduced) != 2:
        return reduced
    function, args = reduced
    if function is _rebuild_from_type_v2:
        inner, kind, inner_args, state = args
        inner, inner_args = _rewrite((inner, inner_args), change)
        return function, (inner, kind, inner_args, state)
    if function not in (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_qtensor):
        return reduced
    storage, offset, size, stride, *rest = args
    dtype = rest[2] if function is _rebuild_tensor_v3 else storage.dtype
    itemsize = dtype.itemsize
    use = Use.of(None if isinstance(storage, torch.UntypedStorage) else dtype, itemsize, offset, size, stride)
    storage, offset, stride = change(storage, use)
    if function is _rebuild_tensor_v3 and rest[0]:
        # torch.load puts a storage into a tensor that already requires grad, which torch forbids. As an attribute
        # that is set on the finished tensor it can be loaded, by torch as well.
        args = (storage, offset, size, stride, False, *rest[1:])
        return _rebuild_from_type_v2, (function, torch.Tensor, args, {"requires_grad": True})
    return function, (storage, offset, size, stride, *rest)


class _Collector(pickle.Pickler):
    """The first pass: walk the payload as the second one will, note every view, write nothing of worth.

    Attributes:
        storages: What was found.
        whole: The tensors that need all of their storage, by identity. The pickler's own memo holds them.
    """

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.storages = UsedStorages()
        self.whole: dict[int, WholeStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not _is_plain(obj):
                return _rewrite(obj.__reduce_ex__(2), self._note)
            storage = obj.untyped_storage()
            if obj.nbytes == storage.nbytes() and obj.is_contiguous():
                whole = self.storages.add_whole(storage, obj)
                if whole is not None:
                    self.whole[id(obj)] = whole
                    return _NOTHING
            self.storages.add(storage, use_of(obj))
            return _NOTHING
        if isinstance(obj, torch.Tensor):
            return _rewrite(obj.__reduce_ex__(2), self._note)
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            self.storages.add(*_of_storage(obj))
            return _NOTHING
        return NotImplemented

    def _note(self, storage: Any, use: Use) -> tuple[Any, int, tuple[int, ...]]:
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        self.storages.add(untyped, use)
        return None, 0, ()


class _Reference:
    """Stands for a storage in what a tensor reduces to."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: tuple[Any, ...]) -> None:
        self.persistent_id = persistent_id


class _Pickler(pickle.Pickler):
    """The second pass: as torch.save pickles, with every view at its place in the file."""

    def __init__(self, buffer: io.BytesIO, first: _Collector, *, fix_imports: bool) -> None:
        super().__init__(buffer, protocol=2, fix_imports=fix_imports)
        self._first = first  # held whole: its memo keeps the objects alive by whose identity the plan goes
        self._storages = first.storages
        self._packs: dict[int, _Reference] = {}
        self._shapes: dict[torch.Size, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._types: dict[torch.dtype, type] = {}
        self.segments: list[Segment] = []
        self.plain = True

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        kind = type(obj)
        if kind is _Reference:
            return obj.persistent_id  # type: ignore[no-any-return]
        if kind is torch.TypedStorage or kind is torch.UntypedStorage:
            storage, use = _of_storage(obj)
            return self._refer(self._storages.place(storage, use).segment, use.dtype).persistent_id
        return None

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.nn.Parameter and _is_plain(obj):
            whole = self._first.whole.get(id(obj))
            data = obj.data
            if whole is not None:
                self._first.whole[id(data)] = whole
            return _rebuild_parameter, (data, obj.requires_grad, OrderedDict())
        if kind is torch.Tensor:
            whole = self._first.whole.get(id(obj))
            if whole is not None:
                return self._whole(obj, whole)
            if _is_plain(obj):
                use = use_of(obj)
                place = self._storages.place(obj.untyped_storage(), use)
                reference = self._refer(place.segment, use.dtype)
                hooks: OrderedDict[int, Any] = OrderedDict()
                return _rebuild_tensor_v2, (reference, place.offset, use.size, place.stride, obj.requires_grad, hooks)
        if isinstance(obj, torch.Tensor):
            self.plain = self.plain and (kind is torch.Tensor or kind is torch.nn.Parameter)
            return _rewrite(obj.__reduce_ex__(2), self._change)
        if kind not in _KNOWN_KINDS and not (isinstance(obj, _CALLABLE) and obj in _KNOWN_CALLABLES):
            self.plain = False
        return NotImplemented

    def _whole(self, tensor: torch.Tensor, whole: WholeStorage) -> Any:
        """Reduce a tensor that needs all of its storage; one that is packed in the shortest way there is."""
        segment = whole.segment
        reference = self._packs.get(id(segment)) if segment.packed else None
        if reference is None:
            reference = self._refer(segment, whole.dtype)
        if not segment.packed:
            size = tuple(tensor.size())
            return _rebuild_tensor_v2, (reference, 0, size, tensor.stride(), tensor.requires_grad, OrderedDict())
        shape = self._shapes.get(tensor.shape)
        if shape is None:  # the same two objects for every tensor of this shape: pickled once, then referred to
            shape = self._shapes[tensor.shape] = (tuple(tensor.size()), tensor.stride())
        if tensor.requires_grad:
            return _rebuild_tensor_v2, (reference, whole.offset, *shape, True, OrderedDict())
        return _rebuild_tensor, (reference, whole.offset, *shape)

    def _change(self, storage: Any, use: Use) -> tuple[Any, int, tuple[int, ...]]:
        untyped = storage if isinstance(storage, torch.UntypedStorage) else storage._untyped_storage
        place = self._storages.place(untyped, use)
        return self._refer(place.segment, use.dtype), place.offset, place.stride

    def _refer(self, segment: Segment, dtype: torch.dtype | None) -> _Reference:
        """Name a record as torch does: by number, in the order in which records are first referred to."""
        if segment.key is None:
            segment.key = str(len(self.segments))
            self.segments.append(segment)
        numel = segment.content.nbytes
        if dtype is None:
            storage_type = normalize_storage_type(torch.UntypedStorage)
        else:
            found = self._types.get(dtype)
            if found is None:
                found = self._types[dtype] = getattr(torch, torch.storage._dtype_to_storage_type_map()[dtype])
            storage_type = found
            numel //= dtype.itemsize
        reference = _Reference(("storage", storage_type, segment.key, location_tag(segment.storage), numel))
        if segment.packed:
            self._packs[id(segment)] = reference
        return reference
