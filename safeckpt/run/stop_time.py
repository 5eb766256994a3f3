"""The end of the time that a job has, and whether the last save has to begin now to be whole before it."""

from __future__ import annotations

import datetime as dt
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["StopTime"]

_log = logging.getLogger("safeckpt")


class StopTime:
    """Tells when a run has to stop by itself, before somebody ends it.

    Schedulers tell the end in a variable of the environment: Slurm in `SLURM_JOB_END_TIME`, seconds since 1970, see
    sbatch(1); GitLab in `CI_JOB_STARTED_AT` and `CI_JOB_TIMEOUT`. PBS, LSF, Flux, Kubernetes, SageMaker and the notices
    of spot machines tell it in none: they send a signal, or have to be asked over the network.

    Args:
        stop_before: The end as a `datetime` with a time zone; or how long before the end of the allocation, as a
            `timedelta`; None for no end.

    Attributes:
        reached: Whether the run has to stop; it stays so.

    Raises:
        TypeError: It is something else.
        ValueError: It has no time zone, is negative, or nothing tells when the allocation ends.
    """

    def __init__(self, stop_before: dt.timedelta | dt.datetime | None) -> None:
        self.reached = False
        self._end = None if stop_before is None else _end_of(stop_before)

    @property
    def is_set(self) -> bool:
        """Whether there is an end."""
        return self._end is not None

    def is_reached(self, needed_seconds: float) -> bool:
        """Return whether what takes this long from now on would not be done before the end."""
        if self.reached or self._end is None:
            return self.reached
        left = self._end - time.time()
        if left <= needed_seconds:
            self.reached = True
            _log.info("stopping: %.1f s are left, and a step and its save take %.1f s", left, needed_seconds)
        return self.reached


def _end_of(stop_before: Any) -> float:
    """Return the end in seconds since 1970."""
    if isinstance(stop_before, dt.datetime):
        if stop_before.utcoffset() is None:
            raise ValueError(
                f"stop_before={stop_before!r} has no time zone: give datetime.now().astimezone() + timedelta(hours=8), "
                "or one with tzinfo"
            )
        return stop_before.timestamp()
    if not isinstance(stop_before, dt.timedelta):
        raise TypeError(
            "stop_before must be a timedelta before the end of the allocation, a datetime with a time zone, or None; "
            f"got {stop_before!r}"
        )
    if stop_before < dt.timedelta(0):
        raise ValueError(f"stop_before must be 0 or more before the end; got {stop_before!r}")
    return _end_of_allocation(os.environ) - stop_before.total_seconds()


def _end_of_allocation(environment: Mapping[str, str]) -> float:
    """Return when the scheduler ends this job, in seconds since 1970.

    Raises:
        ValueError: Nothing tells, or what tells cannot be read.
    """
    for names, read in _TOLD_BY.items():
        if all(name in environment for name in names):
            values = [environment[name] for name in names]
            try:
                return read(*values)
            except ValueError:
                told = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
                raise ValueError(f"stop_before: {told} cannot be read as a time; give the end as a datetime") from None
    variables = ", or ".join(" and ".join(names) for names in _TOLD_BY)
    raise ValueError(
        f"stop_before: nothing tells when this job ends ({variables} would). Give the end as a datetime with a time "
        "zone, such as datetime.now().astimezone() + timedelta(hours=8); a scheduler that sends a signal before the "
        "end needs stop_signals only"
    )


def _from_start_and_seconds(start: str, seconds: str) -> float:
    began = dt.datetime.fromisoformat(start)
    if began.utcoffset() is None:
        raise ValueError(start)
    return began.timestamp() + float(seconds)


_TOLD_BY: dict[tuple[str, ...], Callable[..., float]] = {
    ("SLURM_JOB_END_TIME",): int,
    ("CI_JOB_STARTED_AT", "CI_JOB_TIMEOUT"): _from_start_and_seconds,
}
