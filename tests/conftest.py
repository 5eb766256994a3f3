"""What every test gets: one thread, seeded streams, the signals of a foreground process; and directories to ask for."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent


def pytest_configure() -> None:
    """Hear signals as in a terminal's foreground: a script's background and nohup ignore some, in children too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run single files in this process, and directories on every core but no more than eight: `-n 0` takes one."""
    if all(Path(argument.split("::")[0]).suffix == ".py" for argument in config.args):
        return 0
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take what torch and Python say about workers on a small machine for no failure of the loader's tests."""
    for item in items:
        if HERE / "loader" in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:This DataLoader will create"))
            item.add_marker(pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"))


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what is there for all tests: half a million objects, in forks as well."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: sums of several differ in their last bits, and the cores are for other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_streams() -> None:
    """Start every test from the same seeds: none depends on those before it."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # where it is not, torch.manual_seed notes a traceback each time, for later
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for many syncs whose effect on a disk is not the question."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    path.chmod(0o700)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def straights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Where a module's tests keep the straight run with some options, which many of them compare with."""
    folder = tmp_path_factory.getbasetemp() / "straight" / request.module.__name__
    return lambda **options: folder / repr(sorted(options.items()))
