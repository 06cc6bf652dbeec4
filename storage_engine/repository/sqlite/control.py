"""The control tables of a SQLite storage, and the stamp that says what wrote it.

Both engines share them. `inspect` tells what a file is before anything touches it; creating
tables and migrating an older format step by step happen inside the caller's transaction, so that
a crash leaves the file as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from storage_engine.errors import StorageBackendError, UnsupportedEngineError

BACKEND = "sqlite"
FORMAT = 1
ENGINE_VERSIONS = ("v1", "v2")

CONTROL_TABLES = (
    """
    CREATE TABLE IF NOT EXISTS commits (
        id               INTEGER PRIMARY KEY,
        parent_id        INTEGER,
        created_at       TEXT NOT NULL,
        runtime_id       TEXT NOT NULL,
        kind             TEXT NOT NULL,
        metadata         TEXT NOT NULL,  -- JSON object
        types            TEXT NOT NULL,  -- JSON list: kind, type_name, inserted, updated
        events           TEXT NOT NULL,  -- JSON list: outbox of full envelopes
        idempotency_app  TEXT,
        idempotency      TEXT            -- JSON: the version, an integer or a string
    )
    """,
    """
    CREATE INDEX IF NOT EXISTS commits_by_idempotency_app ON commits (idempotency_app, id)
        WHERE idempotency_app IS NOT NULL
    """,
    """
    CREATE TABLE IF NOT EXISTS schema_registry (
        type_kind                  TEXT NOT NULL,
        type_name                  TEXT NOT NULL,
        current_schema_version_id  INTEGER NOT NULL,
        PRIMARY KEY (type_kind, type_name)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS schema_versions (
        type_kind          TEXT NOT NULL,
        type_name          TEXT NOT NULL,
        schema_version_id  INTEGER NOT NULL,
        schema_json        TEXT NOT NULL,
        schema_sha256      TEXT NOT NULL,
        commit_id          INTEGER NOT NULL,
        created_at         TEXT NOT NULL,
        PRIMARY KEY (type_kind, type_name, schema_version_id)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS locks (
        name         TEXT PRIMARY KEY,
        owner_id     TEXT NOT NULL,
        holder       TEXT NOT NULL,  -- JSON object
        acquired_at  TEXT NOT NULL
    )
    """,
)
STORAGE_META = """
    CREATE TABLE IF NOT EXISTS storage_meta (
        key   TEXT PRIMARY KEY,
        value TEXT NOT NULL
    )
"""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a storage says it is. Format 0 is a v1 file from before there were stamps."""

    engine_version: str
    format: int


# --- what a file is -----------------------------------------------------------------------------


def inspect(connection: sqlite3.Connection, path: str) -> Stamp | None:
    """The storage's stamp, None for an empty database. Refuses what this version cannot handle."""
    found = {
        name
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name IN ('storage_meta', 'commits', 'entity_history')"
        )
    }
    if "storage_meta" in found:
        return _checked(_read_stamp(connection, path), path)
    if {"commits", "entity_history"} <= found:
        return Stamp("v1", 0)
    if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise _foreign(path)
    return None


def _read_stamp(connection: sqlite3.Connection, path: str) -> Stamp:
    try:
        meta = dict(connection.execute("SELECT key, value FROM storage_meta"))
        backend, engine = meta["backend"], meta["engine_version"]
        number = int(meta["format"])
    except (sqlite3.OperationalError, KeyError, ValueError) as error:
        raise _foreign(path) from error
    if backend != BACKEND:
        raise _foreign(path)
    return Stamp(engine, number)


def _checked(stamp: Stamp, path: str) -> Stamp:
    if stamp.engine_version in ENGINE_VERSIONS and stamp.format <= FORMAT:
        return stamp
    raise UnsupportedEngineError(
        f"{path} was written by engine {stamp.engine_version} in format {stamp.format}; this "
        f"version knows {BACKEND} engines {', '.join(ENGINE_VERSIONS)} up to format {FORMAT}: "
        "upgrade ontologia first",
        backend=BACKEND,
        engine_version=stamp.engine_version,
        format=stamp.format,
    )


def _foreign(path: str) -> StorageBackendError:
    return StorageBackendError(
        f"{path} is a SQLite database but not an Ontologia storage; nothing was touched, "
        "give another path",
        operation="open",
        key=path,
    )


def check_engine(stamp: Stamp, engine_version: str, path: str) -> None:
    """An open repository may meet a file that was meanwhile initialised with another engine."""
    if stamp.engine_version != engine_version:
        raise UnsupportedEngineError(
            f"{path} is an engine {stamp.engine_version} storage and was opened as "
            f"{engine_version}; open it with open_repository(), which picks the engine",
            backend=BACKEND,
            engine_version=stamp.engine_version,
            format=stamp.format,
        )


# --- making it writable -------------------------------------------------------------------------


def create_tables(connection: sqlite3.Connection, engine_version: str) -> None:
    """Control tables and stamp of a new storage."""
    for statement in CONTROL_TABLES:
        connection.execute(statement)
    write_stamp(connection, Stamp(engine_version, FORMAT))


def write_stamp(connection: sqlite3.Connection, stamp: Stamp) -> None:
    connection.execute(STORAGE_META)
    connection.executemany(
        "INSERT INTO storage_meta (key, value) VALUES (?, ?) "
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        [
            ("backend", BACKEND),
            ("engine_version", stamp.engine_version),
            ("format", str(stamp.format)),
        ],
    )


def _stamp_v1_file(connection: sqlite3.Connection, engine_version: str) -> None:
    """0 -> 1: a v1 file from before engine versioning gets its stamp (RFC 0009, 7.1)."""
    create_tables(connection, engine_version)


MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection, str], None]] = {0: _stamp_v1_file}


def migrate_format(connection: sqlite3.Connection, stamp: Stamp) -> None:
    """Bring an older format up to date, one idempotent step after another."""
    for step in range(stamp.format, FORMAT):
        MIGRATIONS[step](connection, stamp.engine_version)
        write_stamp(connection, Stamp(stamp.engine_version, step + 1))
