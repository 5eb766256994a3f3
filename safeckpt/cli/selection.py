"""`--where` and `--sort` of a listing: conditions on what a checkpoint says of itself. Needs no torch."""

from __future__ import annotations

import datetime as dt
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from safeckpt.cli.options import parse_best
from safeckpt.system.text import parse_size

__all__ = ["Condition", "Selection", "is_bad", "parse_condition"]

_FIXED = ("step", "saved", "size", "run")  # every checkpoint that can be read has them
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_CONDITION = re.compile(rf"\s*(.+?)\s*({'|'.join(_COMPARE)})\s*(.+?)\s*", re.DOTALL)

Row = dict[str, Any]


def is_bad(row: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint of a listing is known not to be good; that the others are, only a check tells."""
    return row["good"] is False


@dataclass(frozen=True)
class Condition:
    """KEY OPERATOR VALUE.

    Attributes:
        key: `step`, `saved`, `size`, `run`, `loss`, `metric.NAME`, `note.NAME`, or the bare name of a metric.
        sign: One of < <= > >= = == !=.
        value: What it is compared with, as it was written.
    """

    key: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}{self.sign}{self.value}"

    def holds_for(self, found: Any) -> bool:
        """Return whether it holds for a value; not for NaN.

        Raises:
            click.UsageError: What it was given is of another kind than the value.
        """
        if isinstance(found, bool) or not isinstance(found, int | float | dt.datetime):
            if self.sign not in ("=", "==", "!="):
                raise click.UsageError(f"{self}: {self.key} is a text here, {str(found)!r}; it is compared by = and !=")
            return _COMPARE[self.sign](str(found), _truth(self) if isinstance(found, bool) else self.value)
        if isinstance(found, dt.datetime) and self.sign in ("=", "==", "!="):
            raise click.UsageError(f"{self}: a time is compared by < <= > or >=")
        wanted = _time(self) if isinstance(found, dt.datetime) else _number(self)
        return not _is_nan(found) and _COMPARE[self.sign](found, wanted)


def parse_condition(text: str) -> Condition:
    """Return the condition that a text such as `loss<0.5` stands for.

    Raises:
        click.UsageError: The text has another form.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise click.UsageError(
            "a condition is KEY<VALUE, with one of < <= > >= = or !=, such as 'loss<0.5' or 'metric.acc>=0.9'; got "
            f"{text!r}"
        )
    if re.search(r"\s(and|or)\s|&|\|", text):
        raise click.UsageError(f"one --where has one condition, and all of several have to hold; got {text!r}")
    if match[3].startswith(tuple(_COMPARE)):
        raise click.UsageError(f"{text!r} has two signs of comparison")
    return Condition(*match.groups())


def _truth(condition: Condition) -> str:
    value = condition.value.capitalize()
    if value not in ("True", "False"):
        raise click.UsageError(f"{condition}: {condition.key} is true or false here")
    return value


def _number(condition: Condition) -> float:
    text = condition.value
    try:
        value = parse_size(text) if condition.key == "size" else float(text)
    except ValueError:
        value = None
    if value is None or math.isnan(value):
        kind = "number of bytes, such as 5GB" if condition.key == "size" else "number"
        raise click.UsageError(f"{condition}: {text!r} is no {kind}")
    return value


def _time(condition: Condition) -> dt.datetime:
    try:
        found = dt.datetime.fromisoformat(condition.value)
    except ValueError:
        raise click.UsageError(
            f"{condition}: {condition.value!r} is no time (UTC), such as 2026-11-30 or 2026-11-30T18:00"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


@dataclass(frozen=True)
class Selection:
    """Which checkpoints of a listing are shown, and in which order.

    Attributes:
        conditions: All of them hold for what is shown.
        sort: KEY, or KEY:max for the highest first; None for the order of directories and steps.
    """

    conditions: Sequence[Condition] = ()
    sort: str | None = None

    def names_best(self, first: Row) -> bool:
        """Return whether the row that stands first is the best, by its loss, a metric or a note."""
        if self.sort is None or (key := parse_best(self.sort).metric) in _FIXED:
            return False
        values = values_of(first)
        found = _known(key, values)
        return found is not None and not _is_nan(values[found])

    def apply(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """Return the rows that are shown, and those that are not good and could not be judged.

        Raises:
            click.UsageError: No checkpoint has a key, or it is of another kind than what it is compared with.
        """
        known = [(row, values_of(row)) for row in rows]
        keys = dict.fromkeys([*_FIXED, *(key for _, values in known for key in values)])
        named = {one.key: _resolved(one.key, keys) for one in self.conditions} if rows else {}
        shown, unknown = [], []
        for row, values in known:
            asked = [(one, values.get(named[one.key])) for one in self.conditions]
            if not all(one.holds_for(found) for one, found in asked if found is not None):
                continue
            if all(found is not None for _, found in asked):
                shown.append((row, values))
            elif is_bad(row):
                unknown.append(row)
        if self.sort is not None and rows:
            best = parse_best(self.sort)
            key = _resolved(best.metric, keys)
            shown = _sorted(shown, key, highest_first=best.mode == "max")
        return [row for row, _ in shown], unknown


def _known(key: str, keys: Iterable[str]) -> str | None:
    """Return the key that is meant by one, or by the bare name of a metric; None when there is none."""
    return next((one for one in (key, f"metric.{key}") if one in keys), None)


def _resolved(key: str, keys: Iterable[str]) -> str:
    if (found := _known(key, keys)) is None:
        raise click.UsageError(f"no checkpoint here has {key!r}; there is {', '.join(keys)}")
    return found


def _sorted(rows: list[tuple[Row, Row]], key: str, *, highest_first: bool) -> list[tuple[Row, Row]]:
    """Return rows by a value; those without one, and NaN, stand at the end in the order that they had."""

    def is_last(values: Row) -> bool:
        return values.get(key) is None or _is_nan(values[key])

    def rank(pair: tuple[Row, Row]) -> tuple[bool, Any]:
        value = pair[1][key]
        return (False, value) if isinstance(value, int | float | dt.datetime) else (True, str(value))

    first = sorted((pair for pair in rows if not is_last(pair[1])), key=rank, reverse=highest_first)
    return [*first, *(pair for pair in rows if is_last(pair[1]))]


def values_of(row: Mapping[str, Any]) -> Row:
    """Return key to value of a checkpoint as JSON has it; of one that is not good its step."""
    if is_bad(row):
        return {"step": row["step"]}
    return {
        "step": row["step"],
        "saved": dt.datetime.fromisoformat(row["created_at"]),
        "size": row["size_bytes"],
        "run": row["run_id"],
        **dict(_flat("loss", row["metrics"].get("loss", row["loss"]))),  # as `best` reads it
        **{key: value for name, one in row["metrics"].items() for key, value in _flat(f"metric.{name}", one)},
        **{key: value for name, one in row["notes"].items() for key, value in _flat(f"note.{name}", one)},
    }


def _flat(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(f"{path}.{key}", one)
    elif value is not None:
        yield path, value
