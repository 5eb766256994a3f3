"""What a notebook shows of an object: a small table without scripts, in the colours of the page, dark ones too."""

from __future__ import annotations

from collections.abc import Iterable

from safeckpt.system.text import printable

__all__ = ["html_table"]

# Seen on white and on black. No meaning is in the colour alone: the sentence beside it says the same.
_GOOD, _BAD = "#159957", "#d9483b"
_MOST_ROWS = 20
_MOST_CHARACTERS = 200  # of a cell


def html_table(
    sentence: str, rows: Iterable[tuple[str, object]], *, good: bool | None = None, details: str | None = None
) -> str:
    """Return HTML: a sentence, names with their values, and a longer text that can be opened.

    Args:
        sentence: What it is about.
        rows: Names and values; those whose value is None or empty are left out, and what is too long is cut.
        good: Whether the sentence is good or bad news, which gives it a mark.
        details: The longer text, of several lines.
    """
    shown = [(name, str(value)) for name, value in rows if value is not None and str(value)]
    rest = len(shown) - _MOST_ROWS
    if rest > 0:
        shown = [*shown[:_MOST_ROWS], ("...", f"and {rest} more")]
    mark = (
        ""
        if good is None
        else f'<span style="color:{_GOOD if good else _BAD}">{"&#10004;" if good else "&#10008;"}</span> '
    )
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{_safe(name)}</th>'
        f'<td style="text-align:left;white-space:pre-wrap">{_safe(value)}</td></tr>'
        for name, value in shown
    )
    table = f"<table>{cells}</table>" if cells else ""
    text = f'<pre style="white-space:pre-wrap">{_whole(details or "")}</pre>'
    more = "" if details is None else f"<details><summary>all of it</summary>{text}</details>"
    return f"<div>{mark}<b>{_safe(sentence)}</b>{table}{more}</div>"


def _safe(text: str) -> str:
    return _whole(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}...")


def _whole(text: str) -> str:
    from html import escape  # noqa: PLC0415 - it has a table of two thousand names, and few look at a table

    return escape(printable(text))
