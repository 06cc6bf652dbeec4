"""Files: created on first use, stamped, recognised, refused, migrated, erased."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from storage_engine.config import OntologiaConfig
from storage_engine.errors import (
    AlreadyInitializedError,
    IntegrityError,
    MigrationTokenError,
    StorageBackendError,
    UnsupportedEngineError,
)
from storage_engine.maintenance.integrity import verify_storage
from storage_engine.model.declarations import Entity, Relation, spec_of
from storage_engine.model.field import Field
from storage_engine.repository.protocol import CommitRequest, ReadWindow
from storage_engine.repository.sqlite import FORMAT, create, describe, detect, erase
from storage_engine.repository.sqlite.engine import SqliteRepository
from tests.repository.sqlite.support import (
    CUSTOMER,
    PRODUCT,
    commit,
    customer,
    edge,
    open_at,
    product,
    put,
)
from tests.shop import Customer

CONFIG = OntologiaConfig()


def change(path: Path, sql: str, *values: Any) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql, values)
    connection.close()


def test_reading_an_absent_file_does_not_create_it(
    repository: SqliteRepository, path: Path
) -> None:
    assert repository.head_commit_id() == 0
    assert repository.read(CUSTOMER).num_rows == 0
    assert repository.read(CUSTOMER, ReadWindow(history=True)).num_rows == 0
    assert repository.type_head(CUSTOMER) == 0
    assert repository.list_commits() == []
    assert repository.get_commit(1) is None
    assert repository.list_commit_changes(1) == []
    assert repository.known_types() == []
    assert repository.storage_info()["head_commit_id"] == 0
    assert repository.commit(CommitRequest([])) is None
    assert put(repository) is None
    assert detect(path) is None
    assert describe(path)["tables"] == {}
    assert os.listdir(path.parent) == []


def test_reading_an_empty_file_does_not_write_it(engine: str, path: Path) -> None:
    path.touch()
    repository = open_at(path, engine)
    assert repository.read(CUSTOMER).num_rows == 0
    assert detect(path) is None
    assert path.stat().st_size == 0
    assert put(repository, customer("a")) is not None


def test_the_first_commit_creates(repository: SqliteRepository, engine: str, path: Path) -> None:
    put(repository, customer("a"))
    assert detect(path) == (engine, FORMAT)
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        meta = dict(connection.execute("SELECT * FROM storage_meta"))
        assert meta.pop("log_id").startswith(f"{engine}-")  # by which copies know their source
        assert meta == {
            "backend": "sqlite",
            "engine_version": engine,
            "format": str(FORMAT),
        }


def test_storage_info(repository: SqliteRepository, engine: str, path: Path) -> None:
    put(repository, customer("a"))
    commit(repository, PRODUCT, product("p", 1.0))
    info = repository.storage_info()
    layouts = info.pop("type_layouts", None)
    assert info == {
        "backend": "sqlite",
        "engine_version": engine,
        "db_path": str(path),
        "uri": f"sqlite:///{path}",
        "format": FORMAT,
        "head_commit_id": 2,
        "types": {
            "Customer": {"type_kind": "entity", "schema_version_id": 1, "last_commit_id": 1},
            "Product": {"type_kind": "entity", "schema_version_id": 1, "last_commit_id": 2},
        },
    }
    if engine == "v1":
        assert layouts is None
    else:
        assert layouts["Product"] == {
            "type_kind": "entity",
            "current_schema_version_id": 1,
            "activation_commit_id": 2,
            "historical_versions": [],
        }


def test_in_memory(engine: str) -> None:
    repository = open_at(":memory:", engine)
    put(repository, customer("a"))
    put(repository, customer("a", name="Al"))
    assert repository.read(CUSTOMER)["name"].to_pylist() == ["Al"]
    assert open_at(":memory:", engine).head_commit_id() == 0
    repository.flush()
    repository.close()
    repository.close()


def test_a_closed_repository_says_so(repository: SqliteRepository) -> None:
    put(repository, customer("a"))
    repository.close()
    repository.close()
    with pytest.raises(StorageBackendError, match="closed"):
        repository.read(CUSTOMER)
    with pytest.raises(StorageBackendError, match="closed"):
        put(repository, customer("b"))


def test_a_stampless_v1_file_is_read_as_it_is_and_stamped_when_written(path: Path) -> None:
    repository = open_at(path, "v1")
    put(repository, customer("a"))
    repository.close()
    change(path, "DROP TABLE storage_meta")
    change(path, "DROP TABLE locks")
    before = path.read_bytes()

    assert detect(path) == ("v1", 0)
    repository = open_at(path, "v1")
    assert repository.read(CUSTOMER)["name"].to_pylist() == ["Ann"]
    assert repository.storage_info()["format"] == 0
    assert put(repository, customer("a")) is None
    repository.close()
    assert path.read_bytes() == before

    repository = open_at(path, "v1")
    result = put(repository, customer("b"))
    assert result is not None
    assert result.commit_id == 2
    assert detect(path) == ("v1", FORMAT)
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["a", "b"]
    with pytest.raises(UnsupportedEngineError, match="opened as v2"):
        open_at(path, "v2")


@pytest.mark.parametrize(("key", "value"), [("format", str(FORMAT + 1)), ("engine_version", "v9")])
def test_a_newer_stamp_is_refused(engine: str, path: Path, key: str, value: str) -> None:
    repository = open_at(path, engine)
    put(repository, customer("a"))
    change(path, "UPDATE storage_meta SET value = ? WHERE key = ?", value, key)
    for attempt in (
        lambda: detect(path),
        lambda: open_at(path, engine),
        lambda: repository.read(CUSTOMER),
        lambda: put(repository, customer("b")),
        lambda: create(path, engine, CONFIG),
    ):
        with pytest.raises(UnsupportedEngineError, match="upgrade ontologia first"):
            attempt()


def test_the_other_engine_is_refused(path: Path) -> None:
    create(path, "v2", CONFIG)
    with pytest.raises(UnsupportedEngineError, match="opened as v1"):
        open_at(path, "v1")


def test_an_open_repository_notices_another_engine(path: Path) -> None:
    repository = open_at(path, "v1")
    put(repository, customer("a"))
    erase(path)
    assert repository.read(CUSTOMER).num_rows == 0
    create(path, "v2", CONFIG)
    with pytest.raises(UnsupportedEngineError, match="opened as v1"):
        put(repository, customer("b"))


def test_a_file_that_is_no_database(engine: str, path: Path) -> None:
    path.write_bytes(b"this is not a database, but a long enough letter to somebody " * 100)
    before = path.read_bytes()
    for attempt in (
        lambda: detect(path),
        lambda: open_at(path, engine),
        lambda: create(path, engine, CONFIG),
        lambda: erase(path),
    ):
        with pytest.raises(StorageBackendError, match="not a SQLite database") as caught:
            attempt()
        assert str(path) in str(caught.value)
    assert path.read_bytes() == before


def test_somebody_elses_database_is_left_alone(engine: str, path: Path) -> None:
    change(path, "CREATE TABLE recipes (name TEXT)")
    before = path.read_bytes()
    for attempt in (
        lambda: detect(path),
        lambda: open_at(path, engine),
        lambda: create(path, engine, CONFIG),
        lambda: describe(path),
        lambda: erase(path),
    ):
        with pytest.raises(StorageBackendError, match="not an Ontologia storage"):
            attempt()
    change(path, "CREATE TABLE storage_meta (a, b)")
    with pytest.raises(StorageBackendError, match="not an Ontologia storage"):
        detect(path)
    change(path, "DROP TABLE storage_meta")
    assert len(path.read_bytes()) >= len(before)


def test_a_damaged_file(engine: str, path: Path) -> None:
    repository = open_at(path, engine)
    put(repository, *(customer(f"{n:05}") for n in range(2000)))
    repository.close()
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(8192)
        file.write(b"\xab" * (size - 8192))
    with pytest.raises((IntegrityError, StorageBackendError), match=r"onto\.db"):
        open_at(path, engine).read(CUSTOMER)


def test_bad_paths(engine: str, tmp_path: Path) -> None:
    with pytest.raises(StorageBackendError, match="directory"):
        open_at(tmp_path, engine)
    with pytest.raises(StorageBackendError, match=r"directory .*missing does not exist"):
        put(open_at(tmp_path / "missing" / "onto.db", engine), customer("a"))


def test_odd_file_names(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "what? 100%#é.db"
    put(open_at(path, engine), customer("a"))
    assert path.exists()
    assert detect(path) == (engine, FORMAT)


def test_create(engine: str, path: Path) -> None:
    create(path, engine, CONFIG)
    assert detect(path) == (engine, FORMAT)
    repository = open_at(path, engine)
    assert repository.head_commit_id() == 0
    put(repository, customer("a"))
    with pytest.raises(AlreadyInitializedError) as caught:
        create(path, engine, CONFIG)
    assert caught.value.commit_id == 1
    with pytest.raises(UnsupportedEngineError, match="choose one of v1, v2"):
        create(path.with_name("other.db"), "v3", CONFIG)
    assert not path.with_name("other.db").exists()


def test_describe_and_erase(engine: str, path: Path) -> None:
    repository = open_at(path, engine)
    put(repository, customer("a"), customer("b"))
    described = describe(path)
    assert (described["engine_version"], described["head_commit_id"]) == (engine, 1)
    data = "entity_history" if engine == "v1" else "entity_Customer_v1"
    assert described["tables"][data] == 2
    assert described["tables"]["commits"] == 1

    put(repository, customer("c"))
    with pytest.raises(MigrationTokenError, match="changed since the preview"):
        erase(path, expect=described)
    assert repository.head_commit_id() == 2

    erase(path, expect=describe(path))
    assert detect(path) is None
    assert describe(path)["tables"] == {}
    assert repository.read(CUSTOMER).num_rows == 0
    result = put(repository, customer("z"))
    assert result is not None
    assert result.commit_id == 1
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["z"]


def test_a_replaced_file_is_not_written_into_the_void(
    repository: SqliteRepository, path: Path
) -> None:
    put(repository, customer("a"))
    for name in os.listdir(path.parent):
        (path.parent / name).unlink()
    assert repository.head_commit_id() == 0
    put(repository, customer("b"))
    assert path.exists()
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["b"]


def test_types_whose_names_differ_in_case_only(repository: SqliteRepository) -> None:
    class Lower(Entity, name="customer"):
        id: Field[str] = Field(primary_key=True)

    class Same(Relation[Customer, Customer], name="Customer"):
        pass

    lower, same = spec_of(Lower), spec_of(Same)
    put(repository, customer("a"))
    commit(repository, lower, {"entity_key": "x", "id": "x"})
    commit(repository, same, edge("a", "b"))
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["a"]
    assert repository.read(lower)["entity_key"].to_pylist() == ["x"]
    assert repository.read(same)["right_key"].to_pylist() == ["b"]
    assert set(repository.storage_info()["types"]) == {
        "entity:Customer",
        "customer",
        "relation:Customer",
    }


@pytest.mark.parametrize("logged", [0, 2])
def test_a_copy_without_its_log_is_an_older_state_and_sound(
    path: Path, engine: str, tmp_path: Path, logged: int
) -> None:
    """What docs/operations.md says: the tail is lost, and what is there is whole."""
    writer = open_at(path, engine)
    for age in (1, 2, 3):
        put(writer, customer("a", age=age))
        if age == 3 - logged:
            change(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copyfile(path, tmp_path / "copy.db")
    writer.close()
    copy = open_at(tmp_path / "copy.db", engine)
    assert copy.head_commit_id() == 3 - logged
    assert verify_storage(copy, deep=True).findings == []
    put(copy, customer("b", age=9))
    assert copy.head_commit_id() == 4 - logged
    assert {r["entity_key"] for r in copy.read(CUSTOMER).to_pylist()} == {"a", "b"}
    copy.close()
