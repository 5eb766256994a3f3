"""`export`: one component of a checkpoint as a file of another format, tensor by tensor.

A safetensors file is eight bytes with the length of its header, a header in JSON that says which tensor lies where, and
the tensors. Several of them, with an index beside them, are what Hugging Face's loaders read. The files are written
here without the package safetensors, since its writer wants all tensors in memory at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from safeckpt.errors import ComponentMismatchError, UnsavableStateError, listed
from safeckpt.file import DTYPE_NAMES, TensorSource, WrittenFile, encode, load_lazily, open_checkpoint, prepare
from safeckpt.remote import is_url, local_copy
from safeckpt.state import RESERVED_KEY
from safeckpt.state.tree import ENTER, map_tree
from safeckpt.store import commit, commit_several, expand_user
from safeckpt.system.tensor_kind import TensorKind, is_plain, kind_of
from safeckpt.system.text import parse_size

__all__ = ["export"]

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}  # as people call them


class _Entry(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: Its name.
        dtype: As it is written.
        shape: Its extents.
        value: What the checkpoint has for it.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    value: Any

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def export(
    path: str | os.PathLike[str],
    component: str,
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> tuple[Path, ...]:
    """Write one component of a checkpoint into a file of its own, for other programs to read.

    Every byte of the checkpoint is verified first. One process does, also for a sharded checkpoint, and no training run
    is disturbed.

    Args:
        path: A checkpoint of a `CheckpointManager`, its URL in an object store, or a file of `save` or `torch.save`
            that holds a dict; then its keys stand for components.
        component: Its name, such as "model".
        target: Where to. The ending decides the format: `.safetensors`, or `.pt` and `.pth` for a file of torch.
        dtype: What floating tensors are converted to, such as `torch.bfloat16`, "bfloat16" or "bf16"; None leaves them.
        max_shard_size: For `.safetensors`: bytes of tensors in one file at most, as an int or as "5GB" or "500MiB";
            one tensor that is larger has a file of its own. Beyond it, `model.safetensors` becomes
            `model-00001-of-0000N.safetensors` and so on, and `model.safetensors.index.json`: the layout of Hugging
            Face. None is one file.
        overwrite: Replace one file that is there.

    Returns:
        The files; of several the index is the last.

    Raises:
        ComponentMismatchError: There is no such component.
        UnsavableStateError: The format has no place for a value, or a number does not fit into `dtype`; it is named.
        FileExistsError: A file of that name is there, or files of an earlier export that a loader would read as well.
        LoadError: The checkpoint is not good.
        ValueError: The ending, `dtype` or `max_shard_size` is none that is known.
        OSError: The system refused. Whatever is raised, nothing was written, or it was removed again.

    Cost:
        Reads the checkpoint twice. Memory for the largest tensor; for `.pt` of a sharded checkpoint, for the component.
        One in a store is first brought to the directory for temporary files, and deleted from there at the end.

    A tensor that has several names (tied weights) is written under each of them. Views are written as what they show.
    When the process is killed while several files are written, their index is missing, and loaders find nothing.

    Example:
        >>> import tempfile, torch, safeckpt
        >>> folder = tempfile.mkdtemp()
        >>> safeckpt.save({"model": torch.nn.Linear(2, 2).state_dict()}, f"{folder}/step.pt")
        >>> [file.name for file in safeckpt.export(f"{folder}/step.pt", "model", f"{folder}/model.safetensors")]
        ['model.safetensors']
    """
    wanted = _checked_dtype(dtype)
    most_bytes = _checked_size(max_shard_size)
    to = Path(expand_user(target))
    if to.suffix not in (_SAFETENSORS, *_TORCH):
        raise ValueError(f"{target}: the name has to end in .safetensors, .pt or .pth")
    if most_bytes is not None and to.suffix != _SAFETENSORS:
        raise ValueError(f"max_shard_size is for {_SAFETENSORS}; {target} is one file")
    _refuse_existing(to, overwrite=overwrite)
    with _local(path) as copy, open_checkpoint(copy) as file:
        file.verify()
        payload, source = load_lazily(file)
        part = _component_of(payload, component, path)
        if to.suffix != _SAFETENSORS:
            return _write_torch(part, component, to, wanted, source)
        entries = list(_entries_of(part, component, wanted, source))
        return _write_safetensors(entries, to, most_bytes, source, overwrite=overwrite)


def _local(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[str | os.PathLike[str]]:
    """Return where a checkpoint can be opened; of one in a store this is a copy that the block deletes at its end."""
    return local_copy(str(path)) if is_url(str(path)) else contextlib.nullcontext(expand_user(path))


def _component_of(payload: Any, component: str, path: object) -> Any:
    names = [str(name) for name in payload if name != RESERVED_KEY] if isinstance(payload, dict) else []
    if component not in names:
        raise ComponentMismatchError(
            missing=[component], available=names, path=path, cure="name one of those that it holds."
        )
    return next(value for name, value in payload.items() if str(name) == component)


def _checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found: Any = dtype
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is no floating dtype, such as bfloat16 or bf16")
    return found  # type: ignore[no-any-return]


def _checked_size(size: int | str | None) -> int | None:
    if size is None:
        return None
    found = parse_size(str(size))
    if not found or isinstance(size, bool):
        raise ValueError(f"max_shard_size: {size!r} is no number of bytes, such as 5GB or 500MiB")
    return found


def _refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Refuse to write where a reader could then take old and new files for one.

    A loader that finds `model.safetensors` does not look for an index, and one that finds an index reads what that
    says. So neither is written beside the other.

    Raises:
        FileExistsError: There are such files.
    """
    index = _index_of(target)
    there = [one for one in (index, target) if os.path.lexists(one)]
    if target.suffix == _SAFETENSORS and index in there:
        text = "An earlier export in several files is here, delete these and its index first"
        raise FileExistsError(errno.EEXIST, text, str(index))
    if there and not overwrite:
        text = "It exists; overwrite=True replaces it"
        raise FileExistsError(errno.EEXIST, text, str(target))


