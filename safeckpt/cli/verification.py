"""`verify`: check every byte of files and directories. Needs no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from safeckpt.cli.screen import BAD, GOOD, Screen
from safeckpt.errors import LoadError
from safeckpt.file import FileReport, is_folder, open_checkpoint
from safeckpt.remote import RemotePath, find, is_url, names_checkpoint, verify_url
from safeckpt.run.catalog import reason_of
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import CheckpointDirectory
from safeckpt.system.text import from_here, printable, size

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["refuse_shard", "size_of", "verified", "verify_paths"]


def verify_paths(screen: Screen, paths: Sequence[str], last: int | None) -> int:
    """Check every byte of files, and of checkpoints in directories; return 1 when one is not good, or there is none.

    Args:
        screen: Where it is printed.
        paths: Files, directories and URLs.
        last: Of each directory only the newest so many.
    """
    found = {path: _remote_of(path, last) if is_url(path) else _files_of(Path(path), last) for path in paths}
    files = [file for some in found.values() for file in some]
    results = [_none_in(path) for path, some in found.items() if not some]
    with screen.progress(sum(map(size_of, files))) as progress:
        for file in files:
            progress.update(progress.task_ids[0], description=printable(file.name))
            shown = functools.partial(_show, progress, progress.tasks[0].completed)
            results.append(verified(file, shown))
            shown(results[-1]["size_bytes"], 0)
    bad = [one for one in results if not one["good"]]
    if screen.as_json:
        screen.json(results)
        return 1 if bad else 0
    screen.table(
        ("file", "size", "check"),
        [
            (_short(one["path"], paths), size(one["size_bytes"]), (one["text"], GOOD if one["good"] else BAD))
            for one in results
        ],
        right=("size",),
    )
    screen.line(f"{len(results) - len(bad)} of {len(files)} good", BAD if bad else GOOD)
    return 1 if bad else 0


def _short(path: object, asked: Sequence[str]) -> str:
    """Return a file's name when one directory was asked for, else its path from here."""
    return Path(str(path)).name if len(asked) == 1 and Path(asked[0]).is_dir() else from_here(str(path))


def refuse_shard(path: Path) -> None:
    """Refuse one file of a sharded checkpoint: it proves nothing without the index beside it.

    Raises:
        click.ClickException: It is one.
    """
    if path.suffix == ".distcp" and path.is_file():
        raise click.ClickException(
            f"{path} is one shard of a sharded checkpoint, whose index says what it has to be; name the directory: "
            f"{path.parent}"
        )


def _files_of(path: Path, last: int | None) -> list[Path]:
    """Return a checkpoint, or those of a directory; what was set aside is older than the newest ones."""
    refuse_shard(path)
    if not path.is_dir() or is_folder(path):
        return [path]
    files = CheckpointDirectory(path)
    if last is not None:
        return [files.path_of(step) for step in files.steps()[-last:]]
    return [*map(files.path_of, files.steps()), *(aside.path for aside in files.asides())]


def _remote_of(url: str, last: int | None) -> list[Path]:
    """Return the checkpoints that count below a URL, or the one that it names."""
    if names_checkpoint(url):
        return [cast("Path", RemotePath(url))]
    remote = RemoteCatalog(url)
    return [cast("Path", remote.path_of(step)) for step in sorted(remote.checkpoints)[-(last or 0) :]]


def size_of(path: Path) -> int:
    """Return the size of a file, or of all files of a sharded checkpoint."""
    if isinstance(path, RemotePath):
        return find(str(path))[1].size_bytes
    if not path.is_dir():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.iterdir() if one.is_file())


def _show(bar: Progress, before: float, done_bytes: int, _: int) -> None:
    bar.update(bar.task_ids[0], completed=before + done_bytes)


def _verify(file: Path, progress: Callable[[int, int], object] | None) -> FileReport:
    if isinstance(file, RemotePath):
        return verify_url(str(file), progress)
    with open_checkpoint(file) as opened:
        return opened.verify(progress=progress)


def verified(file: Path, progress: Callable[[int, int], object] | None = None) -> dict[str, Any]:
    """Check every byte of a file and return what was found, as JSON has it; damage is a result, not an error."""
    try:
        report = _verify(file, progress)
    except LoadError as error:
        text = str(error).partition("\n")[0].removeprefix(f"{file} ").removeprefix("is ").removesuffix(".")
        return _result(
            file,
            good=False,
            size_bytes=size_of(file),
            text=text,
            reason=reason_of(error),
            record=getattr(error, "record", None),
            tensors=getattr(error, "tensors", ()),
        )
    text = "every byte checked" if report.self_proving else "plain torch: only record CRCs checked"
    return _result(file, good=True, size_bytes=report.size_bytes, self_proving=report.self_proving, text=text)


def _none_in(path: str) -> dict[str, Any]:
    """Return the result for a directory without checkpoints: a check that checked nothing must not look good."""
    return _result(path, good=False, size_bytes=0, text="holds no checkpoint", reason="no checkpoint")


def _result(
    path: Path | str,
    *,
    good: bool,
    size_bytes: int,
    text: str,
    self_proving: bool | None = None,
    reason: str | None = None,
    record: str | None = None,
    tensors: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what was found, with every key whatever it was; `self_proving` is None where nothing good was found."""
    return {
        "path": path,
        "good": good,
        "size_bytes": size_bytes,
        "self_proving": self_proving,
        "text": text,
        "reason": reason,
        "record": record,
        "tensors": list(tensors),
    }
