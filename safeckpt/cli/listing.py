"""`list`, `latest`, `best` and `log`: what is in a directory and in its history.

Needs no torch, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from safeckpt.cli.screen import BAD, Cell, Screen, error_line, number, size, write
from safeckpt.cli.stores import best_of
from safeckpt.errors import LoadError
from safeckpt.remote.options import is_url
from safeckpt.run.catalog import Catalog, Checkpoint, latest, reason_of
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best, CheckpointDirectory

__all__ = ["described", "list_directory", "print_best", "print_latest", "show_log"]


def list_directory(screen: Screen, path: str) -> int:
    """Print the checkpoints of a directory after the cheap check."""
    if is_url(path):
        remote = RemoteCatalog(path)
        place, rows = remote.url, _rows(remote, remote.checkpoints)
        asides = [f"{one.parent.name}/{one.name}" for one in remote.hidden]
    else:
        files = CheckpointDirectory(path)
        place, rows = str(files.path), _rows(Catalog(files), files.steps())
        asides = [aside.path.name for aside in files.asides()]
    if screen.as_json:
        screen.json({"directory": place, "checkpoints": rows, "set_aside": asides})
        return 0
    total = size(sum(row.get("size_bytes", 0) for row in rows))
    screen.line(place)
    screen.line(f"{len(rows)} checkpoint(s), {total}")
    if rows:
        screen.table(
            ("step", "saved (UTC)", "size", "loss", "metrics", "check"),
            [_row(row) for row in rows],
            right=("step", "size", "loss"),
        )
        screen.line(f"Name, size and structure were checked; `safeckpt verify {path}` reads every byte.")
    if asides:
        screen.line(f"{len(asides)} more set aside, of timelines that were left: {', '.join(asides)}")
    return 0


def _rows(catalog: Catalog | RemoteCatalog, steps: Iterable[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            rows.append(described(catalog.peek(step)) | {"good": True, "checked": "structure"})
        except FileNotFoundError:
            continue  # pruned by its writer a moment ago
        except LoadError as error:
            rows.append({"step": step, "path": catalog.path_of(step), "good": False, "reason": reason_of(error)})
    return rows


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as JSON has it."""
    return {
        "step": checkpoint.step,
        "path": checkpoint.path,
        "created_at": checkpoint.created_at.isoformat(),
        "size_bytes": checkpoint.size_bytes,
        "loss": checkpoint.loss,
        "metrics": dict(checkpoint.metrics),
        "run_id": checkpoint.run_id,
        "notes": dict(checkpoint.notes),
    }


def _row(row: dict[str, Any]) -> tuple[Cell, ...]:
    if not row["good"]:
        return str(row["step"]), "", "", "", "", (f"not good: {row['reason']}", BAD)
    when = row["created_at"][:19].replace("T", " ")
    return str(row["step"]), when, size(row["size_bytes"]), number(row["loss"]), number(row["metrics"]), "structure ok"


def print_latest(screen: Screen, path: str) -> int:
    """Print the path of the newest good checkpoint, every byte of it verified; return 1 when there is none."""
    with screen.status(f"verifying {path}"):
        checkpoint = latest(path)
    return _print_one(screen, checkpoint, f"{path} has no good checkpoint.")


def print_best(screen: Screen, path: str, best: Best) -> int:
    """Print the path of the good checkpoint with the best metric, every byte verified; return 1 when there is none."""
    with screen.status(f"verifying {path}"):
        if is_url(path):
            checkpoint = best_of(RemoteCatalog(path), best)
        else:
            checkpoint = Catalog(CheckpointDirectory(path)).find_best(best)
    return _print_one(screen, checkpoint, f"{path} has no good checkpoint with a finite metric {best.metric!r}.")


def _print_one(screen: Screen, checkpoint: Checkpoint | None, missing: str) -> int:
    if screen.as_json:
        screen.json(None if checkpoint is None else described(checkpoint))
    elif checkpoint is None:
        error_line(missing)
    else:
        write(str(checkpoint.path))
    return 1 if checkpoint is None else 0


def show_log(screen: Screen, path: str, last: int | None) -> int:
    """Print the history of a directory, oldest first."""
    events = RemoteCatalog(path).events() if is_url(path) else CheckpointDirectory(path).events.read()
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
