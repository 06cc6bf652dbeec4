"""The control tables of a SQLite storage: commits, lock holder, schemas, and the engine's stamp.

Both engines share them. `inspect` tells what a file is before anything touches it; creating
tables and migrating an older format step by step happen inside the caller's transaction, so that
a crash leaves the file as it was.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage_engine.errors import (
    IntegrityError,
    SchemaOutdatedError,
    StorageBackendError,
    UnsupportedEngineError,
)
from storage_engine.model.spec import TypeSpec, schema_differences
from storage_engine.repository.protocol import CommitRecord, Idempotency, TypeChange

LOCK_NAME = "ontology_write"


@dataclass(frozen=True, slots=True)
class Registered:
    """A type's current schema version."""

    version: int
    sha256: str
    schema: Mapping[str, Any]


def utc_text(moment: datetime) -> str:
    """Fixed-width ISO 8601 in UTC with microseconds, which sorts as text."""
    text = moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")
    return f"{text}Z"


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def head(connection: sqlite3.Connection) -> tuple[int, str]:
    """Id and creation time of the latest commit; (0, "") when there is none."""
    row = connection.execute(
        "SELECT id, created_at FROM commits ORDER BY id DESC LIMIT 1"
    ).fetchone()
    return (row[0], row[1]) if row else (0, "")


def insert_commit(
    connection: sqlite3.Connection,
    commit_id: int,
    *,
    created_at: str,
    runtime_id: str,
    metadata: str,
    events: str,
    changes: Sequence[TypeChange],
    idempotency: Idempotency | None,
) -> None:
    types = [
        {
            "kind": change.kind,
            "type_name": change.type_name,
            "inserted": change.inserted,
            "updated": change.updated,
        }
        for change in changes
    ]
    connection.execute(
        "INSERT INTO commits (id, parent_id, created_at, runtime_id, kind, metadata, types, "
        "events, idempotency_app, idempotency) VALUES (?, ?, ?, ?, 'data', ?, ?, ?, ?, ?)",
        (
            commit_id,
            commit_id - 1 or None,
            created_at,
            runtime_id,
            metadata,
            to_json(types),
            events,
            idempotency.app_id if idempotency else None,
            to_json(idempotency.version) if idempotency else None,
        ),
    )


def record_lock(
    connection: sqlite3.Connection, owner_id: str, holder: Mapping[str, Any], now: str
) -> None:
    """Leave a note of who held the write lock last; the lock itself is SQLite's."""
    connection.execute(
        "INSERT INTO locks (name, owner_id, holder, acquired_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET owner_id = excluded.owner_id, "
        "holder = excluded.holder, acquired_at = excluded.acquired_at",
        (LOCK_NAME, owner_id, to_json(dict(holder)), now),
    )


def applied_by(connection: sqlite3.Connection, unit: Idempotency) -> int | None:
    """The commit that already did this unit of work, None when it is still to be done."""
    earlier = connection.execute(
        "SELECT id, idempotency FROM commits WHERE idempotency_app = ? ORDER BY id DESC",
        (unit.app_id,),
    )
    if isinstance(unit.version, str):
        row = earlier.fetchone()
        return row[0] if row and json.loads(row[1]) == unit.version else None
    applied: int | None = None
    for commit_id, text in earlier:  # newest first, and integers only grow
        version = json.loads(text)
        if isinstance(version, str):
            continue
        if version < unit.version:
            break
        applied = commit_id
    return applied


def commits(connection: sqlite3.Connection, since: int, limit: int) -> list[CommitRecord]:
    """Commits after `since`, newest first."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM commits WHERE id > ? ORDER BY id DESC LIMIT ?", (since, limit)
    )
    return [_record(row) for row in rows]


def commit(connection: sqlite3.Connection, commit_id: int) -> CommitRecord | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM commits WHERE id = ?", (commit_id,)
    ).fetchone()
    return _record(row) if row else None


def commit_at(connection: sqlite3.Connection, moment: datetime) -> int:
    """The last commit at or before a moment, 0 before the first. Without a zone it is in UTC."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    row = connection.execute(
        "SELECT id FROM commits WHERE created_at <= ? ORDER BY id DESC LIMIT 1",
        (utc_text(moment),),
    ).fetchone()
    return row[0] if row else 0


def touched_types(connection: sqlite3.Connection, commit_id: int) -> list[tuple[str, str]]:
    """Kind and name of the types that a commit wrote, in that order."""
    row = connection.execute("SELECT types FROM commits WHERE id = ?", (commit_id,)).fetchone()
    return sorted((t["kind"], t["type_name"]) for t in json.loads(row[0])) if row else []


_COLUMNS = "id, parent_id, created_at, runtime_id, kind, metadata, types"


def _record(row: Sequence[Any]) -> CommitRecord:
    return CommitRecord(
        id=row[0],
        parent_id=row[1],
        created_at=datetime.fromisoformat(row[2]),
        runtime_id=row[3],
        kind=row[4],
        metadata=json.loads(row[5]),
        types=sorted({entry["type_name"] for entry in json.loads(row[6])}),
    )


