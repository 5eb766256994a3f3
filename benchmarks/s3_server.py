"""A small S3 server in memory, as fast as Python allows: an emulator would be the limit of what is measured.

As a *sink* it speaks TLS, as stores do, throws the bytes of large objects away, and takes them no faster than it is
told, as a network does: what this machine has to do then is mostly what the writer does.
"""

from __future__ import annotations

import datetime as dt
import itertools
import mmap
import multiprocessing
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_SMALL_BYTES = 1 << 20  # kept by a sink as well
_PIECE_BYTES = 1 << 20


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    wbufsize = 1 << 20
    objects: dict[str, bytes | mmap.mmap] = {}  # noqa: RUF012 - one store for all connections
    uploads: dict[str, dict[int, bytes | mmap.mmap]] = {}  # noqa: RUF012
    sink: _Sink | None = None
    numbers = itertools.count()
    mutex = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes | mmap.mmap:
        length = int(self.headers.get("Content-Length") or 0)
        if self.sink is None or length < _SMALL_BYTES:
            return self.rfile.read(length)
        read = len(self.rfile.read(min(len(self.rfile.peek()), length)))  # type: ignore[attr-defined]  # buffered
        self.sink.swallow(self.connection, length - read)
        return mmap.mmap(-1, length)  # zeros, which take no memory

    def _send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", headers.get("_length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _parts(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).lstrip("/").partition("/")[2], parse_qs(parts.query, keep_blank_values=True)

    def do_PUT(self) -> None:
        key, query = self._parts()
        data = self._body()
        if "uploadId" in query:
            self.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
        else:
            with self.mutex:
                if self.headers.get("If-None-Match") and key in self.objects:
                    self._send(412)
                    return
                self.objects[key] = data
        self._send(200, ETag='"0"')

    def do_POST(self) -> None:
        key, query = self._parts()
        body = self._body()
        if "delete" in query:
            rows = ""
            for found in re.findall(rb"<Key>([^<]*)</Key>", body):
                self.objects.pop(unescape(found.decode()), None)
                rows += f"<Deleted><Key>{found.decode()}</Key></Deleted>"
            self._send(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
            return
        if "uploads" in query:
            name = f"u{next(self.numbers)}"
            self.uploads[name] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        else:
            parts = self.uploads.pop(query["uploadId"][0])
            if self.sink is None:
                self.objects[key] = b"".join(parts[number] for number in sorted(parts))
            else:
                self.objects[key] = mmap.mmap(-1, sum(map(len, parts.values())))
            text = "<CompleteMultipartUploadResult><ETag>0</ETag></CompleteMultipartUploadResult>"
        self._send(200, text.encode())

    def do_GET(self) -> None:
        key, query = self._parts()
        if "list-type" in query:
            self._list(query)
            return
        data = self.objects.get(key)
        if data is None:
            self._send(404)
            return
        stamp = {"Last_Modified": "Tue, 01 Dec 2026 00:00:00 GMT", "ETag": '"0"'}
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, bytes(data) if self.command == "GET" else b"", **stamp)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        where = f"bytes {start}-{end}/{len(data)}"
        self._send(206, memoryview(data)[start : end + 1], Content_Range=where, **stamp)  # type: ignore[arg-type]

    do_HEAD = do_GET  # noqa: N815 - its name there

    def do_DELETE(self) -> None:
        key, query = self._parts()
        self.uploads.pop(query.get("uploadId", [""])[0], None)
        if "uploadId" not in query:
            self.objects.pop(key, None)
        self._send(204)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        rows, common = [], set()
        for key in sorted(self.objects):
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                common.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-12-01T00:00:00.000Z</LastModified>"
                f'<ETag>"0"</ETag><Size>{len(self.objects[key])}</Size></Contents>'
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(common)]
        self._send(
            200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>".encode()
        )


class _Sink:
    """Takes bytes and forgets them, all connections together no faster than at a rate."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._mutex = threading.Lock()
        self._free_at = 0.0
        self._target = bytearray(_PIECE_BYTES)  # of all connections: nobody reads it

    def swallow(self, connection: socket.socket, length: int) -> None:
        """Take so many bytes from a connection."""
        while length:
            taken = connection.recv_into(self._target, min(length, _PIECE_BYTES))
            if not taken:
                raise ConnectionError("the writer is gone")
            length -= taken
            with self._mutex:
                self._free_at = max(self._free_at, time.monotonic() - _PIECE_BYTES / self._rate) + taken / self._rate
                wait = self._free_at - time.monotonic()
            if wait > 0:
                time.sleep(wait)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the thread of the connection."""
        super().finish_request(self.tls.wrap_socket(request, server_side=True) if self.tls else request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that do not trust the certificate."""


def _tls() -> ssl.SSLContext:
    """Return a context with a certificate that nobody else trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encoding = serialization.Encoding.PEM
    with tempfile.NamedTemporaryFile() as file:
        file.write(certificate.public_bytes(encoding))
        file.write(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _serve(connection: Connection, bytes_per_second: float | None) -> None:
    server = _Server(("127.0.0.1", 0), _Handler)
    if bytes_per_second is not None:
        _Handler.sink = _Sink(bytes_per_second)
        server.tls = _tls()
    connection.send(server.server_address[1])
    server.serve_forever()


class Server(NamedTuple):
    """A server that runs.

    Attributes:
        options: What obstore has to know of it.
        client_options: The same of its HTTP client.
    """

    options: dict[str, str]
    client_options: dict[str, Any]


@contextmanager
def running(*, sink_bytes_per_second: float | None = None) -> Iterator[Server]:
    """Run a server.

    Args:
        sink_bytes_per_second: Be a sink, and take bytes no faster; None keeps everything, without TLS.
    """
    is_sink = sink_bytes_per_second is not None
    here, there = multiprocessing.Pipe()
    arguments = (there, sink_bytes_per_second)
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        options = {
            "endpoint": f"https://localhost:{here.recv()}" if is_sink else f"http://127.0.0.1:{here.recv()}",
            "access_key_id": "bench",
            "secret_access_key": "bench-secret",
            "region": "us-east-1",
        }
        yield Server(options, {"allow_invalid_certificates": True} if is_sink else {"allow_http": True})
    finally:
        process.kill()
        process.join()
