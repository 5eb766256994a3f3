"""How a place in a store is told from a path, how it is shown, and as what path it is handed to callers."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

__all__ = ["RemotePath", "is_url", "shown_url"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: object) -> bool:
    """Return whether a text names something in a store, as `s3://bucket/runs/x` does, and no path.

    Example:
        >>> is_url("s3://bucket/runs/x"), is_url("runs/x"), is_url("C:/runs")
        (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


def shown_url(url: str) -> str:
    """Return a URL as it may be shown: without user, password, query and fragment.

    Example:
        >>> shown_url("az://box/runs?sig=abc")
        'az://box/runs'
    """
    scheme, _, rest = url.partition("://")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    place, slash, path = rest.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}".rstrip("/")


class RemotePath(PurePosixPath):
    """The place of an object in a store, as a path: its text is the URL, and the file system knows nothing of it.

    Example:
        >>> str(RemotePath("s3://bucket/runs/x")), RemotePath("s3://bucket/runs/x").name
        ('s3://bucket/runs/x', 'x')
    """

    __slots__ = ()

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}" if colon else scheme

    def __fspath__(self) -> str:
        return str(self)
