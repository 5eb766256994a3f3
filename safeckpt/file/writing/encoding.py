"""Turn what a user has into what a safe load can read back, or refuse it by name, before the disk is touched.

``torch.load(weights_only=True)`` reads a small set of types. ``torch.save`` writes nearly anything, so a state with a
NumPy scalar or a Path in it is written without a word and refused weeks later. Here plain equivalents are converted
where nothing is lost, and everything else is refused with its key path and what to save instead.
"""

from __future__ import annotations

import pickle
import types
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from safeckpt.errors import UnsavableStateError
from safeckpt.file.gc_pause import no_collection
from safeckpt.file.tree_rebuild import CONTAINERS, Rebuild
from safeckpt.file.writing.convert import EMPTY_BYTES, converted
from safeckpt.file.writing.pickling import used_storages
from safeckpt.file.writing.readability import is_allowed, parts_of, why_unreadable
from safeckpt.file.writing.spans import StorageTypeConflictError, stored_dtype, view_of
from safeckpt.file.writing.tensors import why_unsavable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from safeckpt.file.writing.spans import View

__all__ = ["MOST_LEVELS", "encode"]

MOST_LEVELS: Final = 200  # of nesting: torch's reader and Python's pickler would manage more, people's states need 20

_ATOMS = frozenset(
    {type(EMPTY_BYTES), type(None), bool, float, complex, bytearray, torch.device, torch.layout, torch.Size}
)
_MOST_INT_BITS = 255 * 8 - 1  # a safe load reads integers of up to 255 bytes, sign included
_MOST_STR_BYTES = 0xFFFFFFFF
_MAY_BE_LONG = _MOST_STR_BYTES // 4
_SHOWN_KEY = 60
_SHOWN = frozenset({str, int, float, bool, type(None)})
_WITHOUT_PARTS = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.qscheme, torch.TypedStorage)
_TOO_DEEP = f"it is nested more than {MOST_LEVELS} levels deep"
_FLATTER = "store it in a flatter form, such as a list with indices."


def encode(tree: Any, *, root: str = "obj") -> Any:
    """Return a payload: the same structure with nothing in it that a safe load would refuse.

    NumPy scalars become Python numbers, NumPy arrays tensors (of the same memory where NumPy allows it), ``b""`` an
    equal value that a safe load can read. Everything else is kept as it is: identity of shared containers, cycles,
    ties between tensors, ``OrderedDict._metadata``. Types registered with ``torch.serialization.add_safe_globals``
    pass.

    Args:
        tree: Any object; it is not changed.
        root: What to call it in messages.

    Returns:
        ``tree`` itself when nothing had to be converted, else new containers around the same tensors.

    Raises:
        UnsavableStateError: Something in it cannot be read back. Nothing was written.

    Cost:
        One walk over the containers; no tensor is read or copied, sparse ones excepted, whose indices are checked.

    Example:
        >>> import numpy as np
        >>> encode({"lr": np.float64(0.5), "betas": (0.9, 0.999)})
        {'lr': 0.5, 'betas': (0.9, 0.999)}
    """
    walker = _Walker()
    try:
        with no_collection():
            walker.walk(tree, 0)
            payload = Rebuild(walker.replaced).of(tree) if walker.replaced else tree
            walker.check_shared_storages(payload, root)
    except _RefusedError as refused:
        raise refused.error(root) from None
    return payload


