"""P9: two FSDP2 ranks: what a save costs beside plain torch.distributed.checkpoint, and what grows with the ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks.harness import DURABLE, NOTHING, Options, Report, Row, fresh
from benchmarks.workloads import Training

_RANKS = 2
_GROWTH = (64, 512, 4096, 16384)
_PARAMETERS = 12  # of the model whose shards are simulated
_AGREEMENTS = 300
RESTORE, PLAIN_RESTORE = "CheckpointManager.restore", "DCP load and set_state_dict"
MANAGER, PLAIN = "CheckpointManager.save", "DCP save"
STALL, PLAIN_STALL = "CheckpointManager(async_save=True), stall", "DCP async_save, stall"


def run(options: Options) -> Iterator[Report]:
    """Save on a real group of two, then count what thousands would write."""
    for size_mb in options.sizes_mb:
        yield _race(options, size_mb)
    yield _agreeing()
    yield _growth(options.disk)


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
    report.target("save / DCP save", report.ratio(MANAGER, PLAIN), 1.2)
    report.target("restore / DCP load and set_state_dict", report.ratio(RESTORE, PLAIN_RESTORE), 1.3)
    report.target("stall / DCP async_save", report.ratio(STALL, PLAIN_STALL), 1.6)
    return report


def worker(directory: Path, size_mb: int, repeats: int) -> None:
    """One rank of the race."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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

    def plain_restore(where: Path, target: dict[str, Any]) -> None:
        checkpoint.load(target, checkpoint_id=where)
        model, optimizer = target["model"], target["optimizer"]
        set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def plain_async(where: Path) -> Any:
        return checkpoint.async_save(state(), checkpoint_id=where, process_group=group)

    def one_round(step: int) -> None:
        timed(MANAGER, lambda: ours.save(step))
        timed(PLAIN, lambda: plain(directory / f"dcp-{step}"))
        timed(RESTORE, ours.restore)
        target = state()
        timed(PLAIN_RESTORE, lambda: plain_restore(directory / f"dcp-{step}", target))
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


def _agreeing() -> Report:
    """Agree as rank 0 of many, over connections to all that it talks to, which speak for the ranks below them."""
    rows = {}
    for ranks in _GROWTH:
        found = fresh("distributed:agree_as_rank_zero", ranks=ranks)
        rows[f"{ranks} ranks: rank 0 agrees"] = Row(found.pop("seconds"), NOTHING, found)
    return Report(
        "distributed", "growth with the ranks, one agreement at rank 0, real messages of simulated ranks", rows
    )


def agree_as_rank_zero(ranks: int) -> dict[str, Any]:
    """Make agreements in a fresh process as rank 0, with ranks that have come already: what is left is its own time."""
    from multiprocessing import get_context

    from safeckpt.distributed.agreement import Agreements, reply_to, said
    from safeckpt.distributed.group import lowest
    from safeckpt.distributed.links import Link, children_of

    context = get_context("spawn")
    children = children_of(0, ranks)
    pairs = {child: socket.socketpair() for child in children}
    others = context.Process(target=_speak_for, args=({child: pair[1] for child, pair in pairs.items()},), daemon=True)
    others.start()
    agreements = Agreements({child: Link(pair[0]) for child, pair in pairs.items()}, 0, ranks, 600.0)
    began_cpu = began = 0.0
    seconds = []
    for number in range(_AGREEMENTS + 1):
        began = time.perf_counter()
        if number == 1:
            began_cpu = time.process_time()
        part = agreements.begin(0, _WHAT, lowest, lambda found: found, is_waited_for=True)
        part.combined = said(0, _WHAT, _SAME, 0, None)
        agreements.end(part)
        reply, _ = reply_to(part.replies.get(), part.decide, 0)  # type: ignore[arg-type]  # nobody is lost
        agreements.reply(part, reply)
        seconds.append(time.perf_counter() - began)
    cpu = (time.process_time() - began_cpu) / _AGREEMENTS
    answer = pickle.dumps(("said", (0, 1), said(0, _WHAT, _SAME, 0, None)))
    sent = pickle.dumps(("reply", (0, 1), reply))
    others.kill()
    return {
        "seconds": seconds[1:],  # the first waits for the process of the others
        "messages in": len(children),
        "B in": len(children) * len(answer),
        "B out": len(children) * len(sent),
        "CPU us": cpu * 1e6,
        "levels of the tree": ranks.bit_length() - 1,
    }


_WHAT = "saving step 1000"
_SAME = {"step": 1000, "components": "model optimizer scheduler loader"}


