"""Weights in the files of others and of ours: one dict of tensors, read when asked for."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from safeckpt.errors import CheckpointNotFoundError, ComponentMismatchError, DamagedCheckpointError, listed
from safeckpt.file import CheckpointFile, SafetensorsFile, is_folder, load_lazily, open_checkpoint
from safeckpt.remote import is_url, local_copy
from safeckpt.run.catalog import latest
from safeckpt.state import RESERVED_KEY
from safeckpt.store import CheckpointDirectory, expand_user
from safeckpt.system.tensor_kind import TensorKind, kind_of

__all__ = ["HeldTensor", "Weights", "open_weights"]

_USUAL_NAMES = ("model", "model_state_dict", "state_dict")
_HUGGING_FACE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_VERIFIED = "every byte verified"
_CRC_VERIFIED = "verified by the checksums of its records"
_NOT_VERIFIED = "its format has no checksums"


class HeldTensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        shape: Its extents.
        dtype: Its dtype.
        fault: Why it cannot be taken; empty when it can.
        read: Returns its values.
    """

    shape: torch.Size
    dtype: torch.dtype
    fault: str
    read: Callable[[], torch.Tensor]


class Weights(NamedTuple):
    """What a file holds for a model.

    Attributes:
        path: The file or folder.
        component: The key under which it is.
        verified: How far it was checked.
        tensors: The tensors by name.
        others: Names of what is no tensor.
        checks: Tell that nobody has written into the files since they were opened.
    """

    path: str
    component: str
    verified: str
    tensors: dict[str, HeldTensor]
    others: list[str]
    checks: list[Callable[[], None]]


def open_weights(path: str | os.PathLike[str], component: str | None, opened: contextlib.ExitStack) -> Weights:
    """Open a file, a folder of Hugging Face, a run's directory or a URL; nothing is read but what verifies it.

    Args:
        path: As in `warm_start`.
        component: As in `warm_start`.
        opened: Closes the files.

    Raises:
        LoadError: It is damaged, or asks for a type that is not allowed.
        ComponentMismatchError: There is no such component, or several that could be meant.
        ValueError: A folder holds several kinds of weights.
    """
    if is_url(text := str(path)):
        return _open_checkpoint(opened.enter_context(local_copy(text)), text, component, opened)
    at = Path(expand_user(path))
    if at.name.endswith(".safetensors"):
        return _open_files(at, [at], component, opened)
    if not at.is_dir() or is_folder(at):
        return _open_checkpoint(at, str(at), component, opened)
    there = [name for name in _HUGGING_FACE if (at / name).exists()]
    if not there:
        newest = latest(at)
        if newest is None:
            raise CheckpointNotFoundError(directory=at, step=None, available_steps=())
        return _open_checkpoint(Path(newest.path), str(newest.path), component, opened)
    several = {name for name in there if name.startswith(there[0].partition(".")[0])}
    if len(several) > 1 or CheckpointDirectory(at).steps():
        raise ValueError(f"{at} holds several kinds of weights ({', '.join(there)}): give the path of one file")
    if there[0].endswith(".json"):
        return _open_files(at, _files_of_index(at / there[0]), component, opened)
    if there[0].endswith(".bin"):
        return _open_checkpoint(at / there[0], str(at / there[0]), component, opened)
    return _open_files(at, [at / there[0]], component, opened)


