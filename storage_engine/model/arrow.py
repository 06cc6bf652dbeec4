"""Objects to Arrow tables and back, and the JSON payload of v1 rows.

Work goes column by column. Promise: objects -> table -> objects and table -> payload -> table
give back equal values.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import ValidationError as PydanticError

from storage_engine.errors import IntegrityError, ValidationError
from storage_engine.model.canonical import decoder, dumps, leaf
from storage_engine.model.columns import (
    ARROW_TYPES,
    SQLITE_TYPES,
    EngineVersion,
    arrow_type,
    parquet_schema,
    row_schema,
)
from storage_engine.model.conform import Conformer, conform
from storage_engine.model.decimals import decimal_type
from storage_engine.model.record import hydrate
from storage_engine.model.scalars import lowered
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import explain, validator

__all__ = [
    "ARROW_TYPES",
    "SQLITE_TYPES",
    "Conformer",
    "EngineVersion",
    "column_texts",
    "conform",
    "fields_json",
    "objects_to_table",
    "parquet_schema",
    "row_schema",
    "rows_to_table",
    "table_from_fields_json",
    "table_to_objects",
    "table_to_rows",
]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


# --- objects ----------------------------------------------------------------------------------


def objects_to_table(spec: TypeSpec, objects: Sequence[Any]) -> pa.Table:
    """Objects of the spec's class as rows, in their order."""
    for other in {type(o) for o in objects} - {spec.python_class}:
        raise ValidationError(f"expected {spec.name} objects, got {other.__name__}", type=spec.name)
    return rows_to_table(spec, [vars(o) for o in objects])


