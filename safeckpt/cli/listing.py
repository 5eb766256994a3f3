"""`list`, `show` and `log`: what is in a directory, in a file, in a history."""

from __future__ import annotations

from typing import Any

import torch

from safeckpt.cli.contents import Contents, Entry, read
from safeckpt.cli.screen import Screen, number, size
from safeckpt.errors import LoadError
from safeckpt.proof.leaves import flatten, leaf
from safeckpt.run.catalog import Catalog, Checkpoint, reason_of
from safeckpt.state import find_nonfinite
from safeckpt.store import CheckpointDirectory

__all__ = ["list_directory", "show_file", "show_log"]

_MOST_ROWS = 40


def list_directory(screen: Screen, path: str) -> int:
    """Print the checkpoints of a directory after the cheap check."""
    files = CheckpointDirectory(path)
    catalog = Catalog(files)
    rows = []
    for step in files.steps():
        try:
            rows.append(_described(catalog.peek(step)) | {"good": True})
        except FileNotFoundError:
            continue  # pruned by its writer a moment ago
        except LoadError as error:
            rows.append({"step": step, "path": files.path_of(step), "good": False, "reason": reason_of(error)})
    asides = [aside.path.name for aside in files.asides()]
    if screen.as_json:
        screen.json({"directory": files.path, "checkpoints": rows, "set_aside": asides})
        return 0
    total = size(sum(row.get("size_bytes", 0) for row in rows))
    screen.line(str(files.path))
    screen.line(f"{len(rows)} checkpoint(s), {total}")
    if rows:
        screen.table(
            ("step", "saved (UTC)", "size", "loss", "metrics", "check"),
            [_row(row) for row in rows],
            right=("step", "size", "loss"),
        )
    if asides:
        screen.line(f"{len(asides)} more set aside, of timelines that were left: {', '.join(asides)}")
    return 0


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "path": checkpoint.path,
        "created_at": checkpoint.created_at.isoformat(),
        "size_bytes": checkpoint.size_bytes,
        "loss": checkpoint.loss,
        "metrics": dict(checkpoint.metrics),
        "run_id": checkpoint.run_id,
    }


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["good"]:
        return str(row["step"]), "", "", "", "", f"not good: {row['reason']}"
    when = row["created_at"][:19].replace("T", " ")
    return str(row["step"]), when, size(row["size_bytes"]), number(row["loss"]), number(row["metrics"]), "ok"


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
        **({} if contents.checkpoint is None else _described(contents.checkpoint)),
    }
    if screen.as_json:
        screen.json({**head, "components": components, "values": entries, "environment": contents.environment})
        return 0
    screen.line(str(contents.report))
    if contents.checkpoint is not None:
        one = contents.checkpoint
        screen.line(f"step {one.step}, saved {one.created_at:%Y-%m-%d %H:%M:%S} UTC, run {one.run_id}")
        screen.line(f"loss {number(one.loss) or 'not given'}; metrics {number(one.metrics) or 'none'}")
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


def show_log(screen: Screen, path: str, last: int | None) -> int:
    """Print the history of a directory, oldest first."""
    events = CheckpointDirectory(path).events.read()
    events = events if last is None else events[-last:] if last else []
    if screen.as_json:
        screen.json(events)
        return 0
    if not events:
        screen.line(f"{path} has no history.")
        return 0
    screen.table(("time (UTC)", "event", "step", "details"), [_event(event) for event in events], right=("step",))
    return 0


def _event(event: dict[str, Any]) -> tuple[str, ...]:
    details = []
    for name, value in event.items():
        if name in ("time", "kind", "step") or value in (None, [], {}, ""):
            continue
        text = size(value) if name == "size_bytes" else value if isinstance(value, str) else number_or_text(value)
        details.append(text if name == "reason" else f"{name.removesuffix('_bytes').replace('_', ' ')} {text}")
    when = str(event.get("time", ""))[:19].replace("T", " ")
    step = event.get("step")
    kind = str(event.get("kind", "")).replace("_", " ")
    return when, kind, "" if step is None else str(step), "; ".join(details)


def number_or_text(value: Any) -> str:
    """Return a number with six digits, anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
