"""The guard: find NaN and Inf in losses and tensors, fast when there is none, exact when there is one.

The fast pass is `torch.aminmax`, which propagates NaN and reads memory at full speed; `isfinite(t).all()`
writes a mask and is about twenty times slower. Only a tensor that fails it is looked at again, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from safeckpt.errors import NonFiniteError, UnsavableStateError
from safeckpt.state.tree import named_tensors

__all__ = ["Guard", "NonFiniteTensor", "check_gradients", "find_nonfinite", "nonfinite_loss", "scan"]

# No NaN and no Inf in the format: nothing to look for. Named by string, since an older torch may lack one.
_ALWAYS_FINITE = frozenset({"torch.float4_e2m1fn_x2"})
_NATIVE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SMALL = 1 << 12  # elements up to which tensors are joined before they are looked at
_BATCH = 1 << 18  # elements of such a joint: 1 MiB of float32 stays in cache
_PIECE = 1 << 22  # elements that are converted at a time when aminmax does not know the dtype


@dataclass(frozen=True)
class NonFiniteTensor:
    """One tensor that is not finite.

    Attributes:
        name: Dotted name, `component.qualified.name`.
        nan_count: Elements that are NaN.
        inf_count: Elements that are +Inf or -Inf.
        numel: Elements of the tensor (stored ones, when it is sparse).
        first_index: Index of the first element that is not finite, one entry per dimension.
    """

    name: str
    nan_count: int
    inf_count: int
    numel: int
    first_index: tuple[int, ...]

    def __str__(self) -> str:
        where = list(self.first_index)
        return f"{self.name}: {self.nan_count} NaN, {self.inf_count} Inf of {self.numel} elements, first at {where}"


@dataclass(frozen=True)
class Guard:
    """What the guard looks at besides the loss and the parameters, which it always does.

    Attributes:
        optimizer: Also guard the tensors of optimizers.
        buffers: Also guard the buffers of modules (BatchNorm statistics can be NaN while every weight is finite).
        allow_nonfinite: Glob patterns over tensor names that may hold NaN and Inf, for example
            `("model.attention_mask", "optimizer.*.bound")`.

    Raises:
        TypeError: `allow_nonfinite` is a single string or holds something else than strings.
    """

    optimizer: bool = True
    buffers: bool = True
    allow_nonfinite: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_nonfinite", check_patterns(self.allow_nonfinite, "allow_nonfinite"))


def check_patterns(patterns: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return `patterns` as a tuple of strings; a lone string would be read as one pattern per letter."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{argument} takes a sequence of glob patterns, for example ('model.mask',); got {patterns!r}")
    return tuple(patterns)


def find_nonfinite(tree: Any, *, allow: Sequence[str] = ()) -> list[NonFiniteTensor]:
    """Find every floating or complex tensor in `tree` that holds NaN or Inf.

    Args:
        tree: A tensor, a module, or nested mappings, lists, tuples and sets of tensors, any dtype, layout and
            device. Other values are passed over.
        allow: Glob patterns over the dotted names; a tensor that matches one is not looked at.

    Returns:
        The tensors that are not finite, in the order of `tree`; empty when all are finite.

    Raises:
        UnsavableStateError: A tensor's dtype or layout cannot be examined; it is named.

    Cost:
        One pass over memory, at `torch.aminmax` speed, and one device synchronisation per device and dtype.
        Only tensors that are not finite are read again.

    Example:
        >>> import torch, safeckpt
        >>> bad = {"layer": {"weight": torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]])}}
        >>> print(safeckpt.find_nonfinite(bad)[0])
        layer.weight: 1 NaN, 1 Inf of 4 elements, first at [0, 1]
    """
    patterns = check_patterns(allow, "allow")
    if isinstance(tree, torch.nn.Module):
        tree = dict(tree.named_parameters()) | dict(tree.named_buffers())
    names = ((name or "tensor", tensor) for name, tensor in named_tensors(tree))
    return scan((name, tensor) for name, tensor in names if not matches(name, patterns))


def check_gradients(module: torch.nn.Module, *, allow: Sequence[str] = ()) -> None:
    """Refuse to go on when a gradient is NaN or Inf: call it between `backward()` and `optimizer.step()`.

    One bad gradient turns every weight of its layer into NaN at the next step, and `clip_grad_norm_` makes it
    worse: the norm is infinite, so every healthy gradient is scaled to zero.

    Args:
        module: The module whose parameters' `.grad` are examined; parameters without one are passed over.
        allow: Glob patterns over parameter names that may hold NaN and Inf.

    Raises:
        NonFiniteError: A gradient is not finite; `tensors` names each. Nothing was changed.

    Cost:
        One pass over the gradients and one device synchronisation per device and dtype.
    """
    patterns = check_patterns(allow, "allow")
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    found = scan((f"{name}.grad", grad) for name, grad in gradients if not matches(name, patterns))
    if found:
        raise NonFiniteError(
            tensors=found,
            good="the weights have not been stepped with these gradients.",
            next_step="skip this batch (optimizer.zero_grad()) or stop; do not call optimizer.step().",
        )


def nonfinite_loss(loss: Any, name: str = "loss") -> str | None:
    """Return a description of what is not finite in `loss`, None when all of it is finite.

    Args:
        loss: None, a number, a tensor, a NumPy scalar or array, or a dict, list or tuple of them.
        name: How to call the value in the description.

    Raises:
        TypeError: `loss` is something else.
    """
    for path, value in _loss_values(loss, name):
        if isinstance(value, torch.Tensor):
            if scan([(path, value)]):
                return _described(path, name, value.tolist() if value.numel() == 1 else "a tensor with NaN or Inf")
        elif isinstance(value, np.ndarray):
            if not np.isfinite(value).all():
                return _described(path, name, "an array with NaN or Inf")
        elif not (math.isfinite(value.real) and math.isfinite(value.imag)):
            return _described(path, name, value)
    return None


def _described(path: str, name: str, value: object) -> str:
    return f"{value}" if path == name else f"{value} (in {path})"


def _loss_values(loss: Any, name: str) -> Iterable[tuple[str, Any]]:
    if loss is None:
        return
    if isinstance(loss, Mapping):
        for key, value in loss.items():
            yield from _loss_values(value, f"{name}[{key!r}]")
    elif isinstance(loss, list | tuple):
        for index, value in enumerate(loss):
            yield from _loss_values(value, f"{name}[{index}]")
    elif isinstance(loss, np.generic):
        yield name, loss.item()
    elif isinstance(loss, torch.Tensor | int | float | complex | np.ndarray):
        yield name, loss
    else:
        raise TypeError(
            f"{name} must be a number, a tensor, a NumPy scalar, or a dict or list of them; got {type(loss).__name__}"
        )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a glob pattern matches the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def scan(named: Iterable[tuple[str, torch.Tensor]]) -> list[NonFiniteTensor]:
    """Report the tensors that are not finite, in order; the shared engine of everything in this module."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
    order: dict[str, int] = {}
    for name, tensor in named:
        values = _guarded_values(name, tensor)
        if values is not None:
            order[name] = len(order)
            groups.setdefault((values.device, values.dtype), []).append((name, tensor, values))
    suspects = [entry for group in groups.values() for entry in _suspects(group)]
    suspects.sort(key=lambda entry: order[entry[0]])
    reports = (_report(name, tensor, values) for name, tensor, values in suspects)
    return [report for report in reports if report is not None]


