"""The seam between a mirror and an object store: every request, one method each.

Nothing here knows of epochs or checkpoints. Whatever the store or its library says goes through `scrubbed` before
anybody sees it: requests carry signatures, and answers quote requests.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from safeckpt.errors import MirrorUnreachableError, SafeckptError
from safeckpt.remote.options import Mirror, scrubbed
from safeckpt.remote.urls import shown_url

__all__ = ["PART_BYTES", "Client", "Stored", "open_client"]

T = TypeVar("T")

PART_BYTES = 8 << 20  # at a time; four of them are under way
_PARALLEL = 4
_MOST_PARTS = 9_000  # S3 takes 10,000
_MISSING = (
    'mirror= and URLs need the package {package}: pip install "safeckpt[cloud]"{more}. '
    "Checkpoints in a directory need neither."
)
_S3 = ("s3://", "s3a://")
_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file")


class Stored(NamedTuple):
    """An object as a listing shows it."""

    key: str
    size_bytes: int


class Client(Protocol):
    """What a mirror asks of a store. Keys are relative to the mirror's URL.

    Every method raises `MirrorUnreachableError` for what the store or the way to it refuses, and `FileNotFoundError`
    for an object that is not there.

    Attributes:
        url: The mirror's URL, as it may be shown.
        is_conditional: Whether `create` can refuse an object that is there.
    """

    url: str
    is_conditional: bool

    def listing(self, prefix: str = "") -> list[Stored]:
        """Return every object below a prefix that ends with a slash, or all."""

    def top(self) -> list[str]:
        """Return the names at the top, of objects and of what stands before a slash."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """Return an object or a part of it; less, where the store has less."""

    def size(self, key: str) -> int:
        """Return the size of an object."""

    def create(self, key: str, data: bytes) -> bool:
        """Create an object and return True; False, and nothing has changed, where there is one."""

    def put(self, key: str, data: bytes | Iterator[memoryview], size_bytes: int | None = None) -> None:
        """Write an object: all of it appears at once, or nothing. What the iterator raises is raised."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in this order; one that is gone is none."""

    def abort_stale(self, prefix: str) -> int:
        """Abort the unfinished uploads below a prefix, where they cost money, and return how many."""


def open_client(mirror: Mirror) -> Client:
    """Return the client of a mirror. No request is made.

    Raises:
        ImportError: A package is missing; the text says how to install it.
        ValueError: An option is unknown, or the scheme has no lock and `lock=False` was not said.
    """
    scheme = mirror.url.partition("://")[0].lower()
    if scheme in _SCHEMES:
        return _ObstoreClient(mirror)
    if mirror.lock:
        raise ValueError(
            f"{shown_url(mirror.url)}: two writers cannot be kept apart in a {scheme}:// store. Pass "
            "Mirror(url, lock=False) if you make sure that only one job writes"
        )
    return _FsspecClient(mirror)


# Where a machine in a cloud is told its role. It is asked last: after the options and the environment.
_ROLE_HOSTS = ("169.254.169.254", "metadata.google.internal")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def _reason_of(error: BaseException, mirror: Mirror) -> str:
    """Return what a store's library says, without anything secret, and in words where that says nothing."""
    text = scrubbed(str(error), mirror.options) or type(error).__name__
    if "builder error" in text:  # all that its HTTP client says of an address that it does not take
        return f'{text}. A plain http:// endpoint needs AWS_ALLOW_HTTP=true, or client_options={{"allow_http": True}}'
    host = next((one for one in _ROLE_HOSTS if one in text), None)
    if host is None:
        return text
    names = _CREDENTIALS.get(mirror.url[:2].lower(), "those of this store")
    return (
        f"no credentials were found: not in the environment ({names}), not in Mirror(options=...), and {host} gave "
        "this machine no role"
    )


