"""`diff`: what differs between two checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch

from safeckpt.cli.contents import Contents, Entry, read
from safeckpt.cli.screen import Screen
from safeckpt.proof.leaves import leaf

__all__ = ["diff"]

_MOST_ROWS = 30
_COLUMNS = ("component", "values", "equal", "changed", "A only", "B only", "by at most", "of A")
_PIECE = 1 << 22  # elements compared at a time, so that two large files need no large memory


def diff(screen: Screen, first: str, second: str, components: Sequence[str], *, everything: bool) -> int:
    """Print the differences of two files by component, of those that are named, and return 1 when there are any."""
    with screen.status("verifying both files"):
        a, b = _chosen(read(first), read(second), components)
    with screen.status("comparing"):
        changes = list(_changes(a, b))
    summaries = [_summary(name, a, b, changes) for name in dict.fromkeys([*a.kinds, *b.kinds])]
    equal = not changes and a.kinds == b.kinds
    if screen.as_json:
        screen.json({"equal": equal, "components": summaries, "changes": changes})
        return 0 if equal else 1
    screen.table(
        _COLUMNS,
        [
            (
                one["name"], str(one["values"]), str(one["equal"]), str(one["changed"]), str(one["only_in_first"]),
                str(one["only_in_second"]), _shown(one["largest_change"]), _shown(one["largest_relative_change"]),
            )
            for one in summaries
        ],
        right=_COLUMNS[1:],
    )  # fmt: skip
    screen.line()
    if equal:
        screen.line("Every value is equal, bit for bit.")
        return 0
    shown = changes if everything else changes[:_MOST_ROWS]
    screen.table(("value", "A to B"), [(one["name"], _told(one)) for one in shown])
    if len(changes) > len(shown):
        screen.line(f"... and {len(changes) - len(shown)} more; --all shows them")
    return 1


def _chosen(a: Contents, b: Contents, components: Sequence[str]) -> tuple[Contents, Contents]:
    """Return what two files have of some components; all of it, where none is named.

    Raises:
        click.UsageError: Neither has one.
    """
    known = dict.fromkeys([*a.kinds, *b.kinds])
    if unknown := [name for name in components if name not in known]:
        raise click.UsageError(f"neither file has {', '.join(unknown)}; there is {', '.join(known)}")
    if not components:
        return a, b
    one, other = (
        dataclasses.replace(
            contents,
            kinds={name: kind for name, kind in contents.kinds.items() if name in components},
            entries=[entry for entry in contents.entries if entry.component in components],
        )
        for contents in (a, b)
    )
    return one, other


def _told(change: dict[str, Any]) -> str:
    first, second, largest = change["first"], change["second"], change["largest_change"]
    if first is None or second is None:
        return f"only in {'A' if second is None else 'B'}: {first or second}"
    if first != second:
        return f"{first} -> {second}"
    by = "" if largest is None else f", by at most {largest:.3g} ({_shown(change['largest_relative_change'])} of A)"
    return f"{first}{by}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _changes(a: Contents, b: Contents) -> Iterator[dict[str, Any]]:
    first = {entry.name: entry for entry in a.entries}
    second = {entry.name: entry for entry in b.entries}
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name), second.get(name)
        change = _change(name, one, other)
        if change is not None:
            yield change


def _change(name: str, one: Entry | None, other: Entry | None) -> dict[str, Any] | None:
    leaves = [None if entry is None else leaf(entry.kind, entry.value) for entry in (one, other)]
    if leaves[0] is not None and leaves[1] is not None and leaves[0].key == leaves[1].key:
        return None
    largest, relative = (None, None) if one is None or other is None else _distance(one.value, other.value)
    known = one or other
    return {
        "name": name,
        "component": None if known is None else known.component,
        "first": None if leaves[0] is None else leaves[0].shown,
        "second": None if leaves[1] is None else leaves[1].shown,
        "elements": max(_elements(entry) for entry in (one, other)),
        "largest_change": largest,
        "largest_relative_change": relative,
    }


def _elements(entry: Entry | None) -> int:
    return entry.value.numel() if entry is not None and isinstance(entry.value, torch.Tensor) else 0


def _distance(a: Any, b: Any) -> tuple[float | None, float | None]:
    """Return the largest |b - a|, and that as a share of the largest |a|; None where it has no meaning."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        a, b = torch.tensor(float(a), dtype=torch.float64), torch.tensor(float(b), dtype=torch.float64)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.size() != b.size():
        return None, None
    if any(one.layout is not torch.strided or one.is_quantized or one.is_meta for one in (a, b)):
        return None, None
    largest = scale = 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    for piece, other in zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True):
        x, y = piece.to(wide), other.to(wide)
        if x.numel():
            same = (x == y) | (torch.isnan(x) & torch.isnan(y))  # infinities of one sign, too, are no change
            largest = max(largest, float(torch.where(same, 0, (y - x).abs()).max()))
            scale = max(scale, float(x.abs().nan_to_num(0.0, posinf=0.0).max()))
    return largest, largest / scale if scale else (0.0 if largest == 0 else float("inf"))


def _summary(name: str, a: Contents, b: Contents, changes: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [one for one in changes if one["component"] == name]
    removed = sum(one["second"] is None for one in mine)
    added = sum(one["first"] is None for one in mine)
    total = len({entry.name for contents in (a, b) for entry in contents.entries if entry.component == name})
    return {
        "name": name,
        "kind": a.kinds.get(name) or b.kinds.get(name),
        "values": total,
        "equal": total - len(mine),
        "changed": len(mine) - removed - added,
        "only_in_first": removed,
        "only_in_second": added,
        "bit_equal": not mine,
        "largest_change": _largest(mine, "largest_change"),
        "largest_relative_change": _largest(mine, "largest_relative_change"),
    }


def _largest(changes: list[dict[str, Any]], key: str) -> float | None:
    """Return the largest change of a component: a count of steps must not stand before what the steps have changed."""
    found = [(one["elements"] > 1, one[key]) for one in changes if one[key] is not None]
    of_several = [value for is_several, value in found if is_several]
    return max(of_several or [value for _, value in found], default=None)
