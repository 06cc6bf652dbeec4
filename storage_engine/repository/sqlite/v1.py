"""Engine v1: two history tables for all types, rows as canonical JSON."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from storage_engine.model.arrow import fields_json, table_from_fields_json
from storage_engine.model.spec import TypeSpec
from storage_engine.repository.sqlite.data_table import DataTable, TableColumn, identity_columns
from storage_engine.repository.sqlite.engine import SqliteRepository

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

    def _add_table(
        self, connection: sqlite3.Connection, spec: TypeSpec, version: int, commit_id: int, now: str
    ) -> DataTable:
        return _history(*spec.ref)

    def _current_table(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> DataTable | None:
        return _history(kind, name)

    def _all_tables(
        self, connection: sqlite3.Connection, kind: str, name: str
    ) -> Sequence[DataTable]:
        return [_history(kind, name)]

    def _payload(self, spec: TypeSpec) -> Sequence[TableColumn]:
        return [_FIELDS_JSON]

    def _encode(self, spec: TypeSpec, table: pa.Table) -> list[list[Any]]:
        return [fields_json(spec, table).to_pylist()]

    def _decode(self, spec: TypeSpec, identity: pa.Table, payload: Sequence[Any]) -> pa.Table:
        return table_from_fields_json(spec, identity, pa.array(payload[0], pa.string()))


def _history(kind: str, name: str) -> DataTable:
    return DataTable(f"{kind}_history", kind, name, type_column=f"{kind}_type")
