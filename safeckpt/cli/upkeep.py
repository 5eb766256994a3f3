"""`verify`, `prune` and `extract`: check files, delete files, take a part out of one."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch
from rich.progress import Progress

from safeckpt.cli.contents import read
from safeckpt.cli.screen import Screen, printable, size
from safeckpt.errors import LoadError
from safeckpt.file import is_folder
from safeckpt.functional import save, verify
from safeckpt.run.catalog import Catalog, reason_of
from safeckpt.store import (
    Best,
    CheckpointDirectory,
    KeepBest,
    KeepEvery,
    KeepLast,
    Policy,
    WriterLock,
    commit,
    to_prune,
)

__all__ = ["extract", "prune", "verify_paths"]


def verify_paths(screen: Screen, paths: Sequence[str]) -> int:
    """Check every byte of files, and of all checkpoints in directories; return 1 when one is not good."""
    files = [file for path in paths for file in _files_of(Path(path))]
    results = []
    with screen.progress(sum(map(_size_of, files))) as progress:
        for file in files:
            progress.update(progress.task_ids[0], description=printable(file.name))
            shown = functools.partial(_show, progress, progress.tasks[0].completed)
            results.append(_verified(file, shown))
            shown(results[-1]["size_bytes"], 0)
    bad = [one for one in results if not one["good"]]
    if screen.as_json:
        screen.json(results)
        return 1 if bad else 0
    screen.table(
        ("file", "size", "check"),
        [(_short(one["path"], paths), size(one["size_bytes"]), one["text"]) for one in results],
        right=("size",),
    )
    screen.line(f"{len(results) - len(bad)} of {len(results)} good")
    return 1 if bad else 0


def _short(path: Path, asked: Sequence[str]) -> str:
    """Return a file's name when one directory was asked for, else its path."""
    return path.name if len(asked) == 1 and Path(asked[0]).is_dir() else str(path)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir() or is_folder(path):
        return [path]
    directory = CheckpointDirectory(path)
    found = [directory.path_of(step) for step in directory.steps()] + [aside.path for aside in directory.asides()]
    if not found:
        raise click.ClickException(f"{path} holds no checkpoint")
    return found


def _size_of(path: Path) -> int:
    """Return the size of a file, or of all files of a sharded checkpoint."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.iterdir() if one.is_file())


def _show(bar: Progress, before: float, done_bytes: int, _: int) -> None:
    bar.update(bar.task_ids[0], completed=before + done_bytes)


def _verified(file: Path, progress: Callable[[int, int], object] | None = None) -> dict[str, Any]:
    try:
        report = verify(file, progress=progress)
    except LoadError as error:
        where = getattr(error, "record", None)
        reason = f"DAMAGED: {reason_of(error)}" + (f" (in {where})" if where else "")
        return {
            "path": file,
            "good": False,
            "size_bytes": _size_of(file),
            "text": reason,
            "reason": reason_of(error),
        }
    return {
        "path": file,
        "good": True,
        "size_bytes": report.size_bytes,
        "self_proving": report.self_proving,
        "text": "every byte checked" if report.self_proving else "plain torch: only record CRCs checked",
        "reason": None,
    }


def prune(
    screen: Screen,
    path: str,
    *,
    keep_last: int,
    keep_every: int | None,
    keep_best: Sequence[str],
    dry_run: bool,
    yes: bool,
) -> int:
    """Delete the checkpoints that no rule keeps, after every one that stays was verified."""
    directory = CheckpointDirectory(path)
    if dry_run:
        return _prune(screen, directory, _policies(directory, keep_last, keep_every, keep_best), dry_run=True, yes=True)
    with WriterLock(path, 0):
        return _prune(screen, directory, _policies(directory, keep_last, keep_every, keep_best), dry_run=False, yes=yes)


def _policies(
    directory: CheckpointDirectory, keep_last: int, keep_every: int | None, keep_best: Sequence[str]
) -> list[Policy]:
    policies: list[Policy] = [KeepLast(keep_last)]
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    for text in keep_best:
        metric, _, mode = text.partition(":")
        if mode not in ("", "min", "max"):
            raise click.UsageError(f"--keep-best takes METRIC, METRIC:min or METRIC:max; got {text!r}")
        best = Best(metric, "max" if mode == "max" else "min")
        policies.append(KeepBest(best, functools.partial(_score, Catalog(directory), metric)))
    return policies


def _score(catalog: Catalog, metric: str, step: int) -> float | None:
    try:
        checkpoint = catalog.peek(step)
    except (LoadError, FileNotFoundError):
        return None
    value = checkpoint.metrics.get(metric, checkpoint.loss if metric == "loss" else None)
    return value if isinstance(value, float) else None


def _prune(screen: Screen, directory: CheckpointDirectory, policies: list[Policy], *, dry_run: bool, yes: bool) -> int:
    steps = directory.steps()
    sizes = {step: _size_of(directory.path_of(step)) for step in steps}
    with screen.progress(sum(sizes.values())) as progress:

        def is_good(step: int) -> bool:
            """Check every byte: what stays has to be worth more than what goes."""
            progress.update(progress.task_ids[0], description=f"step {step}")
            good: bool = _verified(directory.path_of(step))["good"]
            progress.advance(progress.task_ids[0], sizes[step])
            return good

        doomed = to_prune(steps, policies, is_good=is_good)
    stays = [step for step in steps if step not in doomed]
    if doomed and not dry_run and not yes:
        screen.line(_listed(doomed, stays, sizes))
        click.confirm("Delete?", abort=True)
    deleted = [] if dry_run else [step for step in doomed if directory.remove(step)]
    if deleted:
        directory.events.append("pruned", steps=deleted, by="command line")
    if screen.as_json:
        screen.json(
            {
                "directory": directory.path,
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


def extract(screen: Screen, path: str, component: str, output: str, *, force: bool) -> int:
    """Write one component of a checkpoint into a file of its own."""
    target = Path(output)
    if target.suffix not in (".pt", ".pth", ".safetensors"):
        raise click.UsageError(f"{output}: the name has to end in .pt, .pth or .safetensors")
    if target.exists() and not force:
        raise click.ClickException(f"{output} exists; --force replaces it")
    with screen.status(f"verifying {path}"):
        contents = read(path)
        if component not in contents.kinds:
            raise click.ClickException(f"{path} has no {component!r}; it has: {', '.join(contents.kinds)}")
        part = contents.payload[component]
        if target.suffix == ".safetensors":
            data = _safetensors(component, part)
            commit(target, lambda file: _write(file, data))
        else:
            save(part, target, allow_nonfinite=("*",))  # it passed the guard that its own run chose
    size_bytes = target.stat().st_size
    if screen.as_json:
        screen.json({"path": target, "component": component, "size_bytes": size_bytes})
    else:
        screen.line(f"{target}: {component} of {path}, {size(size_bytes)}")
    return 0


def _safetensors(component: str, part: Any) -> bytes:
    try:
        library = importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise click.ClickException('this needs the package safetensors. Next: pip install "safetensors"') from None
    others = (
        [str(name) for name, one in part.items() if not isinstance(one, torch.Tensor)] if isinstance(part, dict) else []
    )
    if not isinstance(part, dict) or others:
        what = f"has values that are no tensors ({', '.join(others[:5])})" if others else "is no dict of tensors"
        raise click.ClickException(f"{component} {what}, and safetensors holds nothing else; choose a .pt file")
    # safetensors refuses tensors that share memory, and gaps.
    tensors = {str(name): one.detach().clone(memory_format=torch.contiguous_format) for name, one in part.items()}
    data: bytes = library.save(tensors, metadata={"format": "pt"})
    return data


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
