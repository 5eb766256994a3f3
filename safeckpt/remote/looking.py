"""What is in a store, for whoever only reads: one checkpoint by its URL, or all that count below a prefix."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safeckpt.file import INDEX, open_checkpoint
from safeckpt.remote import keys
from safeckpt.remote.client import Client, open_client
from safeckpt.remote.epochs import Epochs, RemoteCheckpoint
from safeckpt.remote.options import Mirror
from safeckpt.remote.transfer import download, fetch, open_remote
from safeckpt.remote.urls import shown_url
from safeckpt.store import CheckpointDirectory

if TYPE_CHECKING:
    from safeckpt.file import FileReport
    from safeckpt.system.threads import Progress

__all__ = ["find", "local_copy", "names_checkpoint", "open_prefix", "verify_remote", "verify_url"]


def open_prefix(url: str) -> Epochs:
    """Return what reads below the URL of a mirror.

    Raises:
        ImportError: A package is missing.
        ValueError: The URL cannot be used.
    """
    return Epochs(open_client(Mirror(url, lock=False)), lock=False)


def names_checkpoint(url: str) -> bool:
    """Return whether a URL has the form of a checkpoint's below a mirror; else it may be that of a mirror."""
    epoch, _, name = url.rpartition("/")
    return _part(f"{epoch.rpartition('/')[2]}/{name}") is not None


def find(url: str) -> tuple[Client, RemoteCheckpoint]:
    """Return the checkpoint that a URL names, or any other single object.

    Raises:
        FileNotFoundError: There is none.
        MirrorUnreachableError: The store did not answer.
    """
    url = Mirror(url, lock=False).url
    prefix, _, name = url.rpartition("/")
    epoch = prefix.rpartition("/")[2]
    if (found := _part(f"{epoch}/{name}")) is None:
        client = open_client(Mirror(prefix, lock=False))
        return client, RemoteCheckpoint(0, 0, size := client.size(name), {name: size})
    prefix = prefix.rpartition("/")[0]
    client = open_client(Mirror(prefix, lock=False))
    objects = {
        one.key: one.size_bytes
        for one in client.listing(f"{epoch}/")
        if isinstance(part := keys.parse(one.key), keys.Part) and one.key.startswith(f"{epoch}/{name}")
        and part.step == found.step
    }  # fmt: skip
    whole = f"{epoch}/{name}" if found.file is None else f"{epoch}/{name}/{INDEX}"
    if whole not in objects:
        raise FileNotFoundError(errno.ENOENT, "No such checkpoint", shown_url(url))
    ordered = dict(sorted(objects.items(), key=lambda one: (one[0] == whole, one[0])))
    return client, RemoteCheckpoint(found.epoch, found.step, sum(ordered.values()), ordered)


def _part(key: str) -> keys.Part | None:
    found = keys.parse(key) or keys.parse(f"{key}/{INDEX}")
    return found if isinstance(found, keys.Part) else None


@contextlib.contextmanager
def local_copy(url: str, progress: Progress | None = None) -> Iterator[Path]:
    """Bring a checkpoint into a temporary directory, checked, while the block runs.

    Raises:
        LoadError: It is not what was saved.
        FileNotFoundError: There is none.
        MirrorUnreachableError: The store did not answer.
    """
    client, one = find(url)
    with tempfile.TemporaryDirectory(prefix="safeckpt-") as name:
        if one.epoch:
            yield fetch(client, one, CheckpointDirectory(name), progress)
            return
        path = Path(name) / one.key
        with path.open("xb") as file:
            download(client, one.key, one.size_bytes, file.write, progress)
        yield path


def verify_url(url: str, progress: Progress | None = None) -> FileReport:
    """Check every byte of a checkpoint in a store, and return what it is.

    Raises:
        LoadError: It is not what was saved.
        FileNotFoundError: There is none.
    """
    client, one = find(url)
    return verify_remote(client, one, progress)


def verify_remote(client: Client, one: RemoteCheckpoint, progress: Progress | None = None) -> FileReport:
    """Check every byte of a checkpoint: of one file without a copy on the disk."""
    if not one.is_folder or not one.epoch:
        with open_remote(client, one) as file:
            return file.verify(progress)
    with local_copy(f"{client.url}/{one.name}", progress) as path, open_checkpoint(path) as folder:
        return dataclasses.replace(folder.verify(progress=progress), path=f"{client.url}/{one.name}")