def _index_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.index.json")


def _entries_of(part: Any, component: str, dtype: torch.dtype | None, source: TensorSource) -> Iterator[_Entry]:
    """Yield the tensors of a component in its order.

    Raises:
        UnsavableStateError: One of them is no tensor that safetensors can hold.
    """
    if not isinstance(part, Mapping):
        raise _unsavable(component, type(part).__qualname__, "safetensors holds a dict of tensors")
    others = [
        str(name)
        for name, value in part.items()
        if not isinstance(value, torch.Tensor) and source.holder_of(value) is None
    ]
    if others:
        reason = f"safetensors holds nothing but tensors, and these are no tensors ({listed(others)})"
        raise _unsavable(component, "component", reason)
    twice = [name for name, count in Counter(map(str, part)).items() if count > 1 or name == "__metadata__"]
    if twice:
        raise _unsavable(component, "component", f"it has names that safetensors cannot have ({listed(twice)})")
    for key, value in part.items():
        name = f"{component}.{key}"
        holder = source.holder_of(value)
        if holder is None and kind_of(value) not in (TensorKind.PLAIN, TensorKind.FLAGGED):
            raise _unsavable(name, _description_of(value), "safetensors holds dense tensors of plain numbers alone")
        shape, own = (value.size(), value.dtype) if holder is None else (holder.shape, holder.dtype)
        to = dtype if dtype is not None and own.is_floating_point else own
        if to not in DTYPE_NAMES:
            raise _unsavable(name, f"tensor of {own}", f"safetensors has no {to}")
        yield _Entry(str(key), to, shape, value)


