"""Every message on the help page is what the library says: each is provoked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import safeckpt
from safeckpt.remote import worker
from safeckpt.run import mirroring
from tests.remote.memory_store import MemoryStore

PAGE = Path(__file__).parents[1] / ".readme" / "help.md"
ROWS = re.findall(r"^\| `([^`]+)` \| ", PAGE.read_text(), re.MULTILINE)
PROVOKED: dict[str, Callable[[Path], object]] = {}


def provokes(message: str) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    def note(function: Callable[[Path], object]) -> Callable[[Path], object]:
        PROVOKED[message] = function
        return function

    return note


def components(width: int = 8) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(40, 4)), batch_size=8))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}


def manager_of(directory: Path, parts: dict[str, Any] | None = None, **options: Any) -> safeckpt.CheckpointManager:
    return safeckpt.CheckpointManager(directory, parts or components(), **options)


def run_of(directory: Path, parts: dict[str, Any] | None = None) -> None:
    """Leave the checkpoints of the steps 2, 4 and 6."""
    with manager_of(directory, parts) as manager:
        for step in (2, 4, 6):
            manager.save(step, loss=1.0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@provokes("already holds 3 checkpoint(s) of another run")
def forget_the_restore(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory, save_every=100) as manager:
        manager.end_step(1, loss=1.0)


@provokes("restored only model from")
def save_after_a_partial_restore(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory) as manager:
        manager.restore(only=("model",))
        manager.save(7)


@provokes("another process is saving checkpoints into it")
def start_a_second_job(directory: Path) -> None:
    script = (
        "import sys\nfrom safeckpt.store import WriterLock\n"
        "WriterLock(sys.argv[1], 1.0).acquire()\nprint('held')\nsys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-u", "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with manager_of(directory, lock_timeout_seconds=0.01) as manager:
            manager.save(1)


@provokes("another CheckpointManager of this same process")
def run_a_cell_twice(directory: Path) -> None:
    with manager_of(directory) as first, manager_of(directory) as second:
        first.save(1)
        second.restore()
        second.save(2)


@provokes("Step 7 was not saved: the state contains NaN or Inf")
def meet_a_nan(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory) as manager:
        manager.restore()
        manager.end_step(7, loss=float("nan"))


@provokes("Step 7 failed again after 1 rollback(s)")
def roll_back_without_a_change(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory) as manager:
        manager.restore()
        for _ in range(2):
            with contextlib.suppress(safeckpt.NonFiniteError):
                manager.end_step(7, loss=float("nan"))
            manager.rollback()


@provokes("Step 5 is already saved, and the state is different now")
def save_behind_the_epoch(directory: Path) -> None:
    parts = components()
    with manager_of(directory, parts, save_every=5) as manager:
        for _ in parts["loader"].epochs(1):
            for _ in parts["loader"]:
                manager.end_step(manager.step + 1, loss=1.0)
            torch.rand(1)
            manager.save(manager.step, metrics={"val": 0.5})


@provokes("Step 7 is not saved at the end of the run")
def leave_after_an_optimizer_step(directory: Path) -> None:
    parts = components()
    run_of(directory, parts)
    with manager_of(directory, parts) as manager:
        manager.restore()
        manager.end_step(7)
        parts["model"](torch.zeros(1, 4)).sum().backward()
        parts["optimizer"].step()


@provokes("which cannot be saved")
def register_a_lambda(directory: Path) -> None:
    with manager_of(directory, {**components(), "counters": {"rate": lambda step: step}}, save_every=100) as manager:
        manager.end_step(1)


@provokes("the components mapping now holds a different object")
def replace_the_optimizer(directory: Path) -> None:
    parts = components()
    with manager_of(directory, parts) as manager:
        manager.save(1)
        parts["optimizer"] = torch.optim.SGD(parts["model"].parameters(), lr=0.01)
        manager.save(2)


@provokes("The components do not match")
def add_a_component(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory, {**components(), "ema": {"decay": 0.9}}) as manager:
        manager.restore()


@provokes("does not fit the live objects, 6 difference(s)")
def build_another_model(directory: Path) -> None:
    run_of(directory)
    with manager_of(directory, components(width=9)) as manager:
        manager.restore()


@provokes("its learning rate is in optimizer")
def restore_a_scheduler_alone(directory: Path) -> None:
    parts = components()
    parts["scheduler"] = torch.optim.lr_scheduler.StepLR(parts["optimizer"], 1)
    run_of(directory, parts)
    with manager_of(directory, parts) as manager:
        manager.restore(only=("scheduler",))


@provokes("hyper-parameters replaced those of the script")
def change_the_rate(directory: Path) -> None:
    run_of(directory)
    parts = components()
    parts["optimizer"].param_groups[0]["lr"] = 0.5
    with manager_of(directory, parts) as manager:
        manager.restore()


@provokes("has another loss than before the restart")
def compute_another_loss(directory: Path) -> None:
    with manager_of(directory, save_every=4, save_on_exit=False) as manager:
        for step in (1, 2, 3, 4, 5):
            manager.end_step(step, loss=1.0)
    with manager_of(directory) as manager:
        manager.restore()
        manager.end_step(5, loss=2.0)


@provokes("The objects are built differently than in the run that saved")
def change_an_argument_of_a_layer(directory: Path) -> None:
    for p in (0.1, 0.5):
        with manager_of(directory, {"model": nn.Sequential(nn.Linear(2, 2), nn.Dropout(p))}) as manager:
            manager.restore()
            if manager.step == 0:
                manager.save(1)


@provokes("The environment differs from the one that saved")
def change_the_number_of_threads(directory: Path) -> None:
    run_of(directory)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with manager_of(directory) as manager:
            manager.restore()
    finally:
        torch.set_num_threads(threads)


@provokes("Not captured: ")
def leave_the_optimizer_out(directory: Path) -> None:
    parts = components()
    optimizer = parts.pop("optimizer")
    with manager_of(directory, parts) as manager:
        parts["model"](torch.zeros(1, 4)).sum().backward()
        optimizer.step()
        manager.save(1)


@provokes("end_step was not the last statement of the body")
def draw_behind_the_step(directory: Path) -> None:
    parts = components()
    with manager_of(directory, parts, save_every=1) as manager:
        for _ in parts["loader"].epochs(1):
            for _ in parts["loader"]:
                manager.end_step(manager.step + 1)
                torch.rand(1)


@provokes("the checkpoint of step 5 was due")
def put_a_save_off_for_ever(directory: Path) -> None:
    with manager_of(directory, save_every=5) as manager:
        for step in range(1, 7):
            manager.end_step(step, save=False)


@provokes("20 steps have ended since")
def iterate_the_loader_inside(directory: Path) -> None:
    parts = components()
    with manager_of(directory, parts) as manager:
        for _ in range(4):
            for _ in parts["loader"].dataloader:
                manager.end_step(manager.step + 1)


@provokes("after a resume such a loop begins anew")
def keep_the_range(directory: Path) -> None:
    train_in_a_range(directory)
    train_in_a_range(directory)


def train_in_a_range(directory: Path) -> None:
    parts = components()
    with manager_of(directory, parts) as manager:
        manager.restore()
        for _epoch in range(3):
            for _ in parts["loader"]:
                manager.end_step(manager.step + 1)


@provokes("The notes differ from those of the run that saved")
def start_another_seed_in_the_directory(directory: Path) -> None:
    for seed in (0, 1):
        with manager_of(directory, notes={"seed": seed}) as manager:
            manager.restore()
            if seed == 0:
                manager.save(1)


@provokes("This run keeps its best checkpoints")
def leave_out_what_is_the_best(directory: Path) -> None:
    for step, options in enumerate(({"keep_best": safeckpt.Best("val")}, {}), start=1):
        with manager_of(directory, **options) as manager:
            manager.restore()
            manager.save(step, metrics={"val": 0.5})


@provokes("are not the ones that were drawn before it was saved")
def stream_from_a_place_without_memory(directory: Path) -> None:
    class Noise(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.tensor(list(os.urandom(8))) for _ in range(8))

    states = []
    for _ in range(2):
        loader = safeckpt.ResumableLoader(DataLoader(Noise(), num_workers=1))
        for state in states:
            loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
        next(batches)
        states.append(loader.state_dict())


@provokes("has got cannot be saved")
def sample_from_an_iterator(directory: Path) -> None:
    class Endless(Sampler[int]):
        def __init__(self) -> None:
            self.numbers = iter(int, 1)

        def __iter__(self) -> Iterator[int]:
            return (next(self.numbers) for _ in range(4))

        def __len__(self) -> int:
            return 4

    loader = safeckpt.ResumableLoader(DataLoader(TensorDataset(torch.zeros(4, 4)), sampler=Endless()))
    list(loader)


@provokes("was passed over: the bytes of")
def damage_the_newest(directory: Path) -> None:
    run_of(directory)
    flip(directory / "step-00000006.pt")
    with manager_of(directory) as manager:
        manager.restore()


@provokes("holds 3 checkpoint(s), but no good one")
def damage_all(directory: Path) -> None:
    run_of(directory)
    for path in directory.glob("step-*.pt"):
        flip(path)
    with manager_of(directory) as manager:
        manager.restore()


@provokes("holds no checkpoint, but its history says")
def delete_all(directory: Path) -> None:
    run_of(directory)
    for path in directory.glob("step-*.pt"):
        path.unlink()
    with manager_of(directory) as manager:
        manager.restore()


@provokes("which weights_only=True does not allow")
def load_a_whole_model(directory: Path) -> None:
    torch.save(nn.Linear(2, 2), directory / "whole.pt")
    safeckpt.load(directory / "whole.pt")


@provokes("is no checkpoint: ")
def load_a_pointer(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    (directory / "model.pt").write_text(pointer)
    safeckpt.load(directory / "model.pt")


@provokes("File too large (needs")
def fill_the_disk(directory: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with manager_of(directory) as manager:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            manager.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@provokes("has no file locks")
def save_without_flock(directory: Path) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fcntl, "flock", flock)
        with manager_of(directory) as manager:
            manager.save(1)


@provokes("is a loader that Accelerate has prepared")
def wrap_a_prepared_loader(directory: Path) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 4)))
    loader.base_dataloader = loader  # as in the classes of accelerate.data_loader
    safeckpt.ResumableLoader(loader)


@provokes("something fetches 1 ahead")
def fetch_ahead(directory: Path) -> None:
    def prefetched(batches: safeckpt.ResumableLoader) -> Iterator[Any]:
        iterator = iter(batches)
        ahead = next(iterator, None)
        while ahead is not None:
            batch, ahead = ahead, next(iterator, None)
            yield batch

    parts = components()
    with manager_of(directory, parts) as manager:
        for _ in parts["loader"].epochs(1):
            for _ in prefetched(parts["loader"]):
                manager.end_step(manager.step + 1)


@provokes("is a plain DataLoader, which has no position")
def register_a_plain_loader(directory: Path) -> None:
    manager_of(directory, {"loader": DataLoader(TensorDataset(torch.zeros(4, 4)))})


@contextlib.contextmanager
def stored() -> Iterator[MemoryStore]:
    """A store in memory behind every mirror."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mirroring, "open_client", lambda mirror: store.client(store.hook, mirror.url))
        patched.setattr(worker, "_LAST_WAIT_SECONDS", 0.1)  # a request that waits for the gate ends with the story
        yield store
        store.gate.set()


