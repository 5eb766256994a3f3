"""A small S3 server in memory, as fast as Python allows: an emulator would be the limit of what is measured."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement
    wbufsize = 1 << 20
    objects: dict[str, bytes | list[bytes]] = {}  # noqa: RUF012 - one store for all connections
    uploads: dict[str, dict[int, bytes]] = {}  # noqa: RUF012
    numbers = itertools.count()
    mutex = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

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
            self.objects[key] = b"".join(parts[number] for number in sorted(parts))
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


def _serve(connection: Connection, nice: int) -> None:
    os.nice(nice)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    connection.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def running(nice: int = 0) -> Iterator[dict[str, Any]]:
    """Run a server, and yield what obstore has to know of it."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, nice), daemon=True)
    process.start()
    try:
        yield {
            "endpoint": f"http://127.0.0.1:{here.recv()}",
            "access_key_id": "bench",
            "secret_access_key": "bench-secret",
            "region": "us-east-1",
        }
    finally:
        process.kill()
        process.join()
