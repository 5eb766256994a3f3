"""`show`: what is in one file."""

from __future__ import annotations

from typing import Any

import torch

from safeckpt.cli.contents import Contents, Entry, read
from safeckpt.cli.listing import described
from safeckpt.cli.screen import Screen
from safeckpt.proof.leaves import flatten, leaf
from safeckpt.state import find_nonfinite
from safeckpt.system.text import number, size

__all__ = ["show_file"]

_MOST_ROWS = 40


def show_file(screen: Screen, path: str, *, everything: bool) -> int:
    """Print what is in one file, every byte of it verified."""
    with screen.status(f"verifying {path}"):
        contents = read(path)
        bad = {one.name: one for one in find_nonfinite({entry.name: entry.value for entry in contents.entries})}
    components = [_component(contents, name, bad) for name in contents.kinds]
    entries = [_entry(entry, bad) for entry in contents.entries]
    head = {
        "path": contents.report.path,
        "size_bytes": contents.report.size_bytes,
        "self_proving": contents.report.self_proving,
        "format_version": contents.report.format_version,
        **({} if contents.checkpoint is None else described(contents.checkpoint)),
    }
    if screen.as_json:
        screen.json({**head, "components": components, "values": entries, "environment": contents.environment})
        return 0
    screen.line(str(contents.report))
    if contents.checkpoint is not None:
        one = contents.checkpoint
        screen.line(f"step {one.step}, saved {one.created_at:%Y-%m-%d %H:%M:%S} UTC, run {one.run_id}")
        screen.line(f"loss {number(one.loss) or 'not given'}; metrics {number(one.metrics) or 'none'}")
        for name, value in flatten(one.notes, "") if one.notes else ():
            screen.line(f"note {name}: {value}")
    screen.line()
    screen.table(
        ("component", "kind", "tensors", "elements", "bytes", "not finite", "other values"),
        [
            (
                one["name"], one["kind"], str(one["tensors"]), f"{one['elements']:,}", size(one["size_bytes"]),
                str(one["nonfinite_tensors"]), str(one["values"]),
            )
            for one in components
        ],
        right=("tensors", "elements", "bytes", "not finite", "other values"),
    )  # fmt: skip
    screen.line()
    shown = entries if everything else [one for one in entries if "dtype" in one]
    rest = 0 if everything else max(0, len(shown) - _MOST_ROWS)
    screen.table(
        ("name", "dtype", "shape", "bytes", "NaN", "Inf") if not everything else
        ("name", "kind", "value", "bytes", "NaN", "Inf"),
        [_cells(one, everything=everything) for one in shown[: len(shown) - rest]],
        right=("bytes", "NaN", "Inf"),
    )  # fmt: skip
    if rest:
        screen.line(f"... and {rest} more tensors; --all shows them, and the plain values")
    if contents.environment:
        screen.line()
        screen.line("environment: " + ", ".join(f"{name} {value}" for name, value in flatten(contents.environment, "")))
    return 0


def _component(contents: Contents, name: str, bad: dict[str, Any]) -> dict[str, Any]:
    entries = [entry for entry in contents.entries if entry.component == name]
    tensors = [entry for entry in entries if isinstance(entry.value, torch.Tensor)]
    return {
        "name": name,
        "kind": contents.kinds[name],
        "tensors": len(tensors),
        "elements": sum(entry.value.numel() for entry in tensors),
        "size_bytes": sum(entry.size_bytes for entry in tensors),
        "nonfinite_tensors": sum(entry.name in bad for entry in tensors),
        "values": len(entries) - len(tensors),
    }


def _entry(entry: Entry, bad: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": entry.name, "component": entry.component, "kind": entry.kind}
    if not isinstance(entry.value, torch.Tensor):
        return {**found, "value": leaf("", entry.value).shown}
    report = bad.get(entry.name)
    return {
        **found,
        "dtype": str(entry.value.dtype).removeprefix("torch."),
        "shape": list(entry.value.size()),
        "size_bytes": entry.size_bytes,
        "nan_count": 0 if report is None else report.nan_count,
        "inf_count": 0 if report is None else report.inf_count,
    }


def _cells(one: dict[str, Any], *, everything: bool) -> tuple[str, ...]:
    if "dtype" not in one:
        return one["name"], one["kind"], one["value"], "", "", ""
    counts = (size(one["size_bytes"]), str(one["nan_count"] or ""), str(one["inf_count"] or ""))
    if everything:
        return one["name"], one["kind"], f"{one['dtype']}{one['shape']}", *counts
    return one["name"], one["dtype"], str(one["shape"]), *counts