def mirrored(directory: Path, step: int, **options: Any) -> None:
    parts = {"counters": {"step": step}}
    options = {"url": "s3://bucket/run", "wait": "save", "timeout_seconds": 0.2, **options}
    with manager_of(directory, parts, mirror=safeckpt.Mirror(**options), save_on_exit=False) as manager:
        manager.restore()
        parts["counters"]["step"] = step
        manager.save(step)


@provokes("was written to by another run last")
def come_back_to_an_old_machine(directory: Path) -> None:
    with stored():
        mirrored(directory / "a", 1)
        mirrored(directory / "b", 2)
        mirrored(directory / "a", 3)


@provokes("was taken over from this run by another one")
def start_on_another_machine(directory: Path) -> None:
    with stored(), manager_of(directory / "a", {"counters": {"step": 1}}, mirror="s3://bucket/run") as manager:
        manager.save(1)
        manager._run.directory.mirror.wait(30)  # type: ignore[union-attr]
        mirrored(directory / "b", 2)
        manager.save(3)
        manager._run.directory.mirror.wait(30)  # type: ignore[union-attr]


@provokes("does not honour conditional writes")
def mirror_to_a_store_without_conditions(directory: Path) -> None:
    with stored() as store:
        store.is_conditional = False
        mirrored(directory, 1)


