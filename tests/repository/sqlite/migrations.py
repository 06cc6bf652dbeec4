"""Types in several versions, and what tests of migrations do with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from storage_engine.model import Entity, Field, Relation, spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import CommitRequest, ReadWindow, TypeInput
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.schema.migration import (
    MigrationOutcome,
    MigrationRequest,
    TypeDrop,
    plan_migration,
)
from storage_engine.schema.upgraders import Upgrader
from tests.repository.sqlite.support import rows

Row = Mapping[str, Any]


class Person(Entity):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int]


class Person2(Entity, name="Person"):
    id: Field[str] = Field(primary_key=True)
    full_name: Field[str] = Field(renamed_from="name")
    age: Field[float]
    tier: Field[str] = Field(default="Standard")


class Person3(Entity, name="Person"):
    """Not additive: a field less, and one more that nobody can guess."""

    id: Field[str] = Field(primary_key=True)
    full_name: Field[str]
    born: Field[int]


class Client(Entity, renamed_from="Person"):
    id: Field[str] = Field(primary_key=True)
    name: Field[str]
    age: Field[int]


class Likes(Relation[Person, Person]):
    since: Field[int]


class Likes2(Relation[Person, Person], name="Likes"):
    since: Field[int]
    note: Field[str | None] = Field(default=None)


PERSON, PERSON2, PERSON3 = spec_of(Person), spec_of(Person2), spec_of(Person3)
CLIENT, LIKES, LIKES2 = spec_of(Client), spec_of(Likes), spec_of(Likes2)


def person(key: str, name: str = "Ann", age: int = 1) -> dict[str, Any]:
    return {"entity_key": key, "id": key, "name": name, "age": age}


def likes(left: str, right: str, since: int = 1) -> dict[str, Any]:
    return {"left_key": left, "right_key": right, "instance_key": "", "since": since}


def write(repository: SqliteRepository, spec: TypeSpec, *values: Row) -> int:
    stored = {s.ref: s for s in repository.known_types()}.get(spec.ref)
    aligned = spec.aligned(stored.schema_dict()) if stored is not None else spec
    result = repository.commit(CommitRequest([TypeInput(aligned, table=rows(aligned, values))]))
    assert result is not None
    return result.commit_id


def request_for(
    repository: SqliteRepository,
    *specs: TypeSpec,
    upgraders: Sequence[Upgrader] = (),
    **options: Any,
) -> MigrationRequest:
    plan = plan_migration(specs, repository.type_histories(), {u.key: u for u in upgraders})
    plan.require_possible()
    return MigrationRequest(plan.migrations, plan.drops, **options)


def migrate(
    repository: SqliteRepository, *specs: TypeSpec, upgraders: Sequence[Upgrader] = ()
) -> MigrationOutcome:
    return repository.migrate(request_for(repository, *specs, upgraders=upgraders))


def drop(repository: SqliteRepository, spec: TypeSpec, *, purge: bool = False) -> int:
    current = repository.type_histories([spec.ref])[spec.ref].last
    one = TypeDrop(*spec.ref, current.version, current.schema_sha256, purge=purge)
    return repository.migrate(MigrationRequest(drops=[one], kind="drop")).commit_id


def current(repository: SqliteRepository, spec: TypeSpec) -> TypeSpec:
    (stored,) = repository.stored_types([spec.ref])
    return spec.aligned(stored.schema_dict())


def values(
    repository: SqliteRepository, spec: TypeSpec, window: ReadWindow = ReadWindow()
) -> list[dict[str, Any]]:
    table = repository.read(current(repository, spec), window)
    return [_fields(row) for row in table.to_pylist()]


def version_values(
    repository: SqliteRepository, ref: tuple[str, str], version: int, **when: Any
) -> list[dict[str, Any]]:
    stored = repository.type_histories([ref])[ref].version(version)
    assert stored is not None
    asked = QuerySpec(stored.spec, when=When(**when, schema_version=version))
    answer = repository.executor().rows(asked)
    return [_fields(row) for batch in answer.batches for row in batch.to_pylist()]


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("entity_key", "instance_key")}


def sql(path: Path, statement: str, parameters: Iterable[Any] = ()) -> list[Any]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement, tuple(parameters)).fetchall()


def all_of_it(path: Path) -> dict[str, list[Any]]:
    """Every row of every table."""
    tables = sql(path, "SELECT name, sql FROM sqlite_master ORDER BY name")
    facts: dict[str, list[Any]] = {"": tables}
    for name, statement in tables:
        if statement and statement.lstrip().upper().startswith("CREATE TABLE"):
            facts[name] = sorted(sql(path, f'SELECT * FROM "{name}"'), key=repr)
    return facts
