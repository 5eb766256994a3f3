"""`import`: a half-finished run of another tool goes on here."""

from __future__ import annotations

import click

from safeckpt.cli.screen import Screen
from safeckpt.errors import ComponentMismatchError, NonFiniteError
from safeckpt.importing import import_checkpoint

__all__ = ["import_run", "mapping_of"]


def mapping_of(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Return `--map NAME=KEY` as a mapping; None where it was not given.

    Raises:
        click.BadParameter: One has no `=`, or a name comes twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, key = pair.partition("=")
        if not equals or not name or name in found:
            raise click.BadParameter(f"{pair!r} is not of the form model=state_dict, each name once.")
        found[name] = key
    return found or None


def import_run(screen: Screen, source: str, directory: str, *, pairs: tuple[str, ...], step: int | None) -> int:
    """Write the first checkpoint of a run, and say what it has and has not."""
    with screen.status(f"reading {source}"):
        try:
            report = import_checkpoint(source, directory, mapping=mapping_of(pairs), step=step)
        except (ComponentMismatchError, NonFiniteError):
            raise
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    if screen.as_json:
        one = report.checkpoint
        screen.json({
            "path": one.path, "step": one.step, "size_bytes": one.size_bytes, "source": report.source,
            "kind": report.kind, "taken": dict(report.taken), "contents": dict(report.contents),
            "unused": list(report.unused), "position": report.position or None,
        })  # fmt: skip
    else:
        for line in str(report).splitlines():
            screen.line(line)
        screen.line(
            "A manager of this directory with these components goes on from it with restore(), which names what stays "
            "as the script has made it."
        )
    return 0
