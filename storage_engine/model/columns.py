"""The columns of a type: in memory (row schema), in Parquet files and in SQLite tables.

Schemas come from declared types, never from values, so every file of a type has the same one
(RFC 0009 section 5). A JSON column holds canonical JSON text; None is always SQL NULL and the
text `null` is never written, which is lossless because only nullable fields can be None.
"""

from __future__ import annotations

from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.model.decimals import decimal_type
from storage_engine.model.spec import FieldSpec, Storage, TypeSpec

EngineVersion = Literal["v1", "v2"]

# Decimals, which have many types, are not among them: ask `arrow_type` and `sqlite_type`.
ARROW_TYPES: dict[Storage, pa.DataType] = {
    "str": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "datetime": pa.timestamp("us", tz="UTC"),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "bytes": pa.binary(),
    "json": pa.string(),
}

SQLITE_TYPES: dict[Storage, str] = {
    "str": "TEXT",
    "int": "INTEGER",
    "float": "REAL",
    "bool": "INTEGER",
    "datetime": "TEXT",
    "date": "TEXT",
    "time": "TEXT",
    "bytes": "BLOB",
    "json": "TEXT",
}


def arrow_type(storage: Storage) -> pa.DataType:
    """The Arrow type of a kind of column."""
    decimals = decimal_type(storage)
    return ARROW_TYPES[storage] if decimals is None else decimals.arrow


def sqlite_type(storage: Storage) -> str:
    """The declared type of such a column in SQLite."""
    decimals = decimal_type(storage)
    return SQLITE_TYPES[storage] if decimals is None else decimals.in_sqlite


def times_of_text(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts of ISO 8601 as times of day, for which Arrow has no cast; ArrowInvalid for others."""
    moments = pc.binary_join_element_wise("1970-01-01T", column.cast(pa.string()), "")
    return moments.cast(pa.timestamp("us")).cast(pa.time64("us"))


# Part of the file format: never renumber. User fields start at spec.FIRST_FIELD_ID.
SYSTEM_FIELD_IDS = {
    "commit_id": 1,
    "entity_type": 2,
    "relation_type": 3,
    "entity_key": 4,
    "left_key": 5,
    "right_key": 6,
    "instance_key": 7,
    "schema_version_id": 8,
    "fields_json": 9,
}


def row_schema(spec: TypeSpec) -> pa.Schema:
    """Identity columns, then one column per field: how rows travel inside the library."""
    identity = [pa.field(name, pa.string(), nullable=False) for name in spec.identity]
    return pa.schema([*identity, *map(_column, spec.fields)])


def parquet_schema(
    spec: TypeSpec, *, engine_version: EngineVersion, with_commit_id: bool = True
) -> pa.Schema:
    """The columns of a type's data files, each with its stable field id.

    Staged parts have no `commit_id` column: their manifest gives it.
    """
    columns = [_system("commit_id", pa.int64())] if with_commit_id else []
    columns += [_system(name, pa.string()) for name in (spec.type_column, *spec.identity)]
    columns.append(_system("schema_version_id", pa.int64()))
    columns += [_with_id(_column(f), f.field_id) for f in spec.fields]
    if engine_version == "v1":
        columns.append(_system("fields_json", pa.string()))
    return pa.schema(columns)


def _column(field: FieldSpec) -> pa.Field:
    return pa.field(field.name, arrow_type(field.storage), nullable=field.nullable)


def _system(name: str, type_: pa.DataType) -> pa.Field:
    return _with_id(pa.field(name, type_, nullable=False), SYSTEM_FIELD_IDS[name])


def _with_id(column: pa.Field, field_id: int) -> pa.Field:
    return column.with_metadata({b"PARQUET:field_id": str(field_id).encode()})


def columns_of(type_spec: TypeSpec) -> list[str]:
    """The columns by which rows of a type are written."""
    keys: list[str] = []
    if type_spec.kind == "relation":
        keys = [
            "left_key",
            "right_key",
            *([type_spec.instance_key] if type_spec.instance_key else []),
        ]
    return keys + [field.name for field in type_spec.fields]


def distinct_from(a: pa.ChunkedArray, b: pa.ChunkedArray) -> pa.ChunkedArray:
    """SQL's IS DISTINCT FROM, row by row."""
    differ = pc.fill_null(pc.not_equal(a, b), True)
    return pc.and_(differ, pc.invert(pc.and_(pc.is_null(a), pc.is_null(b))))
