"""Which saved parameter of an optimizer each live one is: by name, never by position alone.

Torch stores optimizer state by position. When the model registers its layers in another order, every moment
lands on another parameter of the same shape, without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from safeckpt.state.tree import named_tensors

__all__ = ["Matching", "Slot", "match", "positional"]

Slot = tuple[Sequence[str], torch.Tensor]  # every name of a parameter, and the parameter


@dataclass
class Matching:
    """Where the live parameters are in the file.

    Attributes:
        rows: For each live group, the saved position of each of its parameters within the group it is from.
        sources: For each live group, the number of the saved one.
        differences: What does not match, one sentence each; the rest means something only when there is none.
    """

    rows: list[list[int]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def reordered(self) -> bool:
        """Tell whether a group or a parameter stands elsewhere than in the file; empty groups have no order."""
        filled = [source for source, row in zip(self.sources, self.rows, strict=True) if row]
        return filled != sorted(filled) or any(row != sorted(row) for row in self.rows)


def match(saved: Sequence[Sequence[Mapping[str, Any]]], live: Sequence[Sequence[Slot]]) -> Matching:
    """Find every live parameter in the file.

    Args:
        saved: Name, shape and dtype of each parameter of each group.
        live: Names and parameter of each.
    """
    there = {
        slot["name"]: (group, position, slot)
        for group, slots in enumerate(saved)
        for position, slot in enumerate(slots)
    }
    found = Matching()
    rows: list[list[tuple[int, int]]] = []
    for slots in live:
        rows.append([])
        for names, parameter in slots:
            name = next((name for name in names if name in there), None)
            if name is None:
                found.differences.append(f"no saved state for parameter {names[0]}, which the optimizer now holds")
                continue
            group, position, slot = there.pop(name)
            rows[-1].append((group, position))
            found.differences += _unlike(name, slot, parameter)
    found.differences += [f"saved with parameter {name}, which the optimizer no longer holds" for name in there]
    taken = [{group for group, _ in row} for row in rows]
    whole = all(len(groups) <= 1 for groups in taken) and sum(map(len, taken)) == sum(1 for slots in saved if slots)
    if not found.differences and not (whole and len(live) == len(saved)):
        before = [[slot["name"] for slot in slots] for slots in saved]
        now = [[names[0] for names, _ in slots] for slots in live]
        found.differences.append(f"the parameters were grouped as {before}, now as {now}")
    found.rows = [[position for _, position in row] for row in rows]
    # A group without parameters has no name to be found by: they follow each other as they were saved.
    empty = (number for number, slots in enumerate(saved) if not slots)
    found.sources = [row[0][0] if row else next(empty, index) for index, row in enumerate(rows)]
    return found


def _unlike(name: str, slot: Mapping[str, Any], parameter: torch.Tensor) -> Iterator[str]:
    if list(slot["shape"]) != list(parameter.size()):
        yield f"{name} had shape {list(slot['shape'])}, now {list(parameter.size())}"
    if slot["dtype"] != str(parameter.dtype):
        yield f"{name} had dtype {slot['dtype']}, now {parameter.dtype}"


def positional(saved: Sequence[Sequence[Mapping[str, Any]]], state: Mapping[str, Any]) -> str | None:
    """Return what in an optimizer's state depends on the order of the parameters, None when nothing seems to.

    LBFGS keeps vectors over all parameters in the state of the first; such a tensor is larger than its parameter.
    """
    slots = {
        number: slot
        for group, row in zip(state["param_groups"], saved, strict=True)
        for number, slot in zip(group["params"], row, strict=True)
    }
    for number, entry in state["state"].items():
        numel = math.prod(slots[number]["shape"]) if number in slots else 1
        for key, tensor in named_tensors(entry):
            if tensor.numel() > numel:
                return f"{key or 'state'} of {slots[number]['name'] if number in slots else number}"
    return None
