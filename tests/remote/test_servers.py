"""The same with real servers on the loopback address, and a proxy in front that fails."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import safeckpt
from safeckpt import Mirror
from safeckpt.remote import open_client
from tests import children
from tests.manager.helpers import manager_of, steps_in
from tests.remote import servers
from tests.remote.proxy import Fault, Proxy, Request, proxy_of
from tests.training import Marked, Run

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["moto", "gcs", "azurite"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Each store that honours conditions."""
    with getattr(servers, request.param)(tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.moto(tmp_path_factory.mktemp("s3")) as one:
        yield one


@pytest.fixture
def proxy(s3: servers.Server) -> Iterator[Proxy]:
    with proxy_of(s3.endpoint) as one:
        yield one


def behind(proxy: Proxy, s3: servers.Server) -> servers.Server:
    return dataclasses.replace(s3, endpoint=proxy.endpoint, options={**s3.options, "endpoint": proxy.endpoint})


def new_run() -> str:
    return f"runs/{next(_numbers)}"


class Large:
    """A run whose checkpoint goes up in several parts."""

    def __init__(self, megabytes: int = 20) -> None:
        self.model = torch.nn.Module()
        self.model.register_buffer("noise", torch.zeros(megabytes << 18))
        self.components = {"model": self.model}

    def fill(self, seed: int) -> None:
        self.model.noise.copy_(torch.randn(self.model.noise.shape, generator=torch.Generator().manual_seed(seed)))


def test_run_survives_its_machine(server: servers.Server, tmp_path: Path) -> None:
    """Saved here, restored on an empty disk, taken over, restored again: the state is the same bit for bit."""
    run = new_run()
    first = Run()
    with manager_of(tmp_path / "a", first, mirror=server.mirror(run), keep_last=2) as manager:
        for step in (1, 2, 3):
            first.step()
            manager.save(step)
        assert manager.mirror is not None
        manager.mirror.wait(60)
        expected = first.steps(3)
    second = Run(seed=9)
    with manager_of(tmp_path / "b", second, mirror=server.mirror(run), keep_last=2) as manager:
        found = manager.restore()
        assert found is not None
        assert found.step == 3
        assert second.steps(3) == expected
        manager.save(6)
    third = Run(seed=8)
    with manager_of(tmp_path / "c", third, mirror=server.mirror(run), save_on_exit=False) as manager:
        found = manager.restore()
        assert found is not None
        assert found.step == 6
    with manager_of(tmp_path / "a", first, mirror=server.mirror(run), save_on_exit=False) as manager:
        manager.restore()
        first.step()
        with pytest.raises(safeckpt.MirrorTakenError):
            manager.save(9)


def test_client_does_what_its_methods_say(server: servers.Server) -> None:
    """Create only if absent, whole objects, ranges, listings, deletions, and one error for what is not there."""
    client = open_client(server.mirror(new_run()))
    assert client.create("a.json", b"first")
    assert not client.create("a.json", b"second")
    assert bytes(client.read("a.json")) == b"first"
    assert bytes(client.read("a.json", 1, 3)) == b"irs"
    assert bytes(client.read("a.json", 0, 1 << 20)) == b"first"
    pieces = [bytes([number]) * (8 << 20) for number in range(3)]
    client.put("epoch/x", iter([*map(memoryview, pieces), memoryview(b"end")]), 3 * (8 << 20) + 3)
    assert bytes(client.read("epoch/x", (8 << 20) - 1, 2)) == b"\x00\x01"
    assert {(one.key, one.size_bytes) for one in client.listing()} == {("a.json", 5), ("epoch/x", (24 << 20) + 3)}
    assert [one.key for one in client.listing("epoch/")] == ["epoch/x"]
    assert sorted(name.rstrip("/") for name in client.top()) == ["a.json", "epoch"]
    client.delete(["a.json", "epoch/x", "never"])
    assert client.listing() == []
    with pytest.raises(FileNotFoundError):
        client.read("a.json")


def test_upload_that_is_broken_off_leaves_no_object(server: servers.Server) -> None:
    """What the source raises in the middle is raised, and nothing is there."""
    client = open_client(server.mirror(new_run()))

    def broken() -> Iterator[memoryview]:
        yield memoryview(bytes(8 << 20))
        yield memoryview(bytes(8 << 20))
        raise safeckpt.DamagedCheckpointError(path="x", reason="it is broken")

    with pytest.raises(safeckpt.DamagedCheckpointError):
        client.put("x", broken(), 24 << 20)
    assert client.listing() == []


def test_store_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    """It is found by trying, and named; with `lock=False` it serves, as far as it can be read."""
    (tmp_path / "server").mkdir()
    with servers.rclone(tmp_path / "server") as server:
        with manager_of(tmp_path / "a", Marked(), mirror=server.mirror("run"), save_on_exit=False) as manager:
            with pytest.raises(safeckpt.MirrorUnsafeError, match="lock=False"):
                manager.save(1)
        assert not [one for one in open_client(server.mirror("run")).listing() if one.key.startswith("epoch")]


# -- a bad day -------------------------------------------------------------------------------------------------------

EVERY_THIRD: dict[str, Fault] = {
    "500": Fault(status=500),
    "503": Fault(status=503),
    "cut before": Fault(cut="before"),
    "cut after": Fault(cut="after"),
    "slow": Fault(slow_seconds=0.3),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in ("503", "cut after"))) for one in EVERY_THIRD]
)
def test_run_goes_on_with_a_store_that_fails_now_and_then(
    name: str, s3: servers.Server, proxy: Proxy, tmp_path: Path
) -> None:
    """Every third request fails: all of it is tried again, what was done twice is found, and the state is the same."""
    run, server = new_run(), behind(proxy, s3)
    proxy.plan = lambda request: EVERY_THIRD[name] if request.number % 3 == 0 else None
    large = Large()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with manager_of(tmp_path / "a", large, mirror=server.mirror(run)) as manager:
            for step in (1, 2):
                large.fill(step)
                manager.save(step)
        fresh = Large()
        with manager_of(tmp_path / "b", fresh, mirror=server.mirror(run), save_on_exit=False) as manager:
            found = manager.restore()
    assert found is not None
    assert found.step == 2
    assert torch.equal(fresh.model.noise, large.model.noise)


