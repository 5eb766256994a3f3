"""`list`, `latest`, `best` and `log`: what is in a directory and in its history.

Needs no torch, which takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from safeckpt.cli.bests import best_in, bests_of_run, shown, why_none
from safeckpt.cli.screen import BAD, GOOD, Cell, Screen, error_line, write
from safeckpt.cli.selection import Selection, is_bad
from safeckpt.cli.stores import best_of
from safeckpt.errors import LoadError
from safeckpt.remote.urls import is_url
from safeckpt.run.catalog import Catalog, Checkpoint, latest, reason_of
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best, CheckpointDirectory
from safeckpt.system.text import from_here, number, size

__all__ = ["described", "list_directories", "print_best", "print_latest", "show_log"]


@dataclass(frozen=True)
class _Listed:
    """What is in one directory, or below one URL.

    Attributes:
        place: Its path, or the URL as it may be shown.
        rows: Its checkpoints as JSON has them.
        asides: What was set aside.
    """

    place: str
    rows: list[dict[str, Any]]
    asides: list[str]


def list_directories(screen: Screen, paths: Sequence[str], selection: Selection) -> int:
    """Print the checkpoints of some directories after the cheap check."""
    found = [_listed(path) for path in paths]
    every = [row for one in found for row in one.rows]
    rows, unknown = selection.apply(every)
    asides = [aside for one in found for aside in one.asides]
    if screen.as_json:
        places = [one.place for one in found]
        screen.json({"directories": places, "checkpoints": rows, "set_aside": asides, "not_judged": unknown})
        return 0
    total = size(sum(row.get("size_bytes", 0) for row in rows))
    if len(found) == 1:
        screen.line(from_here(found[0].place))
    of = f" of {len(every)}" if selection.conditions else ""
    several = f" in {len(found)} directories" if len(found) > 1 else ""
    screen.line(f"{len(rows)}{of} checkpoint(s){several}, {total}")
    if rows:
        _print_rows(screen, rows, selection, with_directory=len(found) > 1)
        where = from_here(found[0].place) if len(found) == 1 else "DIRECTORY..."
        screen.line(f"Name, size and structure were checked; `safeckpt verify {where}` reads every byte.")
    if unknown:
        names = ", ".join(f"step {row['step']} ({row['reason']})" for row in unknown)
        screen.line(f"{len(unknown)} not good, so that nobody knows whether --where holds: {names}", BAD)
    if asides:
        names = ", ".join(aside.removeprefix(f"{found[0].place}/") for aside in asides)
        screen.line(f"{len(asides)} more set aside, of timelines that were left: {names}")
    return 0


def _listed(path: str) -> _Listed:
    if is_url(path):
        remote = RemoteCatalog(path)
        return _Listed(remote.url, _rows(remote, remote.checkpoints, remote.url), [str(one) for one in remote.hidden])
    files = CheckpointDirectory(path)
    rows = _rows(Catalog(files), files.steps(), str(files.path))
    return _Listed(str(files.path), rows, [str(aside.path) for aside in files.asides()])


def _print_rows(screen: Screen, rows: Sequence[dict[str, Any]], selection: Selection, *, with_directory: bool) -> None:
    columns = ["step", "saved (UTC)", "size", "loss", "metrics", "check"]
    cells = [_row(row) for row in rows]
    if selection.names_best(rows[0]):
        cells[0] = [(cell, GOOD) if isinstance(cell, str) else cell for cell in cells[0]]
    if with_directory:
        columns.insert(0, "directory")
        cells = [[from_here(row["directory"]), *one] for row, one in zip(rows, cells, strict=True)]
    screen.table(columns, cells, right=("step", "size", "loss"), whole=("saved (UTC)",))


def _rows(catalog: Catalog | RemoteCatalog, steps: Iterable[int], place: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in steps:
        try:
            found = described(catalog.peek(step)) | {
                "good": None,
                "checked": "structure",
            }  # every byte is not read here
        except FileNotFoundError:
            continue  # pruned by its writer a moment ago
        except LoadError as error:
            found = {"step": step, "path": catalog.path_of(step), "good": False, "reason": reason_of(error)}
        rows.append(found | {"directory": place})
    _mark_best(rows, bests_of_run(catalog, [row["step"] for row in rows]))
    return rows


def _mark_best(rows: Sequence[dict[str, Any]], bests: Iterable[Best]) -> None:
    """Note at each checkpoint by which of the run's metrics it is one of the best, if it turns out to be good."""
    known = {row["step"]: row for row in rows if not is_bad(row)}
    for row in known.values():
        row["best_if_good"] = []
    for best in bests:
        scores = ((step, _score(row, best.metric)) for step, row in known.items())
        for step in islice(best.rank(scores), best.count):
            known[step]["best_if_good"].append(shown(best))