def _files_of_index(index: Path) -> list[Path]:
    """Return the files that an index of Hugging Face names.

    Raises:
        DamagedCheckpointError: It is none, or names something outside of its folder.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        is_index = bool(names) and all(type(name) is str and Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_index, names = False, []
    if not is_index:
        reason = "it is no index of weights"
        raise DamagedCheckpointError(path=index, reason=reason, next_step="fetch or write the folder again")
    return [index.with_name(name) for name in names]


def _open_files(path: Path, files: Sequence[Path], component: str | None, opened: contextlib.ExitStack) -> Weights:
    """Open the files of Hugging Face that are one state.

    Raises:
        DamagedCheckpointError: The files do not hold what their index says.
    """
    weights = Weights(str(path), "", _NOT_VERIFIED, {}, [], [])
    for file in files:
        if file.suffix == ".safetensors":
            if component:
                raise ComponentMismatchError(missing=[component], path=file, cure="leave component= out.")
            part = _open_safetensors(file, opened)
        else:
            part = _open_checkpoint(file, str(file), component, opened)
            weights = weights._replace(component=part.component, verified=part.verified)
        twice = weights.tensors.keys() & part.tensors.keys()
        if twice:
            reason = f"another file of the folder has {listed(sorted(twice))} as well"
            raise DamagedCheckpointError(path=file, reason=reason, next_step="fetch or write the folder again")
        weights.tensors.update(part.tensors)
        weights.others.extend(part.others)
        weights.checks.extend(part.checks)
    if len(files) > 1:
        _check_index(path, files[0].suffix, weights)
    return weights


def _check_index(folder: Path, suffix: str, weights: Weights) -> None:
    index = folder / next(name for name in _HUGGING_FACE if name.endswith(f"{suffix}.index.json"))
    listed_there = json.loads(index.read_bytes())["weight_map"].keys()
    differing = sorted(listed_there ^ weights.tensors.keys())
    if differing:
        reason = f"it does not agree with the files about {listed(differing)}"
        raise DamagedCheckpointError(path=index, reason=reason, next_step="fetch or write the folder again")


def _open_safetensors(path: Path, opened: contextlib.ExitStack) -> Weights:
    file = opened.enter_context(SafetensorsFile(path))

    def reader(name: str) -> Callable[[], torch.Tensor]:
        return lambda: file.read(name)

    held = {name: HeldTensor(entry.shape, entry.dtype, "", reader(name)) for name, entry in file.entries.items()}
    return Weights(str(path), "", _NOT_VERIFIED, held, [], [file.check_unchanged])


def _open_checkpoint(path: Path, name: str, component: str | None, opened: contextlib.ExitStack) -> Weights:
    """Open a file of ours or of torch, or a sharded checkpoint, and verify it."""
    file = open_checkpoint(path)
    opened.callback(file.close)
    report = file.verify()
    payload, source = load_lazily(file)

    def held(value: Any) -> HeldTensor | None:
        holder = source.holder_of(value)
        if holder is None and not isinstance(value, torch.Tensor):
            return None
        if holder is not None:
            return HeldTensor(holder.shape, holder.dtype, "", lambda: source.read(value))
        kind = kind_of(value)
        fault = "" if kind in (TensorKind.PLAIN, TensorKind.FLAGGED) else f"a {kind.value} tensor in the file"
        return HeldTensor(value.size(), value.dtype, fault, lambda: source.read(value).clone())

    key, state = _state_of(payload, component, name, lambda value: held(value) is not None)
    tensors = {str(one): found for one, value in state.items() if (found := held(value)) is not None}
    others = [str(one) for one in state if str(one) not in tensors]
    is_proven = not isinstance(file, CheckpointFile) or report.self_proving
    return Weights(name, key, _VERIFIED if is_proven else _CRC_VERIFIED, tensors, others, [source.check_unchanged])


def _state_of(
    payload: Any, component: str | None, path: str, is_tensor: Callable[[Any], bool]
) -> tuple[str, Mapping[Any, Any]]:
    """Return the dict of tensors that is meant, and its key.

    Raises:
        ComponentMismatchError: There is none, or it is not clear which.
    """

    def is_state(value: Any) -> bool:
        return isinstance(value, Mapping) and not is_tensor(value) and any(map(is_tensor, value.values()))

    outer = payload if isinstance(payload, Mapping) else {}
    states = {str(key): value for key, value in outer.items() if key != RESERVED_KEY and is_state(value)}
    if component is not None:
        inner: Any = payload
        for key in component.split("."):
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if not is_state(inner):
            raise ComponentMismatchError(
                missing=[component], available=list(states), path=path, cure="name one that holds tensors: component=."
            )
        return component, inner
    if is_state(payload):
        states[""] = payload
    usual = [name for name in states if name in _USUAL_NAMES]
    chosen = list(states) if len(states) == 1 else usual
    if len(chosen) != 1:
        raise ComponentMismatchError(
            missing=["one dict of tensors that is the model's"],
            available=[name or "tensors at the top" for name in states],
            path=path,
            cure="say which key it is, such as component='model'.",
        )
    return chosen[0], states[chosen[0]]
