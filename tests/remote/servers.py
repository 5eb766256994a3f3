"""Servers of object stores on the loopback address, each a process of its own; what is not installed is skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from safeckpt import Mirror

KEYS = {"access_key_id": "test", "secret_access_key": "test-secret-key", "region": "us-east-1"}
_MOST_SECONDS = 60


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        endpoint: Where it listens.
        bucket: URL of a bucket in it.
        options: What obstore has to know.
    """

    endpoint: str
    bucket: str
    options: dict[str, Any]

    def mirror(self, run: str, **more: Any) -> Mirror:
        return Mirror(
            f"{self.bucket}/{run}", options=self.options, client_options={"allow_http": True, "timeout": "10s"}, **more
        )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def process(command: Sequence[str], endpoint: str, log: Path, **environment: str) -> Iterator[None]:
    """Run a server until the block ends."""
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment}) as server,
    ):
        try:
            end = time.monotonic() + _MOST_SECONDS
            while not _answers(endpoint):
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < end, "the server does not start"
                time.sleep(0.05)
            yield
        finally:
            server.kill()


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def need(*modules: str) -> None:
    """Skip what calls this when a package is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def _request(method: str, url: str, data: bytes = b"", **headers: str) -> None:
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=10).close()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """S3 in memory, which honours conditions."""
    need("obstore", "moto.server", "flask")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    code = f"from moto.server import main; main(['-p', '{port}', '-H', '127.0.0.1'])"
    with process([sys.executable, "-c", code], endpoint, folder / "moto.log"):
        _request("PUT", f"{endpoint}/bucket")
        yield Server(endpoint, "s3://bucket", {**KEYS, "endpoint": endpoint})


@contextlib.contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """S3 over a directory, which ignores conditions."""
    need("obstore")
    program = shutil.which("rclone") or shutil.which("rclone", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("rclone is not installed")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    (folder / "files" / "bucket").mkdir(parents=True)
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,test-secret-key"]
    with process([*command, str(folder / "files")], endpoint, folder / "rclone.log"):
        yield Server(endpoint, "s3://bucket", {**KEYS, "endpoint": endpoint})


@contextlib.contextmanager
def gcs(folder: Path) -> Iterator[Server]:
    """Google Cloud Storage as far as obstore asks for it."""
    need("obstore")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    code = Path(__file__).with_name("gcs_server.py")
    with process([sys.executable, str(code), str(port)], endpoint, folder / "gcs.log"):
        account = {"gcs_base_url": endpoint, "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        yield Server(endpoint, "gs://bucket", {"service_account_key": json.dumps(account)})


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Server]:
    """Azure blobs."""
    need("obstore")
    program = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is neither installed nor named by AZURITE_BLOB")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    command = [program, *where, "--inMemoryPersistence", "--skipApiVersionCheck"]
    with process(command, endpoint, folder / "azurite.log"):
        options = {
            "account_name": "devstoreaccount1",
            "account_key": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
            "endpoint": f"{endpoint}/devstoreaccount1",
        }
        _create_container(options, endpoint)
        yield Server(endpoint, "az://bucket", options)


def _create_container(options: dict[str, str], endpoint: str) -> None:
    import base64
    import datetime as dt
    import hashlib
    import hmac

    now = dt.datetime.now(dt.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    name = options["account_name"]
    headers = f"x-ms-date:{now}\nx-ms-version:2021-08-06"
    resource = f"/{name}/{name}/bucket\nrestype:container"
    text = "\n".join(["PUT", *[""] * 4, "text/plain", *[""] * 6, headers, resource])
    key = base64.b64decode(options["account_key"])
    sign = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
    _request(
        "PUT",
        f"{endpoint}/{name}/bucket?restype=container",
        **{
            "Content-Type": "text/plain",
            "x-ms-date": now,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {name}:{sign}",
        },
    )
