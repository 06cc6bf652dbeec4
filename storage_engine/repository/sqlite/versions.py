"""The two engines in a SQLite file: v1 has two history tables for all types with rows as canonical
JSON, v2 one table per type and schema version with one column per field (RFC 0009, 3 and 8).
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from storage_engine.model.arrow import fields_json, row_schema, table_from_fields_json
from storage_engine.model.columns import sqlite_type
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.protocol import labels
from storage_engine.repository.sqlite.data_table import (
    DataTable,
    TableColumn,
    encode,
    from_values,
    identity_columns,
    quoted,
)
from storage_engine.repository.sqlite.engine import SqliteRepository
from storage_engine.repository.sqlite.forward import forward
from storage_engine.repository.sqlite.stored import StoredRow
from storage_engine.repository.sqlite.type_histories import histories, last_ending
from storage_engine.schema.history import SchemaVersion

_FIELDS_JSON = TableColumn("fields_json", "TEXT")


class SqliteRepositoryV1(SqliteRepository):
    """Rows of every type in `entity_history` and `relation_history`, whatever their version."""

    engine_version = "v1"
    shape = "payload"

    @classmethod
    def _create_data_tables(cls, connection: sqlite3.Connection) -> None:
        for kind in ("entity", "relation"):
            identity = identity_columns(kind)
            keys = "".join(f"{column} TEXT NOT NULL, " for column in identity)
            connection.execute(
                f"CREATE TABLE IF NOT EXISTS {kind}_history (commit_id INTEGER NOT NULL, "
                f"{kind}_type TEXT NOT NULL, {keys}schema_version_id INTEGER NOT NULL, "
                f"fields_json TEXT NOT NULL, "
                f"PRIMARY KEY ({kind}_type, {', '.join(identity)}, commit_id)) WITHOUT ROWID"
            )
            connection.execute(
                f"CREATE INDEX IF NOT EXISTS {kind}_history_by_commit "
                f"ON {kind}_history ({kind}_type, commit_id)"
            )

    def add_table(
        self, connection: sqlite3.Connection, spec: TypeSpec, version: int, commit_id: int, now: str
    ) -> DataTable:
        return _history(*spec.ref)

    def current_table(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> DataTable | None:
        return _history(kind, name, *_incarnation(connection, (kind, name)))

    def version_table(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        history = histories(connection, [(kind, name)]).get((kind, name))
        stored = history.version(version) if history is not None else None
        if stored is None or stored.purged_upto is not None:
            return None
        return replace(
            _history(kind, name),
            schema_version_id=version,
        )

    def rows_at(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        after, versions = _incarnation(connection, (kind, name))
        return _history(kind, name, after, [v for v in versions if v.version <= version])

    def end_type(
        self, connection: sqlite3.Connection, kind: str, name: str, *, purge: bool
    ) -> None:
        if purge:
            connection.execute(f"DELETE FROM {kind}_history WHERE {kind}_type = ?", (name,))

    def all_tables(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> Sequence[DataTable]:
        return [_history(kind, name)]

    def payload(self, spec: TypeSpec) -> Sequence[TableColumn]:
        return [_FIELDS_JSON]

    def _encode(self, spec: TypeSpec, table: pa.Table) -> list[list[Any]]:
        return [fields_json(spec, table).to_pylist()]

    def _decode(self, spec: TypeSpec, identity: pa.Table, payload: Sequence[Any]) -> pa.Table:
        return table_from_fields_json(spec, identity, pa.array(payload[0], pa.string()))


def _history(
    kind: str, name: str, after: int = 0, versions: Sequence[SchemaVersion] = ()
) -> DataTable:
    return DataTable(
        f"{kind}_history",
        kind,
        name,
        type_column=f"{kind}_type",
        after_commit_id=after,
        forward=forward(versions) if versions else None,
    )


def _incarnation(
    connection: sqlite3.Connection, ref: tuple[str, str]
) -> tuple[int, Sequence[SchemaVersion]]:
    """The commit that ended an earlier type of the same name, 0 if none did; the versions since."""
    history = histories(connection, [ref]).get(ref)
    after = last_ending(connection, *ref)
    versions = history.versions if history is not None else ()
    return after, [v for v in versions if v.activation_commit_id > after]


TYPE_LAYOUT_CATALOG = """
    CREATE TABLE IF NOT EXISTS type_layout_catalog (
        type_kind             TEXT NOT NULL,  -- 'entity' or 'relation'
        type_name             TEXT NOT NULL,
        schema_version_id     INTEGER NOT NULL,
        table_name            TEXT NOT NULL,
        activation_commit_id  INTEGER NOT NULL,
        is_current            INTEGER NOT NULL DEFAULT 0,
        created_at            TEXT NOT NULL DEFAULT (datetime('now')),
        PRIMARY KEY (type_kind, type_name, schema_version_id)
    )
