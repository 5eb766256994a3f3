"""Checkpoints below a URL: list them, verify them, find the latest. Reads only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from safeckpt.errors import LoadError
from safeckpt.remote import RemoteCheckpoint, RemotePath, open_prefix, open_remote, verify_remote
from safeckpt.run.catalog import Bad, Checkpoint, bests_in, fault_of, warn_skipped
from safeckpt.store import Best, Timelines, names, timelines_of
from safeckpt.system.threads import Progress

__all__ = ["RemoteCatalog"]


class RemoteCatalog:
    """The checkpoints that count below the URL of a mirror, as they were when this was made.

    Args:
        url: The URL.

    Attributes:
        url: The URL, as it may be shown.
        checkpoints: Step to checkpoint, ascending.
        hidden: What belongs to timelines that were left, or was sent by a writer that had lost the prefix.

    Raises:
        MirrorUnreachableError: The store did not answer.
    """

    def __init__(self, url: str) -> None:
        self.epochs = open_prefix(url)
        self.view = self.epochs.look()
        self.url = self.epochs.client.url
        self.checkpoints: dict[int, RemoteCheckpoint] = dict(self.view.checkpoints)
        self.hidden = [self._path(one) for one in self.view.hidden]

    def _path(self, one: RemoteCheckpoint) -> RemotePath:
        return RemotePath(f"{self.url}/{one.name}")

    def path_of(self, step: int) -> RemotePath:
        """Return the place of a checkpoint."""
        return self._path(self.checkpoints[step])

    def peek(self, step: int) -> Checkpoint:
        """Return a checkpoint after the cheap check of its ends: some ranges are read.

        Raises:
            LoadError: It is not good.
            FileNotFoundError: It is gone.
        """
        one = self.checkpoints[step]
        with open_remote(self.epochs.client, one) as file:
            file.check_structure()
            header = file.header() or {}
        return Checkpoint.from_header(header, cast("Path", self.path_of(step)), one.size_bytes)

    def bests(self, step: int) -> list[Best]:
        """Return which best checkpoints the run keeps, as that of a step says.

        Raises:
            LoadError: It is not good.
            FileNotFoundError: It is gone.
        """
        with open_remote(self.epochs.client, self.checkpoints[step]) as file:
            return bests_in(file.header(), self.path_of(step))

    def verify(self, step: int, progress: Progress | None = None) -> Checkpoint:
        """Return a checkpoint after every byte of it was checked."""
        report = verify_remote(self.epochs.client, self.checkpoints[step], progress)
        return Checkpoint.from_header(report.header or {}, cast("Path", self.path_of(step)), report.size_bytes)

    def find_latest(self, *, verify: bool = True) -> Checkpoint | None:
        """Return the newest good checkpoint; see `safeckpt.latest`."""
        for step in reversed(self.checkpoints):
            try:
                return self.verify(step) if verify else self.peek(step)
            except (LoadError, FileNotFoundError) as error:
                fault = fault_of(error)
            if isinstance(fault, Bad):
                warn_skipped(self.path_of(step), fault.reason)
        return None

    def events(self) -> list[dict[str, Any]]:
        """Return the history of the run, oldest first."""
        return parse_events(self._history(names.EVENTS).split(b"\n"))

    def timelines(self) -> Timelines:
        """Return the losses of the run."""
        return timelines_of(self._history(names.LOSSES))

    def _history(self, name: str) -> bytes:
        epochs = self.view.histories.get(name)
        return bytes(self.epochs.client.read(f"epoch-{max(epochs):08d}/{name}")) if epochs else b""


def parse_events(lines: list[bytes]) -> list[dict[str, Any]]:
    """Return the events in some lines; what is none is passed over."""
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
