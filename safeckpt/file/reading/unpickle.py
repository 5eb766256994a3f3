"""Read the pickle of a state with very many small tensors.

``torch.load`` reads a pickle in pure Python, some 30 us for a tensor. Where thousands of them lie in one record this is
most of the time of a load. Here Python's own reader in C does it instead. It takes only what is left of a safe load
when every luxury is refused:

* the pickle has been scanned (:mod:`safeckpt.file.pickle_scan`): no opcode, no function and no argument in it that
  torch's ``weights_only`` reader would not take as well;
* it asks for nothing but the few names below, which build plain containers and plain tensors. A pickle with anything
  else in it, such as a type that the user registered, goes to ``torch.load``.

A tensor from a shared record gets memory of its own at once.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._utils import _rebuild_tensor, _rebuild_tensor_v2
from torch._weights_only_unpickler import _get_allowed_globals

from safeckpt.file.pickle_calls import storage_dtype
from safeckpt.file.pickle_scan import python3_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from safeckpt.file.pickle_scan import Scan

__all__ = ["is_simple", "unpickle"]

_SIMPLE: Final = frozenset({
    "collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.bytearray", "builtins.set",
    "builtins.complex", "torch.Size", "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter",
})  # fmt: skip


def is_simple(names: Iterable[str]) -> bool:
    """Tell whether a pickle that asks for these names can be read here."""
    allowed = _get_allowed_globals()
    return all(
        name in _SIMPLE or storage_dtype(name) is not None or isinstance(allowed.get(name), torch.dtype)
        for name in names
    )


def unpickle(
    data: bytes, scan: Scan, shared_keys: Collection[str], storage_of: Callable[[str], torch.UntypedStorage]
) -> tuple[Any, bool]:
    """Return the object in a pickle that was scanned and is simple, and whether it is what torch would return.

    It is not where a function of torch's, for which another one stands in here, is itself one of the values.

    Args:
        data: The pickle.
        scan: What was found in it.
        shared_keys: Keys of the records that hold many tensors.
        storage_of: Gives the storage of a record, on its device.
    """
    reader = _Reader(data, scan, shared_keys, storage_of)
    loaded = reader.load()
    reader.memo.clear()
    # Referred to by the dictionary, by the loop, and by the call that counts.
    return loaded, all(sys.getrefcount(function) == 3 for function in reader.stand_ins.values())


class _Reader(pickle.Unpickler):
    def __init__(
        self, data: bytes, scan: Scan, shared_keys: Collection[str], storage_of: Callable[[str], torch.UntypedStorage]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._scan = scan
        self._shared_keys = shared_keys
        self._storage_of = storage_of
        self.stand_ins = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
        }
        self._loaded: dict[str, Any] = {}
        self._shared: dict[int, torch.Tensor] = {}  # elements of a shared record, by the identity of its storage

    def find_class(self, module: str, name: str) -> Any:
        full = ".".join(python3_name(module, name))
        if not is_simple([full]):
            raise pickle.UnpicklingError(f"{full} is not allowed")
        return self.stand_ins.get(full) or _get_allowed_globals()[full]

    def persistent_load(self, persistent_id: Any) -> Any:
        key: str = persistent_id[2]
        found = self._loaded.get(key)
        if found is None:
            dtype = self._scan.claims[key].dtype
            storage = self._storage_of(key)
            found = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
            self._loaded[key] = found
            if key in self._shared_keys:
                size = (storage.nbytes() // dtype.itemsize,)
                elements = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, size, (1,))
                self._shared[id(found)] = elements
        return found

    def _tensor(self, storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        """Stand in for torch's function of this kind: a part of a shared record is copied out of it."""
        shared = self._shared.get(id(storage))
        if shared is not None:
            return torch.as_strided_copy(shared, size, stride, offset)
        return _rebuild_tensor(storage, offset, size, stride)  # type: ignore[no-any-return]

    def _tensor_v2(self, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        """Stand in for torch's function of this kind."""
        shared = self._shared.get(id(storage))
        if shared is None:
            return _rebuild_tensor_v2(storage, offset, size, stride, *rest)
        requires_grad, hooks = rest  # such tensors are plain: they have no metadata
        tensor = torch.as_strided_copy(shared, size, stride, offset).requires_grad_(requires_grad)
        tensor._backward_hooks = hooks
        return tensor
