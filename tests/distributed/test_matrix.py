"""Every kind of training by several processes resumes as the same run: losses and state equal, with `==`."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import groups, settings

pytestmark = pytest.mark.slow


def _all(path: Path, kinds: str, names: tuple[str, ...]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    built = getattr(settings, kinds)
    cases = {
        f"{name} {'async' if background else 'sync'}": functools.partial(settings.resumes, built[name], background)
        for name in names
        for background in (False, True)
    }
    return groups.run_cases(cases, path)


def _chunks(kinds: str, count: int) -> list[Any]:
    """Return the settings in a few parts, each of which one process group runs through."""
    names = list(getattr(settings, kinds))
    return [pytest.param(tuple(names[first::count]), id=str(first)) for first in range(count)]


def _check(seen: list[dict[str, Any]]) -> None:
    wrong = {}
    for name in seen[0]:
        for rank, found in enumerate(seen):
            one = found[name]
            if isinstance(one, groups.Failed):
                wrong[name] = f"rank {rank}: {one.text}"
            elif one != (True, (), ()):
                wrong[name] = f"rank {rank}: {one}"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.parametrize("names", _chunks("PAIR", 2))
def test_setting_of_two_ranks_resumes_exactly(tmp_path: Path, names: tuple[str, ...]) -> None:
    """DDP and FSDP2 in every kind: the losses after the resume and the whole state are those of the run."""
    _check(groups.results(2, _all, tmp_path, "PAIR", names))


def test_setting_of_four_ranks_resumes_exactly(tmp_path: Path) -> None:
    """Meshes of two dimensions, tensor parallel, experts: the same."""
    _check(groups.results(4, _all, tmp_path, "FOUR", tuple(settings.FOUR)))
