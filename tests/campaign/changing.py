"""The state changes while it is saved: at any line of the save, at any operation of its store, all the time.

Something else writes to what is being saved: a thread, a process with shared memory, a callback. Then the save is
refused and the checkpoint before it stays; or a file is committed that verifies, is finite, and in which every tensor
has values that it had. A record that is copied at once has all of one moment; of a large one every piece has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import safeckpt
from safeckpt import CheckpointManager, NonFiniteError
from tests.campaign.outcome import Outcome, Scale, WrongBitsError, alone, quiet, scratch
from tests.faults import Operation, Recorder, Tracing, intercept
from tests.manager.helpers import step_path, steps_in, temps_in

_PLACES = {"fast": 1, "full": 10}  # at which each part is changed, of lines and of operations
_SAVES = {"fast": 3, "full": 40}  # while another thread or process writes

_PACKAGE = str(Path(safeckpt.__file__).parent)
_LARGE = 800_000  # elements: some pieces of a megabyte
_OLD, _NEW = 2, 3  # what every part holds before the change and after it
_MAY_OVERFLOW = ("everything", "gradient")  # under a gradient scaler

Change = Callable[[], None]


class _Stateful:
    """An object that gives its own memory away: a tensor and an array."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(5)
        self.array = np.zeros(5, np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "array": self.array}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor, self.array = state["tensor"], state["array"]


class _Loader(_Stateful):
    """What is taken for a loader."""

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


class Everything:
    """Components of every kind, in which every number says which state it belongs to.

    Attributes:
        components: What a manager has to know.
    """

    def __init__(self) -> None:
        self.model = nn.Module()
        self.model.large = nn.Parameter(torch.zeros(_LARGE))
        self.model.small = nn.Parameter(torch.zeros(6, 4))
        self.model.turned = nn.Parameter(torch.zeros(6, 4).t())
        self.model.narrow = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.model.register_buffer("buffer", torch.zeros(3))
        self.model.register_buffer("tied", self.model.buffer)
        self.optimizer = torch.optim.SGD([self.model.small], lr=0.1, momentum=0.9)
        others = torch.optim.SGD([self.model.large, self.model.turned, self.model.narrow], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.model.small.grad = torch.zeros(6, 4)
        self.optimizer.step()
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.ones(()))
        self.stateful, self.loader = _Stateful(), _Loader()
        self.generator, self.numbers = torch.Generator(), np.random.default_rng(0)
        base = torch.zeros(8)
        self.kept: dict[str, Any] = {"kept": torch.zeros(4), "list": [torch.zeros(4)], "views": [base[:6], base[2:]]}
        self.components: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "others": others, "scheduler": self.scheduler,
            "scaler": self.scaler, "object": self.stateful, "loader": self.loader, "generator": self.generator,
            "numbers": self.numbers, "dict": self.kept,
        }  # fmt: skip
        self.set(0)

    def parts(self) -> dict[str, Callable[[float], object]]:
        """Return how to give each part a value, by name."""
        model, momentum = self.model, self.optimizer.state[self.model.small]["momentum_buffer"]
        assert model.small.grad is not None
        tensors = {
            "large parameter": model.large, "parameter": model.small, "transposed parameter": model.turned,
            "bfloat16 parameter": model.narrow, "tied buffer": model.buffer, "momentum": momentum,
            "gradient": model.small.grad, "tensor of an object": self.stateful.tensor,
            "tensor of a loader": self.loader.tensor, "tensor in a dict": self.kept["kept"],
            "tensor in a list": self.kept["list"][0], "views": self.kept["views"][0]._base,
            "scale": self.scaler._scale,
        }  # fmt: skip
        return {
            **{name: tensor.detach().fill_ for name, tensor in tensors.items()},
            "array of an object": self.stateful.array.fill,
            "array of a loader": self.loader.array.fill,
            "learning rate": lambda value: self.optimizer.param_groups[0].update(lr=float(value)),
            "schedule": lambda value: setattr(self.scheduler, "base_lrs", [float(value)]),
        }

    def streams(self, value: int) -> None:
        """Set the generators to a value."""
        self.generator.manual_seed(value)
        self.numbers.bit_generator.state = np.random.default_rng(value).bit_generator.state

    def set(self, value: int) -> None:
        """Set everything to a value."""
        for put in self.parts().values():
            put(value)
        self.streams(value)


def run(scale: Scale, seed: int) -> Outcome:
    """Change what is saved, everywhere."""
    return alone(_change_it, scale, seed)


