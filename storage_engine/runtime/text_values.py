"""Text and JSON values as Arrow columns: whole columns at a time, faulty rows found one by one.

The fast way is one cast of the column. Only when that fails is each value looked at, to say which
rows are at fault.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import to_json

from storage_engine.model.columns import ARROW_TYPES
from storage_engine.model.problems import Problem
from storage_engine.model.type_spec import Storage
from storage_engine.model.validation import INT64_MAX, INT64_MIN

Made = tuple[pa.Array, list[Problem]]

_EXACT = 2**53  # up to here every integer is a float
_ZONE = r"[0-9](Z|[+-][0-9]{2}(:?[0-9]{2})?)$"  # after a time of day; a date has no such end
_NAMES: dict[Storage, str] = {
    "str": "text",
    "int": "an integer of 64 bits",
    "float": "a number that a float holds exactly",
    "bool": "true or false",
    "datetime": "an ISO 8601 datetime with at most microseconds",
    "date": "an ISO 8601 date",
    "bytes": "base64",
}


def arrow_type(storage: Storage) -> pa.DataType:
    """The column type that text of such a field becomes."""
    return ARROW_TYPES[storage]


def from_text(storage: Storage, column: pa.Array) -> Made:
    """A column of text as values of the field; JSON text stays text."""
    convert = _PARSERS.get(storage)
    if convert is None:
        return column, []
    try:
        return convert(column), []
    except (pa.ArrowInvalid, ValueError):
        return _faulty(storage, column.to_pylist(), lambda v: _parses(convert, v))


def from_python(storage: Storage, values: Sequence[Any]) -> Made:
    """A column of parsed JSON values; nothing is coerced, so 5 is no text and "5" no number."""
    if storage == "json":
        texts = [None if v is None else to_json(v).decode() for v in values]
        return pa.ExtensionArray.from_storage(
            pa.json_(pa.string()), pa.array(texts, pa.string())
        ), []
    fits = _FITS[storage]
    plain = set(map(type, values)) <= _PLAIN[storage]  # spares looking at each
    if not plain and not all(v is None or fits(v) for v in values):
        return _faulty(storage, values, fits)
    if storage in _PARSERS and fits is _is_text:
        return from_text(storage, pa.array(values, pa.string()))
    return pa.array(values, ARROW_TYPES[storage]), []


def _faulty(storage: Storage, values: Sequence[Any], fits: Callable[[Any], bool]) -> Made:
    rows = [row for row, value in enumerate(values) if value is not None and not fits(value)]
    shown = repr(values[rows[0]])
    got = shown if len(shown) <= 40 else shown[:37] + "..."
    problem = Problem(f"is not {_NAMES[storage]} (got {got})", len(rows), rows[0])
    return pa.nulls(len(values), ARROW_TYPES[storage]), [problem]


def _parses(convert: Callable[[pa.Array], pa.Array], value: str) -> bool:
    try:
        convert(pa.array([value], pa.string()))
    except (pa.ArrowInvalid, ValueError):
        return False
    return True


def _ints(column: pa.Array) -> pa.Array:
    # Arrow would take 0x10 for a number.
    plain = pc.match_substring_regex(column, r"^-?[0-9]+$")
    if not pc.all(plain, min_count=0).as_py():
        raise ValueError("not an integer")
    return column.cast(pa.int64())


def _datetimes(column: pa.Array) -> pa.Array:
    """With or without a zone, even mixed; Arrow casts only one kind at a time."""
    zoned = pc.fill_null(pc.match_substring_regex(column, _ZONE), False)
    clocked = pc.and_(zoned, pc.fill_null(pc.match_substring(column, ":"), False))
    null = pa.scalar(None, pa.string())
    instants = pc.if_else(clocked, column, null).cast(pa.timestamp("us", "UTC"))
    naive = pc.if_else(clocked, null, column).cast(pa.timestamp("us"))
    return pc.coalesce(instants, naive.cast(pa.timestamp("us", "UTC")))


def _bytes(column: pa.Array) -> pa.Array:
    decoded = [None if v is None else b64decode(v, validate=True) for v in column.to_pylist()]
    return pa.array(decoded, pa.binary())


_PARSERS: dict[Storage, Callable[[pa.Array], pa.Array]] = {
    "int": _ints,
    "float": lambda column: column.cast(pa.float64()),
    "bool": lambda column: column.cast(pa.bool_()),
    "datetime": _datetimes,
    "date": lambda column: column.cast(pa.date32()),
    "bytes": _bytes,
}


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_int(value: Any) -> bool:
    return type(value) is int and INT64_MIN <= value <= INT64_MAX


def _is_float(value: Any) -> bool:
    return type(value) is float or (type(value) is int and -_EXACT <= value <= _EXACT)


_FITS: dict[Storage, Callable[[Any], bool]] = {
    "str": _is_text,
    "int": _is_int,
    "float": _is_float,
    "bool": lambda value: type(value) is bool,
    "datetime": _is_text,
    "date": _is_text,
    "bytes": _is_text,
}

_PLAIN: dict[Storage, set[type]] = {
    "str": {str, type(None)},
    "int": set(),  # may still be beyond 64 bits
    "float": {float, type(None)},
    "bool": {bool, type(None)},
    "datetime": {str, type(None)},
    "date": {str, type(None)},
    "bytes": {str, type(None)},
}
