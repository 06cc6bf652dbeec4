"""Spark schemas of declared types, and whether a DataFrame fits one.

The columns are those of `Session.ingest`: field names; a relation also has `left_key`, `right_key`
and its instance key under its own name. Nested fields, unions and `Any` are strings that hold
JSON, as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from storage_engine.errors import ConfigurationError
from storage_engine.model.conform import conform
from storage_engine.model.declarations import spec_of
from storage_engine.model.spec import Storage, TypeSpec
from storage_engine.model.validation import unknown_name

_SPARK_TYPES: dict[Storage, DataType] = {
    "str": StringType(),
    "int": LongType(),
    "float": DoubleType(),
    "bool": BooleanType(),
    "datetime": TimestampType(),
    "date": DateType(),
    "bytes": BinaryType(),
    "json": StringType(),
}
COMMIT_ID = "commit_id"


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
        kind = _SPARK_TYPES[field.storage]
        made.append((field.name, StructField(field.name, kind, nullable=field.nullable)))
    return made
