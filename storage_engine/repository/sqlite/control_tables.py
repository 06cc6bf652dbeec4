"""The control tables of a SQLite storage: commits, lock holder, schemas, and the engine's stamp.

Both engines share them. `inspect` tells what a file is before anything touches it; creating
tables and migrating an older format step by step happen inside the caller's transaction, so that
a crash leaves the file as it was.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage_engine.commitlog.state import IdempotencyRecord
from storage_engine.errors import (
    IntegrityError,
    StorageBackendError,
    UnsupportedEngineError,
)
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import (
    AppliedUnit,
    CommitRecord,
    Idempotency,
    TypeChange,
    WrittenRows,
)
from storage_engine.repository.sqlite.stored import StoredRow
from storage_engine.repository.sqlite.type_histories import DROPPED_TYPES, ended
from storage_engine.schema.diff import not_renamed_yet, outdated

LOCK_NAME = "ontology_write"


@dataclass(frozen=True, slots=True)
class Registered:
    """A type's current schema version."""

    version: int
    sha256: str
    schema_json: str

    def spec(self, kind: str, name: str) -> TypeSpec:
        place = StoredRow("schema_versions", (kind, name, self.version))
        return place.schema(self.schema_json, self.sha256)


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
    if row is None:
        return 0, ""
    place = StoredRow("commits", row[0])
    place.instant("created_at", row[1])
    return place.integer("id", row[0], least=1), row[1]


