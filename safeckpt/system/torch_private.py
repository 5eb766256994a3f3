"""Names of torch that are not in its documentation, each with what it is for and what happens when it is gone.

The rest of the package takes them from here, so that a new version of torch has one file to be compared with. Those
that a safe load cannot do without are imported at the top: with a torch that has renamed one, importing safeckpt fails
and says which. The others have a fallback beside them.

The names of attributes are here as well, as functions that say what is asked: of tensors, modules, optimizers,
schedulers and data loaders. Where one that is asked with `getattr` is gone, the answer is that there is nothing; any
other ends in an `AttributeError` that names it. The tests of the architecture refuse private names elsewhere.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = [
    "BLOCKED_MODULES",
    "BYTES_DTYPES",
    "DTYPE_TO_STORAGE",
    "EXTRA_STATE",
    "IMPORT_MAPPING",
    "LAST_RATES",
    "NAME_MAPPING",
    "SCALE_FUNCTION",
    "SCHEDULERS_INSIDE",
    "SCHEDULE_PHASES",
    "STORAGE_CLASSES",
    "STORAGE_TO_DTYPE",
    "WRAPPED_MODULES",
    "allowed_globals",
    "batches_yielded",
    "children_of",
    "class_that_loads",
    "closed_form_rates",
    "communication_states",
    "coo_parts",
    "copy_all",
    "drop_unreduced_by_fsdp",
    "empty_per_channel",
    "fake_mode_is_on",
    "has_backward_hooks",
    "has_hooks_after_loading",
    "has_hooks_before_loading",
    "has_hooks_on_loading",
    "has_stepped",
    "hidden_buffers",
    "is_driven",
    "is_initialized",
    "is_transformed",
    "is_wrapper",
    "is_zero_tensor",
    "iterates_as_torch_does",
    "layout_named",
    "loader_of_entries",
    "local_tensor_of",
    "mark_stepped",
    "metadata_classes",
    "own_tensor_names",
    "part_bounds",
    "rebuild_from_type_v2",
    "rebuild_parameter",
    "rebuild_qtensor",
    "rebuild_tensor_v2",
    "rebuild_tensor_v3",
    "registered_globals",
    "restore_location_of",
    "set_versions",
    "sharded_like",
    "skip_data_is_on",
    "store_below",
    "typed_storage",
    "unreduced_by_fsdp",
    "untyped_of",
    "validate_compressed",
    "validate_coo",
    "version_of",
    "versions_of",
    "with_local_part",
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

    # Which name stands for which layout in the metadata of sharded checkpoints.
    from torch.serialization import _get_layout as layout_named

    # What map_location means: (storage, location) -> storage, as torch.load does it.
    from torch.serialization import _get_restore_location as restore_location_of

    # Which class of storages stands for which dtype in a file, and which dtypes have none and are stored as bytes.
    from torch.storage import _dtype_to_storage_type_map, _new_dtypes, _storage_type_to_dtype_map

    # Does a subclass of tensors say by itself which tensors are inside it?
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper
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


def with_local_part(sharded: Any, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor that lies as another one does, over another local part.

    Not by from_local(), which moves the part to the device of the mesh.
    """
    spec = sharded._spec
    if part.dtype != sharded.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=part.dtype))
    found: torch.Tensor = type(sharded)(part, spec, requires_grad=False)
    return found


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


# -- tensors ---------------------------------------------------------------------------------------------------------

# How often a tensor was written to in place: tells that one has changed without looking at its values.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")

# Whether a tensor is one of the zeros that autograd makes and that have no memory.
is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor

# Makes a quantized tensor of a kind that has no clone().
empty_per_channel = torch._empty_per_channel_affine_quantized


def coo_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (indices, values) of a sparse COO tensor; the public methods demand that it is coalesced, and a copy."""
    return tensor._indices(), tensor._values()


def local_tensor_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a DTensor, any other tensor itself; `to_local()` would make a new one each time."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def has_backward_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks, which torch would pickle with it."""
    return bool(tensor._backward_hooks)


