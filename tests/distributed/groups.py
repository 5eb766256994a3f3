"""Groups of processes in tests: real ones over gloo, forked from a server that has imported torch, or by torchrun.

A forked group can lose a member without an agent that then ends the others, so that what the survivors get is seen.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

from safeckpt.distributed.rank_group import RankGroup
from tests.children import Child
from tests.faults import Ended


def member(function: Callable[..., Any], rank: int, size: int, store: Path, arguments: Sequence[Any]) -> Any:
    """Join a group and run a function in it."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=dt.timedelta(seconds=60)
    )
    return pickle.dumps(function(*arguments))  # as bytes: a tensor in shared memory would go with its process


@contextlib.contextmanager
def running(size: int, function: Callable[..., Any], path: Path, *arguments: Any) -> Iterator[list[Child]]:
    """Run a function on every rank of a new group; yield the processes, which end with the block at the latest."""
    path.mkdir(parents=True, exist_ok=True)
    store = path / f".store-{uuid.uuid4().hex}"
    members = [Child(member, function, rank, size, store, (path, *arguments), talks=False) for rank in range(size)]
    try:
        yield members
    finally:
        for one in members:
            one.__exit__(None, None, None)
        store.unlink(missing_ok=True)


def run_all(size: int, function: Callable[..., Any], path: Path, *arguments: Any) -> list[Ended]:
    """Run a function on every rank of a new group, and return how each ended."""
    with running(size, function, path, *arguments) as members:
        return [end_of(one) for one in members]


def end_of(one: Child) -> Ended:
    """Wait for a member, and return how it ended."""
    try:
        return one.ended()
    except AssertionError as error:  # it was made to hang, and ended itself
        return Ended(None, None, error)


def results(size: int, function: Callable[..., Any], path: Path, *arguments: Any) -> list[Any]:
    """Run a function on every rank of a new group, and return what each rank returned."""
    found = []
    for rank, ended in enumerate(run_all(size, function, path, *arguments)):
        if ended.error is not None:
            raise AssertionError(f"rank {rank}: {type(ended.error).__name__}: {ended.error}") from ended.error
        assert ended.signal is None, f"rank {rank}: {ended.signal}"
        assert ended.value is not None, f"rank {rank} left without an answer"
        found.append(answer(ended))
    return found


def answer(ended: Ended) -> Any:
    """Return what a rank has returned."""
    return pickle.loads(ended.value)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Return what a group says for all tests of a module, which several processes run: one asks, the others read it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make(factory.mktemp(name))
    said = factory.getbasetemp().parent / f"{name}.pickle"
    with filelock.FileLock(f"{said}.lock"):
        if not said.exists():
            said.write_bytes(pickle.dumps(make(factory.mktemp(name))))
        return pickle.loads(said.read_bytes())


@dataclass(frozen=True)
class Failed:
    """What a case that was not meant to raise raised on one rank.

    Attributes:
        text: Its traceback.
    """

    text: str


def run_cases(cases: Mapping[str, Callable[[Path], Any]], path: Path) -> dict[str, Any]:
    """Run cases one after the other on this rank; one that raises is a `Failed`, and the next ones run all the same."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = case(path / name)
        except BaseException:
            found[name] = Failed(traceback.format_exc())
        torch.distributed.barrier()
    return found


def of(seen: list[dict[str, Any]], name: str) -> list[Any]:
    """Return what each rank saw in a case, or fail with what it raised."""
    found = [one[name] for one in seen]
    for rank, one in enumerate(found):
        assert not isinstance(one, Failed), f"rank {rank}: {one.text}"
    return found


def wait_for_ranks(seconds: float) -> None:
    """Have each group of this process wait so long for a rank from now on.

    A rank that hangs costs no more time then, while a slow machine has had all it needs up to here.
    """
    torch.distributed.barrier()
    for one in gc.get_objects():
        if type(one) is RankGroup:
            one._agreements.timeout_seconds = seconds


def torchrun(size: int, *arguments: str, restarts: int = 0, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """Run `tests.distributed.script` under torchrun; when that is killed, what it has started may live on."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
        "--max-restarts", str(restarts), "--monitor-interval", "0.1", "-m", "tests.distributed.script", *arguments,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        # Else a restarted group meets in the store of the one before and finds its addresses, pytorch#135712.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with tempfile.TemporaryFile("w+") as errors:  # not a pipe, which those that live on would hold open
        done = subprocess.run(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, text=True, timeout=seconds, check=False
        )
        errors.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, "", errors.read())


def losses_in(path: Path) -> dict[int, float]:
    """Return the losses that rank 0 has written down, the last one for each step."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] = record["loss"]
    return dict(sorted(found.items()))
