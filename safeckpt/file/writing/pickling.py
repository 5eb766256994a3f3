"""A payload as torch pickles it, and the records its storages become.

The pickle is torch's own, byte for byte, wherever every storage is needed as a whole. Where the file holds a part of a
storage (:mod:`safeckpt.file.writing.spans`), tensors in it begin at another element than in memory.
"""

from __future__ import annotations

import io
import pickle
import secrets
import types
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.serialization import location_tag, normalize_storage_type

from safeckpt.file.writing.convert import EMPTY_BYTES
from safeckpt.file.writing.guarded import mark_guarded
from safeckpt.file.writing.spans import UsedStorages, View, stored_dtype, view_of
from safeckpt.system.tensor_kind import fills_storage
from safeckpt.system.torch_private import (
    DTYPE_TO_STORAGE,
    STORAGE_CLASSES,
    allowed_globals,
    has_backward_hooks,
    rebuild_from_type_v2,
    rebuild_parameter,
    rebuild_qtensor,
    rebuild_tensor_v2,
    rebuild_tensor_v3,
    untyped_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from safeckpt.file.writing.spans import Span

__all__ = ["Pickled", "pickle_payload", "used_storages"]

_PLAIN_DTYPES: frozenset[torch.dtype] = frozenset(
    dtype for dtype in DTYPE_TO_STORAGE if "qint" not in str(dtype) and "quint" not in str(dtype)
)
_STRIDED = torch.strided
_CALLABLE = (type, types.FunctionType, types.BuiltinFunctionType)
_KNOWN_CALLABLES = frozenset(
    [value for value in allowed_globals().values() if isinstance(value, _CALLABLE)] + list(STORAGE_CLASSES)
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


class Pickled(NamedTuple):
    """A payload in two parts.

    Attributes:
        data: The record ``data.pkl``.
        spans: Bytes of the records ``data/0``, ``data/1``, ...
        plain: Whether every class and function in it is one that torch itself allows a safe load to use.
    """

    data: bytes
    spans: Sequence[Span]
    plain: bool


def pickle_payload(payload: object, protocol: int = 2, finite: Iterable[tuple[str, torch.Tensor]] = ()) -> Pickled:
    """Pickle a payload; no tensor is copied.

    Args:
        payload: Anything that :func:`safeckpt.file.writing.encoding.encode` lets pass.
        protocol: 2, or 3. What protocol 3 adds are opcodes for bytes that a safe load does not know, so that a
            file of protocol 3 uses none of them.
        finite: Names and tensors of the payload that have to be finite when they are written.

    Raises:
        StorageTypeConflictError: Tensors of different dtypes share bytes.
    """
    # Nearly always every storage is needed as a whole, which is known when the pickle is made. Where one is not, the
    # pickle is made again, with what is known by then.
    pickler, data = _pickled(payload, fix_imports=protocol < 3)
    storages = pickler.storages
    storages.check_types()
    if not storages.are_needed_whole:
        storages.cut()
        pickler = type(pickler)(storages, pickler, fix_imports=protocol < 3)
        data = pickler.pickled(payload)
    mark_guarded(finite, pickler.placed, pickler.whole, storages.spans)
    if protocol == 3:
        data = b"\x80\x03" + data[2:]
    return Pickled(data, pickler.spans, pickler.plain)


def used_storages(payload: object) -> UsedStorages:
    """Find every storage that a payload refers to, and the tensors in it."""
    return _pickled(payload, fix_imports=True)[0].storages


def _pickled(payload: object, *, fix_imports: bool) -> tuple[_Pickler, bytes]:
    """Return the pickle of a payload, and what has made it."""
    try:
        pickler = _Pickler(UsedStorages(), fix_imports=fix_imports)
        return pickler, pickler.pickled(payload)
    except _BareStorageError:
        pickler = _BareStoragePickler(UsedStorages(), fix_imports=fix_imports)
        return pickler, pickler.pickled(payload)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Return whether torch reduces a tensor to storage, offset, size and stride and nothing else.

    What has no memory, or not enough of it, does not come here: encoding refuses it.
    """
    return (
        tensor.layout is _STRIDED
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.dtype in _PLAIN_DTYPES
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
        and not has_backward_hooks(tensor)
    )


def _of_storage(storage: torch.TypedStorage | torch.UntypedStorage) -> tuple[torch.UntypedStorage, View]:
    if isinstance(storage, torch.UntypedStorage):
        return storage, View(None, 1, 0, storage.nbytes())
    untyped = untyped_of(storage)
    itemsize = storage.dtype.itemsize
    return untyped, View(storage.dtype, itemsize, 0, untyped.nbytes() // itemsize * itemsize)


def _rewrite(reduced: Any, change: Callable[[torch.UntypedStorage, View], tuple[Any, ...]]) -> Any:
    """Let ``change`` replace storage and offset in what a tensor reduces to, where they are in it."""
    if type(reduced) is not tuple or len(reduced) != 2:
        return reduced
    function, args = reduced
    if function is rebuild_from_type_v2:
        inner, kind, inner_args, state = args
        inner, inner_args = _rewrite((inner, inner_args), change)
        return function, (inner, kind, inner_args, state)
    if function not in (rebuild_tensor_v2, rebuild_tensor_v3, rebuild_qtensor):
        return reduced
    storage, offset, size, stride, *rest = args
    itemsize = (rest[2] if function is rebuild_tensor_v3 else storage.dtype).itemsize
    untyped, dtype = (
        (storage, None) if isinstance(storage, torch.UntypedStorage) else (untyped_of(storage), storage.dtype)
    )
    reach = 0 if 0 in size else 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    place = change(untyped, View(dtype, itemsize, offset * itemsize, (offset + reach) * itemsize))
    if function is rebuild_tensor_v3 and rest[0]:
        # torch.load puts a storage into a tensor that already requires grad, which torch forbids. As an attribute
        # that is set on the finished tensor it can be loaded, by torch as well.
        args = (*place, size, stride, False, *rest[1:])
        return rebuild_from_type_v2, (function, torch.Tensor, args, {"requires_grad": True})
    return function, (*place, size, stride, *rest)


class _BareStorageError(Exception):
    """There is a storage in the payload that is no tensor's."""


class _NoHooks:
    """Stands for the empty OrderedDict of hooks that each tensor has in torch's pickles; cheaper to pickle than one."""

    __slots__ = ()


_NO_HOOKS_REDUCED = (OrderedDict, ())


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, with every tensor at its place in the file.

    torch refers to a storage by a persistent id: a tuple, and an opcode after it. Asked of a method `persistent_id`,
    it would be asked for with every key and every number. So a number that nobody can know stands behind the tuple
    while it is pickled, among the arguments of the call that makes the tensor; then the opcode takes its place.

    Args:
        storages: Says what that place is, and takes note of the tensors.
        before: What has pickled the same payload before; it is held, since its memo keeps the objects alive by whose
            identity their places are known.
        fix_imports: As for `pickle.Pickler`.

    Attributes:
        storages: As given.
        placed: The record of every simple tensor, by identity. The pickler's own memo holds the tensors.
        whole: The same for those alone that are all of their storage.
        spans: The records, in the order in which they are first referred to.
        plain: Whether every class and function so far is one that torch itself allows a safe load to use.
    """

    def __init__(self, storages: UsedStorages, before: _Pickler | None = None, *, fix_imports: bool) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=2, fix_imports=fix_imports)
        self._before = before
        self.storages = storages
        self._mark = secrets.randbits(62) | 1 << 62  # the system's entropy: no random stream is touched
        self._types: dict[torch.dtype | None, type] = {None: normalize_storage_type(torch.UntypedStorage)}
        self._locations: dict[torch.device, str] = {}
        self.placed: dict[int, Span] = {}
        self.whole: dict[int, Span] = {}
        self.spans: list[Span] = []
        self.plain = True

    def pickled(self, payload: object) -> bytes:
        """Return the pickle of a payload.

        Raises:
            _BareStorageError: It takes a `_BareStoragePickler`.
        """
        self.dump(payload)
        mark = pickle.LONG1 + b"\x08" + self._mark.to_bytes(8, "little")
        return self._buffer.getvalue().replace(mark, pickle.BINPERSID)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is _NoHooks:
            return _NO_HOOKS_REDUCED
        if kind is torch.Tensor and _is_simple(obj):
            span, offset = self._place_simple(obj, id(obj))
            place = self._refer(span), self._mark, offset
            return rebuild_tensor_v2, (*place, tuple(obj.size()), obj.stride(), obj.requires_grad, _NoHooks())
        if kind is torch.nn.Parameter and _is_simple(obj):
            data = obj.data
            self._place_simple(data, id(obj))
            return rebuild_parameter, (data, obj.requires_grad, _NoHooks())
        if isinstance(obj, torch.Tensor):
            self.plain = self.plain and (kind is torch.Tensor or kind is torch.nn.Parameter)
            return _rewrite(obj.__reduce_ex__(2), self._place)
        if kind is torch.TypedStorage or kind is torch.UntypedStorage:
            raise _BareStorageError
        if kind not in _KNOWN_KINDS and not (isinstance(obj, _CALLABLE) and obj in _KNOWN_CALLABLES):
            self.plain = False
        return NotImplemented

    def _place_simple(self, tensor: torch.Tensor, identity: int) -> tuple[Span, int]:
        if not fills_storage(tensor):
            span, offset = self.storages.place(tensor.untyped_storage(), view_of(tensor))
            self.placed[identity] = span
            return span, offset
        span = self.storages.place_whole(tensor.untyped_storage(), stored_dtype(tensor), tensor.itemsize)
        self.placed[identity] = self.whole[identity] = span
        return span, 0

    def _place(self, storage: torch.UntypedStorage, view: View) -> tuple[Any, ...]:
        span, offset = self.storages.place(storage, view)
        return self._refer(span), self._mark, offset

    def _refer(self, span: Span) -> tuple[Any, ...]:
        """Name a record as torch does: by number, in the order in which records are first referred to."""
        if span.persistent_id is not None:
            # A new tuple each time, as torch makes one: pickle would refer to the same one by its number.
            return (*span.persistent_id,)
        dtype = span.dtype
        storage_type = self._types.get(dtype)
        if storage_type is None:
            storage_type = getattr(torch, DTYPE_TO_STORAGE[dtype])  # type: ignore[index]  # None is in there
            self._types[dtype] = storage_type
        device = span.storage.device
        location = self._locations.get(device)
        if location is None:
            location = self._locations[device] = location_tag(span.storage)
        nbytes = span.high - span.low
        numel = nbytes if dtype is None else nbytes // dtype.itemsize
        span.persistent_id = ("storage", storage_type, str(len(self.spans)), location, numel)
        self.spans.append(span)
        return span.persistent_id


class _BareStoragePickler(_Pickler):
    """The same for payloads in which there are storages by themselves, as torch's old classes of them are."""

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) is torch.TypedStorage or type(obj) is torch.UntypedStorage:
            return self._refer(self.storages.place(*_of_storage(obj))[0])
        return None
