"""The matrix of every trainer: one run straight through, the same one killed with SIGKILL, and its rest in a process.

A test module gives a function `train(path, record, **options)` at the top of a module, which trains a small real run in
`path` and tells `record` what happens: `record("step", step=3, loss=loss, batch=indices)` in each training step, and
`record("validation")`, `record("on_train_epoch_end")` or any other name for what else is to happen as often and in the
same order. What comes before training (set-up, a restore) is not told.

`compare(train, path, place)` runs it three times, each in a process of its own. A resume is exact when the events of
the resumed run are the last ones of the straight run, each equal with `==`, and begin no later than the killed run
ended. So no loss differs, no batch comes twice or never, and nothing is left out or done again around a border.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import safeckpt
from tests import children, faults

LENGTH, EPOCHS, BATCH_SIZE = 6, 3, 4
STEPS = LENGTH * EPOCHS


class Place(NamedTuple):
    """Where a run is killed: at the event of this name that is the `number`-th, from 1.

    `"write"` is no event of the run but a write into a file of the store, in the middle of a save.
    """

    event: str
    number: int


# With a validation at the end of each epoch; for others make your own.
PLACES = {
    "first steps": Place("step", 2),
    "middle of an epoch": Place("step", LENGTH + LENGTH // 2),
    "last batch": Place("step", 2 * LENGTH),
    "first batch of the next epoch": Place("step", 2 * LENGTH + 1),
    "during validation": Place("validation", 4),
    "during a save": Place("write", 12),
}
# For a validation that is recorded as one event.
PLACES_OF_SHORT_VALIDATIONS = PLACES | {"during validation": Place("validation", 2)}


def mostly_slow(names: Iterable[str], plain: Collection[str] = ("middle of an epoch", "last batch")) -> list[Any]:
    """Return the parameters of a test, of which all but a few are left to the slow run."""
    return [name if name in plain else pytest.param(name, marks=pytest.mark.slow) for name in names]


def few_or_all(names: Iterable[str], few: Collection[str] = ("middle of an epoch", "last batch")) -> list[Any]:
    """Return the parameters of a test over places: a few for the slow run, the others for a campaign."""
    others = [name for name in names if name not in few]
    return [
        pytest.param(list(few), marks=pytest.mark.slow, id="few places"),
        pytest.param(others, marks=pytest.mark.campaign, id="other places"),
    ]


class Samples(Dataset):
    """Samples with their number and an augmentation that is drawn from the streams of the process.

    Args:
        length: How many there are.
        keys: Names of input, target and number, for trainers that want dicts; None: a tuple of them.
    """

    def __init__(self, length: int = LENGTH * BATCH_SIZE, keys: tuple[str, str, str] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, 8, generator=generator)
        self.keys = keys

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(8) + 0.1 * float(np.random.standard_normal())
        item = (x, self.x[index].sum(0, keepdim=True), index)
        return item if self.keys is None else dict(zip(self.keys, item, strict=True))


def net() -> nn.Module:
    """Return a small model with dropout."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))


def optimizer_and_schedule(model: nn.Module, steps: int = STEPS) -> tuple[Any, Any]:
    """Return an AdamW and a OneCycleLR over this many optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)


class Record:
    """Writes down what happens, as lines that a SIGKILL does not take back, and kills the process at a place."""

    def __init__(self, path: Path, place: Place | None) -> None:
        self.path = path
        self.place = place
        self._seen = 0
        path.touch()

    def __call__(self, event: str, *, loss: Any = None, batch: Any = None, **values: Any) -> None:
        if loss is not None:
            values["loss"] = float(loss).hex()  # the bits, also of a NaN
        if batch is not None:
            values["batch"] = [int(index) for index in batch]
        with self.path.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")
        if self.place is not None and event == self.place.event:
            self._seen += 1
            if self._seen == self.place.number:
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Comparison:
    """The events of three runs, of one rank.

    Attributes:
        straight: Of the run that nothing stopped.
        killed: Of the run that was killed, until then.
        resumed: Of the rest.
    """

    straight: list[dict[str, Any]]
    killed: list[dict[str, Any]]
    resumed: list[dict[str, Any]]

    @property
    def compared(self) -> int:
        """Steps of the resumed run."""
        return len(_losses(self.resumed))

    @property
    def wrong(self) -> int:
        """Steps of the resumed run whose loss differs from the straight run's, or that it has not."""
        straight = dict(_losses(self.straight))
        return sum(straight.get(step) != loss for step, loss in _losses(self.resumed))

    @property
    def never_trained(self) -> int:
        """Steps of the straight run that neither of the two others has."""
        return len({*dict(_losses(self.straight))} - {*dict(_losses(self.killed + self.resumed))})

    def assert_exact(self) -> None:
        """Assert that the killed run was the straight one until its end, and that the resumed one is its rest."""
        assert self.killed == self.straight[: len(self.killed)], "the killed run was another one from the beginning"
        assert self.resumed, "nothing was left to do after the resume"
        start = len(self.straight) - len(self.resumed)
        assert self.resumed == self.straight[max(start, 0) :], self._first_difference()
        assert start <= len(self.killed), f"events {len(self.killed)} to {start} happened in no run"

    def _first_difference(self) -> str:
        """Return where the two runs differ, seen from their ends, with what is around it."""
        pairs = list(zip(reversed(self.straight), reversed(self.resumed), strict=False))
        back = next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
        around = slice(max(0, back - 3), back + 8)
        lines = [f"{one}\n    {other}" for one, other in pairs[around]]
        return "from the end, straight and resumed:\n" + "\n".join(lines) + f"\nfirst event resumed: {self.resumed[0]}"


