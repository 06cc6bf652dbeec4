"""Arrow columns to SQLite values and back, without loss.

Datetimes and dates become fixed-width ISO 8601 text in UTC, so that text order is time order.
SQLite has no negative zero; like every comparison does, it takes -0.0 for 0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage_engine.errors import ValidationError
from storage_engine.model.arrow import row_schema
from storage_engine.model.spec import TypeSpec

# Microseconds of 0001-01-01 and 9999-12-31T23:59:59.999999, days of the same: outside, text of
# four-digit years would neither sort nor come back.
_FIRST_US, _LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


def to_values(column: pa.Array, storage: str) -> list[Any]:
    """One Arrow column as the values to bind."""
    if storage == "datetime":
        column = pc.replace_substring(column.cast(pa.string()), " ", "T")
    elif storage == "date":
        column = column.cast(pa.string())
    elif storage == "bool":
        column = column.cast(pa.int8())
    values: list[Any] = column.to_pylist()
    return values


def from_values(values: Sequence[Any], storage: str, arrow_type: pa.DataType) -> pa.Array:
    """What `to_values` made, as the Arrow column it came from."""
    if storage in ("datetime", "date"):
        return pa.array(values, pa.string()).cast(arrow_type)
    if storage == "bool":
        return pa.array(values, pa.int8()).cast(pa.bool_())
    return pa.array(values, arrow_type)


def read_schema(spec: TypeSpec) -> pa.Schema:
    """How rows come out: with the commit that wrote them."""
    return pa.schema([pa.field("commit_id", pa.int64(), nullable=False), *row_schema(spec)])


def checked_rows(spec: TypeSpec, rows: pa.Table | pa.RecordBatch) -> pa.Table:
    """The rows in exactly the type's row schema; refuses what does not fit, naming the field."""
    schema = row_schema(spec)
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise ValidationError(f"{spec.name}: rows lack {', '.join(missing)}", type=spec.name)
    table = table.select(schema.names)
    for column in schema:
        values = table.column(column.name)
        problem = _problem(values, column)
        if problem:
            raise ValidationError(
                f"{spec.name}.{column.name}: {problem}", type=spec.name, field=column.name
            )
    return table.cast(schema)


def _problem(values: pa.ChunkedArray, column: pa.Field) -> str:
    """Why a column cannot be stored, "" when it can."""
    if values.null_count and not column.nullable:
        return "null in a column that takes none"
    if values.type != column.type:
        return f"expected {column.type}, got {values.type}"
    if pa.types.is_timestamp(column.type):
        return _out_of_range(values.cast(pa.int64()), _FIRST_US, _LAST_US)
    if pa.types.is_date32(column.type):
        return _out_of_range(values.cast(pa.int32()), _FIRST_DAY, _LAST_DAY)
    return ""


def _out_of_range(numbers: pa.ChunkedArray, first: int, last: int) -> str:
    bounds = pc.min_max(numbers).as_py()
    if bounds["min"] is None or first <= bounds["min"] <= bounds["max"] <= last:
        return ""
    return "a date outside the years 1 to 9999"


def encode(spec: TypeSpec, table: pa.Table, names: Sequence[str]) -> list[list[Any]]:
    """The named columns of a table in the row schema as values to bind."""
    storages = {f.name: f.storage for f in spec.fields}
    return [
        to_values(table.column(name).combine_chunks(), storages.get(name, "str")) for name in names
    ]


def rows_of(columns: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Columns of equal length as rows to bind."""
    return zip(*columns, strict=True)
