"""What a caller says about a mirror, and what may be told of it: nothing that may be a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from safeckpt.remote.urls import is_url, shown_url
from safeckpt.system.arguments import checked_bool, checked_choice, checked_int, checked_number

__all__ = ["Mirror", "Waiting", "scrubbed"]

Waiting = Literal["close", "save", "never"]

_IN_TEXT = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]+://)([^\s\"'<>,)]+)")
_FIELDS = re.compile(  # what an answer of a store may quote of a request
    r"(?i)\b(authorization|x-amz-[a-z-]+|signature|sig|token|secret[a-z_-]*|awsaccesskeyid|stringtosign[a-z]*|"
    r"signatureprovided|canonicalrequest[a-z]*|credential)\b(\W{1,4})[^\s<>,;&\"']+"
)
_ELAPSED = re.compile(r" in [0-9.]+[nµm]?s\b")  # it makes every failure of a request another one
_MOST_TEXT = 400


def scrubbed(text: str, secrets: Mapping[str, Any] | None = None) -> str:
    """Return one line of a text from elsewhere, without what may be a secret in it, and how long a request took.

    Args:
        text: What a library or a server says.
        secrets: Options of the store: their values are taken out as well.
    """
    text = text.partition("Debug source")[0]  # a second, longer form of the same
    text = _ELAPSED.sub("", _IN_TEXT.sub(lambda match: shown_url(match[0]), text))
    text = _FIELDS.sub(r"\1\2***", text)
    for value in (secrets or {}).values():
        if isinstance(value, str) and len(value) >= 6 and not is_url(value):
            text = text.replace(value, "***")
    return " ".join(text.split())[:_MOST_TEXT]


@dataclass(frozen=True)
class Mirror:
    """Where checkpoints are copied to, and who waits for that.

    Attributes:
        url: A prefix in an object store that belongs to this run alone: `s3://bucket/runs/x`, `gs://...`, `az://...`,
            `file:///...`; any scheme that fsspec knows with `lock=False`. Credentials do not belong into it: they come
            from the environment, the machine, or `options`.
        wait: Who waits until a checkpoint is in the store: `"close"`, for the last one, up to `timeout_seconds`;
            `"save"`, each save; `"never"`.
        lock: Whether two writers are kept apart. That needs a store which honours "create only if absent"; whether it
            does is tried. False: you make sure that only one job writes.
        take_over: Take the prefix though another directory has written to it last. For one restart, after making sure
            that the other job is gone: a job that is still running ends with a `MirrorTakenError`.
        max_lag_steps: How far the store may be behind the last save; then the next save is a `MirrorBehindError`. None:
            as far as it gets.
        timeout_seconds: The longest wait of `close`, and with `wait="save"` of a save.
        stop_seconds: The longest wait of `close` after a stop signal or an error.
        options: Settings of the store by obstore's names, such as `{"endpoint": "https://...", "region": "auto"}`.
        client_options: Settings of its HTTP client, such as `{"proxy_url": "http://...", "timeout": "60s"}`.

    Raises:
        TypeError: A value is of a kind that is not accepted.
        ValueError: A value is out of range, or the URL has user, password or query.
    """

    url: str
    wait: Waiting = "close"
    lock: bool = True
    take_over: bool = False
    max_lag_steps: int | None = None
    timeout_seconds: float = 600.0
    stop_seconds: float = 25.0
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    client_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_url(self.url))
        checked_choice("Mirror: wait", self.wait, get_args(Waiting))
        checked_bool("Mirror: lock", self.lock)
        checked_bool("Mirror: take_over", self.take_over)
        if self.max_lag_steps is not None:
            checked_int("Mirror: max_lag_steps", self.max_lag_steps, least=1)
        checked_number("Mirror: timeout_seconds", self.timeout_seconds, positive=True)
        checked_number("Mirror: stop_seconds", self.stop_seconds)
        for name in ("options", "client_options"):
            if not isinstance(getattr(self, name), Mapping):
                raise TypeError(
                    f"Mirror: {name} must be a mapping from name to value"
                )  # not its value: it may be a key


def _checked_url(url: Any) -> str:
    if not is_url(url):
        shown = repr(url) if not isinstance(url, str) or "@" not in url else "another text"
        raise ValueError(f"Mirror: url must be of the form s3://bucket/runs/x; got {shown}")
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"Mirror: {shown_url(url)} was given with a user, a password, a token or a fragment, and a URL is logged "
            "and shown in many places. Put credentials into the environment (AWS_ACCESS_KEY_ID, "
            "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_SAS_KEY, ...) or into Mirror(options=...)"
        )
    return str(url).rstrip("/") if parts.scheme != "file" or parts.path != "/" else url