@provokes("The copy in s3://bucket/run is not up to date")
def lose_the_network(directory: Path) -> None:
    with stored() as store, manager_of(directory, {"counters": {"step": 1}}, mirror="s3://bucket/run") as manager:
        manager.save(1)
        manager._run.directory.mirror.wait(30)  # type: ignore[union-attr]
        store.is_down = True
        with contextlib.suppress(safeckpt.MirrorBehindError):
            manager.save(2)
            manager._run.directory.mirror.wait(1)  # type: ignore[union-attr]
        store.is_down = False


@provokes("Step 1 is not in s3://bucket/run")
def wait_for_a_slow_store(directory: Path) -> None:
    with stored() as store:
        store.gate.clear()
        mirrored(directory, 1)


@provokes("failed at listing")
def start_on_an_empty_disk_without_network(directory: Path) -> None:
    with stored() as store:
        store.is_down = True
        mirrored(directory, 1)


def test_every_error_and_warning_has_a_row() -> None:
    """Someone who has the name of a class, from a traceback or a log, finds what to do, in the order of the tree."""
    text = PAGE.read_text()
    names = re.findall(r"^\| \*\*(\w+)\*\* \| [^|]{15,} \| [^|]{12,} \|$", text, re.MULTILINE)
    classes = [name for name in safeckpt.errors.__all__ if isinstance(getattr(safeckpt.errors, name), type)]
    known = {name for name in classes if issubclass(getattr(safeckpt.errors, name), (Exception, Warning))}
    assert set(names) == known - {"SafeckptError", "SafeckptWarning"}
    assert len(names) == len(set(names))
    assert all(f"`{name}`" in text for name in ("SafeckptError", "SafeckptWarning"))


def test_every_message_of_the_page_is_provoked() -> None:
    """The table and the cases below have the same messages."""
    assert sorted(ROWS) == sorted(PROVOKED)


@pytest.mark.parametrize("message", ROWS)
def test_message_of_the_page_is_what_the_library_says(message: str, tmp_path: Path) -> None:
    """Someone who searches the page for what stands on the screen finds it."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            PROVOKED[message](tmp_path)
            text = ""
        except (safeckpt.SafeckptError, OSError, RuntimeError, TypeError) as error:
            text = str(error)
    assert message in "\n".join([text, *(str(warning.message) for warning in given)])
