"""Say what to save instead, for each kind of value that a safe load cannot read back."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import types
import uuid
from collections import abc
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]  # not in its __all__

__all__ = ["hint_for", "special_reason"]

_REGISTER = "register its type with torch.serialization.add_safe_globals"

# The first row that fits counts, so subclasses stand before their bases. {x} is the key path of the value.
_HINTS: tuple[tuple[Any, str], ...] = (
    (enum.Enum, "save {x}.value"),
    (np.random.Generator, "save {x}.bit_generator.state, arrays in it as lists"),
    (np.random.BitGenerator, "save {x}.state, arrays in it as lists"),
    (np.random.RandomState, "save {x}.get_state(legacy=False), arrays in it as lists"),
    (np.ma.MaskedArray, "save {x}.data and {x}.mask"),
    (np.matrix, "save numpy.asarray({x})"),
    (np.ndarray, "save {x}.tolist(), or an array of numbers or booleans of at most 64 bits each"),
    (np.dtype, "save str({x})"),
    ((np.datetime64, np.timedelta64), "save str({x})"),
    (np.longdouble, "save float({x}), which drops the digits beyond double precision"),
    (np.clongdouble, "save complex({x}), which drops the digits beyond double precision"),
    (np.generic, "save {x}.item()"),
    (bool, "save bool({x})"),
    (int, "save int({x})"),
    (float, "save float({x})"),
    (complex, "save complex({x})"),
    (str, "save str({x})"),
    (bytes, "save bytes({x})"),
    (bytearray, "save bytearray({x})"),
    (UninitializedTensorMixin, "run one forward pass, which gives it its shape, then save"),
    (torch.Tensor, f"save {{x}}.detach().as_subclass(torch.Tensor), or {_REGISTER}"),
    (torch.UntypedStorage, "save torch.empty(0, dtype=torch.uint8).set_({x}), a tensor over the same bytes"),
    (torch.nn.Module, "save {x}.state_dict()"),
    (torch.Generator, "save {x}.get_state()"),
    ((torch.memory_format, torch.qscheme, torch.dtype), "save str({x})"),
    ((torch.finfo, torch.iinfo), "save {x}.dtype"),
    (random.Random, "save {x}.getstate()"),
    (pathlib.PurePath, "save str({x})"),
    ((argparse.Namespace, types.SimpleNamespace), "save vars({x})"),
    ((dt.datetime, dt.date, dt.time), "save {x}.isoformat()"),
    (dt.timedelta, "save {x}.total_seconds()"),
    ((decimal.Decimal, fractions.Fraction, uuid.UUID), "save str({x})"),
    (slice, "save ({x}.start, {x}.stop, {x}.step)"),
    (type(Ellipsis), "save None, or the string '...'"),
    (collections.Counter, "save collections.Counter({x})"),
    (collections.OrderedDict, "save collections.OrderedDict({x})"),
    (abc.Mapping, "save dict({x})"),
    ((list, range, collections.deque, abc.MappingView), "save list({x})"),
    (tuple, "save tuple({x}), or {x}._asdict() if it is a named tuple"),
    (frozenset, "save set({x}), or sorted({x})"),
    (abc.Set, "save set({x})"),
    (array.array, "save torch.tensor({x}), or {x}.tolist()"),
    (memoryview, "save bytes({x})"),
    (abc.Sequence, "save list({x})"),
    (io.IOBase, "save its name and position; open it again after loading"),
    (types.ModuleType, "save {x}.__name__"),
    ((types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, np.ufunc),
     "leave it out, or save its name and look it up after loading: code is no state"),
    (type, f"save {{x}}.__qualname__ and look it up after loading, or {_REGISTER}"),
    (abc.Iterator, "save list({x}), or the position in it"),
)  # fmt: skip

_BY_NAME = {  # of types from libraries that are not imported here
    "omegaconf": "save omegaconf.OmegaConf.to_container({x}, resolve=True)",
    "pandas": "save {x}.to_dict('list')",
    "ml_collections": "save {x}.to_dict()",
}


def hint_for(value: object, location: str) -> str:
    """Return one line that says what to save in the place of a value."""
    kind = type(value)
    by_name = _BY_NAME.get(kind.__module__.partition(".")[0])
    if by_name is not None:
        return _sentence(by_name, location)
    for kinds, hint in _HINTS:
        if isinstance(value, kinds):
            return _sentence(hint, location)
    return _sentence(_by_shape(value), location)


def _by_shape(value: object) -> str:
    """Find a hint by what a value can do."""
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict({x})"
    if callable(getattr(value, "state_dict", None)):
        return "save {x}.state_dict()"
    if hasattr(value, "__dict__"):
        return f"save vars({{x}}), or {_REGISTER}"
    return "store plain values and tensors in its place"


def _sentence(hint: str, location: str) -> str:
    return hint.format(x=location) + "."


def special_reason(value: object) -> str:
    """Return why a value is refused; empty where a safe load simply does not know its type."""
    if isinstance(value, UninitializedTensorMixin):
        return "it has no shape and no data yet"
    if isinstance(value, torch.UntypedStorage):
        return "a safe load would give back another type"
    return ""
