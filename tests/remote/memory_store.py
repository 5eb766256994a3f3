"""An object store in memory that promises what S3 does, one request at a time; and the seam at which tests step in."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence

from safeckpt.errors import MirrorUnreachableError
from safeckpt.remote.client import Stored

Hook = Callable[[str, str], None]  # told of each request before it is done: its kind and its key


class MemoryStore:
    """Objects by key. Every change is whole, and seen by every request after it.

    Attributes:
        objects: What is there.
        is_conditional: Whether it honours "create only if absent".
        log: Every request, kind and key.
        is_down: Whether every request fails.
        read_bytes: How much was read.
        gate: Held closed, no checkpoint gets in.
    """

    def __init__(self, *, is_conditional: bool = True) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_conditional = is_conditional
        self.log: list[tuple[str, str]] = []
        self.is_down = False
        self.read_bytes = 0
        self.mutex = threading.RLock()
        self.gate = threading.Event()  # closed, it holds up every upload of a checkpoint
        self.gate.set()

    def hook(self, kind: str, key: str) -> None:
        if kind == "put" and "/step-" in key:
            assert self.gate.wait(60)

    def keys(self, text: str = "") -> list[str]:
        """Return the keys with a text in them, sorted."""
        with self.mutex:
            return sorted(key for key in self.objects if text in key)

    def client(self, hook: Hook | None = None, url: str = "memory://bucket/run") -> MemoryClient:
        return MemoryClient(self, hook, url)


class MemoryClient:
    """See `safeckpt.remote.client.Client`."""

    is_conditional = True

    def __init__(self, store: MemoryStore, hook: Hook | None, url: str) -> None:
        self.url = url
        self.store = store
        self._hook = hook

    def _request(self, kind: str, key: str) -> None:
        if self._hook is not None:
            self._hook(kind, key)
        self.store.log.append((kind, key))
        if self.store.is_down:
            raise MirrorUnreachableError(url=self.url, what=f"{kind} {key}", reason="it is down")

    def listing(self, prefix: str = "") -> list[Stored]:
        self._request("listing", prefix)
        with self.store.mutex:
            return [Stored(key, len(data)) for key, data in self.store.objects.items() if key.startswith(prefix)]

    def top(self) -> list[str]:
        self._request("top", "")
        with self.store.mutex:
            return sorted({key.partition("/")[0] for key in self.store.objects})

    def read(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        self._request("read", key)
        with self.store.mutex:
            if key not in self.store.objects:
                raise FileNotFoundError(errno.ENOENT, "No such object", f"{self.url}/{key}")
            end = None if length is None else start + length
            data = memoryview(self.store.objects[key])[start:end]
            self.store.read_bytes += len(data)
            return data

    def size(self, key: str) -> int:
        return len(self.read(key))

    def create(self, key: str, data: bytes) -> bool:
        self._request("create", key)
        with self.store.mutex:
            if key in self.store.objects and self.store.is_conditional:
                return False
            self.store.objects[key] = data
            return True

    def put(self, key: str, data: bytes | Iterator[memoryview], size_bytes: int | None = None) -> None:
        content = data if isinstance(data, bytes) else b"".join(data)
        self._request("put", key)
        with self.store.mutex:
            self.store.objects[key] = content

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._request("delete", key)
            with self.store.mutex:
                self.store.objects.pop(key, None)

    def abort_stale(self, prefix: str) -> int:
        return 0
