"""Build the object of a pickle with Python's own reader in C.

``torch.load`` reads a pickle in pure Python, some 60 us for a tensor, which is most of the time of a load unless the
tensors are large. Here the C reader does it. It takes only what is left of a safe load when every luxury is refused:

* the pickle has been scanned (:mod:`safeckpt.file.pickle_scan`): no opcode, no function and no argument in it that
  torch's ``weights_only`` reader would not take as well;
* it asks for nothing but the few names below, which build plain containers and plain tensors. A pickle with anything
  else in it, such as a type that the user registered, goes to ``torch.load``.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import torch

from safeckpt.file.pickle_calls import storage_dtype
from safeckpt.file.pickle_scan import python3_name
from safeckpt.system.torch_private import allowed_globals, rebuild_tensor_v2, typed_storage, untyped_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from safeckpt.file.pickle_calls import Claim
    from safeckpt.file.pickle_scan import Scan

__all__ = ["can_unpickle", "unpickle"]

_SIMPLE: Final = frozenset({
    "collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.bytearray", "builtins.set",
    "builtins.complex", "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter",
})  # fmt: skip


def can_unpickle(scan: Scan) -> bool:
    """Return whether a pickle that was scanned asks for nothing that only torch's own reader may give it."""
    return not scan.builds and all(map(_is_simple, scan.globals))


def unpickle(data: bytes, scan: Scan, storage_of: Callable[[Claim], torch.UntypedStorage]) -> Any:
    """Return the object in a pickle that was scanned and that `can_unpickle`.

    Args:
        data: The pickle.
        scan: What was found in it.
        storage_of: Gives a storage by what the pickle says about it, on its device.

    Raises:
        pickle.UnpicklingError: It asks for something else, which the scan did not see.
    """
    return _Unpickler(data, scan, storage_of).load()


def _is_simple(name: str) -> bool:
    return name in _SIMPLE or storage_dtype(name) is not None or isinstance(allowed_globals().get(name), torch.dtype)


def _rebuild_tensor(storage: torch.TypedStorage, offset: int, size: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """Return a tensor over a storage; torch's function asks of each whether it is a fake one, which takes longer.

    Args:
        storage: The storage.
        offset: The first element.
        size: The size.
        stride: The stride.
        rest: Whether it requires a gradient, hooks, and flags.
    """
    is_bare = len(rest) in (2, 3) and rest[0] is False and type(rest[1]) is OrderedDict and not any(rest[1:])
    if not is_bare:  # its errors are torch's, too
        return rebuild_tensor_v2(storage, offset, size, stride, *rest)  # type: ignore[no-any-return]
    memory = untyped_of(storage)
    return torch.empty(0, dtype=storage.dtype, device=memory.device).set_(memory, offset, size, stride)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, scan: Scan, storage_of: Callable[[Claim], torch.UntypedStorage]) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._claims = scan.claims
        self._storage_of = storage_of
        self._loaded: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = ".".join(python3_name(module, name))
        if not _is_simple(full):
            raise pickle.UnpicklingError(f"{full} is not allowed")
        found = allowed_globals()[full]
        return _rebuild_tensor if found is rebuild_tensor_v2 else found

    def persistent_load(self, persistent_id: Any) -> Any:
        key: str = persistent_id[2]
        found = self._loaded.get(key)
        if found is None:
            claim = self._claims[key]
            found = self._loaded[key] = typed_storage(self._storage_of(claim), claim.dtype)
        return found
