"""The test plan of RFC 0009 for migrations and dropped types, line by line, against the port.

All engines get the same requests. Where v1 differs by the specification (all versions are read
together) a test says so by `versions_apart`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import pyarrow as pa
import pytest

from storage_engine.errors import (
    MigrationError,
    MigrationTokenError,
    SchemaOutdatedError,
    TypeDroppedError,
)
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model import Entity, Field, Relation, TypeSpec, spec_of
from storage_engine.query.results import Rows
from storage_engine.query.spec import QuerySpec, When
from storage_engine.repository import ReadWindow, Repository
from storage_engine.schema.migration import (
    MigrationOutcome,
    MigrationPlan,
    MigrationRequest,
    TypeDrop,
    plan_migration,
)
from storage_engine.schema.upgraders import UpgraderSource, resolve_upgraders
from tests.engines import Storage, commit, edge, rows_of

HISTORY = ReadWindow(history=True)


@pytest.fixture
def repository(storage: Storage) -> Iterator[Repository]:
    opened = storage.open(runtime_id="tester")
    yield opened
    opened.close()


def entity(
    name: str = "Customer", /, *, renamed_from: str | None = None, **fields: Any
) -> TypeSpec:
    annotations: dict[str, Any] = {"id": Field[str]}
    body: dict[str, Any] = {"id": Field(primary_key=True)}
    for field, declared in fields.items():
        annotations[field], options = declared if isinstance(declared, tuple) else (declared, None)
        if options is not None:
            body[field] = options
    options = {"renamed_from": renamed_from} if renamed_from is not None else {}
    made = type(name, (Entity,), {**body, "__annotations__": annotations}, **options)
    return spec_of(made)


V1 = entity(name=Field[str], age=Field[int])
V2 = entity(
    name=Field[str], age=Field[float], tier=(Field[str], Field(default="basic"))
)  # widened, and added
V3 = entity(full_name=Field[str], age=Field[float], tier=(Field[str], Field(default="basic")))


def row(key: str, **values: Any) -> dict[str, Any]:
    return {"entity_key": key, "id": key, **values}


def write(repository: Repository, spec: TypeSpec, *rows: Mapping[str, Any]) -> int:
    result = commit(repository, rows_of(spec, *rows))
    assert result is not None
    return result.commit_id


def planned(
    repository: Repository, *specs: TypeSpec, upgraders: UpgraderSource | None = None
) -> MigrationPlan:
    steps = resolve_upgraders(upgraders if upgraders is not None else {})
    return plan_migration(specs, repository.type_histories(), steps)


def migrate(
    repository: Repository,
    *specs: TypeSpec,
    upgraders: UpgraderSource | None = None,
    plan: MigrationPlan | None = None,
    **request: Any,
) -> MigrationOutcome:
    plan = plan or planned(repository, *specs, upgraders=upgraders)
    plan.require_possible()
    return repository.migrate(MigrationRequest(plan.migrations, plan.drops, **request))


def drop(repository: Repository, *names: str, purge: bool = False) -> MigrationOutcome:
    histories = repository.type_histories()
    drops = [
        TypeDrop(*h.ref, h.last.version, h.last.schema_sha256, purge=purge)
        for h in histories.values()
        if h.name in names
    ]
    return repository.migrate(MigrationRequest(drops=drops, kind="drop"))


def latest(repository: Repository, spec: TypeSpec) -> list[dict[str, Any]]:
    return _plain(spec, repository.read(spec))


def _plain(spec: TypeSpec, table: pa.Table) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    return [{name: r[name] for name in ("commit_id", *_names(spec))} for r in rows]


def _names(spec: TypeSpec) -> list[str]:
    return (
        [f.name for f in spec.fields]
        if spec.kind == "entity"
        else [
            "left_key",
            "right_key",
            *(f.name for f in spec.fields),
        ]
    )


def ask(
    repository: Repository, spec: TypeSpec, **when: Any
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]]]:
    rows: Rows = repository.executor().rows(QuerySpec(spec, when=When(**when)))
    table = pa.Table.from_batches(list(rows.batches), schema=rows.schema)
    return _plain(spec, table), [dict(d) for d in rows.diagnostics]


def versions_apart(repository: Repository) -> bool:
    """Whether typed reads cover the current version alone."""
    return repository.engine_version == "v2"


@pytest.fixture
def migrated(repository: Repository) -> Repository:
    """Three commits of version 1, then version 2 (commit 4), then a change."""
    write(repository, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
    write(repository, V1, row("a", name="Anna", age=1))
    write(repository, V1, row("c", name="Cid", age=3))
    assert migrate(repository, V2).commit_id == 4
    write(repository, V2, row("b", name="Bobby", age=2.5, tier="gold"))
    return repository


# --- typed read contract ------------------------------------------------------------------------


def test_as_of_before_activation_returns_empty_with_diagnostic_warning(
    migrated: Repository,
) -> None:
    rows, diagnostics = ask(migrated, V2, as_of=3)
    if versions_apart(migrated):
        assert rows == []
        assert diagnostics == [{"reason": "commit_before_activation", "activation_commit_id": 4}]
    else:
        assert [(r["id"], r["name"], r["age"], r["tier"]) for r in rows] == [
            ("a", "Anna", 1.0, "basic"),
            ("b", "Bob", 2.0, "basic"),
            ("c", "Cid", 3.0, "basic"),
        ]
        assert diagnostics == []


def test_with_history_includes_only_current_version_rows(migrated: Repository) -> None:
    rows, _ = ask(migrated, V2, history=True)
    commits = [r["commit_id"] for r in rows]
    assert commits == ([4, 4, 4, 5] if versions_apart(migrated) else [1, 1, 2, 3, 4, 4, 4, 5])
    assert all(isinstance(r["age"], float) and r["tier"] in ("basic", "gold") for r in rows)


def test_history_since_old_commit_starts_from_activation_boundary(migrated: Repository) -> None:
    rows, _ = ask(migrated, V2, history=True, since=2)
    commits = [r["commit_id"] for r in rows]
    assert commits == ([4, 4, 4, 5] if versions_apart(migrated) else [3, 4, 4, 4, 5])


def test_collect_returns_only_rows_from_the_current_version_partition(
    migrated: Repository,
) -> None:
    assert {r["commit_id"] for r in latest(migrated, V2)} == {4, 5}
    if migrated.objects is not None:
        plan = migrated.objects.executor().plan(V2)
        assert {item.file.schema_version_id for item in plan.rows} == {2}


def test_collect_returns_complete_latest_state_after_migration_rewrite(
    migrated: Repository,
) -> None:
    assert [(r["id"], r["name"], r["age"], r["tier"]) for r in latest(migrated, V2)] == [
        ("a", "Anna", 1.0, "basic"),
        ("b", "Bobby", 2.5, "gold"),
        ("c", "Cid", 3.0, "basic"),
    ]


def test_v1_brings_rows_of_older_versions_forward_by_the_ids_of_fields(
    repository: Repository,
) -> None:
    before = entity(a=Field[int], b=Field[str])
    renamed = entity(c=(Field[str], Field(renamed_from="b")), a=Field[int])
    after = entity(b=(Field[int], Field(default=7)), c=Field[str], a=Field[int])
    write(repository, before, row("x", a=1, b="one"))
    migrate(repository, renamed)
    migrate(repository, after)  # another field has the old name now
    rows, _ = ask(repository, after, history=True)
    shown = [(r["commit_id"], r["a"], r["b"], r["c"]) for r in rows]
    if versions_apart(repository):
        assert shown == [(3, 1, 7, "one")]
    else:
        assert shown == [(1, 1, 7, "one"), (2, 1, 7, "one"), (3, 1, 7, "one")]
        found = repository.executor().rows(
            QuerySpec(after, when=When(history=True), where=cast(Any, after.python_class).b == 7)
        )
        assert sum(batch.num_rows for batch in found.batches) == 3


def test_v1_history_that_needs_an_upgrader_says_where_to_read_it(repository: Repository) -> None:
    write(repository, V1, row("a", name="Ann", age=1))
    after = entity(name=Field[int], age=Field[int])
    migrate(repository, after, upgraders={("Customer", 1): lambda r: {**r, "name": 5}})
    assert [r["name"] for r in latest(repository, after)] == [5]
    if versions_apart(repository):
        assert [r["name"] for r in ask(repository, after, history=True)[0]] == [5]
        return
    with pytest.raises(
        SchemaOutdatedError, match=r"upgraded\(\).*raw\('Customer', schema_version=1"
    ):
        ask(repository, after, history=True)
    assert [r["name"] for r in ask(repository, after, history=True, since=1)[0]] == [5]
    assert ask(repository, after, as_of=2)[0] == latest(repository, after)


# --- write path ---------------------------------------------------------------------------------


def test_another_process_reads_what_was_migrated(storage: Storage) -> None:
    """By the index, which says which version its entries are of, on v1 too."""
    with closing(storage.open()) as repository:
        write(repository, V1, row("a", name="Ann", age=1))
        migrate(repository, V2)
    with closing(storage.open()) as repository:
        assert [r["tier"] for r in latest(repository, V2)] == ["basic"]


def test_insert_writes_to_the_correct_versioned_path(migrated: Repository) -> None:
    if migrated.objects is None or not versions_apart(migrated):
        pytest.skip("paths are of engine v2 on object stores; SQLite's tables in its own tests")
    files = migrated.objects.executor().plan(V2).rows
    assert all(f"/Customer/v{item.file.schema_version_id}" in item.file.path for item in files)


def test_insert_with_mismatched_schema_version_raises_error(migrated: Repository) -> None:
    with pytest.raises(SchemaOutdatedError, match="tier"):
        write(migrated, V1, row("d", name="Dan", age=4))
    assert migrated.head_commit_id() == 5


def test_a_reader_of_old_code_is_told_so(migrated: Repository) -> None:
    with pytest.raises(SchemaOutdatedError):
        migrated.read(V1)


# --- migration correctness ----------------------------------------------------------------------


def test_new_version_partition_created_per_migrated_type(migrated: Repository) -> None:
    history = migrated.type_histories([V1.ref])[V1.ref]
    assert [
        (v.version, v.activation_commit_id, v.superseded_at_commit_id) for v in history.versions
    ] == [
        (1, 1, 4),
        (2, 4, None),
    ]
    assert [v.spec.schema_sha256 for v in history.versions] == [V1.schema_sha256, V2.schema_sha256]
    rows, _ = ask(migrated, history.versions[0].spec, schema_version=1)
    assert [(r["id"], r["commit_id"]) for r in rows] == [("a", 2), ("b", 1), ("c", 3)]
    rows, _ = ask(migrated, history.versions[0].spec, schema_version=1, as_of=1)
    assert [(r["id"], r["name"]) for r in rows] == [("a", "Ann"), ("b", "Bob")]
    rows, _ = ask(migrated, history.versions[0].spec, schema_version=1, history=True)
    assert [(r["id"], r["commit_id"]) for r in rows] == [("a", 1), ("b", 1), ("a", 2), ("c", 3)]


def test_latest_state_rewrite_is_complete_and_typed_validation_passes(
    repository: Repository,
) -> None:
    write(repository, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
    write(repository, V1, row("a", name="Anna", age=1))
    outcome = migrate(
        repository,
        V3,
        upgraders={
            ("Customer", 1): lambda r: {
                "id": r["id"],
                "full_name": r["name"].upper(),
                "age": r["age"],
            }
        },
    )
    assert dict(outcome.rows) == {V3.ref: 2}
    assert latest(repository, V3) == [
        {"commit_id": 3, "id": "a", "full_name": "ANNA", "age": 1.0, "tier": "basic"},
        {"commit_id": 3, "id": "b", "full_name": "BOB", "age": 2.0, "tier": "basic"},
    ]


def test_a_wrong_type_out_of_an_upgrader_publishes_nothing(repository: Repository) -> None:
    write(repository, V1, row("a", name="Ann", age=1), row("b", name="Bob", age=2))
    bad = {
        ("Customer", 1): lambda r: {
            "id": r["id"],
            "full_name": r["name"],
            "age": "x" if r["id"] == "b" else 1,
        }
    }
    with pytest.raises(MigrationError, match="'b'") as caught:
        migrate(repository, V3, upgraders=bad)
    assert caught.value.old == {"id": "b", "name": "Bob", "age": 2}
    assert repository.head_commit_id() == 1
    assert [r["name"] for r in latest(repository, V1)] == ["Ann", "Bob"]


def test_activation_metadata_is_atomically_updated_with_migration_commit(
    migrated: Repository,
) -> None:
    record = migrated.get_commit(4)
    assert record is not None
    assert record.kind == "migration"
    assert record.metadata["kind"] == "migration"
    assert json.loads(record.metadata["migrated_types"]) == [
        {
            "type_kind": "entity",
            "type_name": "Customer",
            "from_schema_version_id": 1,
            "to_schema_version_id": 2,
            "rows_rewritten": 3,
        }
    ]
    if versions_apart(migrated):
        assert migrated.storage_info()["type_layouts"] == {
            "Customer": {
                "type_kind": "entity",
                "current_schema_version_id": 2,
                "activation_commit_id": 4,
                "historical_versions": [1],
            }
        }


def test_zero_row_type_migration_creates_empty_partition_and_updates_catalog(
    repository: Repository,
) -> None:
    assert migrate(repository, V1).rows == {V1.ref: 0}  # declared, and nothing of it was stored
    assert migrate(repository, V2).rows == {V2.ref: 0}
    assert latest(repository, V2) == []
    assert repository.known_types() == [V2] or repository.type_refs() == [V2.ref]
    versions = repository.type_histories()[V1.ref].versions
    assert [(v.version, v.activation_commit_id) for v in versions] == [(1, 1), (2, 2)]
    with pytest.raises(SchemaOutdatedError):
        write(repository, V1, row("a", name="Ann", age=1))
    write(repository, V2, row("a", name="Ann", age=1.5, tier="x"))
    assert latest(repository, V2) == [
        {"commit_id": 3, "id": "a", "name": "Ann", "age": 1.5, "tier": "x"}
    ]


def test_multi_type_migration_in_a_single_commit_activates_all_types(
    repository: Repository,
) -> None:
    thing1, thing2 = entity("Thing", n=Field[int]), entity("Thing", n=Field[int | None])
    write(repository, V1, row("a", name="Ann", age=1))
    write(repository, thing1, row("t", n=1))
    outcome = migrate(repository, V2, thing2)
    assert outcome.commit_id == 3
    assert dict(outcome.rows) == {V2.ref: 1, thing2.ref: 1}
    histories = repository.type_histories()
    assert {h.last.activation_commit_id for h in histories.values()} == {3}
    assert [r["n"] for r in latest(repository, thing2)] == [1]
    record = repository.get_commit(3)
    assert record is not None
    assert sorted(record.types) == ["Customer", "Thing"]


def test_relations_migrate_with_their_identities(repository: Repository) -> None:
    class Customer(Entity):
        id: Field[str] = Field(primary_key=True)

    class Knows(Relation[Customer, Customer]):
        since: Field[int]

    class KnowsNow(Relation[Customer, Customer]):
        since: Field[float]
        how: Field[str | None] = Field(default=None)

    before = spec_of(Knows)
    KnowsNow.__name__ = "Knows"
    after = TypeSpec(
        "relation", "Knows", spec_of(KnowsNow).fields, left="Customer", right="Customer"
    )
    commit(repository, rows_of(before, edge("a", "b", since=1), edge("b", "a", since=2)))
    assert dict(migrate(repository, after).rows) == {after.ref: 2}
    assert [
        (r["left_key"], r["right_key"], r["since"], r["how"]) for r in latest(repository, after)
    ] == [
        ("a", "b", 1.0, None),
        ("b", "a", 2.0, None),
    ]


def test_a_rename_brings_rows_over_and_ends_the_old_type(repository: Repository) -> None:
    write(repository, V1, row("a", name="Ann", age=1))
    client = entity("Client", renamed_from="Customer", name=Field[str], age=Field[int])
    migrate(repository, client)
    assert [r["name"] for r in latest(repository, client)] == ["Ann"]
    assert repository.type_refs() == [client.ref]
    with pytest.raises(TypeDroppedError, match="Client"):
        write(repository, V1, row("b", name="Bob", age=1))
    old, new = (repository.type_histories()[ref] for ref in (V1.ref, client.ref))
    assert (old.dropped_commit_id, old.renamed_to) == (2, "Client")
    assert new.renamed_from == "Customer"
    rows, _ = ask(repository, V1, schema_version=1)
    assert [r["name"] for r in rows] == ["Ann"]


# --- dropped types ------------------------------------------------------------------------------


def test_dropping_a_type_marks_all_layout_entries_as_not_current(migrated: Repository) -> None:
    assert drop(migrated, "Customer").commit_id == 6
    history = migrated.type_histories()[V2.ref]
    assert history.dropped_commit_id == 6
    assert history.current is None
    assert history.last.superseded_at_commit_id == 6
    assert migrated.type_refs() == []
    assert migrated.known_types() == []
    with pytest.raises(TypeDroppedError):
        write(migrated, V2, row("b", name="Bobby", age=2.5, tier="gold"))
    record = migrated.get_commit(6)
    assert record is not None
    assert record.kind == "drop"


def test_reads_for_dropped_types_return_empty(migrated: Repository) -> None:
    drop(migrated, "Customer")
    for when in ({}, {"as_of": 5}, {"history": True}, {"history": True, "since": 1}):
        rows, diagnostics = ask(migrated, V2, **when)
        assert rows == []
        assert diagnostics == [{"reason": "type_dropped", "dropped_commit_id": 6}]


def test_historical_partitions_remain_on_disk(migrated: Repository) -> None:
    drop(migrated, "Customer")
    histories = migrated.type_histories()[V2.ref].versions
    for version, ids in ((1, ["a", "b", "c"]), (2, ["a", "b", "c"])):
        spec = histories[version - 1].spec
        rows, diagnostics = ask(migrated, spec, schema_version=version)
        assert [r["id"] for r in rows] == ids
        assert diagnostics == []


def test_a_dropped_type_is_created_anew_without_its_old_rows(migrated: Repository) -> None:
    drop(migrated, "Customer")
    migrate(migrated, V1)
    assert latest(migrated, V1) == []
    assert ask(migrated, V1, history=True)[0] == []
    write(migrated, V1, row("z", name="Zoe", age=9))
    assert [r["id"] for r in latest(migrated, V1)] == ["z"]
    assert [r["id"] for r in ask(migrated, V1, history=True)[0]] == ["z"]
    assert [v.version for v in migrated.type_histories()[V1.ref].versions] == [1, 2, 3]


def test_a_dropped_type_has_no_current_layout(migrated: Repository) -> None:
    drop(migrated, "Customer")
    if versions_apart(migrated):
        assert migrated.storage_info()["type_layouts"]["Customer"] == {
            "type_kind": "entity",
            "current_schema_version_id": None,
            "activation_commit_id": None,
            "historical_versions": [1, 2],
        }


@pytest.mark.parametrize("at_once", [True, False])
def test_a_purged_type_has_no_rows_left(migrated: Repository, at_once: bool) -> None:
    if not at_once:
        drop(migrated, "Customer")
    purged = drop(migrated, "Customer", purge=True).commit_id
    history = migrated.type_histories()[V2.ref]
    assert history.purged
    assert history.dropped_commit_id == 6
    assert purged == (6 if at_once else 7)
    assert ask(migrated, history.versions[0].spec, schema_version=1)[0] == []
    assert migrated.list_commit_changes(1) == []
    assert verify_storage(migrated, deep=True).findings == []
    anew = migrate(migrated, V2).commit_id
    assert migrated.type_head(V2) == anew
    write(migrated, V2, row("n", name="New", age=1.0, tier="x"))
    write(migrated, V2, row("n", name="Newer", age=1.0, tier="x"))
    assert [r["name"] for r in latest(migrated, V2)] == ["Newer"]
    assert [r["name"] for r in ask(migrated, V2, history=True)[0]] == ["New", "Newer"]
    assert verify_storage(migrated, deep=True).findings == []
    assert not migrated.type_histories()[V2.ref].purged


def test_commit_changes_are_told_across_versions(migrated: Repository) -> None:
    def changes(commit_id: int) -> list[tuple[str, str]]:
        return [(c["key"], c["operation"]) for c in migrated.list_commit_changes(commit_id)]

    assert changes(1) == [("a", "insert"), ("b", "insert")]
    assert changes(2) == [("a", "update")]
    assert changes(4) == [("a", "update"), ("b", "update"), ("c", "update")]
    assert changes(5) == [("b", "update")]
    drop(migrated, "Customer")
    migrate(migrated, V1)
    write(migrated, V1, row("a", name="Ann", age=1))
    assert changes(8) == [("a", "insert")]
    assert changes(2) == [("a", "update")]


def test_a_storage_with_several_versions_verifies(migrated: Repository) -> None:
    assert verify_storage(migrated, deep=True).findings == []
    drop(migrated, "Customer")
    assert verify_storage(migrated, deep=True).findings == []
    migrate(migrated, V1)
    assert verify_storage(migrated, deep=True).findings == []


# --- two at once --------------------------------------------------------------------------------


def test_of_two_migrations_planned_on_the_same_versions_one_wins(repository: Repository) -> None:
    write(repository, V1, row("a", name="Ann", age=1))
    plan, other = (
        planned(repository, V2),
        planned(repository, entity(name=Field[str], age=Field[int], x=Field[int | None])),
    )
    migrate(repository, plan=plan)
    with pytest.raises(MigrationTokenError, match="version 2"):
        migrate(repository, plan=other)
    with pytest.raises(MigrationTokenError, match="version 2"):
        migrate(repository, plan=plan)
    assert repository.head_commit_id() == 2


def test_rows_that_change_while_others_are_rewritten_are_brought_along(
    repository: Repository, storage: Storage
) -> None:
    write(repository, V1, *(row(f"k{n}", name="old", age=n) for n in range(10)))
    rival = storage.open(runtime_id="rival")
    written: list[int] = []

    def meanwhile(name: str, count: int) -> None:
        if not written:
            written.append(
                write(rival, V1, row("k3", name="new", age=33), row("kx", name="x", age=1))
            )

    try:
        outcome = migrate(repository, V2, progress=meanwhile)
        rows = {r["id"]: r for r in latest(repository, V2)}
        if written and written[0] < outcome.commit_id:
            assert rows["k3"]["name"] == "new"
            assert rows["kx"]["age"] == 1.0
            assert dict(outcome.rows) == {V2.ref: 11}
        assert {r["commit_id"] for r in rows.values()} == {outcome.commit_id}
    finally:
        rival.close()