def _score(row: Mapping[str, Any], metric: str) -> float | None:
    value = row["metrics"].get(metric, row["loss"] if metric == "loss" else None)
    return value if isinstance(value, float) else None


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


def _row(row: dict[str, Any]) -> list[Cell]:
    if is_bad(row):
        return [(str(row["step"]), BAD), "", "", "", "", (f"not good: {row['reason']}", BAD)]
    when = row["created_at"][:19].replace("T", " ")
    loss, metrics = number(row["loss"]), number(row["metrics"])
    bests = row["best_if_good"]
    check: Cell = ", ".join(["structure ok", *(f"best {name}" for name in bests)])
    return [str(row["step"]), when, size(row["size_bytes"]), loss, metrics, (check, GOOD) if bests else check]


def print_latest(screen: Screen, path: str) -> int:
    """Print the path of the newest good checkpoint, every byte of it verified; return 1 when there is none."""
    with screen.status(f"verifying {path}"):
        checkpoint = latest(path)
    return _print_one(screen, checkpoint, f"{path} has no good checkpoint.")


def print_best(screen: Screen, path: str, metric: str | None) -> int:
    """Print the path of the good checkpoint with the best metric, every byte verified; return 1 when there is none."""
    catalog: Catalog | RemoteCatalog = RemoteCatalog(path) if is_url(path) else Catalog(CheckpointDirectory(path))
    steps = list(catalog.checkpoints) if isinstance(catalog, RemoteCatalog) else catalog.files.steps()
    best = best_in(catalog, steps, metric) if steps or metric else None
    if best is None:
        return _print_one(screen, None, f"{path} has no checkpoint.")
    with screen.status(f"verifying {path}"):
        found = best_of(catalog, best) if isinstance(catalog, RemoteCatalog) else catalog.find_best(best)
    missing = "" if found is not None else f"{path} has no good checkpoint {why_none(catalog, steps, best.metric)}."
    return _print_one(screen, found, missing)


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
    columns = ("time (UTC)", "event", "step", "details")
    screen.table(columns, [_event(event) for event in events], right=("step",), whole=columns[:2])
    return 0


_BARE = {"reason", "why"}
_FIRST = {"refused": "not saved", "passed_over": "not good"}  # what the word for an event leaves open
_NAMES = {
    "source": "taken from",
    "size_bytes": "size",
    "left_out": "left out (epoch, batch):",
    "tensors_total": "tensors in all",
}
_COLOURS = {
    "refused": BAD, "passed_over": BAD, "replay_differs": BAD, "replicas_differ": BAD,
    "rolled_back": "yellow", "replay_verified": GOOD,
}  # fmt: skip


def _event(event: dict[str, Any]) -> tuple[Cell, ...]:
    details = []
    for name, value in event.items():
        if name in ("time", "kind", "step") or not value or (name == "tensors_total" and _is_all(event)):
            continue
        text = size(value) if name == "size_bytes" and isinstance(value, int) else _words(value)
        details.append(text if name in _BARE else f"{_NAMES.get(name, name.replace('_', ' '))} {text}")
    when = str(event.get("time", ""))[:19].replace("T", " ")
    step = event.get("step")
    kind = str(event.get("kind", ""))
    text = ": ".join(filter(None, (_FIRST.get(kind), "; ".join(details))))
    return when, (kind.replace("_", " "), _COLOURS.get(kind, "")), "" if step is None else str(step), text


def _is_all(event: Mapping[str, Any]) -> bool:
    names = event.get("tensors")
    return isinstance(names, list) and len(names) == event.get("tensors_total")


def _words(value: Any, level: int = 0) -> str:
    """Return what an event says of one thing: a list in a list in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one, level)}" for name, one in value.items())
    if isinstance(value, list):
        text = ", ".join(_words(one, level + 1) for one in value)
        return f"({text})" if level else text
    return f"{value:.6g}" if isinstance(value, float) else str(value)
