"""Migrations in a SQLite file: tables, catalog, markers, what old versions read as."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from storage_engine.errors import (
    ConfigurationError,
    MigrationError,
    MigrationTokenError,
    SchemaOutdatedError,
    TypeDroppedError,
)
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Entity, Field, Relation, spec_of
from storage_engine.model.spec import TypeSpec
from storage_engine.query.aggregates import sum as total_of
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository.protocol import CommitRequest, ReadWindow, TypeInput
from storage_engine.repository.sqlite import migration as sqlite_migration
from storage_engine.repository.sqlite.copied_rows import copied_fields
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.schema.migration import (
    MigrationRequest,
)
from storage_engine.schema.upgraders import Upgrader
from tests.repository.sqlite.migrations import (
    CLIENT,
    LIKES,
    LIKES2,
    PERSON,
    PERSON2,
    PERSON3,
    Person2,
    all_of_it,
    current,
    drop,
    likes,
    migrate,
    person,
    request_for,
    sql,
    values,
    version_values,
    write,
)
from tests.repository.sqlite.support import open_at, rows

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


# --- v1: rows of all versions together ----------------------------------------------------------


@pytest.fixture
def v1(path: Path) -> Iterator[SqliteRepository]:
    """Two commits of version 1, then version 2 with other names and wider types."""
    repository = open_at(path, "v1")
    write(repository, PERSON, person("a", "Ann", 1), person("b", "Bob", 2))
    write(repository, PERSON, person("a", "Anna", 3))
    migrate(repository, PERSON2)
    yield repository
    repository.close()


def test_v1_shows_older_rows_in_the_current_class(v1: SqliteRepository) -> None:
    def shown(window: ReadWindow) -> list[tuple[Any, ...]]:
        return [
            (r["commit_id"], r["id"], r["full_name"], r["age"], r["tier"])
            for r in values(v1, PERSON2, window)
        ]

    assert shown(ReadWindow(as_of=1)) == [
        (1, "a", "Ann", 1.0, "Standard"),
        (1, "b", "Bob", 2.0, "Standard"),
    ]
    assert [row[:3] for row in shown(ReadWindow(history=True))] == [
        (1, "a", "Ann"),
        (1, "b", "Bob"),
        (2, "a", "Anna"),
        (3, "a", "Anna"),
        (3, "b", "Bob"),
    ]


def test_v1_filters_older_rows_by_what_they_are_now(v1: SqliteRepository) -> None:
    spec = current(v1, PERSON2)

    def asked(condition: Any, **when: Any) -> list[tuple[int, str]]:
        answer = v1.executor().rows(QuerySpec(spec, where=condition, when=When(**when)))
        return [
            (row["commit_id"], row["id"]) for batch in answer.batches for row in batch.to_pylist()
        ]

    assert asked(Person2.full_name == "Ann", history=True) == [(1, "a")]
    assert asked(Person2.age == 2.0, as_of=1) == [(1, "b")]
    assert asked(Person2.tier == "Standard", history=True, since=1) == [
        (2, "a"),
        (3, "a"),
        (3, "b"),
    ]


def test_v1_names_the_way_to_rows_that_do_not_become_the_current_class(path: Path) -> None:
    step = Upgrader(
        "Person", 1, lambda row: {"id": row["id"], "full_name": row["name"], "born": 2000}
    )
    with closing(open_at(path, "v1")) as repository:
        write(repository, PERSON, person("a"))
        migrate(repository, PERSON3, upgraders=[step])
        assert [row["born"] for row in values(repository, PERSON3)] == [2000]
        for window in (ReadWindow(as_of=1), ReadWindow(history=True)):
            with pytest.raises(SchemaOutdatedError, match=r"\.upgraded\(\).*\.raw\('Person'"):
                values(repository, PERSON3, window)
        assert len(values(repository, PERSON3, ReadWindow(history=True, since=1))) == 1
        assert len(version_values(repository, PERSON.ref, 1)) == 1
        spec = current(repository, PERSON3)
        with pytest.raises(SchemaOutdatedError, match="schema version 1"):
            list(repository.executor().rows(QuerySpec(spec, when=When(history=True))).batches)
        assert verify_storage(repository, deep=True).findings == []


def test_v1_keeps_following_a_field_through_several_versions(path: Path) -> None:
    class Person4(Entity, name="Person"):
        id: Field[str] = Field(primary_key=True)
        called: Field[str] = Field(renamed_from="full_name")
        age: Field[float | str]
        tier: Field[str] = Field(default="Standard")
        name: Field[str | None] = Field(default=None)  # another field than the first version's

    with closing(open_at(path, "v1")) as repository:
        write(repository, PERSON, person("a", "Ann", 1))
        migrate(repository, PERSON2)
        migrate(repository, spec_of(Person4))
        history = values(repository, spec_of(Person4), ReadWindow(history=True))
        assert [(r["commit_id"], r["called"], r["age"], r["name"]) for r in history] == [
            (1, "Ann", "1.0", None),
            (2, "Ann", "1.0", None),
            (3, "Ann", "1.0", None),
        ]


# --- dropped, renamed, created anew -------------------------------------------------------------


def asked(repository: SqliteRepository, spec: TypeSpec, **when: Any) -> tuple[list[Any], list[Any]]:
    answer = repository.executor().rows(QuerySpec(spec, when=When(**when)))
    return [row for batch in answer.batches for row in batch.to_pylist()], [*answer.diagnostics]


def test_a_dropped_type_is_empty_and_takes_no_writes(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"))
    assert drop(repository, PERSON) == 2
    for when in ({}, {"as_of": 1}, {"history": True}):
        assert asked(repository, PERSON, **when) == (
            [],
            [{"reason": "type_dropped", "dropped_commit_id": 2}],
        )
    assert repository.read(PERSON).num_rows == 0
    with pytest.raises(TypeDroppedError, match="commit 2"):
        repository.commit(CommitRequest([TypeInput(PERSON, table=rows(PERSON, [person("b")]))]))
    assert (repository.known_types(), repository.type_refs()) == ([], [])
    assert repository.stored_types([PERSON.ref]) == []
    commit = repository.get_commit(2)
    assert commit is not None
    assert (commit.kind, json.loads(commit.metadata["dropped_types"])) == (
        "drop",
        [{"type_kind": "entity", "type_name": "Person"}],
    )
    assert repository.list_commit_changes(2) == []
    assert len(repository.list_commit_changes(1)) == 1
    assert len(version_values(repository, PERSON.ref, 1)) == 1
    with pytest.raises(MigrationTokenError, match="dropped"):
        drop(repository, PERSON)
    assert verify_storage(repository, deep=True).findings == []


@pytest.mark.parametrize("purge", [False, True])
def test_a_type_created_anew_has_none_of_its_old_rows(
    repository: SqliteRepository, purge: bool
) -> None:
    write(repository, PERSON, person("a"), person("b"))
    drop(repository, PERSON, purge=purge)
    assert repository.type_histories()[PERSON.ref].purged is purge
    migrate(repository, PERSON)
    history = repository.type_histories()[PERSON.ref]
    assert [v.version for v in history.versions] == [1, 2]
    assert (history.dropped_commit_id, history.purged) == (None, False)
    assert values(repository, PERSON) == []
    row = person("b", "Bea")
    write(repository, current(repository, PERSON), row)
    assert [r["name"] for r in values(repository, PERSON)] == ["Bea"]
    assert [r["commit_id"] for r in values(repository, PERSON, ReadWindow(history=True))] == [4]
    spec = current(repository, PERSON)
    remark = {"reason": "commit_before_activation", "activation_commit_id": 3}
    remarks = [remark] if repository.engine_version == "v2" else []
    assert asked(repository, spec, as_of=1) == ([], remarks)
    (change,) = repository.list_commit_changes(4)
    assert change["operation"] == "insert"
    assert len(version_values(repository, PERSON.ref, 1)) == (0 if purge else 2)
    assert len(version_values(repository, PERSON.ref, 2)) == 1
    assert repository.list_commit_changes(1) == [] if purge else True
    assert verify_storage(repository, deep=True).findings == []
    assert drop(repository, PERSON) == 5
    assert repository.type_histories()[PERSON.ref].dropped_commit_id == 5


def test_purging_takes_the_rows_and_leaves_markers(
    path: Path, repository: SqliteRepository
) -> None:
    write(repository, PERSON, person("a"))
    migrate(repository, PERSON2)
    write(repository, LIKES, likes("a", "a"))
    drop(repository, LIKES)
    drop(repository, PERSON2, purge=True)
    names = {name for (name,) in sql(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert not [n for n in names if n.startswith("entity_Person")]
    if repository.engine_version == "v1":
        assert sql(path, "SELECT * FROM entity_history") == []
        assert len(sql(path, "SELECT * FROM relation_history")) == 1
    assert sql(path, "SELECT * FROM dropped_types ORDER BY dropped_commit_id") == [
        ("relation", "Likes", 4, 0, None),
        ("entity", "Person", 5, 1, None),
    ]
    history = repository.type_histories()[PERSON.ref]
    assert [v.version for v in history.versions] == [1, 2]
    assert (history.purged, history.dropped_commit_id) == (True, 5)
    assert asked(repository, PERSON, schema_version=1)[0] == []
    assert repository.list_commit_changes(2) == []
    assert verify_storage(repository, deep=True).findings == []


def test_a_dropped_type_can_be_purged_later(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"))
    assert drop(repository, PERSON) == 2
    assert drop(repository, PERSON, purge=True) == 3
    history = repository.type_histories()[PERSON.ref]
    assert (history.dropped_commit_id, history.purged) == (2, True)
    assert asked(repository, PERSON, schema_version=1) == ([], [])
    assert repository.list_commit_changes(1) == []
    assert verify_storage(repository, deep=True).findings == []
    migrate(repository, PERSON)
    assert values(repository, PERSON) == []


def test_a_rename_takes_the_rows_along(repository: SqliteRepository) -> None:
    write(repository, PERSON, person("a"))
    write(repository, PERSON, person("b"))
    outcome = migrate(repository, CLIENT)
    assert outcome.rows == {CLIENT.ref: 2}
    assert [row["id"] for row in values(repository, CLIENT)] == ["a", "b"]
    old, new = (repository.type_histories()[ref] for ref in (PERSON.ref, CLIENT.ref))
    assert (old.dropped_commit_id, old.renamed_to, old.current) == (3, "Client", None)
    assert (new.renamed_from, [v.version for v in new.versions]) == ("Person", [2])
    with pytest.raises(TypeDroppedError, match="write to Client"):
        write(repository, PERSON, person("c"))
    assert asked(repository, PERSON)[1] == [{"reason": "type_dropped", "dropped_commit_id": 3}]
    assert repository.type_refs() == [CLIENT.ref]
    assert verify_storage(repository, deep=True).findings == []


# --- what is checked ----------------------------------------------------------------------------


def test_a_migration_that_was_planned_on_another_version_is_refused(
    repository: SqliteRepository, path: Path
) -> None:
    write(repository, PERSON, person("a"))
    late = request_for(repository, PERSON2)
    migrate(repository, PERSON2)
    before = all_of_it(path)
    with pytest.raises(MigrationTokenError, match="has schema version 2 now"):
        repository.migrate(late)
    assert all_of_it(path) == before


def test_an_upgrader_that_fails_leaves_everything_as_it_was(
    repository: SqliteRepository, path: Path
) -> None:
    def failing(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == "k7":
            raise ValueError("no")
        return {"id": row["id"], "full_name": row["name"], "born": 1}

    write(repository, PERSON, *(person(f"k{n}") for n in range(10)))
    before = all_of_it(path)
    with pytest.raises(MigrationError, match="Person 'k7'") as caught:
        migrate(repository, PERSON3, upgraders=[Upgrader("Person", 1, failing)])
    assert caught.value.old == {"id": "k7", "name": "Ann", "age": 1}
    assert all_of_it(path) == before
    migrate(repository, PERSON2)


def test_verify_finds_layouts_that_contradict_the_versions(path: Path) -> None:
    with closing(open_at(path, "v2")) as repository:
        write(repository, PERSON, person("a"))
        migrate(repository, PERSON2)
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE type_layout_catalog SET is_current = 1 - is_current")
        messages = [finding.message for finding in verify_storage(repository).findings]
        assert any("version 1 of the entity Person is marked as current" in m for m in messages)
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("UPDATE type_layout_catalog SET is_current = 1 - is_current")
            other.execute("DROP TABLE entity_Person_v1")
        messages = [finding.message for finding in verify_storage(repository).findings]
        assert any("has no table entity_Person_v1" in m for m in messages)


def test_files_of_the_format_before_open_and_migrate(path: Path, engine: str) -> None:
    with closing(open_at(path, engine)) as repository:
        write(repository, PERSON, person("a"))
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DROP TABLE dropped_types")
        other.execute("UPDATE storage_meta SET value = '2' WHERE key = 'format'")
    with closing(open_at(path, engine)) as repository:
        assert repository.type_refs() == [PERSON.ref]
        assert len(values(repository, PERSON)) == 1
        assert repository.storage_info()["format"] == 2
        migrate(repository, PERSON2)
        assert repository.storage_info()["format"] == 3
        assert len(values(repository, PERSON2)) == 1


# --- rows that SQLite copies by itself ----------------------------------------------------------


class Wide(Entity):
    id: Field[str] = Field(primary_key=True)
    text: Field[str]
    number: Field[int]
    maybe_number: Field[int | None] = Field(default=None)
    real: Field[float]
    moment: Field[datetime]
    raw: Field[bytes | None] = Field(default=None)
    price: Field[Decimal] = Field(precision=10, scale=2)
    tags: Field[list[str]] = Field(default_factory=list)


class Wider(Entity, name="Wide"):
    id: Field[str] = Field(primary_key=True)
    label: Field[str | None] = Field(renamed_from="text", index=True)
    number: Field[float]
    maybe_number: Field[float | None] = Field(default=None)
    real: Field[float]
    moment: Field[datetime]
    raw: Field[bytes | None] = Field(default=None)
    price: Field[Decimal] = Field(precision=10, scale=2)
    tags: Field[list[str]] = Field(default_factory=list)
    new_text: Field[str] = Field(default="it's")
    new_number: Field[int] = Field(default=7)
    new_real: Field[float] = Field(default=1)
    new_flag: Field[bool] = Field(default=True)
    new_moment: Field[datetime] = Field(default=datetime(2024, 1, 2, 3, tzinfo=UTC))
    new_day: Field[date] = Field(default=date(2024, 1, 2))
    new_raw: Field[bytes] = Field(default=b"\x00\xff")
    new_list: Field[list[int]] = Field(default_factory=list)
    new_mixed: Field[int | str] = Field(default="x")
    new_price: Field[Decimal] = Field(precision=10, scale=2, default=Decimal("1.50"))
    nothing: Field[int | None] = Field(default=None)


WIDE, WIDER = spec_of(Wide), spec_of(Wider)


def wide(number: int) -> dict[str, Any]:
    key = f"k{number}"
    return {
        "entity_key": key,
        "id": key,
        "text": f"t{number}\u00e4",
        "number": number - 5,
        "maybe_number": None if number % 3 else number,
        "real": number / 7,
        "moment": datetime(2020, 1, 1, tzinfo=UTC) + timedelta(microseconds=number),
        "raw": None if number % 2 else bytes([number]),
        "price": Decimal(number) / 100,
        "tags": json.dumps([f"x{number}"] * (number % 3)),
    }


def test_what_sqlite_copies_is_what_python_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_migration, "COPIED_ROWS", 4)
    monkeypatch.setattr(sqlite_migration, "BATCH_ROWS", 4)
    made = []
    for way in ("copied", "rewritten"):
        with closing(open_at(tmp_path / f"{way}.db", "v2")) as repository:
            write(repository, WIDE, *(wide(n) for n in range(18)))
            write(repository, WIDE, *(wide(n) | {"text": "again"} for n in range(0, 18, 5)))
            told: list[int] = []
            request = request_for(repository, WIDER, progress=lambda _, n, t=told: t.append(n))
            (migration,) = request.migrations
            fields = copied_fields(migration)
            assert fields is not None
            assert len(fields.widened) == 2
            if way == "rewritten":
                monkeypatch.setattr(sqlite_migration, "copied_fields", lambda _: None)
            assert repository.migrate(request).rows == {WIDER.ref: 18}
            assert sum(told) == 18
            assert len(told) > 4
            assert verify_storage(repository, deep=True).findings == []
            assert {r["id"]: r["label"] for r in values(repository, WIDER)}["k5"] == "again"
        path = tmp_path / f"{way}.db"
        names = [name for _, name, *_ in sql(path, "PRAGMA table_info(entity_Wide_v2)")]
        typed = ", ".join(f'"{n}", typeof("{n}")' for n in names)
        made.append(sql(path, f"SELECT {typed} FROM entity_Wide_v2 ORDER BY entity_key"))
    assert len(made[0]) == 18
    assert made[0] == made[1]


@pytest.mark.parametrize("number", [2**53, 2**53 + 1, -(2**63), 2**63 - 1])
def test_an_integer_that_no_float_holds_is_refused_with_its_key(
    path: Path, engine: str, number: int
) -> None:
    with closing(open_at(path, engine)) as repository:
        write(repository, PERSON, person("a"), person("b", age=number))
        if number == 2**53:
            migrate(repository, PERSON2)
            assert values(repository, PERSON2)[1]["age"] == 2.0**53
            return
        with pytest.raises(MigrationError, match="Person 'b'"):
            migrate(repository, PERSON2)
        assert repository.head_commit_id() == 1


def test_defaults_that_are_computed_differ_from_row_to_row(
    repository: SqliteRepository,
) -> None:
    class WithToken(Entity, name="Person"):
        id: Field[str] = Field(primary_key=True)
        name: Field[str]
        age: Field[int]
        token: Field[str] = Field(default_factory=lambda: uuid4().hex)

    write(repository, PERSON, person("a"), person("b"))
    migrate(repository, spec_of(WithToken))
    assert len({row["token"] for row in values(repository, spec_of(WithToken))}) == 2


def test_in_memory(engine: str) -> None:
    with closing(open_at(":memory:", engine)) as repository:
        write(repository, PERSON, person("a"))
        migrate(repository, PERSON2)
        assert [row["full_name"] for row in values(repository, PERSON2)] == ["Ann"]
        drop(repository, PERSON2)
        assert repository.type_refs() == []


def test_relations_and_entities_of_one_name_are_apart(repository: SqliteRepository) -> None:
    class Thing(Entity):
        id: Field[str] = Field(primary_key=True)

    class ThingRelation(Relation[Thing, Thing], name="Thing"):
        n: Field[int]

    class WiderRelation(Relation[Thing, Thing], name="Thing"):
        n: Field[float]

    relation = spec_of(ThingRelation)
    write(repository, spec_of(Thing), {"entity_key": "a", "id": "a"})
    row = {"left_key": "a", "right_key": "a", "instance_key": "", "n": 1}
    write(repository, relation, row)
    migrate(repository, spec_of(WiderRelation))
    drop(repository, spec_of(WiderRelation))
    assert repository.type_refs() == [("entity", "Thing")]
    assert len(values(repository, spec_of(Thing))) == 1
    assert verify_storage(repository, deep=True).findings == []


def test_v1_traversals_and_aggregates_see_older_rows_as_they_are_now(path: Path) -> None:
    with closing(open_at(path, "v1")) as repository:
        write(repository, PERSON, person("a", "Ann", 1), person("b", "Bob", 2))
        write(repository, LIKES, likes("a", "b"))
        migrate(repository, PERSON2, LIKES2)
        people, likes2 = current(repository, PERSON2), current(repository, LIKES2)
        asked = QuerySpec(people, when=When(as_of=2)).followed(likes2, backwards=False, call="via")
        answer = repository.executor().traverse(asked)
        assert answer.sources.column("full_name").to_pylist() == ["Ann"]
        assert answer.relations[0].column("note").to_pylist() == [None]
        total = repository.executor().aggregate(
            QuerySpec(
                people,
                when=When(as_of=1),
                aggregates=(("total", total_of(Person2.age)),),
                where=Person2.full_name != "Ann",
            )
        )
        assert total.to_pylist() == [{"total": 2.0}]