def _change_it(scale: Scale, seed: int) -> Outcome:
    outcome = Outcome("what is saved changes meanwhile, or becomes NaN: at any line, at any operation, all the time")
    choose = random.Random(seed)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for save in SAVES.values():
            for at in (_at_lines, _at_operations):
                _at_places(save, at, outcome, choose=choose, most=_PLACES[scale])
            for meanwhile in (_thread, _process):
                _all_the_time(save, meanwhile, outcome, _SAVES[scale])
    return outcome


def around(save: str, part: str) -> Outcome:
    """Let one part become NaN at every operation of one kind of save, one after the other."""
    outcome = Outcome(f"NaN in the {part} at an operation of a save: {save}")
    with quiet():
        _at_places(SAVES[save], _at_operations, outcome, choose=random.Random(0), most=None, parts=(part,))
    return outcome


# -- kinds of saves --------------------------------------------------------------------------------------------------


class _Save:
    """Saves everything, once.

    Args:
        folder: Empty.
        live: What is saved; `_OLD - 1` of it is saved already.
    """

    def __init__(self, folder: Path, live: Everything) -> None:
        self.live = live
        self.folder = folder

    def __call__(self) -> None:
        """Save, and wait until it is written."""
        raise NotImplementedError

    def newest(self) -> Path:
        """Return the newest file."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is held."""


class _Managed(_Save):
    """By a manager."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def __init__(self, folder: Path, live: Everything) -> None:
        super().__init__(folder, live)
        self.manager = CheckpointManager(folder, live.components, keep_last=1, **self.options)
        self.step = 0
        self()

    def __call__(self) -> None:
        self.manager.save(self.step + 1)
        self.manager.wait()
        self.step += 1

    def newest(self) -> Path:
        return step_path(self.folder, steps_in(self.folder)[-1])

    def close(self) -> None:
        self.manager.close()


class _Async(_Managed):
    """By a manager that copies and writes in the background."""

    options = {"async_save": True}  # noqa: RUF012 - never changed


class _DropIn(_Save):
    """By the function that takes torch.save's place."""

    def __init__(self, folder: Path, live: Everything) -> None:
        super().__init__(folder, live)
        self()

    def __call__(self) -> None:
        live = self.live
        of_components = {
            name: obj if isinstance(obj, dict) else obj.state_dict()
            for name, obj in live.components.items()
            if hasattr(obj, "state_dict") or isinstance(obj, dict)
        }
        gradients = {"model.small": live.model.small.grad}
        safeckpt.save({**of_components, "safeckpt": {"gradients": gradients}}, self.folder / "state.pt")

    def newest(self) -> Path:
        return self.folder / "state.pt"


SAVES: dict[str, type[_Save]] = {"sync": _Managed, "async": _Async, "drop-in": _DropIn}


# -- when it changes -------------------------------------------------------------------------------------------------


class _AtLine(Tracing):
    """Does something at one execution of one line of the package."""

    def __init__(self, change: Change | None = None, number: int = 0) -> None:
        self._change = change
        self._number = number
        self.count = 0

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self.count += 1
            if self._change is not None and self.count == self._number:
                self._change()
        return self._trace


@contextlib.contextmanager
def _at_lines(change: Change | None, number: int) -> Iterator[Callable[[], int]]:
    tracer = _AtLine(change, number)
    with tracer:
        yield lambda: tracer.count


class _AtOperation(Recorder):
    """Does something before one operation of the store."""

    def __init__(self, change: Change | None, number: int) -> None:
        super().__init__()
        self._change = change
        self._number = number
        self.count = 0

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        self.count += 1
        if self._change is not None and self.count == self._number:
            self._change()
        return call()


@contextlib.contextmanager
def _at_operations(change: Change | None, number: int) -> Iterator[Callable[[], int]]:
    handler = _AtOperation(change, number)
    with intercept(handler):
        yield lambda: handler.count


_When = Callable[[Change | None, int], contextlib.AbstractContextManager[Callable[[], int]]]


def _at_places(
    kind: type[_Save],
    at: _When,
    outcome: Outcome,
    *,
    choose: random.Random,
    most: int | None,
    parts: tuple[str, ...] = (),
) -> None:
    """Change each part at one place after the other: to the next value, and to NaN."""
    with scratch() as folder:
        save = kind(folder, Everything())
        for _ in range(2):  # the first one fills caches
            with at(None, 0) as count:
                save()
        everywhere = range(1, count() + 1)
        for part in parts or ("everything", *save.live.parts()):
            values = (_NEW,) if part in _MAY_OVERFLOW else (_NEW, float("nan"))
            for value in values:
                places = everywhere if most is None else choose.sample(everywhere, min(most, len(everywhere)))
                for number in places:
                    where = f"{kind.__name__.strip('_')}, {at.__name__[1:]} {number}: {part} becomes {value}"
                    outcome.tried += 1
                    with outcome.judging(where):
                        _change_once(save, at, number, part, value)
        save.close()


