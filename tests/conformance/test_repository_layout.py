"""What the engines write, and how a storage finds its engine again (RFC 0009).

Columns and files are part of the format: other programs read them.
"""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from storage_engine.errors import (
    AlreadyInitializedError,
    ConfigurationError,
    IntegrityError,
    OntologiaError,
    UninitializedStorageError,
    UnsupportedEngineError,
)
from storage_engine.model import Entity, Field, spec_of
from storage_engine.repository import ReadWindow, Repository, initialize_storage, open_repository
from storage_engine.repository.object.engine import S3RepositoryV1, S3RepositoryV2
from storage_engine.repository.sqlite import SqliteRepositoryV1, SqliteRepositoryV2
from tests.engines import (
    CUSTOMER,
    EMPLOYMENT,
    EVERYTHING,
    LOCAL,
    Storage,
    commit,
    customer,
    edge,
    new_storage,
    put,
    rows_of,
    stream_of,
)

CLASSES: dict[tuple[str, str], Any] = {
    ("sqlite", "v1"): SqliteRepositoryV1,
    ("sqlite", "v2"): SqliteRepositoryV2,
    ("directory", "v1"): S3RepositoryV1,
    ("directory", "v2"): S3RepositoryV2,
}

EVERY_ROW = {
    "entity_key": "e",
    "id": "e",
    "text": "text",
    "number": 42,
    "real": 0.5,
    "flag": True,
    "moment": datetime(2024, 2, 29, 12, 0, 0, 123_456, tzinfo=UTC),
    "day": date(2024, 2, 29),
    "raw": b"\x00\xff",
    "maybe": None,
    "maybe_number": 7,
    "tags": '["a","b"]',
    "counts": '{"n":1}',
    "mixed": '"text"',
    "anything": '{"deep":[1,null]}',
}


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """A place for a storage of each engine on this machine; nothing is there yet."""
    return new_storage(str(request.param), request, tmp_path)