def untyped_of(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the memory of a typed storage; `untyped()` warns that the class is deprecated."""
    return storage._untyped_storage


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy many tensors with one call of torch, which saves most of the time where they are small."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


# -- modules ---------------------------------------------------------------------------------------------------------

# The last part of a key of a state_dict that holds what get_extra_state() returned.
EXTRA_STATE = "_extra_state"
# Attributes in which torch.compile's and activation checkpointing's wrappers hold the module; both classes are private.
WRAPPED_MODULES = ("_orig_mod", "_checkpoint_wrapped_module")


def children_of(module: torch.nn.Module) -> Any:
    """Return the mapping of children, None and repeated ones included, which `named_children()` leaves out."""
    return module._modules


def own_tensor_names(module: torch.nn.Module) -> list[str]:
    """Return the names under which a module itself holds parameters and buffers, None included."""
    return [*module._parameters, *module._buffers]


def hidden_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of one module that its `state_dict` leaves out; no public name tells which they are."""
    for name in getattr(module, "_non_persistent_buffers_set", ()):
        buffer = module._buffers.get(name)
        if buffer is not None:
            yield name, buffer


def has_hooks_before_loading(module: torch.nn.Module) -> bool:
    """Return whether functions see a state before the module loads it, beside those of `fully_shard`."""
    return not all(map(_is_of_fully_shard, module._load_state_dict_pre_hooks.values()))


def has_hooks_after_loading(module: torch.nn.Module) -> bool:
    """Return whether functions run when a state was loaded, beside those of `fully_shard`."""
    return not all(map(_is_of_fully_shard, module._load_state_dict_post_hooks.values()))


def _is_of_fully_shard(hook: Any) -> bool:
    """Return whether a hook puts parameters back into their shards; torch's other wrappers rename what is loaded."""
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp.")


def loader_of_entries(kind: type[torch.nn.Module]) -> Any:
    """Return the method by which modules of a class load their own entries of a state: torch's own, or another."""
    return kind._load_from_state_dict


def class_that_loads(module: torch.nn.Module) -> type:
    """Return the class that this method of a module comes from."""
    return next(kind for kind in type(module).__mro__ if "_load_from_state_dict" in vars(kind))


def versions_of(state: Any) -> Mapping[str, Any] | None:
    """Return the versions of modules that torch keeps beside their `state_dict`; None where there are none."""
    return getattr(state, "_metadata", None)


def set_versions(state: Any, versions: Mapping[str, Any]) -> None:
    """Put the versions of modules beside their `state_dict`, where `load_state_dict` looks for them."""
    state._metadata = versions


def communication_states(module: torch.nn.Module) -> list[Any]:
    """Return the states of the communication hooks of a DistributedDataParallel; none of another module."""
    return [state for _, state in getattr(module, "_comm_hooks", ())]


# -- FSDP2 (fully_shard) ---------------------------------------------------------------------------------------------


def unreduced_by_fsdp(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, group, parameter) of what waits in a sharded module for its gradient to be reduced.

    Group and parameter are FSDP2's own records of them, for `drop_unreduced_by_fsdp`. There is no public way to see
    these gradients; with a torch that has renamed the module's own record, a save of such a module fails.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in (one for one in groups if one is not None):
        # Under set_requires_all_reduce(False) the sum over the ranks that shard waits for that over the copies.
        partly = getattr(group, "_partial_reduce_output", None) is not None
        for parameter in group.fsdp_params:
            gathered = getattr(parameter, "_unsharded_param", None)
            waits = parameter.unsharded_accumulated_grad is not None
            if partly or waits or (gathered is not None and gathered.grad is not None):
                yield parameter._param_fqn or "?", group, parameter


def drop_unreduced_by_fsdp(group: Any, parameter: Any) -> None:
    """Clear such a gradient, as `zero_grad` clears the others."""
    if hasattr(group, "_partial_reduce_output"):
        group._partial_reduce_output = None
    parameter.unsharded_accumulated_grad = None
    if getattr(parameter, "_unsharded_param", None) is not None:
        parameter._unsharded_param.grad = None


# -- optimizers and schedulers ---------------------------------------------------------------------------------------

SCHEDULERS_INSIDE = "_schedulers"  # attribute and state key of composed schedulers
LAST_RATES = "_last_lr"  # state key of the rates that a scheduler has set
SCHEDULE_PHASES = "_schedule_phases"  # state key of what OneCycleLR computes from its arguments
SCALE_FUNCTION = "_scale_fn_custom"  # state key of a function that CyclicLR was given


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `Optimizer.__init__` was called, without which an optimizer has no hooks."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


def has_hooks_on_loading(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions of the user's take part when an optimizer loads a state."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has made a step, as far as a scheduler can see; without it, that warns."""
    return bool(getattr(optimizer, "_opt_called", False))


def mark_stepped(optimizer: Any) -> None:
    """Let schedulers see that an optimizer has made a step, before a restart."""
    optimizer._opt_called = True


def is_driven(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scheduler has attached itself to an optimizer: it wraps `step`."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


# -- data loaders ----------------------------------------------------------------------------------------------------


def iterates_as_torch_does(kind: type) -> bool:
    """Return whether loaders of a class hand out batches by torch's own iterators."""
    own = torch.utils.data.DataLoader
    return getattr(kind, "__iter__", None) is own.__iter__ and getattr(kind, "_get_iterator", None) is own._get_iterator


def batches_yielded(iterator: Any) -> int | None:
    """Return how many batches an iterator of a DataLoader has handed out; None for anything else."""
    count = getattr(iterator, "_num_yielded", None)
    return count if isinstance(count, int) else None


# -- process groups --------------------------------------------------------------------------------------------------


def store_below(prefix: str) -> Any:
    """Return the store in which the processes of the default group have met, for names below a prefix.

    There is no public way to it.
    """
    found: Any = torch.distributed
    return found.PrefixStore(prefix, found.distributed_c10d._get_default_store())


def metadata_classes() -> tuple[type, type]:
    """Return the classes in the metadata of torch.distributed.checkpoint that are not in its documentation.

    The first says where a part of a tensor is, made of (name of the file, first byte, bytes); the second lists memory
    formats. Both are in every `.metadata` that the engine has written. With a torch that has neither, or has moved one,
    the first save or restore of shards is an ImportError that names it, and single files are not concerned. The engine
    is large, so it is imported here.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # noqa: PLC0415

    return _StorageInfo, _MEM_FORMAT_ENCODING
