"""Types with every kind of field, storages to keep them in, and rows as reads must give them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from typing import Any

from pyspark.sql import DataFrame

from storage_engine import Entity, Field, Relation, Session
from storage_engine.model import spec_of
from storage_engine.query.spec import Reference
from storage_engine.repository.protocol import Window
from storage_engine.spark.schema import stored_columns


class Sample(Entity):
    """Every kind of field."""

    id: Field[str] = Field(primary_key=True)
    text: Field[str | None] = None
    number: Field[int] = 0
    ratio: Field[float | None] = None
    flag: Field[bool | None] = None
    at: Field[datetime | None] = None
    day: Field[date | None] = None
    raw: Field[bytes | None] = None
    tags: Field[list[str]] = Field(default_factory=list)
    extra: Field[dict[str, int] | None] = None


class Follows(Relation[Sample, Sample]):
    """Unkeyed."""

    weight: Field[int]


class Stay(Relation[Sample, Sample]):
    """Keyed."""

    visit: Field[str] = Field(instance_key=True)
    nights: Field[int | None] = None


def sample(n: int, number: int | None = None) -> Sample:
    """A sample with values of every kind, or with nulls where they are allowed."""
    if n % 3 == 2:
        return Sample(id=f"s{n:04}", number=number or n)
    return Sample(
        id=f"s{n:04}",
        text=f"tëxt {n}, 'quoted'",
        number=number if number is not None else n,
        ratio=n / 7,
        flag=n % 2 == 0,
        at=datetime(2024, 2, 29, 23, 59, 59, 123456 + n, tzinfo=UTC),
        day=date(1969, 12, 31),
        raw=bytes([0, 255, n % 256]),
        tags=["a", "ü"] if n % 2 else [],
        extra={"k": n},
    )


def expected(session: Session, type: Any, *, commit_id: bool = False, **window: Any) -> list[Any]:
    """What the session's own engine reads, under the names that Spark has."""
    spec = spec_of(type)
    table = session.repository.read(spec, Window(**window))
    names = [*(["commit_id"] if commit_id else []), *stored_columns(spec).values()]
    return in_order(tuple(row.values()) for row in table.select(names).to_pylist())


def rows(frame: DataFrame) -> list[Any]:
    return in_order(tuple(_plain(value) for value in row) for row in frame.collect())


def in_order(found: Iterable[tuple[Any, ...]]) -> list[Any]:
    return sorted(found, key=repr)


def _plain(value: Any) -> Any:
    """Spark's Python values as Arrow has them."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    return value


def references(session: Session) -> list[Reference]:
    return list(range(session.repository.head_commit_id() + 1))