@pytest.fixture(params=["directory-v1", "directory-v2", "seaweedfs-v2"])
def on_objects(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    made = new_storage(str(request.param), request, tmp_path)
    initialize_storage(made.uri, made.engine_version, made.config())
    return made


@pytest.fixture
def repository(on_objects: Storage) -> Iterator[Repository]:
    opened = on_objects.open()
    yield opened
    opened.close()


def class_of(repository: Repository) -> type[Any]:
    return type(repository)


def made(storage: Storage) -> Storage:
    initialize_storage(storage.uri, storage.engine_version)
    return storage


# --- Parquet files (RFC 0004 2.5, RFC 0009 4.2 and 5.3) -----------------------------------------


def files_of(storage: Storage, prefix: str) -> dict[str, pq.ParquetFile]:
    """Parquet files by key, without the attempt's random part."""
    store = storage.objects()
    try:
        keys = [i.key for i in store.list(prefix) if i.key.endswith(".parquet")]
        found = {key: pq.ParquetFile(io.BytesIO(store.get(key).data)) for key in keys}
    finally:
        store.close()
    return {_without_attempt(key): file for key, file in found.items()}


def _without_attempt(key: str) -> str:
    first, attempt, rest = key.split("/", 2)
    return f"{first}/{attempt.split('-')[0] if '-' in attempt else '*'}/{rest}"


def columns_of(file: pq.ParquetFile) -> list[tuple[str, str, bool, int]]:
    """Name, Arrow type, nullable and field id, in order."""
    return [
        (f.name, str(f.type), f.nullable, int(f.metadata[b"PARQUET:field_id"]))
        for f in file.schema_arrow
    ]


ENTITY_SYSTEM = [
    ("commit_id", "int64", False, 1),
    ("entity_type", "string", False, 2),
    ("entity_key", "string", False, 4),
    ("schema_version_id", "int64", False, 8),
]
RELATION_SYSTEM = [
    ("commit_id", "int64", False, 1),
    ("relation_type", "string", False, 3),
    ("left_key", "string", False, 5),
    ("right_key", "string", False, 6),
    ("instance_key", "string", False, 7),
    ("schema_version_id", "int64", False, 8),
]
EVERYTHING_FIELDS = [
    ("id", "string", False, 1001),
    ("text", "string", False, 1002),
    ("number", "int64", False, 1003),
    ("real", "double", False, 1004),
    ("flag", "bool", False, 1005),
    ("moment", "timestamp[us, tz=UTC]", False, 1006),
    ("day", "date32[day]", False, 1007),
    ("raw", "binary", False, 1008),
    ("maybe", "string", True, 1009),
    ("maybe_number", "int64", True, 1010),
    ("tags", "string", False, 1011),
    ("counts", "string", False, 1012),
    ("mixed", "string", False, 1013),
    ("anything", "string", True, 1014),
]
FIELDS_JSON = ("fields_json", "string", False, 9)


def test_rfc0009_5_parquet_columns(on_objects: Storage, repository: Repository) -> None:
    commit(
        repository,
        rows_of(EVERYTHING, EVERY_ROW),
        rows_of(EMPLOYMENT, edge("a", "p", "1", role="dev")),
    )
    files = files_of(on_objects, "commits/")
    old = on_objects.engine_version == "v1"
    version = "" if old else "/v1"
    assert sorted(files) == [
        f"commits/1/entities/Everything{version}.parquet",
        f"commits/1/relations/Employment{version}.parquet",
    ]
    entity, relation = (files[name] for name in sorted(files))
    extra = [FIELDS_JSON] if old else []
    assert columns_of(entity) == [*ENTITY_SYSTEM, *EVERYTHING_FIELDS, *extra]
    role = ("role", "string", False, 1001)
    # The instance key is identity alone; other fields keep the ids they were declared with.
    found = columns_of(relation)
    assert [c[:3] for c in found] == [c[:3] for c in (*RELATION_SYSTEM, role, *extra)]
    assert [c[3] for c in found[:6]] == [c[3] for c in RELATION_SYSTEM]


def test_rfc0009_5_parquet_values(on_objects: Storage, repository: Repository) -> None:
    commit(repository, rows_of(EVERYTHING, EVERY_ROW))
    (file,) = files_of(on_objects, "commits/").values()
    (row,) = file.read().to_pylist()
    system = {"commit_id": 1, "entity_type": "Everything", "schema_version_id": 1}
    payload = row.pop("fields_json", None)
    assert row == {**system, **EVERY_ROW}
    if on_objects.engine_version == "v2":
        assert payload is None
        return
    assert json.loads(payload) == {
        "id": "e",
        "text": "text",
        "number": 42,
        "real": 0.5,
        "flag": True,
        "moment": "2024-02-29T12:00:00.123456+00:00",
        "day": "2024-02-29",
        "raw": "AP8=",
        "maybe": None,
        "maybe_number": 7,
        "tags": ["a", "b"],
        "counts": {"n": 1},
        "mixed": "text",
        "anything": {"deep": [1, None]},
    }


def test_bulk_parts_get_their_commit_from_the_manifest(
    on_objects: Storage, repository: Repository
) -> None:
    """v2 stages parts without the column; v1 has no staged parts."""
    commit(repository, stream_of(CUSTOMER, [customer("a")]))
    repository.flush()
    staged = files_of(on_objects, "staged/")
    if on_objects.engine_version == "v1":
        assert not staged
        return
    assert list(staged) == ["staged/*/entities/Customer/v1/part-00000.parquet"]
    (part,) = staged.values()
    assert [c[0] for c in columns_of(part)] == [
        "entity_type",
        "entity_key",
        "schema_version_id",
        "id",
        "name",
        "age",
    ]
    head = on_objects.document("meta/head.json")
    (described,) = on_objects.document(head["manifest_path"])["files"]
    assert described["commit_id_source"] == "manifest"
    assert repository.read(CUSTOMER, ReadWindow(history=True))["commit_id"].to_pylist() == [1]
    store = on_objects.objects()
    assert not list(store.list("meta/attempts/")), "the attempt's heartbeat stays behind"
    store.close()


def test_rfc0009_5_all_files_of_a_version_have_the_same_columns(
    on_objects: Storage, repository: Repository
) -> None:
    """Moving a line in a class changes no schema, so it may not renumber columns either."""

    class Customer(Entity):
        age: Field[int | None] = Field(default=None)
        name: Field[str]
        id: Field[str] = Field(primary_key=True)

    put(repository, customer("a"))
    moved = {"entity_key": "b", "age": 1, "name": "Ben", "id": "b"}
    commit(repository, rows_of(spec_of(Customer), moved))
    first, second = files_of(on_objects, "commits/").values()
    assert columns_of(second) == columns_of(first)


def test_rfc0004_2_manifest_head_and_index(on_objects: Storage, repository: Repository) -> None:
    put(repository, customer("a"), metadata={"why": "test"})
    put(repository, customer("b"))
    repository.flush()
    head = on_objects.document("meta/head.json")
    assert head["commit_id"] == 2
    manifest = on_objects.document(head["manifest_path"])
    parent = on_objects.document(manifest["parent_manifest_path"])
    assert (manifest["commit_id"], manifest["parent_commit_id"]) == (2, 1)
    assert (parent["parent_commit_id"], parent["parent_manifest_path"]) == (None, None)
    assert (parent["metadata"], parent["runtime_id"]) == ({"why": "test"}, "ontologia")
    (file,) = manifest["files"]
    wanted = {"kind": "entity", "type_name": "Customer", "row_count": 1, "schema_version_id": 1}
    assert wanted.items() <= file.items()
    assert file["path"].startswith(head["manifest_path"].rpartition("/")[0])

    index = on_objects.document("meta/indices/entities/Customer.json")
    assert (index["type_name"], index["max_indexed_commit"]) == ("Customer", 2)
    spans = [(e["min_commit_id"], e["max_commit_id"]) for e in index["entries"]]
    assert spans == [(1, 1), (2, 2)]
    assert index["entries"][1]["path"] == file["path"]
    types = on_objects.document("meta/schema/types.json")
    assert (types["entities"], types["relations"]) == (["Customer"], [])
    if on_objects.engine_version == "v2":
        assert (index["current_schema_version_id"], index["activation_commit_id"]) == (1, 1)
        assert [e["schema_version_id"] for e in index["entries"]] == [1, 1]
        (layout,) = on_objects.document("meta/type_layout_catalog.json")["layouts"]
        assert layout == {
            "type_kind": "entity",
            "type_name": "Customer",
            "schema_version_id": 1,
            "activation_commit_id": 1,
            "is_current": True,
        }


# --- SQLite tables (RFC 0009 3 and 5.2) ---------------------------------------------------------


def sqlite_columns(path: Path, table: str) -> dict[str, tuple[str, bool]]:
    """Declared type and NOT NULL by column, in order."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"PRAGMA table_info('{table}')").fetchall()
    return {name: (kind, bool(not_null)) for _, name, kind, not_null, _, _ in rows}


def sqlite_row(path: Path, table: str) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        (row,) = connection.execute(f"SELECT * FROM {table}").fetchall()
    return dict(row)


SYSTEM = {"commit_id": 1, "entity_key": "e", "schema_version_id": 1}


def test_rfc0009_5_sqlite_v2_columns(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    storage = made(new_storage("sqlite-v2", request, tmp_path))
    with closing(storage.open()) as repository:
        commit(repository, rows_of(EVERYTHING, EVERY_ROW))
        commit(repository, rows_of(EMPLOYMENT, edge("a", "p", "1", role="dev")))
    columns = sqlite_columns(storage.path, "entity_Everything_v1")
    fields = {name: columns[name] for name in (f.name for f in EVERYTHING.fields)}
    assert fields == {
        "id": ("TEXT", True),
        "text": ("TEXT", True),
        "number": ("INTEGER", True),
        "real": ("REAL", True),
        "flag": ("INTEGER", True),
        "moment": ("TEXT", True),
        "day": ("TEXT", True),
        "raw": ("BLOB", True),
        "maybe": ("TEXT", False),
        "maybe_number": ("INTEGER", False),
        "tags": ("TEXT", True),
        "counts": ("TEXT", True),
        "mixed": ("TEXT", True),
        "anything": ("TEXT", False),
    }
    assert columns.keys() - fields.keys() == {"commit_id", "entity_key", "schema_version_id"}
    assert sqlite_row(storage.path, "entity_Everything_v1") == {
        **SYSTEM,
        **EVERY_ROW,
        "flag": 1,
        "moment": "2024-02-29T12:00:00.123456Z",
        "day": "2024-02-29",
    }
    relation = sqlite_columns(storage.path, "relation_Employment_v1")
    assert relation.keys() == {*EMPLOYMENT.identity, "commit_id", "schema_version_id", "role"}


def test_rfc0009_5_sqlite_v1_keeps_fields_json(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    storage = made(new_storage("sqlite-v1", request, tmp_path))
    with closing(storage.open()) as repository:
        commit(repository, rows_of(EVERYTHING, EVERY_ROW))
    row = sqlite_row(storage.path, "entity_history")
    payload = json.loads(row.pop("fields_json"))
    assert row == {**SYSTEM, "entity_type": "Everything"}
    assert (payload["tags"], payload["day"]) == (["a", "b"], "2024-02-29")
    assert payload["moment"] == "2024-02-29T12:00:00.123456+00:00"


# --- engine metadata and dispatch (RFC 0009 7 and "Test Plan") ----------------------------------


def test_rfc0009_dispatch_by_the_version_it_was_made_with(local: Storage) -> None:
    plan = initialize_storage(local.uri, local.engine_version)
    assert (plan.backend, plan.engine_version, plan.applied) == (
        local.backend,
        local.engine_version,
        True,
    )
    for _ in range(2):  # empty, and with a commit
        with closing(local.open()) as repository:
            assert class_of(repository) is CLASSES[local.backend, local.engine_version]
            assert repository.storage_info()["engine_version"] == local.engine_version
            commit(repository, rows_of(CUSTOMER, customer("a")))


@pytest.mark.parametrize("name", ["sqlite-v2", "directory-v2"])
def test_rfc0009_default_is_the_latest_engine(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    storage = new_storage(name, request, tmp_path)
    assert initialize_storage(storage.uri).engine_version == "v2"
    with closing(storage.open()) as repository:
        assert class_of(repository) is CLASSES[storage.backend, "v2"]


def test_rfc0009_a_new_sqlite_file_is_the_latest_engine(tmp_path: Path) -> None:
    with closing(open_repository(tmp_path / "new.db")) as repository:
        assert class_of(repository) is SqliteRepositoryV2
        assert not (tmp_path / "new.db").exists()


def test_rfc0009_unknown_version_is_refused_at_init(local: Storage) -> None:
    with pytest.raises(ConfigurationError, match="v1, v2"):
        initialize_storage(local.uri, "v9")
    if local.backend == "directory":
        with pytest.raises(UninitializedStorageError):
            local.open()


def test_a_storage_is_made_once(local: Storage) -> None:
    made(local)
    with closing(local.open()) as repository:
        put(repository, customer("a"))
    with pytest.raises(AlreadyInitializedError) as caught:
        initialize_storage(local.uri, local.engine_version)
    assert caught.value.commit_id == 1
    with closing(local.open()) as repository:
        assert repository.read(CUSTOMER).num_rows == 1


def stamp(storage: Storage, **changes: Any) -> None:
    """Change what a storage says of itself; None takes a statement away."""
    if storage.backend == "sqlite":
        with closing(sqlite3.connect(storage.path)) as connection, connection:
            for key, value in changes.items():
                connection.execute(
                    "UPDATE storage_meta SET value = ? WHERE key = ?", (str(value), key)
                )
        return
    store = storage.objects()
    found = json.loads(store.get("meta/engine.json").data)
    store.put("meta/engine.json", json.dumps({**found, **changes}).encode())
    store.close()


def unstamp(storage: Storage) -> None:
    """As before there were engine versions."""
    if storage.backend == "sqlite":
        with closing(sqlite3.connect(storage.path)) as connection, connection:
            connection.execute("DROP TABLE storage_meta")
        return
    store = storage.objects()
    store.delete_many(["meta/engine.json"])
    store.close()


def test_rfc0009_unknown_engine_is_refused(local: Storage) -> None:
    made(local)
    stamp(local, engine_version="v9")
    with pytest.raises(UnsupportedEngineError, match="v9") as caught:
        local.open()
    assert caught.value.engine_version == "v9"
    assert caught.value.backend == ("sqlite" if local.backend == "sqlite" else "s3")  # as stamped
    assert "upgrade ontologia first" in str(caught.value)


def test_rfc0009_future_format_is_refused(local: Storage) -> None:
    made(local)
    stamp(local, format=99)
    with pytest.raises(UnsupportedEngineError, match="upgrade ontologia first") as caught:
        local.open()
    assert caught.value.format == 99


def test_a_stamp_that_makes_no_sense_is_an_error_of_ours(local: Storage) -> None:
    made(local)
    stamp(local, format="many")
    with pytest.raises(OntologiaError):
        local.open()


def test_a_broken_stamp_is_an_error_of_ours(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    storage = made(new_storage("directory-v2", request, tmp_path))
    store = storage.objects()
    for broken in (b"", b"not json", b"[]"):
        store.put("meta/engine.json", broken)
        with pytest.raises(IntegrityError, match=r"engine\.json"):
            storage.open()
    store.close()


@pytest.mark.parametrize("name", ["sqlite-v1", "directory-v1"])
def test_rfc0009_storage_without_a_stamp_is_v1(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    storage = made(new_storage(name, request, tmp_path))
    with closing(storage.open()) as repository:
        put(repository, customer("a"))
    unstamp(storage)
    with closing(storage.open()) as repository:
        assert class_of(repository) is CLASSES[storage.backend, "v1"]
        assert repository.read(CUSTOMER).num_rows == 1
        assert repository.storage_info()["format"] == 0, "reading has stamped it"
        put(repository, customer("b"))
    # The first commit after brings it to the current format.
    with closing(storage.open()) as repository:
        assert repository.storage_info()["format"] == 3
        assert class_of(repository) is CLASSES[storage.backend, "v1"]
        assert repository.read(CUSTOMER).num_rows == 2


def test_an_uninitialised_object_storage_says_what_to_do(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    storage = new_storage("directory-v2", request, tmp_path)
    with pytest.raises(UninitializedStorageError, match="onto init"):
        storage.open()
    assert list(tmp_path.iterdir()) == []


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but SQLite's shared memory, which readers of a log must have."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


def test_reads_never_write(local: Storage, tmp_path: Path) -> None:
    made(local)
    with closing(local.open()) as repository:
        put(repository, customer("a"))
        put(repository, customer("a", "Bea"))
    before = contents(tmp_path)
    with closing(local.open()) as repository:
        repository.head_commit_id()
        repository.type_head(CUSTOMER)
        for window in (ReadWindow(), ReadWindow(as_of=1), ReadWindow(history=True)):
            repository.read(CUSTOMER, window)
            repository.read(EVERYTHING, window)
        repository.list_commits()
        repository.get_commit(1)
        repository.list_commit_changes(2)
        repository.storage_info()
        commit(repository, rows_of(CUSTOMER, customer("a", "Bea")))
        repository.flush()
    assert contents(tmp_path) == before
