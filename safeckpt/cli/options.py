"""Texts of options: metrics and intervals."""

from __future__ import annotations

import datetime as dt
import re

import click

from safeckpt.store import Best

__all__ = ["parse_best", "parse_interval"]

_UNITS = {"m": dt.timedelta(minutes=1), "h": dt.timedelta(hours=1), "d": dt.timedelta(days=1)}


def parse_best(text: str) -> Best:
    """Return what METRIC, METRIC:min or METRIC:max asks for.

    Raises:
        click.UsageError: The text has another form.
    """
    metric, _, mode = text.partition(":")
    if mode not in ("", "min", "max") or not metric:
        raise click.UsageError(f"a metric is METRIC, METRIC:min or METRIC:max; got {text!r}")
    return Best(metric, "max" if mode == "max" else "min")


def parse_interval(text: str) -> int | dt.timedelta:
    """Return a number of steps, or the time that 30m, 6h or 1d stands for.

    Raises:
        click.UsageError: The text has another form, or is not positive.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})([mhd]?)", text)
    if match is None:
        raise click.UsageError(f"an interval is a number of steps, or a time such as 30m, 6h or 1d; got {text!r}")
    number = int(match[1])
    return number * _UNITS[match[2]] if match[2] else number