class _RefusedError(Exception):
    """A value is refused; on its way up, every container adds how the value is reached from it."""

    def __init__(self, value: object, reason: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason
        self.hint = hint
        self.steps: list[str] = []

    def location(self, root: str) -> str:
        """Return the key path, as Python would index it."""
        path = root
        for step in reversed(self.steps):
            path = f"list({path}){step[1:]}" if step.startswith("#") else path + step
        return path

    def error(self, root: str) -> UnsavableStateError:
        """Return the error for the user."""
        # It knows the types of many libraries, and is needed when a value is refused.
        from safeckpt.file.writing.hints import hint_for, special_reason  # noqa: PLC0415

        kind = type(self.value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        location = self.location(root)
        hint = self.hint.format(x=location) if self.hint else hint_for(self.value, location)
        return UnsavableStateError(
            location=location, type_name=name, reason=self.reason or special_reason(self.value), cure=hint
        )


def _key_step(key: Any) -> str:
    plain = type(key) in _SHOWN or (type(key) is tuple and all(type(item) in _SHOWN for item in key))
    shown = repr(key) if plain else f"<{type(key).__name__}>"
    return f"[{shown if len(shown) <= _SHOWN_KEY else shown[: _SHOWN_KEY - 3] + '...'}]"


class _Walker:
    """One pass over a tree that finds what has to be replaced and refuses what cannot be."""

    def __init__(self) -> None:
        self.replaced: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._open: set[int] = set()  # containers that pickle cannot refer to before they are complete
        self._fixed = 0  # inside objects that cannot be rebuilt, so nothing in them can be replaced
        self._kept: list[Any] = []  # parts made for this walk: while they live, no other object gets their id
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.dtype | None]] = {}
        self._mixed = False

    def walk(self, value: Any, depth: int) -> None:
        """Check a value and everything in it.

        Raises:
            _RefusedError: Something cannot be saved.
        """
        kind = type(value)
        if kind in _ATOMS:
            return
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self._tensor(value, depth)
        elif kind is int:
            if value.bit_length() > _MOST_INT_BITS:
                raise _RefusedError(value, "integers of more than 255 bytes cannot be loaded again", "save str({x}).")
        elif kind is str:
            if len(value) > _MAY_BE_LONG and len(value.encode("utf-8", "surrogatepass")) > _MOST_STR_BYTES:
                raise _RefusedError(value, "texts of more than 4 GiB cannot be saved", "save it in parts.")
        elif kind is bytes:
            if not value:
                self._replace(value, EMPTY_BYTES)
        elif kind in CONTAINERS:
            self._container(kind, value, depth)
        else:
            self._other(kind, value, depth)

    def _container(self, kind: type, value: Any, depth: int) -> None:
        if id(value) in self._open:
            raise _RefusedError(
                value, f"a {kind.__name__} that contains itself cannot be loaded again", "break the cycle."
            )
        if id(value) in self._seen:
            return
        if depth >= MOST_LEVELS:
            raise _RefusedError(value, _TOO_DEEP, _FLATTER)
        self._seen.add(id(value))
        late = kind is tuple or kind is Counter
        if late:
            self._open.add(id(value))
        if kind is list or kind is tuple:
            self._items(enumerate(value), depth)
        elif kind is set:
            self._elements(value, depth)
        else:
            self._elements((key for key in value if type(key) is not str), depth, value)
            self._items(value.items(), depth)
            if kind is OrderedDict and value.__dict__:
                self._attributes(value.__dict__, depth)
        if late:
            self._open.discard(id(value))

    def _items(self, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        key = None
        try:
            for key, item in items:  # noqa: B007  read where the error passes
                if type(item) not in _ATOMS:
                    self.walk(item, depth + 1)
        except _RefusedError as refused:
            refused.steps.append(_key_step(key))
            raise

    def _elements(self, elements: Iterable[Any], depth: int, within: Iterable[Any] | None = None) -> None:
        """Walk what has no key of its own: elements of a set, keys of a dictionary."""
        element = None
        try:
            for element in elements:
                self.walk(element, depth + 1)
        except _RefusedError as refused:
            index = next(index for index, other in enumerate(within or elements) if other is element)
            refused.steps.append(f"#[{index}]")
            raise

    def _attributes(self, attributes: dict[str, Any], depth: int) -> None:
        name = ""
        try:
            for name, item in attributes.items():  # noqa: B007  read where the error passes
                self.walk(item, depth + 1)
        except _RefusedError as refused:
            refused.steps.append(f".{name}")
            raise

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        why = why_unsavable(tensor)
        if why is not None:
            raise _RefusedError(tensor, *why)
        if tensor.layout is torch.strided and not tensor.is_nested:
            # The format gives a storage one element type. Nearly always no storage has two; whether it matters
            # where one has is worked out only then.
            storage = tensor.untyped_storage()
            kind = stored_dtype(tensor)
            if self._storages.setdefault(id(storage), (storage, kind))[1] is not kind:
                self._mixed = True
        else:
            self._mixed = True  # several storages in one tensor
        if tensor.__dict__:
            with self._unchangeable():
                self._attributes(tensor.__dict__, depth)

    def _other(self, kind: type, value: Any, depth: int) -> None:
        """Convert a value of another type, let it pass if it is registered, or refuse it."""
        if id(value) in self._seen or id(value) in self.replaced:
            return
        plain = converted(value)
        if plain is not None:
            self._replace(value, plain)
            return
        if kind is torch.UntypedStorage or not (is_allowed(kind) or is_allowed(value)):
            raise _RefusedError(value)
        self._seen.add(id(value))
        if depth >= MOST_LEVELS:
            raise _RefusedError(value, _TOO_DEEP, _FLATTER)
        if not isinstance(value, _WITHOUT_PARTS):
            self._mixed = True  # there may be tensors in it that this walk does not see
            self._parts(value, depth)
        reason = why_unreadable(value)
        if reason is not None:
            raise _RefusedError(value, reason)

    def _parts(self, value: Any, depth: int) -> None:
        try:
            parts = parts_of(value)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise _RefusedError(value, f"pickling it fails: {error}") from None
        self._kept.append(parts)
        step = ""
        try:
            with self._unchangeable():
                for step, part in parts:  # noqa: B007  read where the error passes
                    self.walk(part, depth + 1)
        except _RefusedError as refused:
            refused.steps.append(step)
            raise

    @contextmanager
    def _unchangeable(self) -> Iterator[None]:
        self._fixed += 1
        yield
        self._fixed -= 1

    def _replace(self, value: Any, plain: Any) -> None:
        if self._fixed:
            hint = (
                "save the plain value: it is inside an object that is saved as it is, so it cannot be converted here."
            )
            raise _RefusedError(value, "", hint)
        self.replaced[id(value)] = plain

    def check_shared_storages(self, payload: Any, root: str) -> None:
        """Refuse tensors of different element types that share bytes; both are named."""
        if not self._mixed:
            return
        try:
            used_storages(payload).check_types()
        except StorageTypeConflictError as conflict:
            views = (conflict.first, conflict.second)
            first, second = (_Finder(conflict.storage, view).find(payload) for view in views)
            if second is None or first is None:
                raise _RefusedError(payload, str(conflict)) from None
            second.reason = f"it shares memory with {first.location(root)}, which has another dtype"
            second.hint = "save a copy of one of them: {x}.clone()."
            raise second from None


class _Finder(_Walker):
    """Finds the first tensor over a given stretch of a storage."""

    def __init__(self, storage: torch.UntypedStorage, view: View) -> None:
        super().__init__()
        self._storage = storage
        self._view = view

    def find(self, tree: Any) -> _RefusedError | None:
        """Return what a refusal of that tensor would be."""
        try:
            self.walk(tree, 0)
        except _RefusedError as found:
            return found
        return None

    def _tensor(self, tensor: torch.Tensor, depth: int) -> None:
        plain = tensor.layout is torch.strided and not tensor.is_nested
        if plain and tensor.untyped_storage() is self._storage and view_of(tensor) == self._view:
            raise _RefusedError(tensor)
        super()._tensor(tensor, depth)
