"""P9: two FSDP2 ranks: what a save costs beside plain torch.distributed.checkpoint, and what grows with the ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks.harness import DURABLE, NOTHING, Options, Report, Row
from benchmarks.workloads import Training

_RANKS = 2
_GROWTH = (64, 512, 4096)
_PARAMETERS = 300  # of the model whose shards are simulated
MANAGER, PLAIN = "CheckpointManager.save", "DCP save"
STALL, PLAIN_STALL = "CheckpointManager(async_save=True), stall", "DCP async_save, stall"


def run(options: Options) -> Iterator[Report]:
    """Save on a real group of two, then count what thousands would write."""
    for size_mb in options.sizes_mb:
        yield _race(options, size_mb)
    yield _growth()


def _race(options: Options, size_mb: int) -> Report:
    with TemporaryDirectory(dir=options.disk) as name:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_RANKS),
            "-m", "benchmarks.distributed", name, str(size_mb), str(options.repeats),
        ]  # fmt: skip
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
        )
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    rows = {
        name: Row(times, DURABLE + ", every byte proven" if name == MANAGER else NOTHING)
        for name, times in seconds.items()
    }
    report = Report("distributed", f"{_RANKS} gloo ranks with FSDP2 on one machine, {size_mb} MB in all", rows)
    report.axis = ("size_mb", size_mb)
    report.notes.append("DCP syncs its files and not the directory, takes no digest, guards nothing, keeps no streams")
    report.target("save / DCP save", report.ratio(MANAGER, PLAIN), 1.6)
    report.target("stall / DCP async_save", report.ratio(STALL, PLAIN_STALL), 1.6)
    return report


def worker(directory: Path, size_mb: int, repeats: int) -> None:
    """One rank of the race."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("cpu:gloo")
    training = Training(size_mb, stepped=False)
    for layer in training.model.layers:
        fully_shard(layer)
    fully_shard(training.model)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-5)
    training.step()
    rank = torch.distributed.get_rank()
    found: dict[str, list[float]] = {}
    step = 0

    def timed(name: str, call: Callable[[], object]) -> Any:
        times = found.setdefault(name, [])
        torch.distributed.barrier()
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        return result

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(training.model, training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def plain(where: Path) -> None:
        checkpoint.save(state(), checkpoint_id=where)

    def plain_async(where: Path) -> Any:
        return checkpoint.async_save(state(), checkpoint_id=where, process_group=group)

    def one_round(step: int) -> None:
        timed(MANAGER, lambda: ours.save(step))
        timed(PLAIN, lambda: plain(directory / f"dcp-{step}"))
        timed(STALL, lambda: background.save(step))
        background.wait()
        timed(PLAIN_STALL, lambda: plain_async(directory / f"async-{step}")).result()
        torch.distributed.barrier()

    group = torch.distributed.new_group(backend="gloo")
    options: dict[str, Any] = {"components": training.components, "keep_last": 1}
    with (
        safeckpt.CheckpointManager(directory / "ours", **options) as ours,
        safeckpt.CheckpointManager(directory / "async", async_save=True, **options) as background,
    ):
        for step in range(1, repeats + 2):
            one_round(step)
    if rank == 0:
        print(json.dumps({name: times[1:] for name, times in found.items()}), flush=True)
    torch.distributed.destroy_process_group()


def _growth() -> Report:
    """Count what rank 0 collects and writes for many ranks, each with a small shard of every parameter."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from safeckpt.distributed.rank_state import merged
    from safeckpt.file import encode, prepare
    from safeckpt.state.random_streams import RngStreams

    rows = {}
    for ranks in _GROWTH:
        own = [
            {"rng": RngStreams.capture(), "states": {"loader": {"epoch": 1, "batch": rank}}} for rank in range(ranks)
        ]
        start = time.perf_counter()
        payload = merged({"safeckpt": {}}, own)
        payload["safeckpt"]["files"] = [[f"__{rank}_0.distcp", 10**9, secrets.token_hex(32)] for rank in range(ranks)]
        sink = io.BytesIO()
        index = prepare(encode(payload), header={}).write(sink).size_bytes
        seconds = time.perf_counter() - start
        sink.seek(0)
        start = time.perf_counter()
        safeckpt.load(sink)
        read = time.perf_counter() - start
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), torch.Size([1, 64])) for rank in range(ranks)]
        metadata = Metadata(
            {
                f"model.layer.{number}.weight": TensorStorageMetadata(
                    TensorProperties(), torch.Size([ranks, 64]), list(chunks)
                )
                for number in range(_PARAMETERS)
            },
            None,
            {
                MetadataIndex(f"model.layer.{number}.weight", torch.Size([rank, 0])): (f"__{rank}_0.distcp", 0, 256)
                for number in range(_PARAMETERS)
                for rank in range(ranks)
            },
        )
        rows[f"{ranks} ranks: rank 0 writes the index"] = Row(
            [seconds],
            NOTHING,
            {
                "index MB": index / 1e6,
                "engine's metadata MB": len(pickle.dumps(metadata)) / 1e6,
                "directory entries": ranks + 2,
                "read s": read,
            },
        )
    return Report("distributed", f"growth with the ranks, {_PARAMETERS} parameters, simulated", rows)


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
