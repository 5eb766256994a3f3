"""`extract`: take one component out of a file."""

from __future__ import annotations

import os

import click

from safeckpt.cli.screen import Screen
from safeckpt.exporting import export
from safeckpt.system.text import size

__all__ = ["extract"]


def extract(
    screen: Screen,
    path: str,
    component: str,
    output: str,
    *,
    dtype: str | None,
    max_shard_size: str | None,
    force: bool,
) -> int:
    """Write one component of a checkpoint into a file of its own, or into several with an index."""
    if not force and os.path.lexists(output):
        raise click.ClickException(f"{output} is there already, and was left alone; --force replaces it.")
    with screen.status(f"verifying {path}"):
        try:
            files = export(path, component, output, dtype=dtype, max_shard_size=max_shard_size, overwrite=force)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise click.UsageError(str(error)) from None
    size_bytes = sum(file.stat().st_size for file in files)
    if screen.as_json:
        found = {"path": files[-1], "files": list(files), "component": component, "size_bytes": size_bytes}
        screen.json(found)
    else:
        several = f" in {len(files)} files" if len(files) > 1 else ""
        screen.line(f"{files[-1]}: {component} of {path}, {size(size_bytes)}{several}")
    return 0
