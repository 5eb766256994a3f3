"""A proxy in front of a server that does what networks and stores do on a bad day."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Request(NamedTuple):
    """A request on its way.

    Attributes:
        number: 1, 2, ... in the order in which they came.
        method: Such as PUT.
        path: With its query.
    """

    number: int
    method: str
    path: str


class Fault(NamedTuple):
    """What happens to a request.

    Attributes:
        status: Answered with this, and not passed on.
        cut: Where the connection is cut: "before" the request is passed on, or "after" it was done.
        kill: A process that is killed: "before" the request is passed on, or "after" it was done.
        pid: That process.
        slow_seconds: How long it takes.
        lose_bytes: How much of the answer's body is missing, with a length that says nothing of it.
        flip: Whether a bit of the answer's body is another.
    """

    status: int | None = None
    cut: str | None = None
    kill: str | None = None
    pid: int = 0
    slow_seconds: float = 0.0
    lose_bytes: int = 0
    flip: bool = False


Plan = Callable[[Request], Fault | None]


class Proxy:
    """Passes requests on.

    Attributes:
        endpoint: Where it listens.
        plan: Returns what happens to a request; None for nothing.
        requests: Those that came.
    """

    def __init__(self, upstream: str) -> None:
        self.plan: Plan = lambda _: None
        self.requests: list[Request] = []
        self._mutex = threading.Lock()
        self._under_way = 0
        self._ended = threading.Condition()
        self._upstream = urlsplit(upstream)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                with proxy._counted():
                    proxy._handle(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 - their names there

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of clients that were killed
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def settle(self) -> None:
        """Wait until every request that came has been passed on; who sent it may be dead for long."""
        with self._ended:
            assert self._ended.wait_for(lambda: not self._under_way, timeout=60)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._ended:
            self._under_way += 1
        try:
            yield
        finally:
            with self._ended:
                self._under_way -= 1
                self._ended.notify_all()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = self._body(handler)
        with self._mutex:
            request = Request(len(self.requests) + 1, handler.command, handler.path)
            self.requests.append(request)
        fault = self.plan(request) or Fault()
        if fault.slow_seconds:
            time.sleep(fault.slow_seconds)
        _strike(fault, "before")
        if fault.cut == "before":
            handler.close_connection = True
            return
        if fault.status is not None:
            _answer(handler, fault.status, [], b"<Error><Code>SlowDown</Code></Error>")
            return
        status, headers, data = self._ask(handler, body)
        _strike(fault, "after")
        if fault.cut == "after":
            handler.close_connection = True
            return
        if fault.flip and data:
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        if fault.lose_bytes:
            data = data[: -fault.lose_bytes]
        with contextlib.suppress(OSError):
            _answer(handler, status, headers, data)

    def _body(self, handler: BaseHTTPRequestHandler) -> bytes:
        length = int(handler.headers.get("Content-Length") or 0)
        return handler.rfile.read(length) if length else b""

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self._upstream.hostname or "", self._upstream.port, timeout=60)
        try:
            skipped = {"connection", "transfer-encoding", "content-length"}
            headers = {name: value for name, value in handler.headers.items() if name.lower() not in skipped}
            upstream.request(handler.command, handler.path, body or None, headers)
            answer = upstream.getresponse()
            data = answer.read()
            length = answer.headers.get("Content-Length")
            kept = [one for one in answer.headers.items() if one[0].lower() not in skipped]
            if handler.command == "HEAD" and length is not None:
                kept.append(("Content-Length", length))
            return answer.status, kept, data
        finally:
            upstream.close()


def _strike(fault: Fault, when: str) -> None:
    if fault.kill == when:
        os.kill(fault.pid, signal.SIGKILL)


def _answer(handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
    handler.send_response(status)
    for name, value in headers:
        if name.lower() not in {"server", "date"}:
            handler.send_header(name, value)
    if handler.command != "HEAD":
        handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)


@contextlib.contextmanager
def proxy_of(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
