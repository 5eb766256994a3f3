"""Names of torch that are not in its documentation, each with what it is for and what happens when it is gone.

The rest of the package takes them from here, so that a new version of torch has one file to be compared with. Those
that a safe load cannot do without are imported at the top: with a torch that has renamed one, importing safeckpt fails
and says which. The others have a fallback beside them.

Attributes of tensors and storages that have no public name are used where they are needed: `_indices` and `_values`
(the public ones demand a coalesced tensor), `_is_zerotensor`, `_backward_hooks`, `_untyped_storage`.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "BLOCKED_MODULES",
    "BYTES_DTYPES",
    "DTYPE_TO_STORAGE",
    "IMPORT_MAPPING",
    "NAME_MAPPING",
    "STORAGE_CLASSES",
    "STORAGE_TO_DTYPE",
    "allowed_globals",
    "closed_form_rates",
    "fake_mode_is_on",
    "is_transformed",
    "part_bounds",
    "rebuild_from_type_v2",
    "rebuild_parameter",
    "rebuild_qtensor",
    "rebuild_tensor_v2",
    "rebuild_tensor_v3",
    "registered_globals",
    "restore_location_of",
    "sharded_like",
    "skip_data_is_on",
    "typed_storage",
    "validate_compressed",
    "validate_coo",
]

try:
    # Is a tensor one of those that exist only inside a transform of torch.func? Its storage must not be asked for.
    from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed

    # By these functions a pickled tensor is made again. They are the format: torch wrote their names into every file.
    from torch._tensor import _rebuild_from_type_v2 as rebuild_from_type_v2

    # How torch's weights_only reader names modules of Python 2, and what it allows: the scan follows the same rules.
    from torch._utils import IMPORT_MAPPING, NAME_MAPPING
    from torch._utils import _rebuild_parameter as rebuild_parameter
    from torch._utils import _rebuild_qtensor as rebuild_qtensor
    from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
    from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3
    from torch._weights_only_unpickler import _blocklisted_modules as BLOCKED_MODULES  # noqa: N812
    from torch._weights_only_unpickler import _get_allowed_globals as allowed_globals
    from torch._weights_only_unpickler import _get_user_allowed_globals as registered_globals

    # What map_location means: (storage, location) -> storage, as torch.load does it.
    from torch.serialization import _get_restore_location as restore_location_of

    # Which class of storages stands for which dtype in a file, and which dtypes have none and are stored as bytes.
    from torch.storage import _dtype_to_storage_type_map, _new_dtypes, _storage_type_to_dtype_map
except ImportError as error:
    message = f"safeckpt needs a name that torch {torch.__version__} does not have ({error}); install another version"
    raise ImportError(message) from error

BYTES_DTYPES: frozenset[torch.dtype] = frozenset(_new_dtypes())
DTYPE_TO_STORAGE: dict[torch.dtype, str] = _dtype_to_storage_type_map()
STORAGE_TO_DTYPE: dict[str, torch.dtype] = _storage_type_to_dtype_map()
STORAGE_CLASSES: frozenset[type] = frozenset(torch._storage_classes)

# The checks of sparse indices that torch makes when it loads a sparse tensor; without them bad ones would be written.
validate_coo = torch._validate_sparse_coo_tensor_args
validate_compressed = torch._validate_sparse_compressed_tensor_args


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return what torch's rebuild functions take for a storage, without the warning that the class is deprecated."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def fake_mode_is_on() -> bool:
    """Return whether tensors made now are fake ones; where torch cannot tell, loads take torch's own, slower way."""
    guards: Any = getattr(torch, "_guards", None)
    return guards is None or guards.detect_fake_mode(None) is not None


def skip_data_is_on() -> bool:
    """Return whether this is inside `torch.serialization.skip_data()`; a torch that cannot tell is taken not to be."""
    return bool(getattr(getattr(torch.serialization, "_serialization_tls", None), "skip_data", False))


def closed_form_rates(scheduler: Any) -> list[Any] | None:
    """Return the learning rates that a scheduler has at its step whatever came before; None where it has no such form.

    Most of torch's schedulers have `_get_closed_form_lr`; in the others named here, `get_lr` is one by itself. Without
    the flag it would warn that it is called outside of `step`. Where a torch has renamed them, there is no form.
    """
    if hasattr(scheduler, "_get_closed_form_lr"):
        return list(scheduler._get_closed_form_lr())
    kinds = (torch.optim.lr_scheduler.LambdaLR, torch.optim.lr_scheduler.OneCycleLR)
    if isinstance(scheduler, kinds):
        scheduler._get_lr_called_within_step = True
        return list(scheduler.get_lr())
    return None


def part_bounds(shape: torch.Size, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of what this process has of a tensor that is cut in this way."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - only in a group

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(sizes), tuple(offsets)


def sharded_like(live: Any, shape: torch.Size, dtype: torch.dtype, cut: tuple[int | None, ...]) -> torch.Tensor:
    """Return a DTensor without memory on the mesh of a live one.

    Args:
        live: The live one.
        shape: Of the whole tensor.
        dtype: Its dtype.
        cut: For each dimension of the mesh, the dimension that is cut there. Where the mesh has another number of them,
            every rank has all of the tensor.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - only in a group

    mesh = live.device_mesh
    dimensions = cut if len(cut) == mesh.ndim else (None,) * mesh.ndim
    placements = [
        # The live one may be cut in strides, which has no public name.
        Replicate() if dimension is None else own if own.is_shard(dimension) else Shard(dimension)
        for dimension, own in zip(dimensions, live.placements, strict=True)
    ]
    sizes, _ = part_bounds(shape, mesh, placements)
    whole = torch.empty(shape, dtype=dtype, device="meta")
    part = torch.empty(sizes, dtype=dtype, device="meta")
    made: torch.Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.size(), stride=whole.stride()
    )
    return made
