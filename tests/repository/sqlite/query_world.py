"""One history, in a SQLite storage and in the plain Python executor that says what is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa

from storage_engine.model import Entity, Field, Relation
from storage_engine.model.arrow import objects_to_table
from storage_engine.model.declarations import spec_of
from storage_engine.query.results import Executor, Traversal
from storage_engine.query.spec import QuerySpec
from storage_engine.repository.protocol import CommitRequest, TypeInput
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.query.memory import MemoryExecutor
from tests.query.worlds import LINK, THING, Link, Thing


class Place(Entity):
    id: Field[str] = Field(primary_key=True)
    size: Field[int | None] = Field(default=None)


class Stay(Relation[Thing, Place]):
    """Keyed: several per pair."""

    nr: Field[str] = Field(instance_key=True)
    nights: Field[int]


class Road(Relation[Place, Place]):
    """No fields: the identity is the whole statement."""


PLACE, STAY, ROAD = spec_of(Place), spec_of(Stay), spec_of(Road)

NOON = datetime(2020, 2, 29, 12, tzinfo=UTC)
COMMITS: list[list[Any]] = [
    [
        Thing(id="a", text="x", whole=1, real=0.5, flag=True, tags=["t"], profile={"k": 1}),
        Thing(id="b", text="y", whole=2, real=1.5, flag=False, moment=NOON, day=date(2020, 1, 2)),
        Thing(id="c", whole=3, mixed="5", number=5, events=[{"k": 1}, {"k": "x"}]),
        Link(left_key="a", right_key="b", weight=1),
        Link(left_key="b", right_key="c", weight=None),
    ],
    [
        Thing(id="a", text="y", whole=5, real=0.25, raw=b"\x00a", node={"n": 1, "at": NOON}),
        Thing(id="d", text="\U0001f600", named="other", whole=-(2**63), number=0.1),
        Link(left_key="b", right_key="c", weight=7),
        Link(left_key="a", right_key="missing", weight=2),
    ],
    [
        Place(id="p", size=1),
        Place(id="q"),
        Stay(left_key="a", right_key="p", nr="1", nights=3),
        Stay(left_key="a", right_key="p", nr="2", nights=1),
        Stay(left_key="c", right_key="q", nr="1", nights=3),
        Road(left_key="p", right_key="q"),
        Road(left_key="q", right_key="q"),
    ],
    [
        Thing(id="b", text="x", whole=None, real=-1.5, tags=["t", "u"], either=["t"]),
        Thing(id="c", text="a\x00b", whole=2**53 + 1, mixed=5, open={"a": 1}, moment=NOON),
        Place(id="q", size=9),
        Stay(left_key="a", right_key="p", nr="2", nights=8),
        Link(left_key="c", right_key="a", weight=3),
        Link(left_key="a", right_key="b", weight=4),
    ],
]
HEAD = len(COMMITS)


@dataclass
class Both:
    """The same history in both."""

    repository: SqliteRepository
    model: MemoryExecutor

    @property
    def executor(self) -> Executor:
        return self.repository.executor()


def load(repository: SqliteRepository) -> Both:
    model = MemoryExecutor()
    for spec in (THING, LINK, PLACE, STAY, ROAD):
        model.put(0, spec)
    for number, things in enumerate(COMMITS, start=1):
        by_type: dict[type[Any], list[Any]] = {}
        for thing in things:
            by_type.setdefault(type(thing), []).append(thing)
        inputs = []
        for cls, members in by_type.items():
            spec = spec_of(cls)
            model.put(number, spec, *members)
            inputs.append(TypeInput(spec, table=objects_to_table(spec, members)))
        result = repository.commit(CommitRequest(inputs))
        assert result is not None
        assert result.commit_id == number
    return Both(repository, model)


def rows(executor: Executor, spec: QuerySpec) -> pa.Table:
    found = executor.rows(spec)
    return pa.Table.from_batches(found.batches, schema=found.schema)


def joined(found: Traversal) -> list[list[dict[str, Any]]]:
    """The rows along each path."""
    columns = [found.sources, *found.relations]
    assert found.paths.column_names == ["source", *(f"step_{n}" for n in range(len(columns) - 1))]
    tables = [table.take(found.paths.column(n)).to_pylist() for n, table in enumerate(columns)]
    return [list(path) for path in zip(*tables, strict=True)]


def at(spec: QuerySpec, when: Any) -> QuerySpec:
    return replace(spec, when=when)
