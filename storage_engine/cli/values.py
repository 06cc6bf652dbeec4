"""Values of rows as JSON, as text in CSV, and as people read them.

Declared types are written as in canonical JSON: datetimes in ISO 8601 with microseconds, bytes in
base64. What SQL computes beyond that becomes the nearest thing: decimals are numbers, and NaN and
infinity, which JSON lacks, are null there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa

from storage_engine.cli.output import moment
from storage_engine.model.canonical import leaf

_UNTOUCHED: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_null,
)


def json_values(column: pa.Array, *, nested: bool = False) -> list[Any]:
    """A column in JSON's own types. `nested`: its texts are JSON already."""
    values = plain_values(column)
    if nested:
        return [None if value is None else orjson.loads(value) for value in values]
    if any(test(column.type) for test in _UNTOUCHED):
        return values
    return [json_value(value) for value in values]


def plain_values(column: pa.Array) -> list[Any]:
    """A column as Python values; as text where Python has none, such as nanoseconds."""
    try:
        found: list[Any] = column.to_pylist()
    except (ValueError, OverflowError):
        found = column.cast(pa.string()).to_pylist()
    return found


def json_value(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case datetime() | date() | bytes():
            return leaf(value)
        case Decimal():
            return _number(value)
        case list():
            return [json_value(item) for item in value]
        case tuple():  # an entry of a map
            return [json_value(item) for item in value]
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case _:
            return str(value)


def _number(value: Decimal) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)


def text_value(value: Any) -> str:
    """One value on a line of text."""
    match value:
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case float():
            return repr(value)
        case datetime() | date() | bytes():
            return leaf(value)
        case list() | Mapping():
            return json.dumps(json_value(value), ensure_ascii=False)
        case _:
            return str(value)


def csv_cell(value: Any) -> str:
    """As `session.ingest` reads it: NULL is an empty cell, the empty text a quoted one."""
    if value is None:
        return ""
    text = text_value(value)
    if text == "" or text != text.strip() or any(c in text for c in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def table_cell(value: Any) -> Any:
    """For people: numbers stay numbers, so that they are set to the right."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, datetime) and not value.microsecond and value.tzinfo is not None:
        return moment(value)
    return text_value(value)
