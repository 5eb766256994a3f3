"""`plot`: the losses of runs, and below them what happened at which step. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from safeckpt.cli.history import History, Losses, Return, read_history
from safeckpt.cli.screen import Screen, error_line
from safeckpt.system.figures import new_figure, wants_log_scale
from safeckpt.system.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_runs"]

Array = npt.NDArray[Any]

# Okabe and Ito's colours, which people who see fewer colours tell apart as well.
_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
_GREY, _BLACK = "#8a8a8a", "#1a1a1a"
_COLOURS = (_BLUE, _RED, _GREEN, _PURPLE, _ORANGE, _SKY, _BLACK)
_LINES = ("-", "--", ":", "-.")  # for more runs than colours

_DOT = {"color": _GREY, "linestyle": "none", "marker": "o", "markersize": 2.5}

_PIXELS = 900  # of the width of the panels
_WIDTH, _HEIGHT, _LANE, _ROW, _LEGEND_ROW = 9.0, 3.8, 0.11, 0.2, 0.19  # inches
_MOST_LANES = 12  # runs whose events are drawn
_LEGEND_CHARACTERS = 130  # in a line of the legend
_MOST_CHARACTERS = 100  # of a title or a label
_DOTS = 80  # losses of the longest run up to which each loss is a dot
_GAP = 5  # times the usual distance between two losses: what lies between is not on record

_SAVED, _REFUSED, _BACK, _RESTORED = "saved", "refused", "rolled back", "restored"  # as `log` calls them


def plot_runs(screen: Screen, places: Sequence[str], output: str | None) -> int:
    """Draw runs into a file and print its path; return 1 when there is nothing to draw."""
    path = Path(output) if output else Path(f"safeckpt-{_file_name(places)}.png")
    with screen.status("reading") as status:
        histories = [read_history(place) for place in places]
        shown = [one for one in histories if one.steps]
        if not shown and screen.as_json:
            screen.json({"path": None, "runs": [_counts(one) for one in histories]})
            return 1
        if not shown:
            error_line(f"{', '.join(places)}: no history and no checkpoint, so there is nothing to draw.")
            return 1
        status("drawing")
        try:
            figure = _figure(shown)
        except ImportError as error:
            raise click.ClickException(str(error)) from None
        figure.savefig(path)
    if screen.as_json:
        screen.json({"path": path, "runs": [_counts(one) for one in histories]})
        return 0
    screen.line(str(path))
    for one in histories:
        screen.line(f"{one.place}: {_text(_counts(one))}")
    if len(shown) > _MOST_LANES:
        screen.line(f"With more than {_MOST_LANES} runs only the losses are drawn.")
    return 0


def _file_name(places: Sequence[str]) -> str:
    names = [Path(place).absolute().name for place in places]
    return printable(names[0] if len(names) == 1 else "runs", keep="").replace("\\", "_")


def _counts(history: History) -> dict[str, Any]:
    return {
        "directory": history.place,
        "first_step": min(history.steps, default=None),
        "last_step": max(history.steps, default=None),
        "losses": max(map(len, history.losses.values()), default=0),
        "saved": len(history.saved | history.present),
        "refused": len(history.refused),
        "rolled_back": len(history.rollbacks),
        "restored": len(history.restarts),
    }


def _text(counts: dict[str, Any]) -> str:
    if counts["last_step"] is None:
        return "nothing on record"
    numbers = (f"{counts[name]} {name.replace('_', ' ')}" for name in ("saved", "refused", "rolled_back", "restored"))
    return f"step {counts['first_step']} to {counts['last_step']}, {counts['losses']} losses; {', '.join(numbers)}"


# -- the picture -------------------------------------------------------------------------------------------------------


def _figure(histories: Sequence[History]) -> Figure:
    events = _Events(histories if len(histories) <= _MOST_LANES else [])
    strip = len(events.rows) * (_ROW + _LANE * len(histories))
    figure = new_figure(_WIDTH, _HEIGHT + strip, "safeckpt plot")
    if events.rows:
        losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(_HEIGHT, strip))
        events.draw(below)
    else:
        losses = below = figure.subplots()
    first = min(min(one.steps) for one in histories)
    last = max(max(one.steps) for one in histories)
    handles = [*_draw_losses(losses, histories, first, last), *events.handles]
    margin = max(1.0, (last - first) * 0.02)
    below.set_xlim(first - margin, last + margin)
    below.set_xlabel("step (optimizer steps completed)")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.xaxis.set_major_formatter("{x:,.0f}")
    figure.suptitle(_plain(_title(histories)), x=0.01, ha="left", fontsize=11)
    if handles:
        longest = max(len(one.get_label()) for one in handles)
        columns = max(1, min(4, _LEGEND_CHARACTERS // (longest + 7)))
        rows = -(-len(handles) // columns)
        figure.set_size_inches(_WIDTH, _HEIGHT + strip + rows * _LEGEND_ROW)
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)
    return figure


def _title(histories: Sequence[History]) -> str:
    return histories[0].place if len(histories) == 1 else f"{len(histories)} runs"


def _plain(text: str) -> str:
    """Return a text in which matplotlib finds no formula, and which it does not hide from a legend."""
    text = printable(text, keep="").replace("$", r"\$")
    text = text if len(text) <= _MOST_CHARACTERS else f"...{text[-_MOST_CHARACTERS:]}"
    return f"./{text}" if text.startswith("_") else text


def _draw_losses(panel: Axes, histories: Sequence[History], first: int, last: int) -> list[Any]:
    """Draw the losses of each run, and return what the legend has to explain."""
    several = len(histories) > 1
    names = list(dict.fromkeys(name for one in histories for name in (*one.losses, *one.saved_losses)))
    shown = names[:1] if several else names[: len(_COLOURS)]
    panel.set_ylabel("loss" if len(shown) != 1 or shown == ["loss"] else _plain(f"loss: {shown[0]}"))
    panel.grid(alpha=0.25)
    if not names:
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no loss was given to end_step or save", transform=panel.transAxes, ha="center")
    if wants_log_scale(loss for one in histories for losses in one.curves for loss in losses.values()):
        panel.set_yscale("log")
    has_dots = all(len(losses) <= _DOTS for one in histories for losses in one.losses.values())
    handles, pen = [], _Pen(panel, first, last, has_dots=has_dots)
    styles = [(history, name) for history in histories for name in shown]
    for index, (history, name) in enumerate(styles):
        colour, line = _COLOURS[index % len(_COLOURS)], _LINES[index // len(_COLOURS) % len(_LINES)]
        for part in history.left:
            pen.draw(part.get(name, {}), color=colour, linestyle=(0, (2, 1)), linewidth=1, alpha=0.55, zorder=2.5)
        pen.draw(history.saved_losses.get(name, {}), color=colour, linestyle="none", marker="o", markersize=2.5)
        pen.draw(history.losses.get(name, {}), color=colour, linestyle=line, linewidth=1.2, is_curve=True)
        if len(styles) > 1:
            handles.append(_line(_plain(history.place if several else name), color=colour, linestyle=line))
    if any(one.left for one in histories):
        handles.append(_line("loss of a timeline that was left", color=_GREY, linestyle=(0, (2, 1)), linewidth=1))
    if any(len(losses) <= 2 * _PIXELS for one in histories for losses in one.saved_losses.values()):
        handles.append(_line("loss at a save, where no others are on record", **_DOT))
    if pen.steps_in_band > 1:
        handles.append(_band(f"smallest to largest loss in {pen.steps_in_band:,.0f} steps, and the mean"))
    return handles


class _Pen:
    """Draws curves of any length: of what falls on one pixel the smallest, the largest and the mean."""

    def __init__(self, panel: Axes, first: int, last: int, *, has_dots: bool) -> None:
        self._panel = panel
        self._has_dots = has_dots
        self._first = first
        self._span = last - first + 1
        self.steps_in_band = 0.0

    def draw(self, losses: Losses, *, color: str, is_curve: bool = False, **style: Any) -> None:
        if not losses:
            return
        steps, values = np.array(list(losses)), np.array(list(losses.values()))
        if is_curve and self._has_dots:
            style = {"marker": ".", "markersize": 4, **style}
        usual = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
        if len(steps) > 2 * _PIXELS:
            steps, low, values, high = _per_pixel(steps, values, self._first, self._span)
            usual = max(usual, self._span / _PIXELS)
            self.steps_in_band = self._span / _PIXELS
            if style.pop("marker", None):
                style["linestyle"] = "-"
            gaps = np.flatnonzero(np.diff(steps) > _GAP * usual) + 1
            at, low, high = (np.insert(one, gaps, np.nan) for one in (steps, low, high))
            self._panel.fill_between(at, low, high, color=color, alpha=0.3, linewidth=0)
        gaps = np.flatnonzero(np.diff(steps) > _GAP * usual) + 1
        self._panel.plot(
            np.insert(steps.astype(float), gaps, np.nan), np.insert(values, gaps, np.nan), color=color, **style
        )
        if is_curve and not self._has_dots:  # a line through one point is none
            starts = np.r_[0, gaps]
            alone = starts[np.diff(np.r_[starts, len(steps)]) == 1]
            self._panel.plot(steps[alone], values[alone], ".", color=color, markersize=4)


def _per_pixel(steps: Array, values: Array, first: int, span: int) -> tuple[Array, Array, Array, Array]:
    """Return step, smallest, mean and largest value of what falls on each pixel; only finite ones are recorded."""
    pixels = (steps - first) * _PIXELS // span
    starts = np.flatnonzero(np.r_[True, np.diff(pixels) > 0])
    counts = np.diff(np.r_[starts, len(steps)])
    middle = np.add.reduceat(steps, starts) / counts
    mean = np.add.reduceat(values / np.repeat(counts, counts), starts)
    return middle, np.minimum.reduceat(values, starts), mean, np.maximum.reduceat(values, starts)


def _line(label: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an extra

    return Line2D([], [], label=label, **style)


def _band(label: str) -> Any:
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

    return Patch(facecolor=_GREY, alpha=0.4, label=label)


class _Events:
    """The strip below the losses: a row for each kind of event, and in it a lane for each run."""

    def __init__(self, histories: Sequence[History]) -> None:
        self._histories = histories
        marks: dict[str, Callable[[History], object]] = {
            _SAVED: lambda one: one.saved | one.present,
            _REFUSED: lambda one: one.refused,
            _BACK: lambda one: one.rollbacks,
            _RESTORED: lambda one: one.restarts,
        }
        self.rows = [name for name, of in marks.items() if any(map(of, histories))]

    def draw(self, panel: Axes) -> None:
        count = len(self._histories)
        height = _ROW / _LANE + count  # of a row, in lanes
        for row, name in enumerate(self.rows):
            for lane, history in enumerate(self._histories):
                y = row * height + lane + (height - count) / 2 + 0.5
                _DRAWN[name](_Lane(panel, history, y, _COLOURS[lane % len(_COLOURS)] if count > 1 else None))
            if row:
                panel.axhline(row * height, color=_GREY, linewidth=0.5, alpha=0.5)
        panel.set_ylim(len(self.rows) * height, 0)
        panel.set_yticks([(row + 0.5) * height for row in range(len(self.rows))], self.rows, fontsize=9)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", alpha=0.25)

    @property
    def handles(self) -> list[Any]:
        """What the legend has to explain."""
        returns = [one for history in self._histories for one in history.returns if one.replayed_to is not None]
        dot = {"linestyle": "none", "markersize": 5, "color": _GREY}
        found = []
        gone = any(history.saved - history.present for history in self._histories)
        if gone and any(history.present for history in self._histories):
            found.append(_line("saved, and there", marker="d", **dot))
        if gone:
            found.append(_line("saved, and gone since", marker="d", fillstyle="none", **dot))
        if any(one.is_equal for one in returns):
            found.append(_line("replayed, all losses equal", color=_GREEN, linewidth=4))
        if not all(one.is_equal for one in returns):
            found.append(_line("replayed, one loss different", color=_RED, linewidth=4))
        return found


@dataclass
class _Lane:
    """One run in one row.

    Attributes:
        panel: The strip.
        history: The run.
        y: The height of the lane.
        colour: That of the run; None when there is only one.
    """

    panel: Axes
    history: History
    y: float
    colour: str | None

    def draw_saved(self) -> None:
        history, colour = self.history, self.colour or _BLACK
        gone = history.saved - history.present
        self._mark(gone, "d", colour, markersize=4.5, fillstyle="none", markeredgewidth=0.6, alpha=0.6)
        self._mark(history.present, "d", colour, markersize=4.5)

    def draw_refused(self) -> None:
        self._mark(self.history.refused, "x", self.colour or _RED, markersize=5, markeredgewidth=1.5)

    def draw_rollbacks(self) -> None:
        rollbacks = self.history.rollbacks
        self._span([(one.step, one.failed_step) for one in rollbacks], self.colour or _BLACK, linewidth=1)
        self._draw_replays(rollbacks)
        self._mark((one.step for one in rollbacks), "<", self.colour or _BLACK, markersize=5)

    def draw_restarts(self) -> None:
        restarts = self.history.restarts
        self._draw_replays(restarts)
        self._mark((one.step for one in restarts), ">", self.colour or _BLACK, markersize=5)

    def _draw_replays(self, returns: Sequence[Return]) -> None:
        for is_equal, colour in ((True, _GREEN), (False, _RED)):
            replayed = [one for one in returns if one.replayed_to is not None and one.is_equal is is_equal]
            self._span([(one.step, one.replayed_to) for one in replayed], colour, linewidth=4, alpha=0.8)

    def _span(self, spans: Sequence[tuple[int, int | None]], colour: str, **style: Any) -> None:
        if spans:
            self.panel.hlines([self.y] * len(spans), *zip(*spans, strict=True), color=colour, **style)

    def _mark(self, steps: Iterable[int], marker: str, colour: str, **style: Any) -> None:
        shown = _visible(steps, self.history)
        self.panel.plot(shown, [self.y] * len(shown), marker, color=colour, **style)


_DRAWN: dict[str, Callable[[_Lane], None]] = {
    _SAVED: _Lane.draw_saved,
    _REFUSED: _Lane.draw_refused,
    _BACK: _Lane.draw_rollbacks,
    _RESTORED: _Lane.draw_restarts,
}


def _visible(steps: Iterable[int], history: History) -> list[int]:
    """Return steps, one for each half of a pixel."""
    width = max(1, (max(history.steps) - min(history.steps)) // (2 * _PIXELS))
    return sorted({step // width: step for step in steps}.values())
