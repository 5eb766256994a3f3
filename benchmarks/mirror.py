"""What a copy in an object store costs: upload, training meanwhile, restore on an empty disk, memory."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import safeckpt
from benchmarks import s3_server
from benchmarks.harness import (
    LIMIT,
    MB,
    NOTHING,
    Contestant,
    Options,
    Report,
    forget_peak,
    fresh,
    peak_bytes,
    race,
    resident_bytes,
)
from benchmarks.workloads import Training

_PART = 8 << 20
_CHECKED = "checked on the way, fenced, history sent"
_NETWORK_BYTES_PER_SECOND = 100 * MB
_ALONE_SECONDS = 3.0
_numbers = itertools.count()


def run(options: Options) -> Iterator[Report]:
    """Measure each beside plain obstore, with a server of its own process."""
    try:
        import obstore  # noqa: F401 - an extra
    except ModuleNotFoundError:
        yield Report("mirror", "left out: obstore is not installed", {})
        return
    for size_mb in options.sizes_mb:
        with TemporaryDirectory(dir=options.disk) as name, s3_server.running() as server:
            bench = _Bench(Path(name), server, size_mb)
            yield bench.upload(options)
            yield bench.restore(options)
        with (
            TemporaryDirectory(dir=options.disk) as name,
            s3_server.running(sink_bytes_per_second=_NETWORK_BYTES_PER_SECOND) as server,
        ):
            yield _Bench(Path(name), server, size_mb).training(options)
        with TemporaryDirectory(dir=options.disk) as name, s3_server.running(sink_bytes_per_second=math.inf) as server:
            yield _Bench(Path(name), server, size_mb).cost(options)


class _Bench:
    def __init__(self, path: Path, server: s3_server.Server, size_mb: float) -> None:
        self.path = path
        self.server = server
        training = Training(size_mb)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with safeckpt.CheckpointManager(path / "made", training.components) as manager:
                self.file = manager.save(1).path
        self.size = self.file.stat().st_size

    def mirror(self, **more: Any) -> safeckpt.Mirror:
        # As to Amazon's own S3, which needs no endpoint.
        signed = {"unsigned_payload": "true"} if self.server.options["endpoint"].startswith("https") else {}
        return safeckpt.Mirror(
            f"s3://bench/{next(_numbers)}",
            options={**self.server.options, **signed},
            client_options=self.server.client_options,
            **more,
        )

    def _plain(self) -> Any:
        import obstore

        url = f"s3://bench/{next(_numbers)}"
        return obstore.store.from_url(url, config=self.server.options, client_options=self.server.client_options)

    # -- up ----------------------------------------------------------------------------------------------------------

    def upload(self, options: Options) -> Report:
        plain = self._plain()
        ours = self._manager(self.mirror())
        rates: list[Contestant] = [
            Contestant(
                "obstore.put of the file",
                lambda: self._put(plain),
                LIMIT,
            ),
            Contestant("mirror=, until it is durable", lambda: self._send(ours), _CHECKED, close=ours.close),
            *self._boto(),
            *self._dcp(),
        ]
        rows = race(rates, options.repeats)
        for row in rows.values():
            row.extra["MB/s"] = self.size / MB / row.median
        report = Report("mirror", f"upload of {self.size / MB:.0f} MB to a server of this machine", rows)
        names = [one.name for one in rates]
        report.target("upload rate / plain obstore.put", report.ratio(names[0], names[1]), 0.9, at_least=True)
        with TemporaryDirectory(dir=options.disk) as name:
            found = fresh("mirror:peak_of", size_mb=self.size / MB, directory=name, server=self.server)
        report.target("memory above the live objects while it goes up", round(found["peak"] / MB, 1), 64, unit="MB")
        return report

    def _put(self, store: Any) -> None:
        import obstore

        obstore.put(store, "x", self.file, chunk_size=_PART, max_concurrency=4)

    def _manager(self, mirror: safeckpt.Mirror) -> safeckpt.CheckpointManager:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = {"counters": {"step": 0}}
            manager = safeckpt.CheckpointManager(self.path / str(next(_numbers)), small, mirror=mirror, keep_last=1)
            manager.save(0)
            assert manager.mirror is not None
            manager.mirror.wait(60)
        return manager

    def _send(self, manager: safeckpt.CheckpointManager) -> float:
        """Have a large file copied that stands in for a new checkpoint, and return how long that took."""
        step = 10 + next(_numbers)
        target = manager.directory / f"step-{step:08d}.pt"
        os.link(self.file, target)
        assert manager.mirror is not None
        began = time.perf_counter()
        manager.mirror.committed(step, rank=0, size=1)
        manager.mirror.wait(600)
        took = time.perf_counter() - began
        target.unlink()
        return took

    def _boto(self) -> Iterator[Contestant]:
        try:
            import boto3
        except ModuleNotFoundError:
            return
        s3 = boto3.client(
            "s3",
            endpoint_url=self.server.options["endpoint"],
            aws_access_key_id=self.server.options["access_key_id"],
            aws_secret_access_key=self.server.options["secret_access_key"],
            region_name=self.server.options["region"],
        )
        yield Contestant("boto3 upload_file", lambda: s3.upload_file(str(self.file), "bench", "boto"))

    def _dcp(self) -> Iterator[Contestant]:
        try:
            import fsspec  # noqa: F401
            from obstore.fsspec import FsspecStore
            from torch.distributed import checkpoint as dcp
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
        except ModuleNotFoundError:
            return
        state = {"state": torch.zeros(self.size // 4)}

        def save() -> None:
            FsspecStore.clear_instance_cache()
            url = f"s3://bench/dcp-{next(_numbers)}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                writer = FsspecWriter(url, config=self.server.options, client_options=self.server.client_options)
                dcp.save(state, storage_writer=writer, no_dist=True)

        from obstore.fsspec import register

        register("s3")
        try:
            save()
        except Exception as error:  # noqa: BLE001 - of others, which then do not take part
            print(f"DCP's FsspecWriter is left out: {type(error).__name__}: {str(error)[:200]}")
            return
        yield Contestant("DCP's FsspecWriter over obstore", save, NOTHING)

    # -- down --------------------------------------------------------------------------------------------------------

    def restore(self, options: Options) -> Report:
        from safeckpt.remote import open_client

        mirror = self.mirror()
        manager = self._manager(mirror)
        self._send_and_keep(manager)
        client = open_client(mirror)
        remote = next(iter(open_epochs(client)))

        def plain() -> None:
            target = self.path / f"plain-{next(_numbers)}"
            with target.open("w+b") as file:
                os.ftruncate(file.fileno(), self.size)

                def one(start: int) -> None:
                    data = client.read(remote.key, start, min(_PART, self.size - start))
                    os.pwrite(file.fileno(), data, start)

                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(one, range(0, self.size, _PART)))
                os.fsync(file.fileno())
            safeckpt.verify(target)
            target.unlink()

        def ours() -> None:
            from safeckpt.remote import fetch
            from safeckpt.store import CheckpointDirectory

            directory = CheckpointDirectory(self.path / f"empty-{next(_numbers)}")
            path = fetch(client, remote, directory)
            safeckpt.verify(path)  # as the restore does that follows
            path.unlink()

        names = ["4 ranges at a time, fsync, one verify", "fetch, and the verify of the restore"]
        rows = race([Contestant(names[0], plain, LIMIT), Contestant(names[1], ours, _CHECKED)], options.repeats)
        report = Report("mirror", f"{self.size / MB:.0f} MB brought to an empty disk, ready to restore", rows)
        report.target("restore / plain ranged download and verify", report.ratio(names[1], names[0]), 1.15)
        manager.close()
        return report

    def _send_and_keep(self, manager: safeckpt.CheckpointManager) -> None:
        os.link(self.file, manager.directory / "step-00000001.pt")
        assert manager.mirror is not None
        manager.mirror.committed(1, rank=0, size=1)
        manager.mirror.wait(600)

    # -- beside training ---------------------------------------------------------------------------------------------

    def cost(self, options: Options) -> Report:
        """Count the CPU of this process for an upload over TLS, while it does nothing else."""
        plain, ours = self._plain(), self._manager(self.mirror())
        names = ["obstore.put of the file", "mirror=, until it is durable"]
        contestants = [
            Contestant(names[0], lambda: _cpu_seconds(lambda: self._put(plain)), LIMIT),
            Contestant(names[1], lambda: _cpu_seconds(lambda: self._send(ours)), _CHECKED, close=ours.close),
        ]
        rows = race(contestants, options.repeats)
        for row in rows.values():
            row.extra["s/GB"] = row.median / self.size * 1e9
        report = Report("mirror", f"CPU seconds for {self.size / MB:.0f} MB that go up over TLS", rows)
        report.target("CPU / plain obstore.put", report.ratio(names[1], names[0]), 1)
        return report

    def training(self, options: Options) -> Report:
        """Time steps of one thread, alone and while a checkpoint goes up over TLS at the rate of a network."""
        torch.set_num_threads(1)
        manager = self._manager(self.mirror())
        kinds = {"large": _large_step(), "small": _small_step()}
        contestants = []
        for kind, step in kinds.items():
            contestants += [
                Contestant(f"{kind} steps alone", partial(_seconds_alone, step)),
                Contestant(f"{kind} steps while it goes up", partial(self._seconds_meanwhile, step, manager)),
            ]
        rows = race(contestants, options.repeats)
        rate = f"{_NETWORK_BYTES_PER_SECOND / MB:.0f} MB/s"
        report = Report("mirror", f"training while {self.size / MB:.0f} MB go up at {rate}", rows)
        for kind in kinds:
            slowdown = report.ratio(f"{kind} steps while it goes up", f"{kind} steps alone")
            report.target(f"slowdown of {kind} steps", slowdown, 1.02)
        manager.close()
        return report

    def _seconds_meanwhile(self, step: Callable[[], object], manager: safeckpt.CheckpointManager) -> float:
        thread = threading.Thread(target=self._send, args=(manager,))
        thread.start()
        try:
            return _seconds_a_step(step, thread.is_alive)
        finally:
            thread.join()


def _seconds_alone(step: Callable[[], object]) -> float:
    end = time.perf_counter() + _ALONE_SECONDS
    return _seconds_a_step(step, lambda: time.perf_counter() < end)


def _seconds_a_step(step: Callable[[], object], goes_on: Callable[[], bool]) -> float:
    done, began = 0, time.perf_counter()
    while goes_on():
        step()
        done += 1
    return (time.perf_counter() - began) / done


def _large_step() -> Callable[[], object]:
    """Return a step that computes for long without the interpreter."""
    weight = torch.randn(1024, 1024)
    return lambda: torch.mm(weight, weight)


def _small_step() -> Callable[[], object]:
    """Return a step of many small operations, each of which the interpreter starts."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return how long all threads of this process computed meanwhile."""
    began = time.process_time()
    work()
    return time.process_time() - began


def peak_of(size_mb: float, directory: str, server: list[Any]) -> dict[str, float]:
    """Send a checkpoint in this process, which has to be a fresh one, and return the peak above what was there."""
    bench = _Bench(Path(directory), s3_server.Server(*server), size_mb)
    manager = bench._manager(bench.mirror())
    before = resident_bytes()
    forget_peak()
    bench._send(manager)
    peak = peak_bytes() - before
    manager.close()
    return {"peak": float(peak)}


def open_epochs(client: Any) -> list[Any]:
    """Return the newest checkpoint below a prefix, in a list."""
    from safeckpt.remote import Epochs

    found = Epochs(client, lock=False).look().checkpoints
    return [found[max(found)]]
