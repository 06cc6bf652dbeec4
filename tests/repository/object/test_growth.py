"""What a small commit writes and a reader keeps, however many types there are."""

from __future__ import annotations

import uuid

import pytest

from storage_engine.commitlog import chain as chain_module
from storage_engine.config import KIB
from storage_engine.maintenance.compaction.background import keep_compact
from storage_engine.repository.object.engine import ObjectRepository
from tests.repository.object.test_budgets import (
    CUSTOMER,
    another,
    opened,
    rows_of_types,
    write,
)

COMMITS = 120  # with a checkpoint among them


def with_types(count: int) -> ObjectRepository:
    repository = opened(f"growth-{uuid.uuid4().hex}")
    keep_compact(repository)  # as sessions do
    write(repository, *rows_of_types(count))
    repository.flush()
    return repository


def rows_written(repository: ObjectRepository) -> int:
    objects = repository.store.backend.objects()  # type: ignore[attr-defined]
    return sum(len(data) for key, data in objects.items() if key.endswith(".parquet"))


@pytest.mark.parametrize("count", [10, 100, 1_000])
def test_a_small_commit_writes_little_besides_its_rows(count: int) -> None:
    repository = with_types(count)
    written, rows = repository.store.meter.bytes_written, rows_written(repository)
    requests = repository.requests()["total"]
    for number in range(COMMITS):
        write(repository, (CUSTOMER, f"c{number % 10}", number + 1))
    repository.flush()
    besides = repository.store.meter.bytes_written - written - (rows_written(repository) - rows)
    assert besides / COMMITS <= 64 * KIB
    assert repository.requests()["total"] - requests <= COMMITS * 10
    manifest = repository.chain.head_manifest(repository.chain.read_head().head)
    assert manifest is not None
    assert len(manifest.to_bytes()) <= (48 * KIB if count <= 100 else 16 * KIB)


def test_a_reader_of_one_type_reads_one_bucket_of_a_thousand_types() -> None:
    repository = with_types(1_000)
    for number in range(3):
        write(repository, (CUSTOMER, "c", number + 1))
    repository.flush()
    reader = another(repository)
    assert reader.type_head(CUSTOMER) == 4
    assert reader.requests()["GET"] == 5  # stamp and head to open it; head, manifest, bucket
    assert reader.store.meter.bytes_read <= 32 * KIB


def test_what_is_remembered_of_the_log_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "_MANIFEST_BYTES", 64 * KIB)
    repository = opened("bounded")
    for number in range(60):
        write(repository, (CUSTOMER, "c", number + 1))
    repository.flush()
    reader = another(repository)
    head = reader.chain.read_head().head
    for _ in range(2):
        assert len(reader.chain.stretch(head.link, above=0)) == 60
    remembered = reader.chain._manifests
    assert 0 < remembered._bytes <= 64 * KIB
    assert len(remembered._values) < 60
