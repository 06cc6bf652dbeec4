"""The way for many small requests: what its failures mean, and that each is sent once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.errors import StorageBackendError
from storage_engine.objectstore.protocol import (
    ObjectNotFound,
    OutcomeUnknown,
    PreconditionFailed,
)
from storage_engine.objectstore.s3 import S3Store
from storage_engine.objectstore.s3_bulk import S3Bulk
from tests.objectstore.fake_s3 import FakeS3, Seen, run_fake_s3
from tests.servers import aws_environment

__all__ = ["aws_environment"]

KEY = "claims/shop/a%2Fb/billing.bill.json"


@pytest.fixture
def fake() -> Iterator[FakeS3]:
    impatient = SimpleNamespace(sleep=lambda seconds: None)
    with pytest.MonkeyPatch.context() as patch, run_fake_s3() as running:
        patch.setattr("botocore.endpoint.time", impatient)
        yield running
        running.reset()


@pytest.fixture
def bulk(fake: FakeS3, aws_environment: None) -> Iterator[S3Bulk]:
    config = OntologiaConfig(s3_endpoint_url=fake.endpoint, s3_request_timeout_s=0.3)
    store = S3Store("bucket", "some/prefix", config)
    yield store.bulk
    store.close()


def puts(fake: FakeS3) -> list[Seen]:
    return [seen for seen in fake.requests if seen.method == "PUT"]


def test_an_s3_store_offers_it_and_others_are_their_own(bulk: S3Bulk) -> None:
    from storage_engine.objectstore.memory import MemoryStore

    memory = MemoryStore()
    assert memory.bulk is memory
    assert bulk.bulk is bulk


def test_a_conditional_write_carries_its_condition_and_write_id(bulk: S3Bulk, fake: FakeS3) -> None:
    etag = bulk.put_if_absent(KEY, b"one", write_id="w1")
    bulk.put_if_match(KEY, b"two", etag, write_id="w2")

    created, replaced = puts(fake)
    assert created.headers["if-none-match"] == "*"
    assert created.headers["x-amz-meta-write-id"] == "w1"
    assert replaced.headers["if-match"].strip('"') == etag.strip('"')
    assert fake.objects == {f"some/prefix/{KEY}": b"two"}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_what_the_server_does_not_clearly_answer_is_unknown_and_sent_once(
    bulk: S3Bulk, fake: FakeS3, status: int
) -> None:
    fake.answer = lambda seen: (status, "SlowDown")
    with pytest.raises(OutcomeUnknown):
        bulk.put_if_absent(KEY, b"x", write_id="w")
    assert len(puts(fake)) == 1


@pytest.mark.parametrize("how", ["hang", "close"])
def test_silence_is_unknown_and_sent_once(bulk: S3Bulk, fake: FakeS3, how: str) -> None:
    fake.answer = lambda seen: how
    with pytest.raises(OutcomeUnknown):
        bulk.put_if_match(KEY, b"x", '"e"', write_id="w")
    assert len(puts(fake)) == 1


def test_a_false_condition(bulk: S3Bulk, fake: FakeS3) -> None:
    bulk.put(KEY, b"there")
    with pytest.raises(PreconditionFailed):
        bulk.put_if_absent(KEY, b"x", write_id="w")
    with pytest.raises(PreconditionFailed):
        bulk.put_if_match(KEY, b"x", '"other"', write_id="w")
    with pytest.raises(PreconditionFailed):
        bulk.put_if_match("gone.json", b"x", '"other"', write_id="w")
    with pytest.raises(ObjectNotFound):
        bulk.get("gone.json")


def test_denied_is_said(bulk: S3Bulk, fake: FakeS3) -> None:
    fake.answer = lambda seen: (403, "AccessDenied")
    with pytest.raises(StorageBackendError, match="access was denied"):
        bulk.put_if_absent(KEY, b"x", write_id="w")
    with pytest.raises(StorageBackendError, match="access denied"):
        bulk.get(KEY)  # boto3 repeats it, and explains


def test_what_may_be_repeated_is_repeated(bulk: S3Bulk, fake: FakeS3) -> None:
    answers = iter([(500, "InternalError"), None, (500, "InternalError"), None])
    fake.answer = lambda seen: next(answers, None)
    bulk.put(KEY, b"x")

    assert bulk.get(KEY).data == b"x"


def test_each_request_is_counted_as_what_it_is(bulk: S3Bulk) -> None:
    etag = bulk.put_if_absent(KEY, b"one", write_id="w")
    bulk.put_if_match(KEY, b"two", etag, write_id="v")
    bulk.get(KEY)
    bulk.put("x.json", b"three")

    counted = bulk.meter.snapshot()
    assert {k: counted[k] for k in ("PUT_IF", "GET", "PUT")} == {"PUT_IF": 2, "GET": 1, "PUT": 1}
    assert counted["bytes_written"] == 11


def test_a_proxy_is_not_asked_for_loopback(
    fake: FakeS3, aws_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    store = S3Store("bucket", "p", OntologiaConfig(s3_endpoint_url=fake.endpoint))
    store.bulk.put(KEY, b"x")
    assert fake.objects == {f"p/{KEY}": b"x"}
    store.close()
