"""The S3 adapter's own promises: what failures mean, what is sent, and how it is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.loaders import Loader

from storage_engine.commitlog import layout
from storage_engine.config import OntologiaConfig
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore import s3
from storage_engine.objectstore.metering import HopTrace, tracing
from storage_engine.objectstore.open import probe_conditional_writes
from storage_engine.objectstore.protocol import (
    ConditionalConflict,
    ObjectNotFound,
    ObjectStore,
    OutcomeUnknown,
    PreconditionFailed,
)
from storage_engine.objectstore.s3 import S3Store
from tests.objectstore.fake_s3 import FakeS3, run_fake_s3
from tests.servers import S3Server, free_ports


@pytest.fixture(scope="module")
def server() -> Iterator[FakeS3]:
    # botocore backs off for seconds between its retries; nobody here is to wait for that.
    impatient = SimpleNamespace(sleep=lambda seconds: None)
    with pytest.MonkeyPatch.context() as patch, run_fake_s3() as running:
        patch.setattr("botocore.endpoint.time", impatient)
        yield running


@pytest.fixture
def fake(server: FakeS3) -> FakeS3:
    server.reset()
    return server


def open_fake(fake: FakeS3) -> S3Store:
    config = OntologiaConfig(s3_endpoint_url=fake.endpoint, s3_request_timeout_s=0.3)
    return S3Store("bucket", "some/prefix", config)


@pytest.fixture(scope="module")
def shared_store(server: FakeS3, aws_environment: None) -> Iterator[S3Store]:
    opened = open_fake(server)
    yield opened
    opened.close()


@pytest.fixture
def store(shared_store: S3Store, fake: FakeS3) -> S3Store:
    """One client for all tests, as making one takes long; those that change it make their own."""
    return shared_store


@pytest.fixture
def own_store(fake: FakeS3, aws_environment: None) -> Iterator[S3Store]:
    opened = open_fake(fake)
    yield opened
    opened.close()


CONDITIONAL: dict[str, Callable[[ObjectStore], object]] = {
    "put_if_absent": lambda store: store.put_if_absent("k", b"x", write_id="w"),
    "put_if_match": lambda store: store.put_if_match("k", b"x", '"e"', write_id="w"),
    "delete_if_match": lambda store: store.delete_if_match("k", '"e"'),
}
OTHERS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("k"),
    "get_if_changed": lambda store: store.get_if_changed("k", '"e"'),
    "list": lambda store: list(store.list("k")),
    "put": lambda store: store.put("k", b"x"),
    "delete_many": lambda store: store.delete_many(["k"]),
}


@pytest.mark.parametrize("operation", CONDITIONAL)
@pytest.mark.parametrize(
    ("answer", "signal"),
    [
        ((412, "PreconditionFailed"), PreconditionFailed),
        ((409, "ConditionalRequestConflict"), ConditionalConflict),
        ((409, "OperationAborted"), ConditionalConflict),
        ((500, "InternalError"), OutcomeUnknown),
        ((502, "BadGateway"), OutcomeUnknown),
        ((503, "SlowDown"), OutcomeUnknown),
        ((503, "ServiceUnavailable"), OutcomeUnknown),
        ((504, "GatewayTimeout"), OutcomeUnknown),
        ((429, "TooManyRequests"), OutcomeUnknown),
        ((400, "RequestTimeout"), OutcomeUnknown),
        ("hang", OutcomeUnknown),
        ("close", OutcomeUnknown),
        ((403, "AccessDenied"), StorageBackendError),
        ((404, "NoSuchBucket"), StorageBackendError),
        ((501, "NotImplemented"), StorageBackendError),
    ],
)
def test_a_conditional_write_is_sent_once_and_told_apart(
    store: S3Store,
    fake: FakeS3,
    operation: str,
    answer: tuple[int, str] | str,
    signal: type[Exception],
) -> None:
    fake.answer = lambda seen: answer
    with pytest.raises(signal):
        CONDITIONAL[operation](store)
    assert len(fake.requests) == 1


def test_not_found_under_a_condition(store: S3Store, fake: FakeS3) -> None:
    fake.answer = lambda seen: (404, "NoSuchKey")
    for operation in ("put_if_match", "delete_if_match"):
        with pytest.raises(PreconditionFailed):
            CONDITIONAL[operation](store)
    # A create that misses something met a concurrent delete: read back, then try again.
    with pytest.raises(ConditionalConflict):
        CONDITIONAL["put_if_absent"](store)


@pytest.mark.parametrize("operation", OTHERS)
@pytest.mark.parametrize("answer", [(500, "InternalError"), (503, "SlowDown"), "hang", "close"])
def test_other_requests_are_repeated_then_retryable(
    store: S3Store, fake: FakeS3, operation: str, answer: tuple[int, str] | str
) -> None:
    fake.answer = lambda seen: answer
    with pytest.raises(StorageBackendError) as caught:
        OTHERS[operation](store)
    assert caught.value.retryable
    assert caught.value.operation == operation
    assert len(fake.requests) == 3


def test_other_requests_survive_a_hiccup(own_store: S3Store, fake: FakeS3) -> None:
    fake.objects["some/prefix/k"] = b"there"
    fake.answer = lambda seen: (503, "SlowDown") if len(fake.requests) == 1 else None
    assert own_store.get("k").data == b"there"
    assert own_store.meter.snapshot()["GET"] == 1  # One logical request, whatever botocore did.


def test_a_body_that_breaks_off_is_read_again(store: S3Store, fake: FakeS3) -> None:
    fake.objects["some/prefix/k"] = b"whole"
    fake.answer = lambda seen: "truncate" if len(fake.requests) == 1 else None
    assert store.get("k").data == b"whole"
    fake.answer = lambda seen: "truncate"
    with pytest.raises(StorageBackendError) as caught:
        store.get("k")
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "NoSuchBucket"), "create it, or correct the storage URI"),
        ((403, "AccessDenied"), "s3:PutObject"),
        ((403, "SomethingForbidden"), "access denied"),
        ((403, "InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID"),
        ((403, "SignatureDoesNotMatch"), "the secret key is wrong"),
        ((400, "ExpiredToken"), "log in again"),
        ((403, "RequestTimeTooSkewed"), "clock"),
        ((400, "AuthorizationHeaderMalformed"), "AWS_REGION"),
        ((400, "InvalidRequest"), "400 InvalidRequest told to"),
    ],
)
@pytest.mark.parametrize("operation", ["get", "put", "put_if_absent", "delete_if_match", "list"])
def test_refusals_say_what_to_do(
    store: S3Store, fake: FakeS3, operation: str, answer: tuple[int, str], words: str
) -> None:
    fake.answer = lambda seen: answer
    with pytest.raises(StorageBackendError) as caught:
        (CONDITIONAL | OTHERS)[operation](store)
    assert words in str(caught.value)
    assert not caught.value.retryable
    facts = caught.value.facts()
    assert (facts["bucket"], facts["prefix"], facts["key"]) == ("bucket", "some/prefix", "k")
    assert facts["operation"] == operation


def test_failing_uploads_are_translated(store: S3Store, fake: FakeS3, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    fake.answer = lambda seen: (403, "AccessDenied")
    with pytest.raises(StorageBackendError, match="access denied"):
        store.put_file("k", tmp_path / "small")
    with pytest.raises(FileNotFoundError):
        store.put_file("k", tmp_path / "missing")


def test_unreachable_endpoint(aws_environment: None) -> None:
    (port,) = free_ports(1)
    config = OntologiaConfig(s3_endpoint_url=f"http://127.0.0.1:{port}", s3_request_timeout_s=1)
    store = S3Store("bucket", "", config)
    # Nothing was sent, so even a conditional write is known not to have landed.
    for attempt in (CONDITIONAL["put_if_absent"], OTHERS["get"]):
        with pytest.raises(StorageBackendError, match=f"cannot reach .*{port}") as caught:
            attempt(store)
        assert caught.value.retryable
    store.close()


def test_no_credentials(
    fake: FakeS3, aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = S3Store("bucket", "", OntologiaConfig(s3_endpoint_url=fake.endpoint))
    for attempt in (*CONDITIONAL.values(), *OTHERS.values()):
        with pytest.raises(StorageBackendError, match="AWS_ACCESS_KEY_ID"):
            attempt(store)
    assert fake.requests == []
    assert "KEY_ID" not in store.duckdb_secret()
    store.close()


def test_what_a_conditional_write_carries(store: S3Store, fake: FakeS3) -> None:
    etag = store.put_if_absent("k", b"x", write_id="attempt 1/ü")
    store.put_if_match("k", b"y", etag, write_id="w2")
    create, replace = fake.requests
    assert create.key == "some/prefix/k"
    assert create.headers["if-none-match"] == "*"
    assert create.headers["x-amz-meta-write-id"] == "attempt%201/%C3%BC"
    assert replace.headers["if-match"] == etag
    for request in fake.requests:
        assert "expect" not in request.headers  # It would cost a round trip more.
        assert not [name for name in request.headers if "checksum" in name or "trailer" in name]


def test_delete_many_reports_what_was_left(own_store: S3Store) -> None:
    errors = [
        {"Key": "some/prefix/gone", "Code": "NoSuchKey", "Message": "no such key"},
        {"Key": "some/prefix/kept", "Code": "AccessDenied", "Message": "locked"},
    ]
    own_store._client.meta.events.register(
        "after-call.s3.DeleteObjects", lambda parsed, **_: parsed.update(Errors=errors)
    )
    with pytest.raises(StorageBackendError, match=r"1 of 2 objects .* kept") as caught:
        own_store.delete_many(["gone", "kept"])
    assert caught.value.key == "kept"


@pytest.mark.parametrize(
    ("ignored", "words"),
    [
        ("create", r"If-None-Match: \* on PutObject"),
        ("replace", "If-Match on PutObject"),
        ("delete", "If-Match on DeleteObject"),
    ],
)
def test_probe_names_the_ignored_condition(
    store: S3Store, fake: FakeS3, ignored: str, words: str
) -> None:
    probe_conditional_writes(store, layout.probe())
    fake.ignores.add(ignored)
    with pytest.raises(StorageBackendError, match=words) as caught:
        probe_conditional_writes(store, layout.probe())
    assert "lose data" in str(caught.value)
    for known in ("AWS S3", "SeaweedFS", "MinIO"):
        assert known in str(caught.value)


def test_probe_of_a_server_that_does_not_answer(store: S3Store, fake: FakeS3) -> None:
    fake.answer = lambda seen: (500, "InternalError") if seen.method == "PUT" else None
    with pytest.raises(StorageBackendError, match="did not answer") as caught:
        probe_conditional_writes(store, layout.probe())
    assert caught.value.retryable


def test_the_clock_follows_the_server(own_store: S3Store, fake: FakeS3) -> None:
    fake.date = format_datetime(datetime.now(UTC) + timedelta(hours=2), usegmt=True)
    own_store.put("k", b"")
    ahead = (own_store.now() - datetime.now(UTC)).total_seconds()
    assert 7199 <= ahead <= 7201
    fake.date = "nonsense"
    own_store.put("k", b"")
    assert (own_store.now() - datetime.now(UTC)).total_seconds() > 7190


def test_the_clock_is_local_while_it_may_be(own_store: S3Store, fake: FakeS3) -> None:
    own_store.put("k", b"")
    assert abs((own_store.now() - datetime.now(UTC)).total_seconds()) < 0.5


def test_multipart_uploads_are_counted_part_by_part(
    moto_s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_engine.objectstore.s3._PART_BYTES", 5 * 1024 * 1024)
    store = S3Store(moto_s3.make_bucket(), "", moto_s3.config())
    source = tmp_path / "large"
    source.write_bytes(b"x" * (11 * 1024 * 1024))
    with tracing(HopTrace()) as trace:
        store.put_file("large", source)
    # Create, three parts together, complete.
    assert store.meter.snapshot()["PUT"] == 5
    assert trace.depth == 3
    source.write_bytes(b"x")
    with tracing(HopTrace()) as trace:
        store.put_file("small", source)
    assert store.meter.snapshot()["PUT"] == 6
    assert trace.depth == 1
    store.close()


def test_hops_of_parallel_requests(moto_s3: S3Server) -> None:
    store = S3Store(moto_s3.make_bucket(), "", moto_s3.config())
    with tracing(HopTrace()) as trace:
        store.parallel.map(lambda n: store.put(f"k{n}", b""), range(20))
        store.parallel.map(lambda n: store.get(f"k{n}"), range(20))
        list(store.list(""))
    assert trace.depth == 3
    assert store.meter.snapshot()["total"] == 41
    store.close()


def test_missing_bucket_on_a_real_server(seaweedfs_s3: S3Server) -> None:
    store = S3Store("no-such-bucket-here", "", seaweedfs_s3.config())
    with pytest.raises((StorageBackendError, ObjectNotFound)):
        store.get("k")
    with pytest.raises(StorageBackendError, match="the bucket does not exist"):
        list(store.list(""))
    store.close()


def test_wrong_keys_on_a_real_server(
    seaweedfs_s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = seaweedfs_s3.make_bucket()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = S3Store(bucket, "", seaweedfs_s3.config())
    with pytest.raises(StorageBackendError, match="the secret key is wrong"):
        store.put_if_absent("k", b"", write_id="w")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    other = S3Store(bucket, "", seaweedfs_s3.config())
    with pytest.raises(StorageBackendError, match="does not know this access key"):
        other.get("k")
    store.close()
    other.close()


def test_duckdb_addresses(moto_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    store = S3Store("bucket", "a/b", moto_s3.config())
    assert store.duckdb_url("c d.parquet") == "s3://bucket/a/b/c d.parquet"
    assert store.duckdb_secret() == {
        "KEY_ID": "test-access-key",
        "SECRET": "test-secret-key",
        "SESSION_TOKEN": "token",
        "REGION": "us-east-1",
        "ENDPOINT": moto_s3.endpoint.removeprefix("http://"),
        "URL_STYLE": "path",
        "USE_SSL": "false",
    }
    aws = S3Store("bucket", "", OntologiaConfig(s3_region="eu-west-1"))
    secret = aws.duckdb_secret()
    assert (secret["REGION"], secret["URL_STYLE"]) == ("eu-west-1", "vhost")
    assert secret["USE_SSL"] == "true"
    assert "ENDPOINT" not in secret
    store.close()
    aws.close()


def test_slow_answers_do_not_pass_the_timeout(store: S3Store, fake: FakeS3) -> None:
    fake.answer = lambda seen: "hang"
    before = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("k", b"", write_id="w")
    assert time.monotonic() - before < 20  # Far below botocore's own minute.


def test_the_services_that_sessions_ask_for_are_those_that_botocore_has() -> None:
    """They are told from memory, as looking for all of them takes as long as several requests."""
    known = Loader().list_available_services("service-2")
    assert set(s3._SERVICES) <= set(known)
    session: Any = s3._new_session("eu-central-1")
    for service in s3._SERVICES:
        assert session.client(service, aws_access_key_id="a", aws_secret_access_key="b") is not None