IN_A_BODY: dict[str, Fault] = {"flipped": Fault(flip=True), "truncated": Fault(lose_bytes=1000)}


@pytest.mark.parametrize("name", IN_A_BODY)
def test_what_comes_back_wrong_is_passed_over(name: str, s3: servers.Server, proxy: Proxy, tmp_path: Path) -> None:
    """A bit that flips, or a body that is cut with a length to match: found before the file has a name."""
    run, server = new_run(), behind(proxy, s3)
    large = Large(2)
    with manager_of(tmp_path / "a", large, mirror=server.mirror(run, wait="save")) as manager:
        for step in (1, 2):
            large.fill(step)
            manager.save(step)
    seen: list[str] = []

    def plan(request: Request) -> Fault | None:
        if request.method == "GET" and "step-00000002.pt" in request.path:
            seen.append(request.path)
            return IN_A_BODY[name]
        return None

    proxy.plan = plan
    fresh = Large(2)
    with manager_of(tmp_path / "b", fresh, mirror=server.mirror(run), save_on_exit=False) as manager:
        with pytest.warns(safeckpt.SkippedCheckpointWarning, match=r"step-00000002\.pt was passed over"):
            found = manager.restore()
    assert found is not None
    assert found.step == 1
    assert seen
    assert steps_in(tmp_path / "b") == [1]


def test_part_that_is_lost_does_not_become_a_checkpoint(s3: servers.Server, proxy: Proxy, tmp_path: Path) -> None:
    """A store that acknowledges a part and forgets it makes an object that is found at the restore."""
    run, server = new_run(), behind(proxy, s3)
    large = Large(20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with manager_of(tmp_path / "a", large, mirror=server.mirror(run)) as manager:
            assert manager.mirror is not None
            large.fill(1)
            manager.save(1)
            manager.mirror.wait(60)
            proxy.plan = lambda request: Fault(status=200) if "partNumber=2" in request.path else None
            large.fill(2)
            manager.save(2)
            with pytest.raises(safeckpt.MirrorBehindError):
                manager.mirror.wait(3)
            proxy.plan = lambda _: None
            manager.mirror.wait(60)
    fresh = Large(20)
    with manager_of(tmp_path / "b", fresh, mirror=server.mirror(run), save_on_exit=False) as manager:
        found = manager.restore()
    assert found is not None
    assert torch.equal(fresh.model.noise, large.model.noise)


def test_parts_that_a_kill_left_are_removed_at_the_take_over(s3: servers.Server, tmp_path: Path) -> None:
    """An unfinished upload of an earlier writer costs money until somebody aborts it; one elsewhere is left alone."""
    servers.need("boto3")
    import boto3

    run = new_run()
    client = boto3.client(
        "s3", endpoint_url=s3.endpoint, region_name="us-east-1", aws_access_key_id="test",
        aws_secret_access_key=servers.KEYS["secret_access_key"],
    )  # fmt: skip
    for key in (f"{run}/epoch-00000001/step-00000001.pt", "elsewhere/step-00000001.pt"):
        upload = client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
        client.upload_part(Bucket="bucket", Key=key, UploadId=upload, PartNumber=1, Body=bytes(5 << 20))
    with manager_of(tmp_path, Marked(), mirror=s3.mirror(run)) as manager:
        manager.save(1)
    unfinished = [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])]
    left = [key for key in unfinished if key.startswith((f"{run}/", "elsewhere/"))]  # other tests leave some, too
    assert left == ["elsewhere/step-00000001.pt"]


