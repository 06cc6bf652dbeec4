"""A DataFrame as rows of a declared type, in Spark's own columns wherever that keeps every value.

A source whose columns have the declared types (or narrower ones) is compared with what is stored
by Catalyst alone. Others (nested values, JSON text, floats for ints) go through the same
conversion as all bulk input, in Python, a column at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from storage_engine.model.canonical import decode, dumps
from storage_engine.model.columns import row_schema
from storage_engine.model.conform import Conformer, conform
from storage_engine.model.spec import MISSING, FieldSpec, Storage, TypeSpec
from storage_engine.spark.quarantine import set_aside
from storage_engine.spark.schema import check_dataframe, quoted
from storage_engine.spark.staged_parts import (
    FAULTS,
    HELPERS,
    ORIGIN,
    ORIGINAL,
    REASONS,
    sift_with_reasons,
)

SPARK_TYPES: dict[Storage, str] = {
    "str": "string",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "datetime": "timestamp",
    "date": "date",
    "bytes": "binary",
    "json": "string",
}
# What Catalyst widens without loss. Everything else that can be converted is, by `conform`.
_EXACT: dict[Storage, frozenset[str]] = {
    "str": frozenset({"string"}),
    "int": frozenset({"tinyint", "smallint", "int", "bigint"}),
    "float": frozenset({"float", "double"}),
    "bool": frozenset({"boolean"}),
    "datetime": frozenset({"timestamp"}),
    "date": frozenset({"date"}),
    "bytes": frozenset({"binary"}),
    "json": frozenset(),
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class SourceRows:
    """Rows to be written. `frame` has either the source's columns or, when `conformed`, those of
    the row schema with faulty rows marked; `columns` are the row schema's columns over it."""

    frame: DataFrame
    columns: dict[str, Column]
    conformed: bool


def check_columns(spec: TypeSpec, schema: StructType) -> None:
    """ValidationError that lists every column of a DataFrame that does not fit the type."""
    check_dataframe(spec, StructType([f for f in schema.fields if f.name not in HELPERS]))


def source_rows(df: DataFrame, spec: TypeSpec, *, compared: bool) -> SourceRows:
    """`df` (checked before) for writing; `compared`: its values are to be compared with others."""
    native = _native(df, spec)
    if native is not None or not compared:
        return SourceRows(df, native or {}, conformed=False)
    stripped = _plain_spec(spec)
    made = df.mapInArrow(ConformTask(stripped), _conformed_ddl(spec))
    return SourceRows(made, {name: F.col(quoted(name)) for name in row_schema(spec).names}, True)


def _native(df: DataFrame, spec: TypeSpec) -> dict[str, Column] | None:
    """The row schema's columns as expressions; None when Catalyst alone cannot make them."""
    given = {f.name: f.dataType.simpleString() for f in df.schema.fields}
    sources = {"entity_key": spec.primary_key, "instance_key": spec.instance_key}
    columns: dict[str, Column] = {}
    for name in spec.identity:
        source = sources.get(name, name)
        if source is None:
            columns[name] = F.lit("")
        elif given.get(source) == "string":
            columns[name] = F.col(quoted(source))
        else:
            return None
    for field in spec.fields:
        made = _native_field(field, given.get(field.name))
        if made is None:
            return None
        columns[field.name] = made
    return columns


def _native_field(field: FieldSpec, source: str | None) -> Column | None:
    target = SPARK_TYPES[field.storage]
    if source is not None:
        if source not in _EXACT[field.storage]:
            return None
        column = F.col(quoted(field.name))
        return column if source == target else column.cast(target)
    if field.default is not MISSING:
        return _literal(field).cast(target)
    return F.lit(None).cast(target) if field.nullable and field.default_factory is None else None


def _literal(field: FieldSpec) -> Column:
    value = decode(field.type_spec, field.default)
    if field.storage == "json" and value is not None:
        value = dumps(value)
    if isinstance(value, datetime):
        return F.timestamp_micros(F.lit(_micros(value)))
    return F.lit(value)