def registered(connection: sqlite3.Connection, kind: str, name: str) -> Registered | None:
    row = connection.execute(
        "SELECT v.schema_version_id, v.schema_sha256, v.schema_json "
        "FROM schema_registry AS r JOIN schema_versions AS v "
        "ON v.type_kind = r.type_kind AND v.type_name = r.type_name "
        "AND v.schema_version_id = r.current_schema_version_id "
        "WHERE r.type_kind = ? AND r.type_name = ?",
        (kind, name),
    ).fetchone()
    return Registered(row[0], row[1], json.loads(row[2])) if row else None


def check_schema(connection: sqlite3.Connection, spec: TypeSpec) -> Registered | None:
    """The type's stored schema, None before its first commit; refuses a class that differs."""
    stored = registered(connection, spec.kind, spec.name)
    if stored is None or stored.sha256 == spec.schema_sha256:
        return stored
    if spec.aligned(stored.schema).schema_sha256 == stored.sha256:
        return stored
    differences = schema_differences(stored.schema, spec.schema_dict())
    listed = "; ".join(differences) or "details that do not change its fields"
    raise SchemaOutdatedError(
        f"class {spec.name} differs from schema version {stored.version} in this storage: "
        f"{listed}. Declare the class as it was, or migrate the storage to the new one",
        type=spec.name,
        stored_version=stored.version,
        differences=differences,
    )


def register(
    connection: sqlite3.Connection, spec: TypeSpec, version: int, commit_id: int, now: str
) -> None:
    """Make this the type's current schema version."""
    connection.execute(
        "INSERT INTO schema_versions VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            spec.kind,
            spec.name,
            version,
            to_json(spec.schema_dict()),
            spec.schema_sha256,
            commit_id,
            now,
        ),
    )
    connection.execute(
        "INSERT INTO schema_registry VALUES (?, ?, ?) ON CONFLICT (type_kind, type_name) "
        "DO UPDATE SET current_schema_version_id = excluded.current_schema_version_id",
        (spec.kind, spec.name, version),
    )


def type_refs(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Kind and name of every registered type."""
    return connection.execute(
        "SELECT type_kind, type_name FROM schema_registry ORDER BY type_kind, type_name"
    ).fetchall()


def known_types(
    connection: sqlite3.Connection, ref: tuple[str, str] | None = None
) -> list[tuple[int, TypeSpec]]:
    """Every registered type's current version and schema, by kind and name; of one, if told."""
    only = "WHERE r.type_kind = ? AND r.type_name = ? " if ref is not None else ""
    rows = connection.execute(
        "SELECT v.schema_version_id, v.schema_json, v.type_kind, v.type_name "
        "FROM schema_registry AS r JOIN schema_versions AS v "
        "ON v.type_kind = r.type_kind AND v.type_name = r.type_name "
        "AND v.schema_version_id = r.current_schema_version_id "
        f"{only}ORDER BY v.type_kind, v.type_name",
        ref or (),
    ).fetchall()
    specs = []
    for version, text, kind, name in rows:
        try:
            specs.append((version, TypeSpec.from_schema_dict(json.loads(text))))
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(
                f"the stored schema of {kind} {name} is unreadable: {error}", key="schema_versions"
            ) from error
    return specs


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
class FileStamp:
    """What a storage says it is. Format 0 is a v1 file from before there were stamps."""

    engine_version: str
    format: int


# --- what a file is -----------------------------------------------------------------------------


def inspect(connection: sqlite3.Connection, path: str) -> FileStamp | None:
    """The storage's stamp, None for an empty database. Refuses what this version cannot handle."""
    tables = {
        name
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND name IN ('storage_meta', 'commits', 'entity_history')"
        )
    }
    if "storage_meta" in tables:
        return _checked(_read_stamp(connection, path), path)
    if {"commits", "entity_history"} <= tables:
        return FileStamp("v1", 0)
    if connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
        raise _foreign(path)
    return None


def _read_stamp(connection: sqlite3.Connection, path: str) -> FileStamp:
    try:
        meta = dict(connection.execute("SELECT key, value FROM storage_meta"))
        backend, engine = meta["backend"], meta["engine_version"]
        number = int(meta["format"])
    except (sqlite3.OperationalError, KeyError, ValueError) as error:
        raise _foreign(path) from error
    if backend != BACKEND:
        raise _foreign(path)
    return FileStamp(engine, number)


def _checked(stamp: FileStamp, path: str) -> FileStamp:
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


def check_engine(stamp: FileStamp, engine_version: str, path: str) -> None:
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
    write_stamp(connection, FileStamp(engine_version, FORMAT))


def write_stamp(connection: sqlite3.Connection, stamp: FileStamp) -> None:
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


def migrate_format(connection: sqlite3.Connection, stamp: FileStamp) -> None:
    """Bring an older format up to date, one idempotent step after another."""
    for step in range(stamp.format, FORMAT):
        MIGRATIONS[step](connection, stamp.engine_version)
        write_stamp(connection, FileStamp(stamp.engine_version, step + 1))
