"""`prune`: delete the checkpoints that no rule keeps. Needs no torch."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Sequence

import click

from safeckpt.cli.bests import bests_of_run, shown
from safeckpt.cli.options import parse_best, parse_interval
from safeckpt.cli.screen import Screen
from safeckpt.cli.stores import prune_store
from safeckpt.cli.verification import size_of, verified
from safeckpt.errors import LoadError
from safeckpt.remote.urls import is_url
from safeckpt.run.catalog import Catalog, score
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import (
    Best,
    CheckpointDirectory,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPeriod,
    Policy,
    WriterLock,
    to_prune,
)
from safeckpt.system.text import size

__all__ = ["prune"]


def prune(
    screen: Screen,
    path: str,
    *,
    keep_last: int,
    keep_every: str | None,
    keep_best: Sequence[str] | None,
    dry_run: bool,
    yes: bool,
) -> int:
    """Delete the checkpoints that no rule keeps, after every one that stays was verified."""
    if is_url(path):
        remote = RemoteCatalog(path)
        bests = _bests(screen, remote, list(remote.checkpoints), keep_best)
        policies = _policies(remote, keep_last, keep_every, bests)
        return prune_store(screen, remote, policies, dry_run=dry_run, yes=yes)
    files = CheckpointDirectory(path)
    catalog = Catalog(files)
    policies = _policies(catalog, keep_last, keep_every, _bests(screen, catalog, files.steps(), keep_best))
    if dry_run:
        return _prune(screen, files, policies, dry_run=True, yes=True)
    with WriterLock(path, 0):
        return _prune(screen, files, policies, dry_run=False, yes=yes)


def _bests(
    screen: Screen, catalog: Catalog | RemoteCatalog, steps: Sequence[int], keep_best: Sequence[str] | None
) -> list[Best]:
    """Return the best ones to keep: those of the run, when nothing was said about them."""
    if keep_best is not None:
        return [parse_best(text) for text in keep_best]
    found = bests_of_run(catalog, steps)
    if found and not screen.as_json:
        names = ", ".join(map(shown, found))
        screen.line(f"The best by {names} stays, as the run keeps it; --no-keep-best lets it go.")
    return found


def _policies(
    catalog: Catalog | RemoteCatalog, keep_last: int, keep_every: str | None, bests: Sequence[Best]
) -> list[Policy]:
    policies: list[Policy] = [KeepLast(keep_last)]
    if keep_every is not None:
        interval = parse_interval(keep_every)
        if isinstance(interval, int):
            policies.append(KeepEvery(interval))
        else:
            policies.append(KeepPeriod(interval, functools.partial(_created_at, catalog)))
    return [*policies, *(KeepBest(best, functools.partial(_score, catalog, best.metric)) for best in bests)]


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
    asides = [one.path for one in files.asides()]
    if screen.as_json:
        answer = {"dry_run": dry_run, "deleted": deleted, "would_delete": doomed, "stays": stays, "set_aside": asides}
        screen.json({"directory": files.path, **answer})
        return 0 if dry_run or deleted == doomed else 2
    if dry_run or not doomed:
        screen.line(_listed(doomed, stays, sizes))
    else:
        screen.line(f"Deleted {len(deleted)} checkpoint(s), {size(sum(sizes[step] for step in deleted))}.")
    if asides:
        total = size(sum(map(size_of, asides)))
        screen.line(
            f"{len(asides)} set aside stay ({total}): delete aside-* by hand if their timelines are not wanted."
        )
    return 0 if dry_run or deleted == doomed else 2


def _listed(doomed: list[int], stays: list[int], sizes: dict[int, int]) -> str:
    if not doomed:
        return f"Nothing to delete. Stays: step {_steps(stays)}."
    total = size(sum(sizes[step] for step in doomed))
    return f"To delete: step {_steps(doomed)} ({total}). Stays: step {_steps(stays)}."


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
