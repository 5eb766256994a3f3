"""Which checkpoints of a run are the best: by a metric that is named, or by what the run itself keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from safeckpt.cli.options import parse_best
from safeckpt.errors import LoadError
from safeckpt.run.catalog import Catalog
from safeckpt.run.remote_catalog import RemoteCatalog
from safeckpt.store import Best

__all__ = ["best_in", "bests_of_run", "metrics_in", "shown"]


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
    raise click.UsageError(f"which METRIC? {why}; its checkpoints have {metrics_in(catalog, steps)}")


def shown(best: Best) -> str:
    """Return a rule as the command line takes it."""
    return best.metric + (":max" if best.mode == "max" else "")


def metrics_in(catalog: Catalog | RemoteCatalog, steps: Iterable[int]) -> str:
    """Return the names of the metrics of some checkpoints."""
    names: dict[str, None] = {}
    for step in steps:
        try:
            checkpoint = catalog.peek(step)
        except (LoadError, FileNotFoundError):
            continue
        names.update(dict.fromkeys([*checkpoint.metrics, *(["loss"] if isinstance(checkpoint.loss, float) else [])]))
    return ", ".join(names) or "none"
