"""Files that another implementation of RFC 0009 may have made: all of it is read and written, or
the file is refused when it is opened, with the reason; never halfway."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from storage_engine import Ontology, Session
from storage_engine.errors import UnsupportedEngineError
from storage_engine.repository import open_repository
from storage_engine.repository.sqlite import FORMAT, detect
from tests.cli.support import onto
from tests.repository.sqlite.support import CUSTOMER, customer, open_at, put
from tests.shop import Customer

# As the first implementation has them: the tables that RFC 0009 names, with columns of its own.
FIRST_V1 = """
    CREATE TABLE commits (
        id INTEGER PRIMARY KEY AUTOINCREMENT, created_at TEXT NOT NULL, metadata_json TEXT
    );
    CREATE TABLE entity_history (
        commit_id INTEGER NOT NULL, entity_type TEXT NOT NULL, entity_key TEXT NOT NULL,
        fields_json TEXT NOT NULL, schema_version_id INTEGER
    );
    CREATE TABLE relation_history (
        commit_id INTEGER NOT NULL, relation_type TEXT NOT NULL, left_key TEXT NOT NULL,
        right_key TEXT NOT NULL, instance_key TEXT NOT NULL DEFAULT '', fields_json TEXT NOT NULL,
        schema_version_id INTEGER
    );
    INSERT INTO commits VALUES (1, '2026-02-11T00:00:00+00:00', '{}');
    INSERT INTO entity_history VALUES (1, 'Customer', 'a', '{"id":"a","name":"Ann"}', 1);
"""
# RFC 0009 3, word for word, and the least keys that it asks for.
RFC_0009_V2 = """
    CREATE TABLE storage_meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
    INSERT INTO storage_meta VALUES ('engine_version', 'v2'), ('backend', 'sqlite');
    CREATE TABLE type_layout_catalog (
        type_kind             TEXT NOT NULL,  -- 'entity' or 'relation'
        type_name             TEXT NOT NULL,
        schema_version_id     INTEGER NOT NULL,
        table_name            TEXT NOT NULL,
        activation_commit_id  INTEGER NOT NULL,
        is_current            INTEGER NOT NULL DEFAULT 0,
        created_at            TEXT NOT NULL DEFAULT (datetime('now')),
        PRIMARY KEY (type_kind, type_name, schema_version_id)
    );
    CREATE TABLE entity_Customer_v1 (
        entity_key TEXT NOT NULL, commit_id INTEGER NOT NULL, schema_version_id INTEGER NOT NULL,
        id TEXT, name TEXT
    );
    CREATE TABLE commits (id INTEGER PRIMARY KEY, created_at TEXT NOT NULL, metadata TEXT);
    CREATE TABLE schema_registry (kind TEXT, name TEXT, version INTEGER);
    CREATE TABLE schema_versions (kind TEXT, name TEXT, version INTEGER, spec TEXT);
    CREATE TABLE locks (name TEXT PRIMARY KEY, owner TEXT);
"""


def make(path: Path, script: str) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


@pytest.mark.parametrize(
    ("script", "reasons"),
    [
        (
            FIRST_V1,
            [
                "an engine v1 storage that another implementation has made",
                "table commits has no parent_id, runtime_id, kind, metadata, types, events",
                "there is no table schema_registry",
                "table entity_history has another primary key",
            ],
        ),
        (
            RFC_0009_V2,
            [
                "an engine v2 storage that another implementation has made",
                "table schema_versions has no type_kind",
                "table locks has no owner_id",
            ],
        ),
    ],
    ids=["v1", "v2"],
)
def test_tables_of_another_shape_are_refused_when_opened(
    path: Path, script: str, reasons: list[str]
) -> None:
    make(path, script)
    before = path.read_bytes()
    attempts: list[Callable[[], object]] = [
        lambda: detect(path),
        lambda: open_repository(path),
        lambda: Session(path),
        lambda: Ontology(str(path)),
    ]
    for attempt in attempts:
        with pytest.raises(UnsupportedEngineError) as caught:
            attempt()
        for reason in [*reasons, "Nothing was touched", "session.ingest()"]:
            assert reason in str(caught.value)
    for command in (["info"], ["commits"], ["verify"], ["query", "entities", "Customer"]):
        refused = onto(*command, "--db", path)
        assert refused.code != 0
        assert "another implementation" in refused.error()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("ALTER TABLE commits ADD COLUMN signature TEXT NOT NULL DEFAULT ''", ""),
        ("DROP TABLE relation_history", "there is no table relation_history"),
        ("CREATE TABLE tags (label TEXT)", "table tags has no name, commit_id"),
        ("CREATE TABLE events (id TEXT)", "table events has no seq"),
        ("UPDATE schema_versions SET schema_json = '{}'", "no schema with the hash"),
        (
            "DROP TABLE locks; CREATE TABLE locks (name TEXT, owner_id TEXT, holder TEXT, "
            "acquired_at TEXT)",
            "table locks has another primary key",
        ),
        (
            "DROP TABLE locks; CREATE TABLE locks (name TEXT PRIMARY KEY, owner_id TEXT, "
            "holder TEXT, acquired_at TEXT, host TEXT NOT NULL)",
            "table locks wants values for host",
        ),
    ],
)
def test_what_would_fail_later_is_seen_at_once(path: Path, change: str, reason: str) -> None:
    """A v1 file without stamp, such as we made before there were stamps, and one difference."""
    repository = open_at(path, "v1")
    put(repository, customer("a"))
    repository.close()
    make(path, f"DROP TABLE storage_meta; {change};")
    if reason:
        with pytest.raises(UnsupportedEngineError, match=reason):
            open_at(path, "v1")
        return
    with Session(path) as session:  # a column that needs no value is no obstacle
        assert [c.id for c in session.query().entities(Customer).collect()] == ["a"]


def test_rfc0009_v2_with_the_least_keys_is_read_and_brought_forward(path: Path) -> None:
    repository = open_at(path, "v2")
    put(repository, customer("a"))
    repository.close()
    make(path, "DELETE FROM storage_meta WHERE key = 'format'")
    before = path.read_bytes()

    assert detect(path) == ("v2", 0)
    repository = open_at(path, "v2")
    assert repository.read(CUSTOMER)["name"].to_pylist() == ["Ann"]
    assert repository.storage_info()["format"] == 0
    assert path.read_bytes() == before

    result = put(repository, customer("b"))
    assert result is not None
    assert result.commit_id == 2
    assert detect(path) == ("v2", FORMAT)
    assert repository.read(CUSTOMER)["entity_key"].to_pylist() == ["a", "b"]
    repository.close()