def _losses(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def run(
    train: Callable[..., Any], path: Path, place: Place | None = None, *, name: str, ranks: int = 1, **options: Any
) -> tuple[list[faults.Ended], list[list[dict[str, Any]]]]:
    """Run `train(path, record, **options)` in a fresh process, or in one for each rank of a group over gloo.

    The ranks find the usual variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), as under torchrun, and a group that is
    initialised already. All of them are killed at the place.

    Returns:
        How each rank ended, and its events; they are in `path / f"{name}-{rank}.jsonl"` as well.
    """
    path.mkdir(parents=True, exist_ok=True)
    store = path / f".store-{uuid.uuid4().hex}" if ranks > 1 else None
    files = [path / f"{name}-{rank}.jsonl" for rank in range(ranks)]
    members = [
        children.Child(
            _run, train, path, Record(file, place), options, rank=rank, ranks=ranks, store=store, talks=False
        )
        for rank, file in enumerate(files)
    ]
    ended: list[faults.Ended] = []
    try:
        for member in members:
            try:
                ended.append(member.ended())
            except AssertionError:  # it waited in vain, perhaps for one that has failed
                for error in [one.error for one in (other.ended() for other in members[len(ended) + 1 :]) if one.error]:
                    raise error from None
                raise
            if ended[-1].signal == signal.SIGKILL:  # the others would wait for it
                for other in members:
                    with contextlib.suppress(ProcessLookupError):
                        other.signal(signal.SIGKILL)
    finally:
        for member in members:
            member.__exit__(None, None, None)
    return ended, [read(file) for file in files]


def read(file: Path) -> list[dict[str, Any]]:
    """Return the events of a run."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def _run(
    train: Callable[..., Any],
    path: Path,
    record: Record,
    options: dict[str, Any],
    *,
    rank: int,
    ranks: int,
    store: Path | None,
) -> Any:
    """Train in this process."""
    warnings.simplefilter("ignore")  # of trainers there are many, safeckpt's are errors
    warnings.simplefilter("error", safeckpt.SafeckptWarning)
    importlib.import_module(train.__module__)
    if store is not None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    np.random.seed(0)
    with contextlib.ExitStack() as stack:
        if record.place is not None and record.place.event == "write":
            stack.enter_context(faults.intercept(faults.Kill(record.place.number, "before", ("write",))))
        return train(path, record, **options)


def compare(
    train: Callable[..., Any], path: Path, place: Place, *, ranks: int = 1, straight: Path | None = None, **options: Any
) -> list[Comparison]:
    """Run straight through, killed at a place, and resumed in fresh processes; return one comparison for each rank.

    Args:
        train: What trains; see the module.
        path: A directory for these runs. The killed and the resumed one share `path / "run"`.
        place: Where it is killed.
        ranks: Processes of a group.
        straight: Where the straight run is kept from one call with these options to the next; None: it is run.
        options: For `train`.
    """
    base = straight or path / "straight"
    if not (base / "straight-0.jsonl").exists():
        _whole(*run(train, base, name="straight", ranks=ranks, **options))
    ended, killed = run(train, path / "run", place, name="killed", ranks=ranks, **options)
    assert ended[0].signal == signal.SIGKILL, f"the run was not killed at {place}: {ended[0]}"
    resumed = _whole(*run(train, path / "run", name="resumed", ranks=ranks, **options))
    straights = [read(base / f"straight-{rank}.jsonl") for rank in range(ranks)]
    return [Comparison(*three) for three in zip(straights, killed, resumed, strict=True)]


def assert_exact(train: Callable[..., Any], path: Path, place: Place, **options: Any) -> list[Comparison]:
    """Compare, and assert that every rank's resume was exact."""
    comparisons = compare(train, path, place, **options)
    for comparison in comparisons:
        comparison.assert_exact()
    return comparisons


def _whole(ended: list[faults.Ended], events: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return the events of a run that has to end by itself."""
    for rank, one in enumerate(ended):
        if one.error is not None:
            raise AssertionError(f"rank {rank}: {type(one.error).__name__}: {one.error}") from one.error
        assert one.signal is None, f"rank {rank}: {one.signal}"
    return events


def value_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a function returns in a fresh process, in which warnings of trainers are no errors."""
    ended = children.run(partial(_quiet, function), *arguments, **options)
    if ended.error is not None:
        raise ended.error
    assert ended.signal is None, ended.signal
    return ended.value


def _quiet(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    warnings.simplefilter("ignore")
    return function(*arguments, **options)
