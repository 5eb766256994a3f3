"""`prune`: delete the checkpoints that no rule keeps. Needs no torch."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Sequence

import click

from safeckpt.cli.options import parse_best, parse_interval
from safeckpt.cli.screen import Screen
from safeckpt.cli.stores import prune_store
from safeckpt.cli.verification import size_of, verified
from safeckpt.errors import LoadError
from safeckpt.remote.options import is_url
from safeckpt.run.catalog import Catalog, score
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import CheckpointDirectory, KeepBest, KeepEvery, KeepLast, KeepPeriod, Policy, WriterLock, to_prune
from safeckpt.system.text import size

__all__ = ["prune"]


def prune(
    screen: Screen,
    path: str,
    *,
    keep_last: int,
    keep_every: str | None,
    keep_best: Sequence[str],
    dry_run: bool,
    yes: bool,
) -> int:
    """Delete the checkpoints that no rule keeps, after every one that stays was verified."""
    if is_url(path):
        remote = RemoteCatalog(path)
        policies = _policies(remote, keep_last, keep_every, keep_best)
        return prune_store(screen, remote, policies, dry_run=dry_run, yes=yes)
    files = CheckpointDirectory(path)
    policies = _policies(Catalog(files), keep_last, keep_every, keep_best)
    if dry_run:
        return _prune(screen, files, policies, dry_run=True, yes=True)
    with WriterLock(path, 0):
        return _prune(screen, files, policies, dry_run=False, yes=yes)


def _policies(
    catalog: Catalog | RemoteCatalog, keep_last: int, keep_every: str | None, keep_best: Sequence[str]
) -> list[Policy]:
    policies: list[Policy] = [KeepLast(keep_last)]
    if keep_every is not None:
        interval = parse_interval(keep_every)
        if isinstance(interval, int):
            policies.append(KeepEvery(interval))
        else:
            policies.append(KeepPeriod(interval, functools.partial(_created_at, catalog)))
    for text in keep_best:
        best = parse_best(text)
        policies.append(KeepBest(best, functools.partial(_score, catalog, best.metric)))
    return policies


def _score(catalog: Catalog | RemoteCatalog, metric: str, step: int) -> float | None:
    try:
        return score(catalog.peek(step), metric)
    except (LoadError, FileNotFoundError):
        return None


def _created_at(catalog: Catalog | RemoteCatalog, step: int) -> dt.datetime | None:
    try:
        return catalog.peek(step).created_at
    except (LoadError, FileNotFoundError):
        return None


def _prune(screen: Screen, files: CheckpointDirectory, policies: list[Policy], *, dry_run: bool, yes: bool) -> int:
    steps = files.steps()
    sizes = {step: size_of(files.path_of(step)) for step in steps}
    with screen.progress(sum(sizes.values())) as progress:

        def is_good(step: int) -> bool:
            """Check every byte: what stays has to be worth more than what goes."""
            progress.update(progress.task_ids[0], description=f"step {step}")
            good: bool = verified(files.path_of(step))["good"]
            progress.advance(progress.task_ids[0], sizes[step])
            return good

        doomed = to_prune(steps, policies, is_good=is_good)
    stays = [step for step in steps if step not in doomed]
    if doomed and not dry_run and not yes:
        screen.line(_listed(doomed, stays, sizes))
        click.confirm("Delete?", abort=True)
    deleted = [] if dry_run else [step for step in doomed if files.remove(step)]
    if deleted:
        files.events.append("pruned", steps=deleted, by="command line")
    if screen.as_json:
        screen.json(
            {
                "directory": files.path,
                "dry_run": dry_run,
                "deleted": deleted,
                "would_delete": doomed,
                "stays": stays,
            }
        )
    elif dry_run or not doomed:
        screen.line(_listed(doomed, stays, sizes))
    else:
        screen.line(f"Deleted {len(deleted)} checkpoint(s), {size(sum(sizes[step] for step in deleted))}.")
    return 0 if dry_run or deleted == doomed else 2


def _listed(doomed: list[int], stays: list[int], sizes: dict[int, int]) -> str:
    if not doomed:
        return f"Nothing to delete. Stays: step {_steps(stays)}."
    total = size(sum(sizes[step] for step in doomed))
    return f"To delete: step {_steps(doomed)} ({total}). Stays: step {_steps(stays)}."


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
