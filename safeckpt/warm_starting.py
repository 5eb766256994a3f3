"""`warm_start`: begin a new run with weights from elsewhere, all of them or none, and say what was taken."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from safeckpt.errors import (
    NonFiniteError,
    StateMismatchError,
    listed,
)
from safeckpt.remote import is_url
from safeckpt.state import persistent_tensors
from safeckpt.state.fill import cannot_fill, fill_special, is_special
from safeckpt.state.guard import check_patterns, matcher
from safeckpt.state.nonfinite import scan
from safeckpt.system.tensor_kind import TensorKind, is_plain, kind_of
from safeckpt.weights import Weights, open_weights

__all__ = ["KeptTensor", "TakenTensor", "UnusedTensor", "WarmStartReport", "warm_start"]

Rename = Mapping[str, str | None] | Callable[[str], str | None] | None


@dataclass(frozen=True)
class TakenTensor:
    """A tensor of the model that has the values of one in the file.

    Attributes:
        name: Its name in the model.
        source: The name in the file.
        shape: Its extents.
        dtype: In the model.
        source_dtype: In the file; where it is another one, the values were converted.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source_dtype: torch.dtype

    def __str__(self) -> str:
        renamed = "" if self.name == self.source else f" <- {self.source}"
        was = "" if self.dtype == self.source_dtype else f", {_short(self.source_dtype)} in the file"
        return f"{self.name}{renamed} {list(self.shape)} {_short(self.dtype)}{was}"


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of the model that is as it was before.

    Attributes:
        name: Its name in the model.
        reason: Why nothing was taken for it.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class UnusedTensor:
    """A tensor of the file that was not taken.

    Attributes:
        source: Its name in the file.
        reason: Why not.
    """

    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass(frozen=True)
class WarmStartReport:
    """What `warm_start` has done; as text, a line for each tensor.

    Attributes:
        path: Where the weights came from.
        component: Under which key of the file; empty where the file is the state itself.
        verified: How far the bytes could be checked.
        taken: What the model has from the file.
        kept: What is as it was, by leave of `allow_missing` or `allow_shape`, or because it is no tensor.
        unused: What is left over in the file.
    """

    path: str
    component: str
    verified: str
    taken: tuple[TakenTensor, ...]
    kept: tuple[KeptTensor, ...]
    unused: tuple[UnusedTensor, ...]

    def __str__(self) -> str:
        name = self.path if is_url(self.path) else str(Path(*Path(self.path).parts[-2:]))
        where = f"{self.component} of {name}" if self.component else name
        lines = [f"{len(self.taken)} of {len(self.taken) + len(self.kept)} taken from {where}, {self.verified}"]
        for title, rows in (("taken", self.taken), ("as before", self.kept), ("not used", self.unused)):
            lines += [f"{title}:", *(f"  {row}" for row in rows)] if rows else []
        return "\n".join(lines)


