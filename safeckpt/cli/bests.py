"""Which checkpoints of a run are the best: by a metric that is named, or by what the run itself keeps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence

import click

from safeckpt.cli.options import parse_best
from safeckpt.errors import LoadError
from safeckpt.run.catalog import Catalog, Checkpoint, score
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best

__all__ = ["best_in", "bests_of_run", "shown", "why_none"]


def bests_of_run(catalog: Catalog | RemoteCatalog, steps: Iterable[int]) -> list[Best]:
    """Return which best ones the run keeps, as its newest checkpoint that can be read says."""
    for step in sorted(steps, reverse=True):
        try:
            return catalog.bests(step)
        except (LoadError, FileNotFoundError):
            continue
    return []


def best_in(catalog: Catalog | RemoteCatalog, steps: Sequence[int], metric: str | None) -> Best:
    """Return the rule for a metric; where none is named, the one of the run.

    Raises:
        click.UsageError: None is named, and the run keeps no best checkpoint, or several kinds of them.
    """
    if metric is not None:
        return parse_best(metric)
    found = bests_of_run(catalog, steps)
    if len(found) == 1:
        return found[0]
    why = (
        f"the run keeps several kinds ({', '.join(map(shown, found))})" if found else "the run keeps no best checkpoint"
    )
    raise click.UsageError(f"which METRIC? {why}; its checkpoints have {_metrics_of(_readable(catalog, steps))}")


def shown(best: Best) -> str:
    """Return a rule as the command line takes it."""
    return best.metric + (":max" if best.mode == "max" else "")


def why_none(catalog: Catalog | RemoteCatalog, steps: Iterable[int], metric: str) -> str:
    """Return the rest of "has no good checkpoint ...": nobody has the metric, or nobody good has it."""
    readable = _readable(catalog, steps)
    having = [one.step for one in readable if (value := score(one, metric)) is not None and math.isfinite(value)]
    if having:
        return f"with a finite {metric!r}: of those that have one, step {', '.join(map(str, having))}, none is good"
    return f"with a finite metric {metric!r}; there is: {_metrics_of(readable)}"


def _metrics_of(checkpoints: Iterable[Checkpoint]) -> str:
    names: dict[str, None] = {}
    for one in checkpoints:
        names.update(dict.fromkeys([*one.metrics, *(["loss"] if isinstance(one.loss, float) else [])]))
    return ", ".join(names) or "none"


def _readable(catalog: Catalog | RemoteCatalog, steps: Iterable[int]) -> list[Checkpoint]:
    """Return the checkpoints whose structure is whole."""
    found = []
    for step in steps:
        with contextlib.suppress(LoadError, FileNotFoundError):
            found.append(catalog.peek(step))
    return found