def insert_commit(
    connection: sqlite3.Connection,
    commit_id: int,
    *,
    created_at: str,
    runtime_id: str,
    metadata: str,
    events: str,
    changes: Sequence[TypeChange],
    idempotency: Idempotency | None = None,
    kind: str = "data",
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
        "events, idempotency_app, idempotency) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            commit_id,
            commit_id - 1 or None,
            created_at,
            runtime_id,
            kind,
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


def record_unit(connection: sqlite3.Connection, unit: Idempotency, head: int) -> None:
    """Of a unit of work that changed nothing: applied, after commit `head`, without a commit."""
    connection.execute(
        "INSERT INTO applied_units (app_id, version, after_commit_id) VALUES (?, ?, ?) "
        "ON CONFLICT (app_id) DO UPDATE SET version = excluded.version, "
        "after_commit_id = excluded.after_commit_id",
        (unit.app_id, to_json(unit.version), head),
    )


def applied(connection: sqlite3.Connection, unit: Idempotency) -> AppliedUnit | None:
    """How this unit of work was done, None when it is still to be done. The newest record of its
    application decides, be it a commit or a unit that changed nothing."""
    by_commit = connection.execute(
        "SELECT id, idempotency FROM commits WHERE idempotency_app = ? ORDER BY id DESC LIMIT 1",
        (unit.app_id,),
    ).fetchone()
    by_itself = None
    if has_table(connection, "applied_units"):  # a file of format 1 gets it with its next commit
        by_itself = connection.execute(
            "SELECT after_commit_id, version FROM applied_units WHERE app_id = ?", (unit.app_id,)
        ).fetchone()
    place = StoredRow("applied_units", unit.app_id)
    after = place.integer("after_commit_id", by_itself[0]) if by_itself is not None else -1
    if by_itself is not None and (by_commit is None or by_commit[0] <= after):
        record = IdempotencyRecord(unit_version(place, "version", by_itself[1]), None)
    elif by_commit is not None:
        place = StoredRow("commits", by_commit[0])
        record = IdempotencyRecord(unit_version(place, "idempotency", by_commit[1]), by_commit[0])
    else:
        return None
    return AppliedUnit(record.commit_id) if record.covers(unit.version) else None


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(sql, (name,)).fetchone() is not None


def unit_version(place: StoredRow, column: str, text: Any) -> int | str:
    """Of a unit of work."""
    version = place.json(column, text)
    if isinstance(version, bool) or not isinstance(version, int | str):
        raise place.damaged(f"{column} should be an integer or a text, not {text!r}")
    return version


def commits(connection: sqlite3.Connection, since: int, limit: int) -> list[CommitRecord]:
    """Commits after `since`, newest first."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM commits WHERE id > ? ORDER BY id DESC LIMIT ?", (since, limit)
    )
    return [_record(row) for row in rows]


def commits_between(connection: sqlite3.Connection, since: int, upto: int) -> list[CommitRecord]:
    """Commits after `since`, up to `upto`, oldest first."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM commits WHERE id > ? AND id <= ? ORDER BY id", (since, upto)
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
    changes = StoredRow("commits", commit_id).changes("types", row[0]) if row else []
    return sorted((change.kind, change.type_name) for change in changes)


_COLUMNS = "id, parent_id, created_at, runtime_id, kind, metadata, types"


def _record(row: Sequence[Any]) -> CommitRecord:
    place = StoredRow("commits", row[0])
    changes = place.changes("types", row[6])
    return CommitRecord(
        id=row[0],
        parent_id=row[1] if row[1] is None else place.integer("parent_id", row[1]),
        created_at=place.instant("created_at", row[2]),
        runtime_id=place.text("runtime_id", row[3]),
        kind=place.text("kind", row[4]),
        metadata=place.texts("metadata", row[5]),
        types=sorted({change.type_name for change in changes}),
        written=[
            WrittenRows(c.kind, c.type_name, c.inserted + c.updated, c.inserted)
            for c in sorted(changes, key=lambda change: (change.kind, change.type_name))
        ],
    )


def sent_events(connection: sqlite3.Connection, commit_id: int) -> list[dict[str, Any]]:
    """The envelopes that a commit sent."""
    row = connection.execute("SELECT events FROM commits WHERE id = ?", (commit_id,)).fetchone()
    return StoredRow("commits", commit_id).json_list("events", row[0]) if row else []


def inserted_rows(connection: sqlite3.Connection, since: int) -> Counter[tuple[str, str]]:
    """By type, how many identities the commits after `since` inserted."""
    totals: Counter[tuple[str, str]] = Counter()
    for commit_id, text in connection.execute(
        "SELECT id, types FROM commits WHERE id > ?", (since,)
    ):
        for change in StoredRow("commits", commit_id).changes("types", text):
            totals[change.kind, change.type_name] += change.inserted
    return totals


def registered(connection: sqlite3.Connection, kind: str, name: str) -> Registered | None:
    row = connection.execute(
        "SELECT r.current_schema_version_id, v.schema_sha256, v.schema_json "
        "FROM schema_registry AS r LEFT JOIN schema_versions AS v "
        "ON v.type_kind = r.type_kind AND v.type_name = r.type_name "
        "AND v.schema_version_id = r.current_schema_version_id "
        "WHERE r.type_kind = ? AND r.type_name = ?",
        (kind, name),
    ).fetchone()
    return _registered(kind, name, *row) if row else None


def _registered(kind: str, name: str, version: Any, sha256: Any, text: Any) -> Registered:
    place = StoredRow("schema_registry", (kind, name))
    number = place.integer("current_schema_version_id", version, least=1)
    if text is None:
        raise place.damaged(f"its schema version {number} is not in schema_versions")
    return Registered(number, sha256, text)


def check_schema(connection: sqlite3.Connection, spec: TypeSpec) -> Registered | None:
    """The type's stored schema, None before its first commit; refuses a class that differs, and a
    new name for a type that still has the old one."""
    stored = registered(connection, spec.kind, spec.name)
    if stored is None and spec.renamed_from is not None:
        old = spec.kind, spec.renamed_from
        current = registered(connection, *old) if old not in ended(connection, old) else None
        if current is not None:
            raise not_renamed_yet(spec, current.version)
    if stored is None or stored.sha256 == spec.schema_sha256:
        return stored
    schema = stored.spec(*spec.ref)
    if spec.aligned(schema.schema_dict()).schema_sha256 == stored.sha256:
        return stored
    raise outdated(spec, stored.version, schema)


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
    """Kind and name of every registered type, but for those that were dropped."""
    rows = connection.execute(
        "SELECT type_kind, type_name FROM schema_registry ORDER BY type_kind, type_name"
    ).fetchall()
    gone = ended(connection)
    return [ref for ref in rows if ref not in gone]


def known_types(
    connection: sqlite3.Connection, ref: tuple[str, str] | None = None
) -> list[tuple[int, TypeSpec]]:
    """Every registered type's current version and schema, by kind and name; of one, if told.
    Those that were dropped are left out."""
    only = "WHERE r.type_kind = ? AND r.type_name = ? " if ref is not None else ""
    rows = connection.execute(
        "SELECT r.type_kind, r.type_name, r.current_schema_version_id, v.schema_sha256, "
        "v.schema_json "
        "FROM schema_registry AS r LEFT JOIN schema_versions AS v "
        "ON v.type_kind = r.type_kind AND v.type_name = r.type_name "
        "AND v.schema_version_id = r.current_schema_version_id "
        f"{only}ORDER BY r.type_kind, r.type_name",
        ref or (),
    ).fetchall()
    types = []
    gone = ended(connection, ref)
    for kind, name, *rest in rows:
        if (kind, name) in gone:
            continue
        stored = _registered(kind, name, *rest)
        spec = stored.spec(kind, name)
        if spec.ref != (kind, name):
            raise StoredRow("schema_registry", (kind, name)).damaged(
                f"has the schema of {spec.ref}"
            )
        types.append((stored.version, spec))
    return types


BACKEND = "sqlite"
FORMAT = 3
LOG_ID = "log_id"
ENGINE_VERSIONS = ("v1", "v2")

APPLIED_UNITS = """
    CREATE TABLE IF NOT EXISTS applied_units (  -- that changed nothing, the latest of each app
        app_id           TEXT NOT NULL PRIMARY KEY,
        version          TEXT NOT NULL,    -- JSON: an integer or a string
        after_commit_id  INTEGER NOT NULL  -- head at that time
    )
    """

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
    APPLIED_UNITS,
    DROPPED_TYPES,
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
    """What a storage says it is. Format 0 is a file without our format number: a v1 file from
    before there were stamps, or one with the minimum of RFC 0009 3. Another implementation may
    have made it, so its tables are compared with ours (`check_shape`) before anything is read."""

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
        number = int(meta.get("format", 0))
    except (sqlite3.OperationalError, KeyError, ValueError, TypeError) as error:
        raise _foreign(path) from error
    if backend != BACKEND or not isinstance(engine, str) or number < 0:
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


Shape = Mapping[str, Mapping[str, tuple[bool, int]]]  # table: column: must be given, place in key
_REQUIRED = {"commits", "schema_registry", "schema_versions"}


def shape_of(connection: sqlite3.Connection) -> Shape:
    """The tables, with their columns."""
    tables = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 7) <> 'sqlite_'"
    ).fetchall()
    return {
        table: {
            column: (bool(not_null) and default is None, key)
            for _, column, _, not_null, default, key in connection.execute(
                "SELECT * FROM pragma_table_info(?)", (table,)
            )
        }
        for (table,) in tables
    }


