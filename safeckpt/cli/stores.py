"""`best` and `fetch` for URLs. Needs no torch, but for sharded checkpoints."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import click

from safeckpt.cli.screen import Screen, error_line
from safeckpt.errors import LoadError
from safeckpt.remote import fetch
from safeckpt.run.catalog import Checkpoint, reason_of, score, warn_skipped
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best, CheckpointDirectory, WriterLock

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["best_of", "fetch_one"]


def best_of(catalog: RemoteCatalog, best: Best) -> Checkpoint | None:
    """Return the good checkpoint with the best value of a metric, every byte verified; None when there is none."""
    found = {}
    for step in catalog.checkpoints:
        try:
            found[step] = catalog.peek(step)
        except LoadError as error:
            warn_skipped(catalog.path_of(step), reason_of(error))
    for step in best.rank((step, score(one, best.metric)) for step, one in found.items()):
        try:
            return catalog.verify(step)
        except LoadError as error:
            warn_skipped(catalog.path_of(step), reason_of(error))
    return None


def fetch_one(screen: Screen, url: str, directory: str, step: int | None) -> int:
    """Bring the newest good checkpoint below a URL, or one step, into a directory; return 1 when there is none."""
    catalog = RemoteCatalog(url)
    files = CheckpointDirectory(directory)
    files.create()
    steps = list(reversed(catalog.checkpoints)) if step is None else [step]
    with WriterLock(directory, 0), screen.progress(0) as progress:
        for one in steps:
            if one not in catalog.checkpoints:
                raise click.ClickException(f"{catalog.url} has no checkpoint of step {one}.")
            if one in files.steps():
                raise click.ClickException(f"{files.path_of(one)} is there already; nothing was fetched.")
            remote = catalog.checkpoints[one]
            progress.update(progress.task_ids[0], description=f"step {one}", total=remote.size_bytes)
            try:
                path = fetch(catalog.epochs.client, remote, files, functools.partial(_show, progress))
            except LoadError as error:
                if step is not None:
                    raise
                warn_skipped(catalog.path_of(one), reason_of(error))
                continue
            if screen.as_json:
                screen.json({"path": path, "step": one, "size_bytes": remote.size_bytes, "from": catalog.path_of(one)})
            else:
                screen.line(str(path))
            return 0
    if screen.as_json:
        screen.json(None)
    else:
        error_line(f"{catalog.url} has no good checkpoint.")
    return 1


def _show(bar: Progress, done_bytes: int, _: int) -> None:
    bar.update(bar.task_ids[0], completed=done_bytes)
