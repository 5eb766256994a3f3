"""The guard: what has to be finite, and what may be otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from safeckpt.errors import NonFiniteError, NonFiniteTensor
from safeckpt.state.loss_limit import TimesMedian, checked_limit
from safeckpt.state.nonfinite import scan
from safeckpt.state.tree import join, named_leaves

__all__ = [
    "Guard",
    "check_gradients",
    "find_nonfinite",
    "guarded_tensors",
    "matcher",
    "nonfinite_floats",
    "selected_tensors",
]

_WIDEST = {"f": 8, "c": 16}  # bytes of the widest NumPy number of each kind that torch has too


@dataclass(frozen=True)
class Guard:
    """What the guard refuses besides a loss and parameters that are not finite, which it always does.

    Attributes:
        optimizer: Also guard the tensors of optimizers.
        buffers: Also guard the buffers of modules (BatchNorm statistics can be NaN while every weight is finite).
        allow_nonfinite: Glob patterns over tensor names that may hold NaN and Inf, for example
            `("model.attention_mask", "optimizer.*.bound")`.
        loss_above: Refuse a finite loss, too, that is above this number, or above a multiple of the median of those
            before it: `TimesMedian(3, steps=100)`. Of a loss of several numbers the largest counts.

    Raises:
        TypeError: `allow_nonfinite` is a single string or holds something else than strings; `loss_above` is neither a
            number nor a `TimesMedian`.
        ValueError: `loss_above` is not finite.
    """

    optimizer: bool = True
    buffers: bool = True
    allow_nonfinite: Sequence[str] = ()
    loss_above: float | TimesMedian | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_nonfinite", check_patterns(self.allow_nonfinite, "allow_nonfinite"))
        checked_limit(self.loss_above)


def check_patterns(patterns: Sequence[str], argument: str) -> tuple[str, ...]:
    """Return `patterns` as a tuple of strings; a lone string would be read as one pattern per letter."""
    several = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not several or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{argument} takes a sequence of glob patterns, for example ('model.mask',); got {patterns!r}")
    return tuple(patterns)


def find_nonfinite(tree: Any, *, allow: Sequence[str] = ()) -> list[NonFiniteTensor]:
    """Find every floating or complex tensor in `tree` that holds NaN or Inf.

    Args:
        tree: A tensor, a NumPy array, a module, or nested mappings, lists, tuples and sets of them, any dtype,
            layout and device. Other values are passed over.
        allow: Glob patterns over the dotted names; a tensor that matches one is not looked at.

    Returns:
        The tensors that are not finite, in the order of `tree`; empty when all are finite.

    Raises:
        UnsavableStateError: A tensor's dtype or layout cannot be examined; it is named.

    Cost:
        One pass over memory, at `torch.sum` speed, and one device synchronisation per device and dtype.
        Only tensors that are not finite are read again.

    Example:
        >>> import torch, safeckpt
        >>> bad = {"layer": {"weight": torch.tensor([[1.0, float("nan")], [float("inf"), 0.0]])}}
        >>> print(safeckpt.find_nonfinite(bad)[0])
        layer.weight: 1 NaN, 1 Inf of 4 elements, first at [0, 1]
    """
    return scan(selected_tensors(tree, allow=allow))


def selected_tensors(tree: Any, *, allow: Sequence[str] = ()) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of every tensor that `find_nonfinite` looks at."""
    allowed = matcher(check_patterns(allow, "allow"))
    names = ((name or "tensor", tensor) for name, tensor in guarded_tensors(tree))
    return [entry for entry in names if allowed is None or not allowed(entry[0])]


def guarded_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, tensor) of every tensor, array and module in nested containers."""
    for name, leaf in named_leaves(tree, prefix):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf
        elif isinstance(leaf, np.ndarray):
            if leaf.dtype.kind in "fc" and leaf.dtype.itemsize <= _WIDEST[leaf.dtype.kind]:
                yield name, torch.from_numpy(_native(leaf))
        elif isinstance(leaf, torch.TypedStorage):
            yield name, torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(leaf)
        elif isinstance(leaf, torch.nn.Module):
            for owned in (leaf.named_parameters(), leaf.named_buffers()):
                yield from ((join(name, key), tensor) for key, tensor in owned)


def _native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array itself, or a copy: torch takes no memory that is read-only, runs backwards or is swapped."""
    native = np.asarray(array).astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return native if native.flags.writeable and native.flags.aligned else native.copy()


def nonfinite_floats(tree: Any, prefix: str = "", *, infinite: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, value as a tensor) of the plain floats that are NaN, and Inf when these count as well."""
    for name, leaf in named_leaves(tree, prefix):
        if isinstance(leaf, float | complex | np.inexact) and not np.isfinite(leaf) and (infinite or np.isnan(leaf)):
            yield name, torch.tensor(complex(leaf) if isinstance(leaf, complex) else float(leaf.real))


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
    allowed = matcher(check_patterns(allow, "allow"))
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    found = scan((f"{name}.grad", grad) for name, grad in gradients if allowed is None or not allowed(name))
    if found:
        raise NonFiniteError(
            tensors=found,
            good="the weights have not been stepped with these gradients.",
            next_step="skip this batch (optimizer.zero_grad()) or stop; do not call optimizer.step().",
        )


@lru_cache(maxsize=32)
def matcher(patterns: tuple[str, ...]) -> Callable[[str], object] | None:
    """Return a function that tells whether a name matches one of the glob patterns; None when there are none."""
    return re.compile("|".join(map(translate, patterns))).match if patterns else None
