"""`prune`: delete the checkpoints that no rule keeps. Needs no torch."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from safeckpt.cli.bests import bests_of_run, shown
from safeckpt.cli.options import parse_best, parse_interval
from safeckpt.cli.screen import Screen
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


@dataclass(frozen=True)
class _Place:
    """A directory, or what is below a URL.

    Attributes:
        name: As it may be shown.
        catalog: Its checkpoints.
        sizes: Step to bytes, ascending.
        is_good: Checks every byte of a step: what stays has to be worth more than what goes.
        delete: Deletes steps, and returns those that are gone.
        asides: What was set aside.
        writer: Who has written into it last, as a sentence; empty where nobody can be in it now.
    """

    name: str
    catalog: Catalog | RemoteCatalog
    sizes: dict[int, int]
    is_good: Callable[[int], bool]
    delete: Callable[[Sequence[int]], list[int]]
    asides: Sequence[Path] = ()
    writer: str = ""


@dataclass(frozen=True)
class _Plan:
    """What is to be deleted.

    Attributes:
        sizes: Step to bytes.
        doomed: What goes.
        stays: What stays.
        damaged: Of what stays that which was looked at, is not good, and so counts for nothing.
    """

    sizes: dict[int, int]
    doomed: list[int]
    stays: list[int]
    damaged: list[int]

    def __str__(self) -> str:
        goes = f"To delete: {_steps(self.doomed)} ({self.bytes_of(self.doomed)})." if self.doomed else ""
        whole = [step for step in self.stays if step not in self.damaged]
        return f"{goes or 'Nothing to delete.'} Stays: {_steps(whole)}.{self.warning}"

    @property
    def warning(self) -> str:
        return f" Damaged, so that it stays and does not count: {_steps(self.damaged)}." if self.damaged else ""

    def bytes_of(self, steps: Sequence[int]) -> str:
        return size(sum(self.sizes[step] for step in steps))


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
    with contextlib.nullcontext() if dry_run or is_url(path) else WriterLock(path, 0):
        place = _store(path) if is_url(path) else _directory(path)
        bests = _bests(screen, place.catalog, list(place.sizes), keep_best)
        policies = _policies(place.catalog, keep_last, keep_every, bests)
        plan = _plan(screen, place, policies)
        if plan.doomed and not dry_run and not yes:
            if place.writer:
                screen.line(place.writer)
            screen.line(str(plan))
            click.confirm("Delete?", abort=True)
        deleted = [] if dry_run else place.delete(plan.doomed)
    if screen.as_json:
        screen.json({
            "directory": place.name, "dry_run": dry_run, "deleted": deleted, "would_delete": plan.doomed,
            "stays": plan.stays, "damaged": plan.damaged, "set_aside": list(place.asides),
        })  # fmt: skip
        return 0 if dry_run or deleted == plan.doomed else 2
    if dry_run or not plan.doomed:
        screen.line(str(plan))
    else:
        screen.line(f"Deleted {len(deleted)} checkpoint(s), {plan.bytes_of(deleted)}.{plan.warning}")
    if place.asides:
        total = size(sum(map(size_of, place.asides)))
        screen.line(
            f"{len(place.asides)} set aside stay ({total}): delete aside-* by hand if their timelines are not wanted."
        )
    return 0 if dry_run or deleted == plan.doomed else 2


def _directory(path: str) -> _Place:
    files = CheckpointDirectory(path)

    def delete(steps: Sequence[int]) -> list[int]:
        deleted = [step for step in steps if files.remove(step)]
        if deleted:
            files.events.append("pruned", steps=deleted, by="command line")
        return deleted

    return _Place(
        name=str(files.path),
        catalog=Catalog(files),
        sizes={step: size_of(files.path_of(step)) for step in files.steps()},
        is_good=lambda step: bool(verified(files.path_of(step))["good"]),
        delete=delete,
        asides=[one.path for one in files.asides()],
    )


def _store(url: str) -> _Place:
    catalog = RemoteCatalog(url)
    found, newest = catalog.checkpoints, catalog.view.newest

    def is_good(step: int) -> bool:
        try:
            catalog.verify(step)
        except (LoadError, FileNotFoundError):
            return False
        return True

    def delete(steps: Sequence[int]) -> list[int]:
        for step in steps:  # first what makes it a checkpoint, so that a half of one never looks like one
            one = found[step]
            catalog.epochs.client.delete([one.key, *(key for key in one.objects if key != one.key)])
        return list(steps)

    return _Place(
        name=catalog.url,
        catalog=catalog,
        sizes={step: found[step].size_bytes for step in sorted(found)},
        is_good=is_good,
        delete=delete,
        writer=""
        if newest is None or newest.pid is None
        else f"Last written to by pid {newest.pid} on {newest.host}, since {newest.since}.",
    )


def _plan(screen: Screen, place: _Place, policies: Sequence[Policy]) -> _Plan:
    damaged = []
    with screen.progress(sum(place.sizes.values())) as progress:

        def is_good(step: int) -> bool:
            progress.update(progress.task_ids[0], description=f"step {step}")
            good = place.is_good(step)
            progress.advance(progress.task_ids[0], place.sizes[step])
            if not good:
                damaged.append(step)
            return good

        doomed = to_prune(list(place.sizes), policies, is_good=is_good)
    return _Plan(place.sizes, doomed, [step for step in place.sizes if step not in doomed], sorted(damaged))


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


def _steps(steps: Sequence[int]) -> str:
    return f"step {', '.join(map(str, steps))}" if steps else "none"
