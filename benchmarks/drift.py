"""How much processor time does it take to find out whether the copies of several ranks are the same?"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness import LIMIT, Contestant, Options, Report, race
from benchmarks.workloads import Training
from safeckpt.distributed.fingerprint import fingerprints

_OURS = "safeckpt's sums of every tensor"


def run(options: Options) -> Iterator[Report]:
    """Make the fingerprints of a state of each size."""
    for size_mb in options.sizes_mb:
        training = Training(size_mb)
        state, tensors = training.state(), training.tensors()
        contestants = [
            _spent("one sum of each tensor", lambda: [tensor.sum() for tensor in tensors], LIMIT),  # noqa: B023
            _spent(_OURS, lambda: fingerprints(state), "differs for a permutation, or any one bit"),  # noqa: B023
            _spent("SHA-256 of all bytes", lambda: _sha256(tensors), "a cryptographic digest"),  # noqa: B023
        ]
        rows = race(contestants, options.repeats)
        report = Report("drift", f"processor time to compare copies, {training.describe()}", rows)
        report.axis = ("size_mb", size_mb)
        report.target(
            "S9 seconds of processor time for 1 GB", rows[_OURS].median / training.nbytes * 1e9, 0.1, unit="s"
        )
        yield report


def _spent(name: str, work: Callable[[], object], promises: str) -> Contestant:
    def run() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return Contestant(name, run, promises)


def _sha256(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(memoryview(tensor.reshape(-1).numpy()))
    return digest.hexdigest()
