"""What obstore asks of Google Cloud Storage, over HTTP: no emulator that can be installed speaks this interface, XML.

It does what Google documents for those requests: generations as a condition, uploads in parts that appear as a whole,
404 for a deletion of nothing. What Google does beyond is not shown by it.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_STAMP = "2026-12-01T00:00:00.000Z"
_MODIFIED = "Tue, 01 Dec 2026 00:00:00 GMT"


class _Object(NamedTuple):
    data: bytes
    generation: int

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, _Object]] = {}
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}
    numbers: ClassVar[Any] = itertools.count(1)
    mutex = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.mutex:
            status, headers, data = getattr(self, f"_{self.command.lower()}")(key, query, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", headers.get("x-goog-stored-content-length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - their names there

    def _put(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in query:
            if query["uploadId"] not in self.uploads:
                return _error(404, "NoSuchUpload")
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return 200, {"ETag": _Object(body, 0).etag}, b""
        wanted = self.headers.get("x-goog-if-generation-match")
        there = self.objects.get(key)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            return _error(412, "PreconditionFailed")
        return 200, self._stored(key, body), b""

    def _stored(self, key: str, data: bytes) -> dict[str, str]:
        one = self.objects[key] = _Object(data, next(self.numbers))
        return {"ETag": one.etag, "x-goog-generation": str(one.generation)}

    def _post(self, key: str, query: dict[str, str], _: bytes) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            name = f"upload-{next(self.numbers)}"
            self.uploads[name] = {}
            return 200, {}, _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        if (pieces := self.uploads.pop(query["uploadId"], None)) is None:
            return _error(404, "NoSuchUpload")
        headers = self._stored(key, b"".join(pieces[number] for number in sorted(pieces)))
        return 200, headers, _xml("CompleteMultipartUploadResult", f"<ETag>{escape(headers['ETag'])}</ETag>")

    def _get(self, key: str, query: dict[str, str], _: bytes) -> tuple[int, dict[str, str], bytes]:
        if not key:
            return 200, {}, self._listing(query.get("prefix", ""), query.get("delimiter", ""))
        if (one := self.objects.get(key)) is None:
            return _error(404, "NoSuchKey")
        headers = {"ETag": one.etag, "x-goog-generation": str(one.generation), "Last-Modified": _MODIFIED}
        if self.command == "HEAD":
            return 200, {**headers, "x-goog-stored-content-length": str(len(one.data))}, b""
        if (asked := self.headers.get("Range")) is None:
            return 200, headers, one.data
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(one.data) - 1), len(one.data) - 1)
        if start >= len(one.data):
            return _error(416, "InvalidRange")
        return 206, {**headers, "Content-Range": f"bytes {start}-{end}/{len(one.data)}"}, one.data[start : end + 1]

    _head = _get

    def _listing(self, prefix: str, delimiter: str) -> bytes:
        rows, folders = [], set()
        for key, one in sorted(self.objects.items()):
            rest = key.removeprefix(prefix) if key.startswith(prefix) else None
            if rest is None:
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Generation>{one.generation}</Generation><LastModified>{_STAMP}"
                f"</LastModified><ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
            )
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)]
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{''.join(rows)}")

    def _delete(self, key: str, query: dict[str, str], _: bytes) -> tuple[int, dict[str, str], bytes]:
        gone = self.uploads.pop(query["uploadId"], None) if "uploadId" in query else self.objects.pop(key, None)
        return (204, {}, b"") if gone is not None else _error(404, "NoSuchKey")


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inside}</{name}>'.encode()


def _error(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {}, _xml("Error", f"<Code>{code}</Code>")


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