def cannot_be_written(source: SourceRows, spec: TypeSpec) -> Column:
    """Whether staging will set a row aside: the rules of `conform` for columns that Catalyst takes
    as they are."""
    frame = source.frame
    if source.conformed:
        return F.col(FAULTS).isNotNull()
    bad = F.lit(False)
    if REASONS in frame.columns:
        bad = bad | F.coalesce(F.size(REASONS) > 0, F.lit(False))
    for name in spec.identity:
        column = source.columns[name]
        if name != "instance_key" or spec.instance_key is not None:
            bad = bad | column.isNull() | (column == "") | ~F.is_valid_utf8(column)
    for field in spec.fields:
        if field.name != spec.primary_key:
            bad = bad | _misfit(field, source.columns[field.name])
    return F.coalesce(bad, F.lit(False))


def _misfit(field: FieldSpec, column: Column) -> Column:
    bad = F.lit(False) if field.nullable else column.isNull()
    if field.storage == "float":
        # NaN compares as greater than infinity.
        bad = bad | (F.abs(column) >= F.lit(math.inf))
    elif field.storage == "str":
        bad = bad | ~F.is_valid_utf8(column)
    elif field.storage == "date":
        days = F.unix_date(column)
        bad = bad | (days < _days(date.min)) | (days > _days(date.max))
    elif field.storage == "datetime":
        micros = F.unix_micros(column)
        bad = bad | (micros < _micros(_FIRST)) | (micros > _micros(_LAST))
    return F.coalesce(bad, F.lit(False))


def _days(day: date) -> int:
    return day.toordinal() - _EPOCH.toordinal()


def _micros(moment: datetime) -> int:
    """Since 1970, exactly: floats are not fine enough for all years."""
    return (moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(
        microseconds=1
    )


# -- in Python workers --------------------------------------------------------------------------


@dataclass(frozen=True)
class ConformTask:
    """Turns a source's batches into row-schema batches; rows that do not fit stay, as nulls, with
    their faults and their original beside them."""

    spec: TypeSpec

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        conformer: Conformer | None = None
        for batch in batches:
            own = batch.select([name for name in batch.schema.names if name not in HELPERS])
            if conformer is None:
                conformer = conform(self.spec, own.schema)
            sifted = sift_with_reasons(conformer, own, batch)
            yield _marked(sifted.rows, [None] * sifted.rows.num_rows, [None] * sifted.rows.num_rows)
            if sifted.faults:
                numbers = sorted(sifted.faults)
                place = batch.schema.get_field_index(ORIGIN)
                origin = batch.column(place) if place >= 0 else None
                rows = set_aside(own, origin, numbers)
                faults = [
                    json.dumps([[f.what, f.detail] for f in sifted.faults[n]]) for n in numbers
                ]
                empty = pa.RecordBatch.from_arrays(
                    [pa.nulls(len(numbers), f.type) for f in sifted.rows.schema],
                    names=sifted.rows.schema.names,
                )
                yield _marked(empty, faults, [row.to_text() for row in rows])


def _marked(
    rows: pa.RecordBatch, faults: Sequence[str | None], originals: Sequence[str | None]
) -> pa.RecordBatch:
    arrays = [*rows.columns, pa.array(faults, pa.string()), pa.array(originals, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, names=[*rows.schema.names, FAULTS, ORIGINAL])


def row_ddl(spec: TypeSpec) -> str:
    """The row schema's columns, all nullable, as Spark declares them."""
    columns = [f"{quoted(name)} string" for name in spec.identity]
    columns += [f"{quoted(f.name)} {SPARK_TYPES[f.storage]}" for f in spec.fields]
    return ", ".join(columns)


def _conformed_ddl(spec: TypeSpec) -> str:
    return f"{row_ddl(spec)}, {FAULTS} string, {ORIGINAL} string"


def _plain_spec(spec: TypeSpec) -> TypeSpec:
    """Without the user's class, which executors may not be able to import."""
    return replace(spec, python_class=None)