def _converted(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in a dtype.

    Raises:
        UnsavableStateError: A finite number in it is larger than that has; some dtypes make the largest of it.
    """
    if tensor.dtype == dtype:
        return tensor
    most = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max > most:
        wide = tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.float32)
        lost = int((wide.isfinite() & (wide.abs() > most)).sum())
        if lost:
            reason = f"{lost} of its {tensor.numel()} numbers are too large for {dtype}"
            raise _unsavable(name, f"tensor of {tensor.dtype}", reason, "choose torch.bfloat16, or leave dtype out.")
    return tensor.to(dtype)


def _unsavable(location: str, type_name: str, reason: str, cure: str = "choose a .pt file.") -> UnsavableStateError:
    return UnsavableStateError(location=location, type_name=type_name, reason=reason, cure=cure)


def _description_of(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" with layout {tensor.layout}"
    return f"{type(tensor).__qualname__} of {tensor.dtype}{layout}"


def _write_safetensors(
    entries: Sequence[_Entry], target: Path, most_bytes: int | None, source: TensorSource, *, overwrite: bool
) -> tuple[Path, ...]:
    files = _split(entries, most_bytes)
    if len(files) == 1:
        commit(target, partial(_write_file, files[0], source), size_bytes=_size_of(files[0]))
        return (target,)
    count = len(files)
    paths = [
        target.with_name(f"{target.stem}-{number:05d}-of-{count:05d}{_SAFETENSORS}") for number in range(1, count + 1)
    ]
    for path in (target, *paths):
        if os.path.lexists(path) and (path == target or not overwrite):
            text = "It would be read together with the files of this export, or instead of them; delete it first"
            raise FileExistsError(errno.EEXIST, text, str(path))
    index = {
        "metadata": {"total_size": sum(entry.size_bytes for entry in entries)},
        "weight_map": {entry.name: path.name for path, some in zip(paths, files, strict=True) for entry in some},
    }
    data = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
    parts: list[tuple[Path, Callable[[BinaryIO], object], int]] = [
        (path, partial(_write_file, some, source), _size_of(some)) for path, some in zip(paths, files, strict=True)
    ]
    parts.append((_index_of(target), partial(_write_bytes, data), len(data)))
    commit_several(parts)
    return tuple(path for path, *_ in parts)


def _split(entries: Sequence[_Entry], most_bytes: int | None) -> list[list[_Entry]]:
    """Return which tensors are in which file, in their order."""
    files: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if most_bytes is not None and files[-1] and size + entry.size_bytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.size_bytes
    # In a file the widest numbers come first: so each tensor begins at a multiple of its width.
    return [sorted(some, key=lambda entry: -entry.dtype.itemsize) for some in files]


def _header_of(entries: Sequence[_Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers refuses a file
    start = 0
    for entry in entries:
        end = start + entry.size_bytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end],
        }  # fmt: skip
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size_of(entries: Sequence[_Entry]) -> int:
    return len(_header_of(entries)) + sum(entry.size_bytes for entry in entries)


def _write_file(entries: Sequence[_Entry], source: TensorSource, file: BinaryIO) -> None:
    file.write(_header_of(entries))
    for entry in entries:
        tensor = _converted(source.read(entry.value), entry.name, entry.dtype)
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.numel():
            file.write(memoryview(flat.view(torch.uint8).numpy()))  # type: ignore[arg-type]  # NumPy's stubs
        source.forget(entry.value)
    source.check_unchanged()


def _write_bytes(data: bytes, file: BinaryIO) -> None:
    file.write(data)


def _write_torch(
    part: Any, component: str, target: Path, dtype: torch.dtype | None, source: TensorSource
) -> tuple[Path, ...]:
    def written(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) and source.holder_of(value) is None:
            return ENTER
        tensor = source.read(value)
        if dtype is None or not tensor.dtype.is_floating_point or not is_plain(tensor):
            return tensor
        return _converted(tensor, component, dtype)

    prepared = prepare(encode(map_tree(part, written)))

    def write(file: BinaryIO) -> WrittenFile:
        written = prepared.write(file)
        source.check_unchanged()
        return written

    commit(target, write, check=prepared.check, size_bytes=prepared.size_bytes)
    return (target,)