def _change_once(save: _Save, at: _When, number: int, part: str, value: float) -> None:
    live = save.live
    live.set(_OLD - 1)
    save()
    live.set(_OLD)
    before = save.newest().read_bytes()

    def change() -> None:
        if part == "everything":
            live.set(int(value))
        else:
            live.parts()[part](value)

    refused: BaseException | None = None
    try:
        with at(change, number):
            save()
    except NonFiniteError as error:
        refused = error
    _check(save, before, refused, {float(_OLD), float(value)})


# -- all the time ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _thread(live: Everything) -> Iterator[None]:
    """Have another thread of this process train."""
    ended = threading.Event()

    def write() -> None:
        value = _OLD
        while not ended.is_set():
            value = _OLD + _NEW - value
            for put in live.parts().values():
                put(value)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_for_ever(model: nn.Module, started: Any) -> None:
    value = _OLD
    started.set()
    while True:
        value = _OLD + _NEW - value
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(value)


@contextlib.contextmanager
def _process(live: Everything) -> Iterator[None]:
    """Have another process train, in shared memory."""
    live.model.share_memory()
    forked = multiprocessing.get_context("fork")
    started = forked.Event()
    process = forked.Process(target=_write_for_ever, args=(live.model, started), daemon=True)
    process.start()
    try:
        started.wait()
        yield
    finally:
        process.kill()
        process.join()


def _all_the_time(
    kind: type[_Save],
    meanwhile: Callable[[Everything], contextlib.AbstractContextManager[None]],
    outcome: Outcome,
    saves: int,
) -> None:
    with scratch() as folder:
        live = Everything()
        save = kind(folder, live)
        live.set(_OLD)
        with meanwhile(live):
            for number in range(saves):
                outcome.tried += 1
                with outcome.judging(f"{kind.__name__.strip('_')}, {meanwhile.__name__[1:]}, save {number}"):
                    before = save.newest().read_bytes()
                    save()
                    _check(save, before, None, {float(_OLD), float(_NEW)}, pieces=True)
        save.close()


# -- what is found ---------------------------------------------------------------------------------------------------


def _check(
    save: _Save, before: bytes, refused: BaseException | None, values: set[float], *, pieces: bool = False
) -> None:
    """Check the newest file, and that it is the one before where the save was refused.

    Args:
        save: What has saved.
        before: The file before.
        refused: What the save has raised.
        values: What each element may be.
        pieces: Whether a tensor may have changed while it was copied, so that it is of several moments.

    Raises:
        WrongBitsError: Something is in the file that was not there, or is not finite.
    """
    path = save.newest()
    assert temps_in(save.folder) == []
    if refused is not None:
        assert path.read_bytes() == before, f"refused, and {path.name} is not the checkpoint from before"
        return
    safeckpt.verify(path)
    for name, tensor in _tensors("", safeckpt.load(path)):
        found = _values_in(tensor)
        if not found <= {value for value in values if value == value}:  # noqa: PLR0124 - not NaN
            raise WrongBitsError(f"{name} holds {sorted(found)[:4]}, it held {sorted(values)}")
        if len(found) > 1 and not pieces and "large" not in name:
            raise WrongBitsError(f"{name} is of two moments: {sorted(found)}")


def _values_in(tensor: torch.Tensor) -> set[float]:
    """Return what a tensor holds; all of it, unless that is very much."""
    flat = tensor.detach().double().flatten()
    found: set[float] = set()
    while len(flat) and len(found) < 10:
        value = float(flat[0])
        found.add(value)
        flat = flat[flat != value] if value == value else flat[~flat.isnan()]  # noqa: PLR0124 - not NaN
    return found


_OTHER = ("safeckpt", "generator", "numbers", "scheduler", "scaler")


def _tensors(name: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor | np.ndarray):
        yield name, torch.as_tensor(tree)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if name or key not in _OTHER:
                yield from _tensors(f"{name}.{key}" if name else str(key), value)
            elif key == "safeckpt":
                yield from _tensors("gradients", value["gradients"])
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _tensors(f"{name}.{index}", value)