def rows_to_table(spec: TypeSpec, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Validated values by the names that a constructor takes, as rows, in their order."""
    schema = row_schema(spec)
    columns = [_identity_column(name, spec, rows) for name in spec.identity]
    columns += [_field_column(f, spec, rows) for f in spec.fields]
    return pa.Table.from_arrays(columns, schema=schema)


def _identity_column(column: str, spec: TypeSpec, rows: Sequence[dict[str, Any]]) -> pa.Array:
    source = _identity_source(column, spec)
    values = [row[source] for row in rows] if source else [""] * len(rows)
    return pa.array(values, pa.string())


def _identity_source(column: str, spec: TypeSpec) -> str | None:
    """The attribute that an identity column holds; None for the key of an unkeyed relation."""
    sources = {"entity_key": spec.primary_key, "instance_key": spec.instance_key}
    return sources.get(column, column)


def _field_column(field: FieldSpec, spec: TypeSpec, rows: Sequence[dict[str, Any]]) -> pa.Array:
    if field.storage == "json":
        return pa.array(_json_texts(field, spec, rows), pa.string())
    values = [row[field.name] for row in rows]
    if field.logical is not None:
        values = [lowered(value) for value in values]
    return pa.array(values, arrow_type(field.storage))


def _json_texts(
    field: FieldSpec, spec: TypeSpec, rows: Sequence[dict[str, Any]]
) -> list[str | None]:
    # Lists and dicts can have been changed in place since construction: look again.
    check = validator(field.type_spec).validate_python
    texts: list[str | None] = []
    try:
        for row in rows:
            value = row[field.name]
            texts.append(None if value is None else dumps(check(value)))
    except PydanticError as error:
        sources = [_identity_source(column, spec) for column in spec.identity]
        keys = tuple(rows[len(texts)][source] for source in sources if source)
        identity = keys[0] if spec.kind == "entity" else keys
        raise explain(
            error, type_name=spec.name, identity=identity, arguments=(), within=(field.name,)
        ) from None
    return texts


def table_to_objects(spec: TypeSpec, table: pa.Table) -> list[Any]:
    """Objects of the spec's class from rows; a `commit_id` column becomes their metadata."""
    cls = spec.python_class
    if cls is None:
        raise TypeError(f"{spec.name} was read from a stored schema and has no class to build")
    made = [hydrate(cls, values) for values in table_to_rows(spec, table)]
    if "commit_id" in table.column_names:
        for item, commit_id in zip(made, table.column("commit_id").to_pylist(), strict=True):
            item._attach_meta(commit_id)
    return made


def table_to_rows(spec: TypeSpec, table: pa.Table) -> list[dict[str, Any]]:
    """The inverse of `rows_to_table`: values as objects have them, without a class."""
    attributes: dict[str, list[Any]] = {}
    for column in spec.identity:
        source = _identity_source(column, spec)
        if source is not None and source != spec.primary_key:
            attributes[source] = table.column(column).to_pylist()
    for field in spec.fields:
        try:
            values = _python_values(field, table.column(field.name))
            if field.logical is not None or field.revive is not None:
                values = [field.restored(value) for value in values]
            attributes[field.name] = values
        except ValueError as error:
            raise IntegrityError(
                f"{spec.name}.{field.name}: unreadable stored value: {error}"
            ) from error
    names = tuple(attributes)
    return [dict(zip(names, row, strict=True)) for row in zip(*attributes.values(), strict=True)]


def _python_values(field: FieldSpec, column: pa.ChunkedArray) -> list[Any]:
    match field.storage:
        case "json":
            return _map(decoder(field.type_spec), column.to_pylist())
        case "datetime":
            # Far faster than to_pylist, which makes a zone object a value.
            return _map(_from_micros, column.cast(pa.int64()).to_pylist())
        case _:
            values: list[Any] = column.to_pylist()
            return values


def _from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _map(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    return [None if v is None else function(v) for v in values]


# --- the payload of v1 rows -------------------------------------------------------------------


def fields_json(spec: TypeSpec, table: pa.Table) -> pa.Array:
    """The canonical JSON payload of each row: all fields, an entity's primary key included."""
    columns = [_payload_values(f, table.column(f.name)) for f in spec.fields]
    names = [f.name for f in spec.fields]
    payloads = (
        [dumps(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
        if columns
        else ["{}"] * table.num_rows
    )
    return pa.array(payloads, pa.string())


def _payload_values(field: FieldSpec, column: pa.ChunkedArray) -> list[Any]:
    if field.storage == "json":
        return _map(orjson.Fragment, column.to_pylist())  # canonical already: goes in as it is
    if field.storage == "float":
        column = pc.add(column, 0.0)  # -0.0 equals 0.0, so they have one text
    values = _python_values(field, column)
    return _map(leaf, values) if _parser(field.storage) is not None else values


def column_texts(field: FieldSpec, column: pa.ChunkedArray) -> list[str | None]:
    """A column as text, one for each value: that of canonical JSON, without quotes around it."""
    if field.storage in ("str", "json"):
        texts: list[str | None] = column.to_pylist()
        return texts
    values = _payload_values(field, column)
    if field.storage == "bool":
        return _map(lambda value: "true" if value else "false", values)
    return _map(repr if field.storage == "float" else str, values)


def table_from_fields_json(
    spec: TypeSpec, identity_table: pa.Table, fields_json_array: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """Rows from identity columns and payloads: the inverse of `fields_json`.

    A payload written before a field existed lacks it: the field's default stands in, else NULL.
    """
    payloads = [orjson.loads(text) for text in fields_json_array.to_pylist()]
    columns = [identity_table.column(name).cast(pa.string()) for name in spec.identity]
    columns += [_payload_column(f, spec, payloads) for f in spec.fields]
    return pa.Table.from_arrays(columns, schema=row_schema(spec))


def _payload_column(
    field: FieldSpec, spec: TypeSpec, payloads: Sequence[dict[str, Any]]
) -> pa.Array:
    absent = None if field.default is MISSING else field.default
    values = [payload.get(field.name, absent) for payload in payloads]
    if not field.nullable and None in values:
        raise IntegrityError(
            f"{spec.name}: a stored payload has no value for {field.name!r}, which cannot be null"
        )
    parse = dumps if field.storage == "json" else _parser(field.storage)
    return pa.array(_map(parse, values) if parse else values, arrow_type(field.storage))


def _parser(storage: str) -> Callable[[Any], Any] | None:
    """From the text that JSON has of a scalar to its value; None where JSON has the value."""
    return Decimal if decimal_type(storage) is not None else _PARSERS.get(storage)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "bytes": b64decode,
}
