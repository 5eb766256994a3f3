"""Contents of a checkpoint by name, for `show`, `diff` and `extract`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from safeckpt.file import CheckpointFolder, FileReport, open_checkpoint
from safeckpt.proof.captured import named_values
from safeckpt.proof.leaves import flatten
from safeckpt.remote import RemotePath, is_url, local_copy
from safeckpt.run.catalog import Checkpoint
from safeckpt.state.component import Captured, Component
from safeckpt.state.imported import IMPORTED
from safeckpt.state.run_state import RESERVED_KEY

__all__ = ["Contents", "Entry", "read"]


@dataclass(frozen=True)
class Entry:
    """One value.

    Attributes:
        name: Dotted name; of an optimizer's state `optimizer.<parameter name>.<key>`.
        component: The component it belongs to.
        kind: Its role: weight, buffer, moment, option and so on.
        value: A tensor or a plain value.
    """

    name: str
    component: str
    kind: str
    value: Any

    @property
    def size_bytes(self) -> int:
        """Of a tensor, 0 for anything else."""
        is_dense = isinstance(self.value, torch.Tensor) and self.value.layout is torch.strided
        return self.value.numel() * self.value.element_size() if is_dense else 0


@dataclass(frozen=True)
class Contents:
    """A verified and loaded file.

    Attributes:
        report: Of the verification.
        checkpoint: Its header; None for a file that no manager wrote.
        payload: What it holds.
        kinds: Component to kind, in the order of the file.
        entries: Everything in it.
        environment: What the run computed in; empty when it is not known.
    """

    report: FileReport
    checkpoint: Checkpoint | None
    payload: Any
    kinds: dict[str, str]
    entries: list[Entry]
    environment: dict[str, Any]


def read(path: str) -> Contents:
    """Verify every byte of a file and map it; of a sharded checkpoint, put the tensors together.

    Raises:
        DamagedCheckpointError: It is damaged.
        OSError: The system refused.
    """
    if is_url(path):
        with local_copy(path) as copy:  # what is mapped stays when the copy is deleted
            contents = read(str(copy))
        one = contents.checkpoint
        return dataclasses.replace(
            contents,
            report=dataclasses.replace(contents.report, path=path),
            checkpoint=None if one is None else dataclasses.replace(one, path=cast("Path", RemotePath(path))),
        )
    with open_checkpoint(path) as file:
        report = file.verify()
        payload = file.load_whole() if isinstance(file, CheckpointFolder) else file.load("cpu", mmap=True)
    own = payload.get(RESERVED_KEY) if isinstance(payload, dict) else None
    if not isinstance(own, dict) or report.header is None:
        return _foreign(report, payload)
    checkpoint = Checkpoint.from_header(report.header, Path(path), report.size_bytes)
    if IMPORTED in own:  # what it is of is known only with the live objects
        states = {name: state for name, state in payload.items() if name != RESERVED_KEY}
        found = _foreign(report, states)
        return dataclasses.replace(found, checkpoint=checkpoint, kinds=dict.fromkeys(found.kinds, IMPORTED))
    parts: list[tuple[Component, Captured]] = []
    for name, record in own["components"].items():
        kind = type("Saved", (Component,), {"kind": record["kind"]})  # a component without its live object
        parts.append((kind(name, None), Captured(payload[name], record)))
    return Contents(
        report=report,
        checkpoint=checkpoint,
        payload=payload,
        kinds={component.name: component.kind for component, _ in parts},
        entries=[
            Entry(name, component.name, kind, value)
            for component, captured in parts
            for name, kind, value in named_values([(component, captured)])
        ],
        environment=own["environment"],
    )


def _foreign(report: FileReport, payload: Any) -> Contents:
    """Return what is in a file of the drop-in or of plain torch: its top-level keys stand for components."""
    parts = payload.items() if isinstance(payload, dict) else [("", payload)]
    entries = [
        Entry(name, str(key), "tensor" if isinstance(value, torch.Tensor) else "value", value)
        for key, part in parts
        for name, value in flatten(part, str(key))
    ]
    kinds = {str(key): type(part).__name__ for key, part in parts}
    return Contents(report, None, payload, kinds, entries, {})
