"""Declared types as Spark sees them: their schemas, whether a DataFrame fits one, and its rows.

The columns are those of `Session.ingest`: field names; a relation also has `left_key`, `right_key`
and its instance key under its own name. Nested fields, unions and `Any` are strings that hold
JSON, as they are stored. Times of day are strings too, with microseconds: Spark has a type for
them, but by default refuses to use it.

Rows stay in Spark's own columns wherever that keeps every value: a source whose columns have the
declared types (or narrower ones) is compared with what is stored by Catalyst alone. Others (nested
values, JSON text, floats for ints) go through the same conversion as all bulk input, in Python, a
column at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from storage_engine.errors import ConfigurationError
from storage_engine.model.canonical import decode, dumps, leaf
from storage_engine.model.casts import plan_cast
from storage_engine.model.columns import row_schema
from storage_engine.model.conform import Conformer, conform, input_fields
from storage_engine.model.decimals import decimal_type
from storage_engine.model.declarations import spec_of
from storage_engine.model.field_types import scalar_spec
from storage_engine.model.scalars import UUID_TEXT, lowered
from storage_engine.model.spec import MISSING, FieldSpec, Storage, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.spark.quarantine import set_aside
from storage_engine.spark.staged_parts import (
    FAULTS,
    GIVEN,
    HELPERS,
    ORIGIN,
    ORIGINAL,
    REASONS,
    exchanged,
    sift_with_reasons,
)

SPARK_TYPES: dict[Storage, DataType] = {
    "str": StringType(),
    "int": LongType(),
    "float": DoubleType(),
    "bool": BooleanType(),
    "datetime": TimestampType(),
    "date": DateType(),
    "time": StringType(),
    "bytes": BinaryType(),
    "json": StringType(),
}


def spark_type(storage: Storage) -> DataType:
    """The Spark type of a kind of column."""
    decimals = decimal_type(storage)
    if decimals is not None:
        return DecimalType(decimals.precision, decimals.scale)
    return SPARK_TYPES[storage]


COMMIT_ID = "commit_id"
CARRIED = (REASONS, ORIGIN)  # columns that a source may bring beside those of the type


def type_spec(type: Any) -> TypeSpec:
    """Of a declared class; a spec is passed on."""
    return type if isinstance(type, TypeSpec) else spec_of(type)


def spark_schema(type: Any, *, with_commit_id: bool = False) -> StructType:
    """The columns of a type, as readers return them and writers take them.

    `type` is a declared class, or a TypeSpec. `with_commit_id` puts `commit_id` in front.
    """
    spec = type_spec(type)
    made = [StructField(COMMIT_ID, LongType(), nullable=False)] if with_commit_id else []
    return StructType([*made, *(field for _, field in _columns(spec))])


def stored_columns(spec: TypeSpec) -> dict[str, str]:
    """By the name that a DataFrame has it under, the column in the type's files."""
    return {field.name: stored for stored, field in _columns(spec)}


def chosen_columns(spec: TypeSpec, names: Iterable[str] | None) -> list[str] | None:
    """Names that a reader asks for, checked."""
    if names is None:
        return None
    wanted = [names] if isinstance(names, str) else list(names)
    columns_there = [COMMIT_ID, *stored_columns(spec)]
    wrong = [
        unknown_name(name, columns_there, what="column")
        for name in wanted
        if name not in columns_there
    ]
    if wrong or not wanted:
        problem = "; ".join(wrong) or "no columns are asked for"
        raise ConfigurationError(
            f"{spec.name}: {problem} (there are {', '.join(columns_there[1:])})"
        )
    return list(dict.fromkeys(wanted))


def check_dataframe(type: Any, schema: StructType) -> None:
    """ValidationError that lists every column which does not fit the type.

    The rules are those of `Session.ingest`: a column may be missing where the field has a default
    or can be null; values must fit without loss, which rows are checked for when they are written.
    """
    conform(type_spec(type), arrow_schema(schema))


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow form in which Spark hands over rows of a schema."""
    return pa.schema(
        [pa.field(f.name, _arrow_type(f.dataType), nullable=f.nullable) for f in schema.fields]
    )


def quoted(name: str) -> str:
    """A column's name as SQL takes it literally."""
    return f"`{name.replace('`', '``')}`"


def _arrow_type(kind: DataType) -> pa.DataType:
    try:
        return to_arrow_type(kind, timezone="UTC")
    except PySparkTypeError:
        return pa.month_day_nano_interval()  # Spark's intervals have no Arrow form: fits nowhere


def _columns(spec: TypeSpec) -> list[tuple[str, StructField]]:
    keys: list[tuple[str, str]] = []
    if spec.kind == "relation":
        keys = [("left_key", "left_key"), ("right_key", "right_key")]
        if spec.instance_key is not None:
            keys.append(("instance_key", spec.instance_key))
    made = [(stored, StructField(name, StringType(), nullable=False)) for stored, name in keys]
    for field in spec.fields:
        kind = spark_type(field.storage)
        made.append((field.name, StructField(field.name, kind, nullable=field.nullable)))
    return made


# -- rows of a DataFrame ----------------------------------------------------------------------

