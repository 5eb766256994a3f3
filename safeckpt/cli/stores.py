"""`list`, `latest`, `best`, `log`, `prune` and `fetch` for URLs. Needs no torch, but for sharded checkpoints."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from safeckpt.cli.screen import Screen, error_line
from safeckpt.errors import LoadError
from safeckpt.remote import RemoteCheckpoint, fetch
from safeckpt.run.catalog import Checkpoint, reason_of, score, warn_skipped
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best, CheckpointDirectory, Policy, WriterLock, to_prune
from safeckpt.system.text import size

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["best_of", "fetch_one", "prune_store"]


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


def prune_store(screen: Screen, catalog: RemoteCatalog, policies: list[Policy], *, dry_run: bool, yes: bool) -> int:
    """Delete the checkpoints below a URL that no rule keeps, after every one that stays was verified."""
    found = catalog.checkpoints

    def is_good(step: int) -> bool:
        try:
            catalog.verify(step)
        except (LoadError, FileNotFoundError):
            return False
        return True

    with screen.status(f"verifying what stays in {catalog.url}"):
        doomed = to_prune(sorted(found), policies, is_good=is_good)
    stays = [step for step in found if step not in doomed]
    text = f"To delete: step {_steps(doomed)} ({size(_bytes(found, doomed))}). Stays: step {_steps(stays)}."
    if doomed and not dry_run and not yes:
        newest = catalog.view.newest
        if newest is not None and newest.pid is not None:
            screen.line(f"Last written to by pid {newest.pid} on {newest.host}, since {newest.since}.")
        screen.line(text)
        click.confirm("Delete?", abort=True)
    deleted: list[int] = []
    if not dry_run:
        for step in doomed:  # first what makes it a checkpoint, so that a half of one never looks like one
            one = found[step]
            catalog.epochs.client.delete([one.key, *(key for key in one.objects if key != one.key)])
            deleted.append(step)
    if screen.as_json:
        answer = {"dry_run": dry_run, "deleted": deleted, "would_delete": doomed, "stays": stays}
        screen.json({"directory": catalog.url, **answer})
    elif dry_run or not doomed:
        screen.line(text if doomed else f"Nothing to delete. Stays: step {_steps(stays)}.")
    else:
        screen.line(f"Deleted {len(deleted)} checkpoint(s), {size(_bytes(found, deleted))}.")
    return 0


def _bytes(found: Any, steps: list[int]) -> int:
    sizes: dict[int, RemoteCheckpoint] = dict(found)
    return sum(sizes[step].size_bytes for step in steps)


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