def warm_start(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    component: str | None = None,
    rename: Rename = None,
    allow_missing: Sequence[str] = (),
    allow_shape: Sequence[str] = (),
) -> WarmStartReport:
    """Begin with weights from elsewhere: everything that was asked for is taken, or nothing.

    Values are copied into the tensors of the model, which stay the same objects. Nothing else is touched: no modes, no
    `requires_grad`, no optimizer, no random numbers. It is no resume: no step comes with it and no directory is
    adopted. In a script that is started again, call it only where `manager.restore()` has returned None.

    Args:
        model: The model. Wrappers of DDP and `torch.compile` are taken off, so that its names are those without them.
        path: A checkpoint of ours (a file, a sharded one, a run's directory, whose newest good one is taken, or a URL),
            a file of `torch.save`, a `.ckpt` of Lightning, a `.safetensors` file, or a folder of Hugging Face with
            `model.safetensors` or `pytorch_model.bin`, in several files too.
        component: Under which key of the file the weights are, with dots for keys within keys. None: the only dict of
            tensors, or the one called `model`, `model_state_dict` or `state_dict`.
        rename: From names in the file to names in the model. A mapping is applied in its order: `{"encoder.": "body."}`
            exchanges what a name begins with, `{"layers.*.w": "blocks.*.weight"}` a whole name with its wildcards,
            and None as a value leaves such tensors out. A function takes a name and returns one, or None.
        allow_missing: Glob patterns over names in the model that may be missing in the file.
        allow_shape: Glob patterns over names in the model that may have another shape in the file. Both stay as they
            are.

    Returns:
        What was taken, what was not, and why.

    Raises:
        StateMismatchError: Something does not fit; `mismatches` lists all of it.
        NonFiniteError: What would be taken holds NaN, or Inf where the model has none.
        ComponentMismatchError: The file has no such component, or several that could be meant.
        CheckpointNotFoundError: The directory holds none.
        LoadError: The file is damaged, or asks for a type that is not allowed.
        ValueError: A pattern matches no name in the model, or a folder holds several kinds of weights.
        OSError: The system refused. Whatever is raised, the model is as it was.

    Cost:
        Reads the file once to verify it and what is taken once more; memory for what is taken, on the host.

    Example:
        >>> import tempfile, torch, safeckpt
        >>> path = f"{tempfile.mkdtemp()}/old.pt"
        >>> torch.save({"module.weight": torch.ones(1, 2)}, path)
        >>> layer = torch.nn.Linear(2, 1)
        >>> report = safeckpt.warm_start(layer, path, rename={"module.": ""}, allow_missing=["bias"])
        >>> print(report.taken[0], "|", report.kept[0])
        weight <- module.weight [1, 2] float32 | bias: not in the file
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"rename must be a mapping of names or a function; got {type(rename).__name__}")
    own, live_others = persistent_tensors(model)
    may_miss = _patterns(allow_missing, "allow_missing", own)
    may_differ = _patterns(allow_shape, "allow_shape", own)
    with contextlib.ExitStack() as opened:
        weights = open_weights(path, component, opened)
        fit = _Fit(own, weights, rename, may_miss, may_differ)
        values = fit.read()
        for check in weights.checks:
            check()
    _refuse_nonfinite(own, values, {name for name, _ in model.named_parameters(remove_duplicate=False)}, weights.path)
    _copy(own, values)
    fit.kept += [KeptTensor(name, "no tensor, so it is left alone") for name in live_others]
    return WarmStartReport(
        weights.path, weights.component, weights.verified, tuple(fit.taken), tuple(fit.kept), tuple(fit.unused)
    )


def _patterns(patterns: Sequence[str], argument: str, names: Mapping[str, object]) -> Callable[[str], bool]:
    """Return whether a name matches.

    Raises:
        ValueError: A pattern matches no name of the model: a slip that would allow less, or later something else.
    """
    checked = check_patterns(patterns, argument)
    for pattern in checked:
        match = matcher((pattern,))
        if match is not None and not any(map(match, names)):
            raise ValueError(f"{argument}: the model has no tensor {pattern!r}; it has {listed(list(names))}")
    matches = matcher(checked)
    return lambda name: matches is not None and bool(matches(name))


# -- what goes where --------------------------------------------------------------------------------------------------


class _Fit:
    """Which tensor of a file goes into which of the model.

    Attributes:
        taken: What the model will have from the file.
        kept: What stays as it is.
        unused: What is left over.

    Args:
        own: The tensors of the model.
        weights: What the file holds.
        rename: See `warm_start`.
        may_miss: Whether a name may be missing.
        may_differ: Whether a name may have another shape.

    Raises:
        StateMismatchError: Something does not fit.
    """

    def __init__(
        self,
        own: Mapping[str, torch.Tensor],
        weights: Weights,
        rename: Rename,
        may_miss: Callable[[str], bool],
        may_differ: Callable[[str], bool],
    ) -> None:
        self.taken: list[TakenTensor] = []
        self.kept: list[KeptTensor] = []
        self.unused = [UnusedTensor(name, "no tensor") for name in weights.others]
        self._own = own
        self._weights = weights
        self._differences: list[str] = []
        renamed = self._renamed(rename)
        self._ties = _ties(own)
        for name, tensor in own.items():
            # A tied tensor is often in the file under one of its names.
            source = next((renamed[one] for one in (name, *self._ties[name]) if one in renamed), None)
            if source is not None:
                self._fit_one(name, tensor, source, may_differ)
            elif may_miss(name):
                self.kept.append(KeptTensor(name, "not in the file"))
            else:
                self._differences.append(f"{name}: not in the file")
        used = {one.source for one in self.taken}
        left = [(name, source) for name, source in renamed.items() if source not in used]
        self.unused += [UnusedTensor(source, self._why_unused(name)) for name, source in left]
        if not self.taken and not self._differences:
            self._differences.append("nothing in the file would be taken")
        self._refuse()

    def _refuse(self) -> None:
        if self._differences:
            hint = _hint(self._weights.tensors, self._own)
            raise StateMismatchError(
                mismatches=self._differences,
                path=self._weights.path,
                cure=f"{hint}rename= maps names, allow_missing= and allow_shape= leave tensors as they are.",
            )

    def _renamed(self, rename: Rename) -> dict[str, str]:
        """Return name in the file by name in the model."""
        found: dict[str, str] = {}
        for source in self._weights.tensors:
            name = _rename(source, rename)
            if name is None:
                self.unused.append(UnusedTensor(source, "left out by rename"))
            elif name in found:
                self._differences.append(f"{name}: both {found[name]} and {source} of the file would go there")
            else:
                found[name] = source
        return found

    def _fit_one(self, name: str, tensor: torch.Tensor, source: str, may_differ: Callable[[str], bool]) -> None:
        held = self._weights.tensors[source]
        fault = held.fault or _why_not_filled(tensor)
        if fault:
            self._differences.append(f"{name}: {fault}")
        elif held.shape != tensor.size():
            text = f"shape {list(held.shape)} in the file, {list(tensor.size())} here"
            if may_differ(name):
                self.kept.append(KeptTensor(name, text))
            else:
                self._differences.append(f"{name}: {text}")
        else:
            self.taken.append(TakenTensor(name, source, tuple(held.shape), tensor.dtype, held.dtype))

    def _why_unused(self, name: str) -> str:
        if name in self._own:
            return "the model's has another shape"
        return f"the model has no {name}"

    def read(self) -> dict[str, torch.Tensor]:
        """Return the values for each tensor, in its dtype.

        Raises:
            StateMismatchError: Values cannot be converted or written, or differ where the model has one tensor.
        """
        read: dict[str, torch.Tensor] = {}
        values: dict[str, torch.Tensor] = {}
        for one in self.taken:
            if one.source not in read:
                read[one.source] = self._weights.tensors[one.source].read()
            found, fault = _converted(read[one.source], one.dtype)
            faults = [fault] if fault else list(cannot_fill(self._own[one.name], found))
            self._differences += [f"{one.name}: {text}" for text in faults]
            values[one.name] = read[one.source] = found
            other = next((tie for tie in self._ties[one.name] if tie in values), None)
            if other is not None and values[other] is not found and not _is_same(values[other], found):
                self._differences.append(f"{one.name}: one tensor with {other} here, another one in the file")
        self._refuse()
        return values


def _rename(name: str, rename: Rename) -> str | None:
    if rename is None:
        return name
    if not isinstance(rename, Mapping):
        found = rename(name)
        if found is not None and not isinstance(found, str):
            raise TypeError(f"rename({name!r}) must return a name or None; got {type(found).__name__}")
        return found
    for old, new in rename.items():
        if "*" in old:
            match = re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), name)
            if match is None:
                continue
            if new is None:
                return None
            wildcards = iter(match.groups())
            name = re.sub(r"\*", lambda _: next(wildcards, ""), new)  # noqa: B023 - used at once
        elif name.startswith(old):
            if new is None:
                return None
            name = new + name.removeprefix(old)
    return name


def _hint(there: Mapping[str, object], own: Mapping[str, object]) -> str:
    """Return what to do when every name in the file begins with the same word, and fits without it."""
    first = {name.partition(".")[0] for name in there}
    if len(first) != 1:
        return ""
    prefix = f"{first.pop()}."
    if sum(name.removeprefix(prefix) in own for name in there) <= sum(name in own for name in there):
        return ""
    return f"every name in the file begins with {prefix!r}: rename={{{prefix!r}: ''}}. "


def _ties(own: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the other names of each tensor."""
    groups: dict[object, list[str]] = {}
    keys: dict[str, object] = {}
    for name, tensor in own.items():
        has_address = is_plain(tensor) and tensor.numel()
        place = (tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype) if has_address else id(tensor)
        keys[name] = place
        groups.setdefault(place, []).append(name)
    return {name: [other for other in groups[place] if other != name] for name, place in keys.items()}