"""


class SqliteRepositoryV2(SqliteRepository):
    """Typed reads see the table of the current schema version; the catalog says which it is."""

    engine_version = "v2"
    shape = "columns"

    @classmethod
    def _create_data_tables(cls, connection: sqlite3.Connection) -> None:
        connection.execute(TYPE_LAYOUT_CATALOG)

    def add_table(
        self, connection: sqlite3.Connection, spec: TypeSpec, version: int, commit_id: int, now: str
    ) -> DataTable:
        name = _free_name(connection, f"{spec.kind}_{spec.name}_v{version}")
        identity = identity_columns(spec.kind)
        parts = [
            *(f"{column} TEXT NOT NULL" for column in identity),
            "commit_id INTEGER NOT NULL",
            "schema_version_id INTEGER NOT NULL",
            *(
                f"{quoted(f.name)} {sqlite_type(f.storage)}{'' if f.nullable else ' NOT NULL'}"
                for f in spec.fields
            ),
            f"PRIMARY KEY ({', '.join(identity)}, commit_id)",
        ]
        connection.execute(f"CREATE TABLE {quoted(name)} ({', '.join(parts)}) WITHOUT ROWID")
        for column in ("commit_id", *(f.name for f in spec.fields if f.index)):
            connection.execute(
                f"CREATE INDEX {quoted(f'{name}:{column}')} ON {quoted(name)} ({quoted(column)})"
            )
        connection.execute(
            "UPDATE type_layout_catalog SET is_current = 0 WHERE type_kind = ? AND type_name = ?",
            spec.ref,
        )
        connection.execute(
            "INSERT INTO type_layout_catalog (type_kind, type_name, schema_version_id, table_name, "
            "activation_commit_id, is_current, created_at) VALUES (?, ?, ?, ?, ?, 1, ?)",
            (*spec.ref, version, name, commit_id, now),
        )
        return DataTable(name, *spec.ref, activation_commit_id=commit_id)

    def current_table(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> DataTable | None:
        return _layout(
            connection, "type_kind = ? AND type_name = ? AND is_current = 1", (kind, name)
        )

    def version_table(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        condition = "type_kind = ? AND type_name = ? AND schema_version_id = ?"
        table = _layout(connection, condition, (kind, name, version))
        return replace(table, activation_commit_id=0) if table is not None else None

    def rows_at(
        self, connection: sqlite3.Connection, kind: str, name: str, version: int
    ) -> DataTable | None:
        return self.version_table(connection, kind, name, version)

    def end_type(
        self, connection: sqlite3.Connection, kind: str, name: str, *, purge: bool
    ) -> None:
        ref = (kind, name)
        if purge:
            for table in self.all_tables(connection, *ref):
                connection.execute(f"DROP TABLE {quoted(table.name)}")
            sql = "DELETE FROM type_layout_catalog WHERE type_kind = ? AND type_name = ?"
        else:
            sql = (
                "UPDATE type_layout_catalog SET is_current = 0 "
                "WHERE type_kind = ? AND type_name = ?"
            )
        connection.execute(sql, ref)

    def all_tables(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> Sequence[DataTable]:
        rows = connection.execute(
            "SELECT table_name FROM type_layout_catalog WHERE type_kind = ? AND type_name = ? "
            "ORDER BY schema_version_id",
            (kind, name),
        )
        place = StoredRow("type_layout_catalog", (kind, name))
        return [DataTable(place.text("table_name", table), kind, name) for (table,) in rows]

    def payload(self, spec: TypeSpec) -> Sequence[TableColumn]:
        return [TableColumn(f.name, sqlite_type(f.storage)) for f in spec.fields]

    def _encode(self, spec: TypeSpec, table: pa.Table) -> list[list[Any]]:
        return encode(spec, table, [f.name for f in spec.fields])

    def _decode(self, spec: TypeSpec, identity: pa.Table, payload: Sequence[Any]) -> pa.Table:
        schema = row_schema(spec)
        fields = [
            from_values(values, f.storage, schema.field(f.name).type)
            for f, values in zip(spec.fields, payload, strict=True)
        ]
        return pa.Table.from_arrays([*identity.columns, *fields], schema=schema)

    def layout_problems(self, connection: sqlite3.Connection) -> list[str]:
        tables = {
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
        rows = connection.execute(
            "SELECT type_kind, type_name, schema_version_id, table_name, is_current "
            "FROM type_layout_catalog"
        )
        layouts = {(kind, name, version): rest for kind, name, version, *rest in rows}
        problems = []
        for ref, history in histories(connection).items():
            now = history.current.version if history.current is not None else None
            for version in history.versions:
                number = version.version
                label = f"schema version {number} of the {history.kind} {history.name}"
                table, is_current = layouts.pop((*ref, number), (None, None))
                if table is None:
                    if version.purged_upto is None:
                        problems.append(f"type_layout_catalog lacks {label}")
                elif table not in tables:
                    problems.append(f"{label} has no table {table}")
                elif bool(is_current) != (number == now):
                    what = "is marked as current" if is_current else "is not marked as current"
                    problems.append(f"{label} {what}")
        problems += [
            f"type_layout_catalog has schema version {version} of the {kind} {name}, which is not "
            "in schema_versions"
            for kind, name, version in layouts
        ]
        return problems

    def _engine_info(self, connection: sqlite3.Connection | None) -> dict[str, Any]:
        layouts = {}
        for ref, history in (histories(connection) if connection else {}).items():
            now = history.current  # None for a dropped type
            layouts[ref] = {
                "type_kind": history.kind,
                "current_schema_version_id": now.version if now else None,
                "activation_commit_id": now.activation_commit_id if now else None,
                "historical_versions": [v.version for v in history.versions if v is not now],
            }
        return {"type_layouts": dict(zip(labels(list(layouts)), layouts.values(), strict=True))}


def _layout(
    connection: sqlite3.Connection, condition: str, parameters: Sequence[Any]
) -> DataTable | None:
    """The table that the catalog names."""
    row = connection.execute(
        f"SELECT table_name, activation_commit_id FROM type_layout_catalog WHERE {condition}",
        parameters,
    ).fetchone()
    if row is None:
        return None
    kind, name, *_ = parameters
    place = StoredRow("type_layout_catalog", (kind, name))
    return DataTable(
        place.text("table_name", row[0]),
        kind,
        name,
        activation_commit_id=place.integer("activation_commit_id", row[1]),
    )


def _free_name(connection: sqlite3.Connection, wanted: str) -> str:
    """Names that differ in case only would share a table; the catalog knows the real name."""
    taken = {name.lower() for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    numbered = (f"{wanted}_{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([wanted], numbered) if name.lower() not in taken)
