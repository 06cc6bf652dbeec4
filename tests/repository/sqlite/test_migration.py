"""Migrations in a SQLite file: tables, catalog, markers, what old versions read as."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage_engine.errors import (
    ConfigurationError,
    SchemaOutdatedError,
)
from storage_engine.maintenance.integrity import verify_storage
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
from tests.repository.sqlite.support import open_at, rows

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


# --- one version after another ------------------------------------------------------------------


def test_the_latest_rows_are_in_the_new_version(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"), person("b", "Bob", 2))
    write(repository, PERSON, person("a", "Anna", 3))
    outcome = migrate(repository, PERSON2)
    assert (outcome.commit_id, outcome.rows) == (3, {("entity", "Person"): 2})
    assert values(repository, PERSON2) == [
        {"commit_id": 3, "id": "a", "age": 3.0, "full_name": "Anna", "tier": "Standard"},
        {"commit_id": 3, "id": "b", "age": 2.0, "full_name": "Bob", "tier": "Standard"},
    ]
    commit = repository.get_commit(3)
    assert commit is not None
    assert (commit.kind, commit.types) == ("migration", ["Person"])
    assert commit.metadata["kind"] == "migration"
    assert json.loads(commit.metadata["migrated_types"]) == [
        {
            "type_kind": "entity",
            "type_name": "Person",
            "from_schema_version_id": 1,
            "to_schema_version_id": 2,
            "rows_rewritten": 2,
        }
    ]
    assert repository.list_commit_changes(3) == [
        {"kind": "entity", "type_name": "Person", "key": key, "operation": "update"}
        for key in ("a", "b")
    ]


def test_history_of_types(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"))
    migrate(repository, PERSON2)
    history = repository.type_histories()["entity", "Person"]
    assert [
        (v.version, v.activation_commit_id, v.superseded_at_commit_id) for v in history.versions
    ] == [
        (1, 1, 2),
        (2, 2, None),
    ]
    assert history.current is not None
    assert history.current.spec.field("full_name").field_id == PERSON.field("name").field_id
    assert repository.type_histories([("entity", "Nobody")]) == {}
    assert repository.type_head(PERSON2) == 2
    assert repository.storage_info()["types"]["Person"] == {
        "type_kind": "entity",
        "schema_version_id": 2,
        "last_commit_id": 2,
    }


def test_v2_makes_a_table_per_version_and_leaves_the_old_one_alone(path: Path) -> None:
    with closing(open_at(path, "v2")) as repository:
        write(repository, PERSON, person("a"))
        before = sql(path, "SELECT * FROM entity_Person_v1")
        migrate(repository, PERSON2)
        assert sql(path, "SELECT * FROM entity_Person_v1") == before
        assert sql(
            path,
            "SELECT schema_version_id, table_name, activation_commit_id, is_current "
            "FROM type_layout_catalog ORDER BY 1",
        ) == [(1, "entity_Person_v1", 1, 0), (2, "entity_Person_v2", 2, 1)]
        assert repository.storage_info()["type_layouts"]["Person"] == {
            "type_kind": "entity",
            "current_schema_version_id": 2,
            "activation_commit_id": 2,
            "historical_versions": [1],
        }


def test_without_rows_there_is_an_empty_table(repository: SqliteRepository, path: Path) -> None:
    write(repository, PERSON, person("a"))
    outcome = migrate(repository, PERSON2, LIKES)
    assert outcome.rows == {("entity", "Person"): 1, ("relation", "Likes"): 0}
    write(repository, LIKES, likes("a", "a"))
    assert len(values(repository, LIKES)) == 1
    migrate(repository, LIKES2)
    assert [row["note"] for row in values(repository, LIKES2)] == [None]
    assert verify_storage(repository, deep=True).findings == []


def test_one_version_can_be_read_alone(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"), person("b"))
    write(repository, PERSON, person("a", "Anna"))
    migrate(repository, PERSON2)
    ref = PERSON.ref
    latest = version_values(repository, ref, 1)
    assert [(row["commit_id"], row["id"], row["name"]) for row in latest] == [
        (2, "a", "Anna"),
        (1, "b", "Ann"),
    ]
    assert [row["name"] for row in version_values(repository, ref, 1, as_of=1)] == ["Ann", "Ann"]
    assert len(version_values(repository, ref, 1, history=True)) == 3
    assert len(version_values(repository, ref, 1, history=True, since=1)) == 1
    assert [row["commit_id"] for row in version_values(repository, ref, 2)] == [3, 3]


def test_writers_of_the_old_class_are_told(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"))
    migrate(repository, PERSON2)
    with pytest.raises(SchemaOutdatedError):
        repository.commit(CommitRequest([TypeInput(PERSON, table=rows(PERSON, [person("b")]))]))
    spec = current(repository, PERSON2)
    row = {"entity_key": "b", "id": "b", "full_name": "Bob", "age": 1.0, "tier": "Gold"}
    assert write(repository, spec, row) == 3
    assert len(values(repository, PERSON2)) == 2


def test_nothing_to_do_is_refused(repository: SqliteRepository) -> None:
    with pytest.raises(ConfigurationError):
        repository.migrate(MigrationRequest())