def test_other_scheme_is_served_by_fsspec_without_a_lock(tmp_path: Path) -> None:
    """A store that obstore does not know: told that it has no lock, then used."""
    servers.need("fsspec")
    url = f"memory://{new_run()}"
    with pytest.raises(ValueError, match="two writers cannot be kept apart"):
        manager_of(tmp_path / "a", Marked(), mirror=url)
    mirror = Mirror(url, lock=False, wait="save")
    run = Marked()
    with manager_of(tmp_path / "a", run, mirror=mirror, keep_last=1) as manager:
        for step in (1, 2):
            run.step = step
            manager.save(step)
    fresh = Marked()
    with manager_of(tmp_path / "b", fresh, mirror=mirror, save_on_exit=False) as manager:
        found = manager.restore()
    assert found is not None
    assert fresh.step == 2


def test_secrets_are_in_no_error_of_a_store_that_refuses(tmp_path: Path) -> None:
    """A place where nobody listens, and one that quotes the request: the text has neither key nor signature."""
    servers.need("obstore")
    secret = "wJalrXUtnFEMIK7MDENG"
    options: dict[str, Any] = {**servers.KEYS, "secret_access_key": secret, "endpoint": "http://127.0.0.1:9"}
    mirror = Mirror("s3://bucket/run", options=options, client_options={"allow_http": True})
    with manager_of(tmp_path, Marked(), mirror=mirror, save_on_exit=False) as manager:
        with pytest.raises(safeckpt.MirrorUnreachableError) as caught:
            manager.restore()
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert "?" not in str(caught.value)


def test_same_failure_has_the_same_text() -> None:
    """How long a request took is left out: else each of many tries would be a new failure, with its own warning."""
    servers.need("obstore")
    options = {**servers.KEYS, "endpoint": "http://127.0.0.1:9"}
    client = open_client(Mirror("s3://bucket/run", options=options, client_options={"allow_http": True}))
    texts = set()
    for _ in range(2):
        with pytest.raises(safeckpt.MirrorUnreachableError) as caught:
            client.listing()
        texts.add(str(caught.value))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("url", "options", "client_options", "environment", "expected"),
    [
        ("s3://bucket/run", {}, {}, {}, "true"),
        ("s3://bucket/run", {}, {"allow_http": True}, {}, None),
        ("s3://bucket/run", {}, {}, {"AWS_ALLOW_HTTP": "true"}, None),
        ("s3://bucket/run", {"endpoint": "https://store.example"}, {}, {}, None),
        ("s3://bucket/run", {}, {}, {"AWS_ENDPOINT_URL": "https://store.example"}, None),
        ("s3://bucket/run", {"AWS_UNSIGNED_PAYLOAD": "false"}, {}, {}, "false"),
        ("gs://bucket/run", {}, {}, {}, None),
    ],
)
def test_payload_is_left_out_of_the_signature_where_tls_covers_it(  # noqa: PLR0917 - pytest passes them by name
    url: str,
    options: dict[str, Any],
    client_options: dict[str, Any],
    environment: dict[str, str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of Amazon's S3 alone, and not where plain HTTP is possible, or where the user has said what he wants."""
    servers.need("obstore")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    client: Any = open_client(Mirror(url, options=options, client_options=client_options))
    config = {name.lower().removeprefix("aws_"): value for name, value in client._store.config.items()}
    assert config.get("unsigned_payload") == expected


def test_http_that_was_not_allowed_says_what_to_set(
    s3: servers.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore's own words for it are "builder error"; the variable permits it."""
    mirror = Mirror(f"{s3.bucket}/{new_run()}", options=s3.options)
    with manager_of(tmp_path, Marked(), mirror=mirror, save_on_exit=False) as manager:
        with pytest.raises(safeckpt.MirrorUnreachableError, match="needs AWS_ALLOW_HTTP=true"):
            manager.restore()
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with manager_of(tmp_path, Marked(), mirror=mirror, save_on_exit=False) as manager:
        assert manager.restore() is None


def _open_without_obstore(path: Path) -> None:
    sys.modules["obstore"] = None  # type: ignore[assignment]
    safeckpt.CheckpointManager(path, {"counters": {"n": 0}}, mirror="s3://bucket/run")


def test_missing_package_says_what_to_install(tmp_path: Path) -> None:
    """Without the extra, `mirror=` is an error at construction, with the line to type."""
    error = children.run(_open_without_obstore, tmp_path).error
    assert isinstance(error, ImportError)
    assert 'pip install "safeckpt[cloud]"' in str(error)
