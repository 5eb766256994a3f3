"""Output of the commands: tables for people, JSON for programs, progress for what takes long.

Names in a checkpoint, a path or a history may come from another user. Everything that is printed, errors and warnings
too, goes through `printable`, so that none of it reaches the terminal as a command.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from safeckpt.system.text import is_harmless, printable

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["BAD", "GOOD", "Cell", "Screen", "error_line", "write", "write_json"]

GOOD, BAD = "green", "red"  # colours, on a terminal only and not with NO_COLOR; no meaning is in the colour alone

Cell = str | tuple[str, str]
Side = Literal["left", "right"]


class Screen:
    """Standard output and standard error of one command.

    Args:
        as_json: Print JSON, and no progress.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._out = Console(highlight=False)
        self._errors = Console(stderr=True, highlight=False)

    def json(self, value: Any) -> None:
        """Print a value as JSON; NaN and infinities become strings, since JSON has no word for them."""
        write_json(json.dumps(_plain(value), indent=2, ensure_ascii=False))

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print a line; on a terminal it is wrapped at its width."""
        _print(self._out, Text(printable(text), style or ""))

    def verdict(self, text: str, *, good: bool) -> None:
        """Print a text of several lines as it is, its first line in the colour of good or bad news."""
        first, newline, rest = printable(text).partition("\n")
        self._out.print(Text.assemble((first, GOOD if good else BAD), newline, rest), soft_wrap=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        *,
        right: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> None:
        """Print rows under headings: a line each for a program, and on a terminal folded where it is narrow, never cut.

        Args:
            columns: The headings.
            rows: Their texts, or pairs of text and colour.
            right: Headings of columns of numbers.
            whole: Headings of columns that, as those of numbers, are folded only where there is no room for them.
        """
        cells = [[_text(cell) for cell in row] for row in rows]
        texts = [[*columns], *([cell.plain for cell in row] for row in cells)]
        widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
        sides: list[Side] = ["right" if column in right else "left" for column in columns]
        if not self._out.is_terminal:
            for line in texts:
                aligned = (_aligned(*one) for one in zip(line, widths, sides, strict=True))
                sys.stdout.write("  ".join(aligned).rstrip() + "\n")
            return
        from rich.table import Table  # noqa: PLC0415 - a quarter of the time that a command takes

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        rigid = [column in right or column in whole for column in columns]
        has_room = sum(width + 2 for width, one in zip(widths, rigid, strict=True) if one) < 0.8 * self._out.width
        for column, side, one in zip(columns, sides, rigid, strict=True):
            table.add_column(column, justify=side, overflow="fold", no_wrap=one and has_room)
        for row in cells:
            table.add_row(*row)
        self._out.print(table)

    @contextmanager
    def progress(self, total_bytes: int) -> Iterator[Progress]:
        """Show a bar on standard error while a block runs; its first task counts bytes."""
        from rich.progress import (  # noqa: PLC0415 - as above
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (TextColumn("{task.description}", markup=False), BarColumn(20), DownloadColumn(), TimeElapsedColumn())
        quiet = self.as_json or not self._errors.is_terminal
        with Progress(*columns, console=self._errors, transient=True, disable=quiet) as progress:
            progress.add_task("", total=total_bytes)
            yield progress

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a line on standard error while a block runs; a call of what this yields changes it."""
        with self._errors.status(Text(printable(text))) as status:
            yield lambda text: status.update(Text(printable(text)))

    @contextmanager
    def warnings_as_lines(self) -> Iterator[None]:
        """Print warnings as one line each on standard error, without the place in the code."""

        def show(message: Warning | str, *_: object, **__: object) -> None:
            _print(self._errors, Text(printable(f"warning: {message}"), "yellow"))

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = show
            yield


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=not console.is_terminal)


def _aligned(text: str, width: int, side: Side) -> str:
    room = " " * (width - cell_len(text))
    return room + text if side == "right" else text + room


def _text(cell: Cell) -> Text:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(printable(text, keep=""), style)


def write(text: str) -> None:
    """Write a text of several lines to standard output, as it is but for what `printable` escapes."""
    sys.stdout.write(printable(text) + "\n")


def write_json(text: str) -> None:
    """Write a JSON text; what `printable` would escape stands in its strings, and is escaped there as JSON does."""
    escaped = (one if is_harmless(one) or one == "\n" else _json_escaped(one) for one in text)
    sys.stdout.write("".join(escaped) + "\n")


def _json_escaped(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]  # the only one that JSON leaves


def error_line(text: str) -> None:
    """Write an error to standard error."""
    Console(stderr=True, highlight=False).print(Text("Error: ", f"bold {BAD}"), end="")
    sys.stderr.write(f"{printable(text)}\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)
