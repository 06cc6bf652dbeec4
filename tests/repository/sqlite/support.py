"""Types, rows and helpers for the SQLite engines' tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.model.arrow import row_schema
from storage_engine.model.declarations import Entity, spec_of
from storage_engine.model.field import Field
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import CommitRequest, CommitResult, TypeInput
from storage_engine.repository.sqlite import ENGINES, connection
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.shop import Customer, Employment, Knows, Product, Subscription


class Everything(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]
    number: Field[int]
    real: Field[float]
    flag: Field[bool]
    moment: Field[datetime]
    day: Field[date]
    raw: Field[bytes]
    maybe: Field[str | None] = Field(default=None)
    maybe_moment: Field[datetime | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)


CUSTOMER = spec_of(Customer)
PRODUCT = spec_of(Product)
SUBSCRIPTION = spec_of(Subscription)
EMPLOYMENT = spec_of(Employment)
KNOWS = spec_of(Knows)
EVERYTHING = spec_of(Everything)


def open_at(path: str | Path, engine: str, **config: Any) -> SqliteRepository:
    return ENGINES[engine](path, OntologiaConfig(**config), uri=f"sqlite:///{path}")


def rows(spec: TypeSpec, values: Iterable[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([dict(value) for value in values], schema=row_schema(spec))


def customer(
    key: str, name: str = "Ann", tier: str = "Gold", age: int | None = 1
) -> dict[str, Any]:
    return {"entity_key": key, "id": key, "name": name, "tier": tier, "age": age}


def customers(*values: Mapping[str, Any]) -> TypeInput:
    return TypeInput(CUSTOMER, table=rows(CUSTOMER, values))


def product(key: str, price: float) -> dict[str, Any]:
    return {"entity_key": key, "sku": key, "price": price}


def edge(left: str, right: str, instance: str = "", **values: Any) -> dict[str, Any]:
    return {"left_key": left, "right_key": right, "instance_key": instance, **values}


def stream(spec: TypeSpec, *batches: Iterable[Mapping[str, Any]]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from rows(spec, batch).to_batches()


def put(
    repository: SqliteRepository, *values: Mapping[str, Any], **request: Any
) -> CommitResult | None:
    """Commit customers."""
    return repository.commit(CommitRequest([customers(*values)], **request))


def commit(
    repository: SqliteRepository, spec: TypeSpec, *values: Mapping[str, Any], **request: Any
) -> CommitResult | None:
    return repository.commit(CommitRequest([TypeInput(spec, table=rows(spec, values))], **request))


def commit_many(path: str, engine: str, writer: str, count: int) -> list[int]:
    """A writer process: `count` commits, each of one customer of its own."""
    repository = open_at(path, engine, s3_lock_timeout_ms=60_000, runtime_id=writer)
    ids = []
    for number in range(count):
        result = put(repository, customer(f"{writer}-{number:03}"))
        assert result is not None
        ids.append(result.commit_id)
    repository.close()
    return ids


def traced(monkeypatch: pytest.MonkeyPatch, callback: Any) -> None:
    """Call back before every statement on connections opened from now on."""
    real = connection.connect

    def connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened = real(*args, **kwargs)
        opened.set_trace_callback(callback)
        return opened

    monkeypatch.setattr(connection, "connect", connect)
