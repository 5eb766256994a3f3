"""What a store's library says without credentials is said in words."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import safeckpt
from safeckpt.remote.client import open_client

# As obstore says it, where nothing else gives credentials.
SAID = {
    "s3://bucket/run": (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3.5s, after 3 retries, "
        "max_retries: 3, retry_timeout: 60s - HTTP error: error sending request"
    ),
    "gs://bucket/run": (
        "Generic GCS error: Error performing token request: Error performing GET http://metadata.google.internal/"
        "computeMetadata/v1/instance/service-accounts/default/token"
    ),
}


class StoreError(Exception):
    """What obstore raises."""


@pytest.mark.parametrize(
    ("url", "said", "words"),
    [
        (
            "s3://bucket/run",
            SAID["s3://bucket/run"],
            r"no credentials were found: .*AWS_ACCESS_KEY_ID .*169\.254\.169\.254",
        ),
        ("gs://bucket/run", SAID["gs://bucket/run"], "no credentials were found: .*GOOGLE_APPLICATION_CREDENTIALS"),
        ("s3://bucket/run", "Client error with status 403 Forbidden: AccessDenied", "403 Forbidden: AccessDenied"),
    ],
)
def test_missing_credentials_are_called_that(url: str, said: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a machine's role stands for them; every other answer comes out as it is."""

    def refuse(*_: Any) -> Any:
        raise StoreError(said)

    store = SimpleNamespace(from_url=lambda *_, **__: None)
    exceptions = SimpleNamespace(BaseError=StoreError, AlreadyExistsError=FileExistsError)
    obstore = ModuleType("obstore")
    vars(obstore).update(store=store, exceptions=exceptions, list_with_delimiter=refuse)
    monkeypatch.setitem(sys.modules, "obstore", obstore)
    monkeypatch.setitem(sys.modules, "obstore.store", store)  # type: ignore[arg-type]
    with pytest.raises(safeckpt.MirrorUnreachableError, match=words) as caught:
        open_client(safeckpt.Mirror(url)).top()
    text = str(caught.value)
    assert ("Error performing" in text) is ("Error performing" in words)
    assert "Still safe: every checkpoint on this machine." in text
    assert "`safeckpt doctor URL`" in text
