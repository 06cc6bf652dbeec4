"""Types with every kind of field, storages to keep them in, and rows as reads must give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession, functions

from storage_engine import (
    CompactionPolicy,
    Entity,
    Field,
    OntologiaConfig,
    Relation,
    Session,
)
from storage_engine.model import objects_to_table, spec_of
from storage_engine.repository.protocol import ReadWindow
from storage_engine.spark.schema import stored_columns


class Sample(Entity):
    """Every kind of field."""

    id: Field[str] = Field(primary_key=True)
    text: Field[str | None] = Field(default=None)
    number: Field[int] = Field(default=0)
    ratio: Field[float | None] = Field(default=None)
    flag: Field[bool | None] = Field(default=None)
    at: Field[datetime | None] = Field(default=None)
    day: Field[date | None] = Field(default=None)
    raw: Field[bytes | None] = Field(default=None)
    tags: Field[list[str]] = Field(default_factory=list)
    extra: Field[dict[str, int] | None] = Field(default=None)


class Follows(Relation[Sample, Sample]):
    """Unkeyed."""

    weight: Field[int]


class Stay(Relation[Sample, Sample]):
    """Keyed."""

    visit: Field[str] = Field(instance_key=True)
    nights: Field[int | None] = Field(default=None)


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
        at=datetime(1 if n % 2 else 2024, 2, 28, 23, 59, 59, 123456 + n, tzinfo=UTC),
        day=date(1, 1, 1),
        raw=bytes([0, 255, n % 256]),
        tags=["a", "ü"] if n % 2 else [],
        extra={"k": n},
    )


Rows = list[dict[str, Any]]


def expected(session: Session, type: Any, *, commit_id: bool = False, **window: Any) -> Rows:
    """What the session's own engine reads, under the names that Spark has."""
    spec = spec_of(type)
    table = session.repository.read(spec, ReadWindow(**window))
    names = {name: name for name in ("commit_id",) if commit_id} | stored_columns(spec)
    return in_order(table.select(list(names.values())).rename_columns(list(names)).to_pylist())


def rows(frame: DataFrame) -> Rows:
    return in_order(frame.toArrow().to_pylist())


def in_order(found: Iterable[dict[str, Any]]) -> Rows:
    return sorted(found, key=repr)


def by_window(frames: dict[str, DataFrame]) -> dict[str, Rows]:
    """The rows of several frames of one type, in a single Spark job."""
    labelled = [frame.withColumn("window", functions.lit(name)) for name, frame in frames.items()]
    found: dict[str, Rows] = {name: [] for name in frames}
    for row in reduce(lambda a, b: a.unionByName(b), labelled).toArrow().to_pylist():
        found[row.pop("window")].append(row)
    return {name: in_order(rows) for name, rows in found.items()}


def check_every_window(
    spark: SparkSession, session: Session, type: Any, read: Callable[..., DataFrame]
) -> None:
    """What `read(**window)` gives is what the session reads, now, before, and in between."""
    head = session.repository.head_commit_id()
    asked: dict[str, dict[str, Any]] = {"latest": {}}
    asked |= {f"as of {n}": {"as_of": n} for n in (2, head - 1)}
    frames = {name: read(with_commit_id=True, **window) for name, window in asked.items()}
    windows = {name: dict(window) for name, window in asked.items()}
    windows |= {
        "history": {"history": True},
        "history since": {"history": True, "since": head - 2},
        "history as of": {"history": True, "as_of": head - 1},
    }
    frames["history"] = read(history=True)
    frames["history since"] = read(since=head - 2)
    frames["history as of"] = read(history=True, as_of=head - 1)
    found = by_window(frames)
    for name, window in windows.items():
        assert found[name] == expected(session, type, commit_id=True, **window), (type, name)


@dataclass(frozen=True)
class Place:
    """An initialised storage."""

    uri: str
    config: OntologiaConfig

    def open(self) -> Session:
        return Session(self.uri, config=self.config)

    @property
    def options(self) -> dict[str, str]:
        """For the data source."""
        given = {"storage_uri": self.uri, "s3_endpoint_url": self.config.s3_endpoint_url}
        return {name: value for name, value in given.items() if value}


def commit(session: Session, *objects: Any) -> int:
    session.ensure(list(objects))
    commit_id = session.commit()
    assert commit_id is not None
    session.flush()
    return commit_id


def stage(session: Session, numbers: Iterable[int], value: int) -> int:
    """A bulk commit: its files carry no commit id."""
    table = objects_to_table(spec_of(Sample), [sample(n, value) for n in numbers])
    session.ingest(Sample, table.drop_columns(["entity_key"]))
    commit_id = session.commit()
    assert commit_id is not None
    session.flush()
    return commit_id


def first_commits(session: Session) -> None:
    """Overlapping small and bulk commits of three types."""
    commit(
        session,
        *(sample(n) for n in range(12)),
        *(Follows(left_key="s0001", right_key=f"s{n:04}", weight=n) for n in range(4)),
        *(Stay(left_key="s0001", right_key="s0002", visit=f"v{n}") for n in range(3)),
    )
    stage(session, range(8, 20), 200)
    commit(session, *(sample(n, 300 + n) for n in range(0, 20, 3)))
    commit(
        session,
        Follows(left_key="s0001", right_key="s0002", weight=77),
        Follows(left_key="s0000", right_key="s0002", weight=5),
        Stay(left_key="s0001", right_key="s0002", visit="v1", nights=2),
    )
    stage(session, [0, 30], 500)


def compact(session: Session) -> None:
    report = session.compact(CompactionPolicy(min_entries=2))
    assert report.rows_rewritten
    session.flush()