class _ObstoreClient:
    """S3, GCS, Azure and what speaks their languages, by obstore."""

    is_conditional = True

    def __init__(self, mirror: Mirror) -> None:
        try:
            import obstore  # noqa: PLC0415 - an extra
            import obstore.store  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ImportError(_MISSING.format(package="obstore", more="")) from error
        self.url = shown_url(mirror.url)
        self._obstore: Any = obstore
        self._mirror = mirror
        more: dict[str, Any] = {"mkdir": True}
        if not mirror.url.startswith("file:"):
            client_options = {
                "timeout": "60s",
                "connect_timeout": "10s",
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1"),  # not read by obstore
                **mirror.client_options,
            }
            more = {
                "config": _store_options(mirror, uses_tls=not client_options["allow_http"]) or None,
                "client_options": client_options,
                "retry_config": {
                    "max_retries": 3,
                    "retry_timeout": dt.timedelta(seconds=60),
                    "backoff": {"init_backoff": dt.timedelta(seconds=0.2), "max_backoff": dt.timedelta(seconds=5)},
                },
            }
        text = ""
        try:
            self._store: Any = obstore.store.from_url(mirror.url, **more)
        except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
            text = scrubbed(str(error), mirror.options)
        if text:  # outside of the block: the error that says it is not kept
            raise ValueError(f"{self.url}: the store cannot be used with these options: {text}")

    def _ask(self, what: str, request: Callable[[], T]) -> T:
        """Make a request, and say in our words what went wrong."""
        failure: BaseException
        try:
            return request()
        except FileNotFoundError:
            failure = FileNotFoundError(errno.ENOENT, "No such object", f"{self.url}/{what.partition(' ')[2]}")
        except (self._obstore.exceptions.AlreadyExistsError, SafeckptError):
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of a local file that is being uploaded
            failure = MirrorUnreachableError(url=self.url, what=what, reason=_reason_of(error, self._mirror))
        raise failure

    def listing(self, prefix: str = "") -> list[Stored]:
        """See `Client`."""
        pages = self._ask(
            f"listing {prefix}", lambda: [*self._obstore.list(self._store, prefix or None, chunk_size=1000)]
        )
        return [Stored(str(one["path"]), int(one["size"])) for page in pages for one in page]

    def top(self) -> list[str]:
        """See `Client`."""
        found = self._ask("listing", lambda: self._obstore.list_with_delimiter(self._store))
        return [*map(str, found["common_prefixes"]), *(str(one["path"]) for one in found["objects"])]

    def read(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """See `Client`."""
        if length is None:
            return memoryview(self._ask(f"reading {key}", lambda: self._obstore.get(self._store, key).bytes()))
        end = start + length
        return memoryview(
            self._ask(f"reading {key}", lambda: self._obstore.get_range(self._store, key, start=start, end=end))
        )

    def size(self, key: str) -> int:
        """See `Client`."""
        return int(self._ask(f"looking at {key}", lambda: self._obstore.head(self._store, key))["size"])

    def create(self, key: str, data: bytes) -> bool:
        """See `Client`."""
        try:
            self._ask(f"creating {key}", lambda: self._obstore.put(self._store, key, data, mode="create"))
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def put(self, key: str, data: bytes | Iterator[memoryview], size_bytes: int | None = None) -> None:
        """See `Client`."""
        if isinstance(data, bytes):
            self._ask(f"writing {key}", lambda: self._obstore.put(self._store, key, data, use_multipart=False))
            return
        part = max(PART_BYTES, (size_bytes or 0) // _MOST_PARTS + 1)
        self._ask(
            f"writing {key}",
            lambda: self._obstore.put(
                self._store, key, data, use_multipart=True, chunk_size=part, max_concurrency=_PARALLEL
            ),
        )

    def delete(self, keys: Sequence[str]) -> None:
        """See `Client`."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._ask(f"deleting {key}", lambda key=key: self._obstore.delete(self._store, key))  # type: ignore[misc]

    def abort_stale(self, prefix: str) -> int:
        """See `Client`: only S3 keeps and bills them for good, and only boto3 can name them."""
        bucket, _, path = self._mirror.url.partition("://")[2].partition("/")
        if not self._mirror.url.startswith(_S3):
            return 0
        try:
            import boto3  # noqa: PLC0415 - an extra of an extra
            from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415
        except ModuleNotFoundError:
            return 0
        try:
            s3 = boto3.client("s3", **_boto_options(self._mirror.options))
            found = s3.list_multipart_uploads(Bucket=bucket, Prefix=f"{path}/{prefix}".lstrip("/")).get("Uploads", [])
            for upload in found:
                s3.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except (BotoCoreError, ClientError, ValueError):
            return 0  # what they cost is little, and the next one that takes over tries again
        return len(found)


def _store_options(mirror: Mirror, *, uses_tls: bool) -> dict[str, Any]:
    """Return the options of a store, with payloads that S3's signature leaves out where TLS goes to Amazon's own S3.

    Their SHA-256 is as much work as all the rest of an upload, and says what TLS says there. Before another store, TLS
    may end at a proxy, and what comes after that would be checked by nobody before it counts as durable.
    """
    options = dict(mirror.options)
    given = {name.lower().removeprefix("aws_") for name in (*options, *os.environ)}
    is_of_amazon = mirror.url.startswith(_S3) and not given & {"endpoint", "endpoint_url", "endpoint_url_s3"}
    if uses_tls and is_of_amazon and "unsigned_payload" not in given:
        options["unsigned_payload"] = "true"
    return options


def _boto_options(options: Any) -> dict[str, Any]:
    names = {
        "endpoint_url": ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url"),
        "aws_access_key_id": ("access_key_id", "aws_access_key_id"),
        "aws_secret_access_key": ("secret_access_key", "aws_secret_access_key"),
        "aws_session_token": ("session_token", "token", "aws_session_token"),
        "region_name": ("region", "aws_region", "default_region"),
    }
    found = {theirs: next((options[one] for one in ours if one in options), None) for theirs, ours in names.items()}
    return {name: value for name, value in found.items() if value is not None}


class _FsspecClient:
    """Any scheme that fsspec knows, without conditions."""

    is_conditional = False

    def __init__(self, mirror: Mirror) -> None:
        try:
            import fsspec  # noqa: PLC0415 - an extra
        except ModuleNotFoundError as error:
            more = " fsspec, and the package for the scheme"
            raise ImportError(_MISSING.format(package="fsspec", more=more)) from error
        self.url = shown_url(mirror.url)
        self._mirror = mirror
        text = ""
        try:
            self._fs, self._root = fsspec.core.url_to_fs(mirror.url, **mirror.options)
        except ImportError as error:
            raise ImportError(scrubbed(str(error), mirror.options)) from None
        except (ValueError, TypeError) as error:
            text = scrubbed(str(error), mirror.options)
        if text:
            raise ValueError(f"{self.url}: the store cannot be used with these options: {text}")

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}".rstrip("/")

    def _ask(self, what: str, request: Callable[[], T]) -> T:
        failure: BaseException
        try:
            return request()
        except FileNotFoundError:
            failure = FileNotFoundError(errno.ENOENT, "No such object", f"{self.url}/{what.partition(' ')[2]}")
        except SafeckptError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            failure = MirrorUnreachableError(
                url=self.url, what=what, reason=scrubbed(f"{type(error).__name__}: {error}", self._mirror.options)
            )
        raise failure

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root.rstrip("/")).lstrip("/")

    def listing(self, prefix: str = "") -> list[Stored]:
        """See `Client`."""
        self._fs.invalidate_cache()
        try:
            found = self._ask(f"listing {prefix}", lambda: self._fs.find(self._path(prefix), detail=True))
        except FileNotFoundError:
            return []
        return [Stored(self._relative(path), int(one["size"])) for path, one in found.items()]

    def top(self) -> list[str]:
        """See `Client`."""
        self._fs.invalidate_cache()
        try:
            found = self._ask("listing", lambda: self._fs.ls(self._path(""), detail=False))
        except FileNotFoundError:
            return []
        return [self._relative(path) for path in found]

    def read(self, key: str, start: int = 0, length: int | None = None) -> memoryview:
        """See `Client`."""
        end = None if length is None else start + length
        return memoryview(self._ask(f"reading {key}", lambda: self._fs.cat_file(self._path(key), start=start, end=end)))

    def size(self, key: str) -> int:
        """See `Client`."""
        return int(self._ask(f"looking at {key}", lambda: self._fs.size(self._path(key))))

    def create(self, key: str, data: bytes) -> bool:
        """See `Client`: there is no condition, so that it is never refused."""
        self.put(key, data)
        return True

    def put(self, key: str, data: bytes | Iterator[memoryview], size_bytes: int | None = None) -> None:
        """See `Client`. Where the file system writes in place, a part of an object may be seen: its trailer tells."""
        path = self._path(key)

        def write() -> None:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._fs.open(path, "wb") as file:
                for piece in [data] if isinstance(data, bytes) else data:
                    file.write(piece)

        self._ask(f"writing {key}", write)

    def delete(self, keys: Sequence[str]) -> None:
        """See `Client`."""
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._ask(f"deleting {key}", lambda key=key: self._fs.rm_file(self._path(key)))  # type: ignore[misc]

    def abort_stale(self, prefix: str) -> int:
        """See `Client`: nothing is known of them."""
        return 0