def _speak_for(sockets: dict[int, socket.socket]) -> None:
    """Say what the ranks below each child of rank 0 say together, agreement after agreement."""
    from safeckpt.distributed.agreement import said
    from safeckpt.distributed.links import Link

    links = {child: Link(one) for child, one in sockets.items()}
    for number in range(1, _AGREEMENTS + 2):
        for child, link in links.items():
            link.send(pickle.dumps(("said", (0, number), said(child, _WHAT, _SAME, 0, None))))
        for link in links.values():
            kinds: list[str] = []
            while "reply" not in kinds:
                wait([link])
                kinds += [pickle.loads(data)[0] for data in link.take_in()]


def _growth(disk: Path) -> Report:
    """Write what many ranks leave in a directory, each with a small shard of every parameter, and read it as rank 0."""
    rows = {}
    for ranks in _GROWTH:
        with TemporaryDirectory(dir=disk) as name:
            found = fresh("distributed:as_rank_zero", ranks=ranks, directory=name)
        rows[f"{ranks} ranks: rank 0 restores"] = Row([found.pop("restore")], NOTHING, found)
    title = f"growth with the ranks, {_PARAMETERS} parameters, real files of simulated ranks"
    return Report("distributed", title, rows)


def as_rank_zero(ranks: int, directory: str) -> dict[str, float]:
    """Write a checkpoint of so many ranks and read what rank 0 reads, in a process that has to be a fresh one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from safeckpt.distributed.storage import ShardReader
    from safeckpt.file import CheckpointFolder, MappedFiles, open_checkpoint

    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    found = _write_as(ranks, Path(directory))
    wanted = {
        f"model.{number}": DTensor.from_local(torch.empty(1, 64), mesh, [Shard(0)], run_check=False)
        for number in range(_PARAMETERS)
    }
    start = time.perf_counter()
    with open_checkpoint(directory) as file:
        assert isinstance(file, CheckpointFolder)
        file.check_structure()
        file.verify(0, ranks)
        _, index = file.load_mapped()
        mapped = MappedFiles(index)
        opened = time.perf_counter()
        reader = ShardReader(Path(directory), [name for name, *_ in file.shards()], file.verified, mapped)
        parts = reader.read(wanted)
        mapped.check_unchanged()
        reader.close()
    end = time.perf_counter()
    assert all(torch.equal(part, torch.ones(1, 64)) for part in parts.values())
    return {**found, "read index s": opened - start, "read metadata s": end - opened, "restore": end - start}


def _write_as(ranks: int, directory: Path) -> dict[str, float]:
    """Write the files of all ranks, the engine's metadata and the index; return sizes and what rank 0 took for them."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    from safeckpt.file import INDEX, METADATA, JoinedFile, encode, prepare, shard_of_bytes

    part = prepare(encode(torch.ones(1, 64)), trailer=False)
    sink = io.BytesIO()
    offsets = JoinedFile([part] * _PARAMETERS).write(sink).offsets
    _, size, digest = shard_of_bytes("", sink.getvalue())
    for rank in range(ranks):
        (directory / f"__{rank}_0.distcp").write_bytes(sink.getvalue())
    places = [torch.Size([rank, 0]) for rank in range(ranks)]
    keys = [f"model.{number}" for number in range(_PARAMETERS)]
    chunks = [ChunkStorageMetadata(place, torch.Size([1, 64])) for place in places]
    metadata = Metadata(
        {key: TensorStorageMetadata(TensorProperties(), torch.Size([ranks, 64]), list(chunks)) for key in keys},
        None,
        {
            MetadataIndex(key, place): _StorageInfo(f"__{rank}_0.distcp", offset, part.size_bytes)
            for key, offset in zip(keys, offsets, strict=True)
            for rank, place in enumerate(places)
        },
    )
    start = time.perf_counter()
    document = pickle.dumps(metadata)
    (directory / METADATA).write_bytes(document)
    written = time.perf_counter()
    files = [[f"__{rank}_0.distcp", size, digest] for rank in range(ranks)]
    files.append(list(shard_of_bytes(METADATA, document)))
    header = {"shards": len(files), "shards_bytes": ranks * size + len(document)}
    index = prepare(encode({"safeckpt": {"files": files}}), header=header)
    with (directory / INDEX).open("wb") as file:
        index.write(file)
    end = time.perf_counter()
    bare = prepare(encode({"safeckpt": {"files": []}}), header=header).size_bytes
    return {
        "files": float(len(files) + 1),
        "index kB": index.size_bytes / 1e3,
        "without its list kB": bare / 1e3,
        "metadata MB": len(document) / 1e6,
        "write index s": end - written,
        "write metadata s": written - start,
    }


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