def _why_not_filled(tensor: torch.Tensor) -> str:
    """Return why nothing can be written into a tensor of the model; empty when it can."""
    kind = kind_of(tensor)
    if kind is TensorKind.PLAIN:
        return ""
    cures = {
        TensorKind.SHARDED: "call warm_start before the model is sharded",
        TensorKind.UNINITIALIZED: "run one forward pass first",
        TensorKind.META: "give it memory first: model.to_empty(device=...)",
    }
    return f"{kind.value} here, {cures.get(kind, 'which warm_start cannot fill')}"


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, str]:
    """Return values in another dtype, and what would be lost by that; empty when it is rounding alone."""
    if tensor.dtype == dtype:
        return tensor, ""
    text = f"{_short(tensor.dtype)} in the file, {_short(dtype)} here"
    if (tensor.is_floating_point(), tensor.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
        return tensor, f"{text}: another kind of numbers"
    found = tensor.to(dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return found, "" if torch.equal(found.to(tensor.dtype), tensor) else f"{text}: numbers are too large for it"
    if dtype.is_complex:
        return found, ""
    wide = tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)
    lost = int((wide.isfinite() & (wide.abs() > torch.finfo(dtype).max)).sum())
    return found, f"{text}: {lost} of {tensor.numel()} numbers are too large for it" if lost else ""


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def _refuse_nonfinite(
    own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], parameters: set[str], path: str
) -> None:
    """Refuse NaN, and Inf but for a buffer that has it at the same places, as a mask does.

    Raises:
        NonFiniteError: There is one.
    """

    def is_known(name: str) -> bool:
        value, live = values[name], own[name].detach().cpu()
        return name not in parameters and not value.isnan().any() and torch.equal(value.isinf(), live.isinf())

    found = [one for one in scan(values.items()) if not is_known(one.name)]
    if found:
        raise NonFiniteError(
            tensors=found,
            good="the model is as it was.",
            next_step="take an earlier checkpoint of that run, or leave these tensors out: rename={name: None} with "
            "allow_missing=.",
            path=path,
        )


def _copy(own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        for name, value in values.items():
            if is_special(own[name]):
                fill_special(own[name].detach(), value)
            else:
                own[name].copy_(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