def check_shape(
    connection: sqlite3.Connection,
    ours: Shape,
    data_tables: Iterable[str],
    stamp: FileStamp,
    path: str,
) -> None:
    """Refuse a file without our format number whose tables are not those that we know: all of it
    can be read and written, or nothing is."""
    stored = shape_of(connection)
    problems = [f"there is no table {t}" for t in {*_REQUIRED, *data_tables} if t not in stored]
    for table, columns in ours.items():
        theirs = stored.get(table, columns)
        missing = [name for name in columns if name not in theirs]
        unknown = [name for name, (needed, _) in theirs.items() if needed and name not in columns]
        if missing:
            problems.append(f"table {table} has no {', '.join(missing)}")
        elif unknown:
            problems.append(f"table {table} wants values for {', '.join(unknown)}")
        elif any(theirs[name][1] != place for name, (_, place) in columns.items()):
            problems.append(f"table {table} has another primary key")
    if not problems:
        try:
            known_types(connection)
        except IntegrityError as error:
            problems.append(str(error))
    if problems:
        raise UnsupportedEngineError(
            f"{path} is an engine {stamp.engine_version} storage that another implementation has "
            f"made, with tables that this one does not know ({'; '.join(sorted(problems))}). "
            "Nothing was touched. Export its types as JSON lines with the program that wrote it, "
            "and load them into a new storage with session.ingest()",
            backend=BACKEND,
            engine_version=stamp.engine_version,
            format=stamp.format,
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


def meta(connection: sqlite3.Connection) -> dict[str, str]:
    """What the storage says of itself besides; nothing in a file without a stamp."""
    if not has_table(connection, "storage_meta"):
        return {}
    return dict(connection.execute("SELECT key, value FROM storage_meta").fetchall())


def name_log(connection: sqlite3.Connection, engine_version: str) -> None:
    """Give a new storage an id of its own, by which copies know their source."""
    connection.execute(
        "INSERT OR IGNORE INTO storage_meta (key, value) VALUES (?, ?)",
        (LOG_ID, f"{engine_version}-{secrets.token_hex(16)}"),
    )


def _stamp_file(connection: sqlite3.Connection, engine_version: str) -> None:
    """0 -> 1: a file without our format number gets its stamp (RFC 0009, 7.1)."""
    create_tables(connection, engine_version)


def _add_applied_units(connection: sqlite3.Connection, _engine_version: str) -> None:
    """1 -> 2: units of work that changed nothing are recorded, too."""
    connection.execute(APPLIED_UNITS)


def _add_dropped_types(connection: sqlite3.Connection, _engine_version: str) -> None:
    """2 -> 3: types can have several schema versions, and end."""
    connection.execute(DROPPED_TYPES)


MIGRATIONS: Mapping[int, Callable[[sqlite3.Connection, str], None]] = {
    0: _stamp_file,
    1: _add_applied_units,
    2: _add_dropped_types,
}


def migrate_format(connection: sqlite3.Connection, stamp: FileStamp) -> None:
    """Bring an older format up to date, one idempotent step after another."""
    for step in range(stamp.format, FORMAT):
        MIGRATIONS[step](connection, stamp.engine_version)
        write_stamp(connection, FileStamp(stamp.engine_version, step + 1))