# What Catalyst widens without loss. Everything else that can be converted is, by `conform`.
_EXACT: dict[Storage, frozenset[str]] = {
    "str": frozenset({"string"}),
    "int": frozenset({"tinyint", "smallint", "int", "bigint"}),
    "float": frozenset({"float", "double"}),
    "bool": frozenset({"boolean"}),
    "datetime": frozenset({"timestamp"}),
    "date": frozenset({"date"}),
    "time": frozenset(),  # a text, of which there are several for a time
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


def fitting_columns(df: DataFrame, spec: TypeSpec) -> DataFrame:
    """`df` for a type; ValidationError lists every column that does not fit it.

    A column of another type that holds nothing becomes nulls of the declared type: Spark reads the
    untyped nulls of a Parquet file as integers. Only such columns are looked into.
    """
    own = [field for field in df.schema.fields if field.name not in CARRIED]
    fields = {field.name: field for field in input_fields(spec)}
    nulls = {}
    if len({field.name.casefold() for field in own}) == len(own):
        nulls = {
            field.name: spark_type(fields[field.name].storage)
            for field in own
            if field.name in fields and _holds_nothing(df, field, fields[field.name])
        }
    if nulls:
        df = df.select(
            *(
                F.lit(None).cast(nulls[name]).alias(name) if name in nulls else F.col(quoted(name))
                for name in df.columns
            )
        )
    check_dataframe(spec, StructType([f for f in df.schema.fields if f.name not in CARRIED]))
    return df


def _holds_nothing(df: DataFrame, column: StructField, target: FieldSpec) -> bool:
    """Of a column whose type does not fit."""
    if isinstance(column.dataType, NullType):
        return True
    (source,) = arrow_schema(StructType([column]))
    if plan_cast(target.storage, target.type_spec, source.type) is not None:
        return False
    return not df.select(quoted(column.name)).filter(F.col(quoted(column.name)).isNotNull()).head(1)


def source_rows(df: DataFrame, spec: TypeSpec, *, compared: bool) -> SourceRows:
    """`df` (checked before) for writing; `compared`: its values are to be compared with others."""
    native = _native(df, spec)
    if native is not None or not compared:
        return SourceRows(df, native or {}, conformed=False)
    made = df.mapInArrow(ConformTask(spec.without_class()), _conformed_ddl(spec))
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
    target = spark_type(field.storage).simpleString()
    if source is not None:
        if source not in _EXACT.get(field.storage, {target}):
            return None
        column = F.col(quoted(field.name))
        if field.logical == "uuid":
            return F.lower(column)
        return column if source == target else column.cast(target)
    if field.default is not MISSING:
        return value_column(field, decode(field.type_spec, field.default))
    return F.lit(None).cast(target) if field.nullable and field.default_factory is None else None


def value_column(field: FieldSpec, value: Any) -> Column:
    """A value of a field, as Python has it, for every row."""
    target = spark_type(field.storage).simpleString()
    if field.storage == "json" and value is not None:
        value = dumps(value)
    if isinstance(value, time):
        value = leaf(value)
    value = lowered(value)
    if isinstance(value, datetime):
        return F.timestamp_micros(F.lit(_micros(value))).cast(target)
    return F.lit(value).cast(target)


def given_identity(source: SourceRows, spec: TypeSpec) -> list[Column]:
    """The identity of every row, bad ones too: null where a row does not tell it."""
    columns = [source.columns[name] for name in spec.identity]
    if source.conformed:
        given = [F.get(F.col(GIVEN), place) for place in range(len(columns))]
        return [F.coalesce(*pair) for pair in zip(columns, given, strict=True)]
    has_text = [n != "instance_key" or spec.instance_key is not None for n in spec.identity]
    return [
        F.when((column != "") & F.is_valid_utf8(column), column) if is_text else column
        for column, is_text in zip(columns, has_text, strict=True)
    ]


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
        if field.logical == "uuid":
            bad = bad | ~column.rlike(UUID_TEXT.replace("$", r"\z"))
    elif field.storage == "date":
        days = F.unix_date(column)
        bad = bad | (days < _days(date.min)) | (days > _days(date.max))
    elif field.storage == "datetime":
        micros = F.unix_micros(column)
        bad = bad | (micros < _micros(_FIRST)) | (micros > _micros(_LAST))
    if field.logical == "literal":
        bad = bad | ~column.isin(list(scalar_spec(field.type_spec)["values"]))
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
            none = [None] * sifted.rows.num_rows
            yield _marked(sifted.rows, none, none, none)
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
                given = conformer.identities(own.take(pa.array(numbers, pa.int64())))
                yield _marked(empty, faults, [row.to_text() for row in rows], given)


def _marked(
    rows: pa.RecordBatch,
    faults: Sequence[str | None],
    originals: Sequence[str | None],
    given: Sequence[Sequence[str | None] | None],
) -> pa.RecordBatch:
    rows = rows.cast(exchanged(rows.schema))
    arrays = [*rows.columns, pa.array(faults, pa.string()), pa.array(originals, pa.string())]
    arrays.append(pa.array(given, pa.list_(pa.string())))
    return pa.RecordBatch.from_arrays(arrays, names=[*rows.schema.names, FAULTS, ORIGINAL, GIVEN])


def row_ddl(spec: TypeSpec) -> str:
    """The row schema's columns, all nullable, as Spark declares them."""
    columns = [f"{quoted(name)} string" for name in spec.identity]
    columns += [f"{quoted(f.name)} {spark_type(f.storage).simpleString()}" for f in spec.fields]
    return ", ".join(columns)


def _conformed_ddl(spec: TypeSpec) -> str:
    return f"{row_ddl(spec)}, {FAULTS} string, {ORIGINAL} string, {GIVEN} array<string>"