def _guarded_values(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the real floating values behind `tensor`, without a copy; None when it cannot hold NaN or Inf."""
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return None  # no data; encoding refuses it by name
    t = tensor.detach()
    if t.is_quantized:
        # The integers are finite by nature, the scales are floating.
        per_channel = t.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        return t.q_per_channel_scales() if per_channel else torch.tensor([t.q_scale()], dtype=torch.float64)
    if not (t.is_floating_point() or t.is_complex()) or str(t.dtype) in _ALWAYS_FINITE:
        return None
    if hasattr(t, "to_local"):
        t = t.to_local()  # DTensor: each rank guards its own shard
    if t.is_nested:
        t = t.values()
    elif t.layout is torch.sparse_coo:
        t = t._values()  # values() demands a coalesced tensor, and coalescing copies
    elif t.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        t = t.values()
    elif t.layout is not torch.strided:
        if not t.is_mkldnn:
            raise UnsavableStateError(
                location=name, type_name=f"tensor of layout {t.layout}", reason="the guard cannot examine this layout"
            )
        t = t.to_dense()
    if t.is_complex():
        t = torch.view_as_real(t.conj() if t.is_conj() else t)
    return t if t.numel() else None


def _in_memory_order(t: torch.Tensor) -> torch.Tensor:
    """Return the same elements as a flat tensor where memory has no holes: aminmax is fast on contiguous memory.

    Dimensions of stride 0 repeat one element, so one index of each is enough: an expanded tensor may claim 10**12.
    """
    for dim, (size, stride) in enumerate(zip(t.size(), t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(dim, 0, 1)
    if t.is_contiguous():
        return t
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.size(), t.stride(), strict=True))
    return t.as_strided((span,), (1,)) if span == t.numel() else t


def _suspects(
    group: list[tuple[str, torch.Tensor, torch.Tensor]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return the entries of one device and dtype whose extremes are not finite, with one synchronisation.

    Small tensors are looked at in batches: fifty thousand calls of aminmax cost more than reading the memory.
    """
    batches: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = []
    room = 0
    for entry in group:
        size = entry[2].numel()
        if size > _SMALL:
            batches.append([entry])
        elif size <= room:
            batches[-1].append(entry)
            room -= size
            continue
        else:
            batches.append([entry])
            room = _BATCH - size
            continue
        room = 0
    extremes: list[torch.Tensor] = []
    for batch in batches:
        values = [entry[2] for entry in batch]
        extremes += _aminmax(batch[0][0], values[0] if len(batch) == 1 else torch.cat([v.reshape(-1) for v in values]))
    finite = torch.isfinite(torch.stack(extremes)).view(-1, 2).all(dim=1).tolist()
    suspects = [batch for batch, is_finite in zip(batches, finite, strict=True) if not is_finite]
    return [entry for batch in suspects for entry in (batch if len(batch) == 1 else _nonfinite_of(batch))]


def _nonfinite_of(
    batch: list[tuple[str, torch.Tensor, torch.Tensor]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    return [entry for entry in batch if _suspects([entry])]


def _aminmax(name: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = _in_memory_order(values)
    if flat.dtype in _NATIVE:
        low, high = torch.aminmax(flat)
        return low, high
    # float8 and whatever comes next: widened piece by piece, so that no copy of the whole is made.
    try:
        pieces = [torch.aminmax(piece.to(torch.float32)) for piece in flat.reshape(-1).split(_PIECE)]
    except (NotImplementedError, RuntimeError) as error:
        raise UnsavableStateError(
            location=name, type_name=f"tensor of dtype {values.dtype}", reason=f"the guard cannot examine it ({error})"
        ) from error
    return torch.stack([p.min for p in pieces]).amin(), torch.stack([p.max for p in pieces]).amax()


def _report(name: str, tensor: torch.Tensor, values: torch.Tensor) -> NonFiniteTensor | None:
    """Count exactly; None when the elements themselves are finite (only memory between them was not)."""
    if tensor.is_complex() and tensor.layout is torch.strided:
        values = tensor.detach().resolve_conj()
    elif values.dtype not in _NATIVE:
        values = values.to(torch.float32)
    nan, inf = torch.isnan(values), torch.isinf(values)
    if values.is_complex():
        inf &= ~nan
    bad = nan | inf
    if not bool(bad.any()):
        return None
    index = torch.nonzero(bad.reshape(-1))[0]
    first = torch.unravel_index(index, bad.shape) if bad.dim() else ()
    return NonFiniteTensor(
        name=name,
        nan_count=int(nan.sum()),
        inf_count=int(inf.sum()),
        numel=values.numel(),
        first_index=tuple(int(i) for i in first),
    )
