"""`extract`: take one component out of a file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch

from safeckpt.cli.contents import read
from safeckpt.cli.screen import Screen, size
from safeckpt.functional import save
from safeckpt.store import commit

__all__ = ["extract"]


def extract(screen: Screen, path: str, component: str, output: str, *, force: bool) -> int:
    """Write one component of a checkpoint into a file of its own."""
    target = Path(output)
    if target.suffix not in (".pt", ".pth", ".safetensors"):
        raise click.UsageError(f"{output}: the name has to end in .pt, .pth or .safetensors")
    if target.exists() and not force:
        raise click.ClickException(f"{output} exists; --force replaces it")
    with screen.status(f"verifying {path}"):
        contents = read(path)
        if component not in contents.kinds:
            raise click.ClickException(f"{path} has no {component!r}; it has: {', '.join(contents.kinds)}")
        part = contents.payload[component]
        if target.suffix == ".safetensors":
            data = _safetensors(component, part)
            commit(target, lambda file: _write(file, data))
        else:
            save(part, target, allow_nonfinite=("*",))  # it passed the guard that its own run chose
    size_bytes = target.stat().st_size
    if screen.as_json:
        screen.json({"path": target, "component": component, "size_bytes": size_bytes})
    else:
        screen.line(f"{target}: {component} of {path}, {size(size_bytes)}")
    return 0


def _safetensors(component: str, part: Any) -> bytes:
    try:
        library = importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise click.ClickException('this needs the package safetensors. Next: pip install "safetensors"') from None
    others = (
        [str(name) for name, one in part.items() if not isinstance(one, torch.Tensor)] if isinstance(part, dict) else []
    )
    if not isinstance(part, dict) or others:
        what = f"has values that are no tensors ({', '.join(others[:5])})" if others else "is no dict of tensors"
        raise click.ClickException(f"{component} {what}, and safetensors holds nothing else; choose a .pt file")
    # safetensors refuses tensors that share memory, and gaps.
    tensors = {str(name): one.detach().clone(memory_format=torch.contiguous_format) for name, one in part.items()}
    data: bytes = library.save(tensors, metadata={"format": "pt"})
    return data


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
