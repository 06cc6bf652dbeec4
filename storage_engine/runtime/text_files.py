"""CSV and JSON lines as Arrow batches of the declared types, never of guessed ones.

Values are written as in canonical JSON: datetimes, dates and times of day in ISO 8601 (a datetime
without a zone is UTC), bytes in base64, decimals as digits (in JSON lines as strings, or integers:
other numbers have been floats). In CSV, a field that is stored as JSON holds JSON text; an empty
cell is null, or the empty string where the field is a `str` that cannot be null; a quoted empty
cell is always the empty string. In JSON lines, a key that a record lacks gets the field's default,
else null. Promise: "007" in a `str` field stays "007", and what does not fit is refused, by row.

Whole columns are converted at a time; only when that fails is each value looked at, to say which
rows are at fault.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json, to_json

from storage_engine.errors import ValidationError
from storage_engine.model.canonical import encode
from storage_engine.model.casts import Problem
from storage_engine.model.columns import arrow_type, times_of_text
from storage_engine.model.csv_text import BadRecord, CsvDialect, CsvRows, shown
from storage_engine.model.decimals import Precision, decimal_type
from storage_engine.model.field_types import Storage
from storage_engine.model.scalars import TIME_TEXT
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import INT64_MAX, INT64_MIN, unknown_name

Conversion = tuple[pa.Array, list[Problem]]

_BLOCK_BYTES = 8 * 1024 * 1024
_HEADER_BYTES = 64 * 1024
_SAMPLE_ROWS = 1_000
_LINES_SHOWN = 3
_TEXT_SHOWN = 200
_BOM = b"\xef\xbb\xbf"
_DIALECT = CsvDialect(quoted_nulls=False)
_STR = {"kind": "primitive", "name": "str"}
_EXACT = 2**53  # up to here every integer is a float
_ZONE = r"[0-9](Z|[+-][0-9]{2}(:?[0-9]{2})?)$"  # after a time of day; a date has no such end
_NAMES: dict[Storage, str] = {
    "str": "text",
    "int": "an integer of 64 bits",
    "float": "a number that a float holds exactly",
    "bool": "true or false",
    "datetime": "an ISO 8601 datetime with at most microseconds",
    "date": "an ISO 8601 date",
    "time": "an ISO 8601 time of day with at most microseconds",
    "bytes": "base64",
}


# --- values -----------------------------------------------------------------------------------


def from_text(storage: Storage, column: pa.Array) -> Conversion:
    """A column of text as values of the field; JSON text stays text."""
    convert = _parser(storage)
    if convert is None:
        return column, []
    try:
        return convert(column), []
    except (pa.ArrowInvalid, ValueError):
        return _faulty(storage, column.to_pylist(), lambda v: _parses(convert, v))


def from_python(storage: Storage, values: Sequence[Any]) -> Conversion:
    """A column of parsed JSON values; nothing is coerced, so 5 is no text and "5" no number."""
    if storage == "json":
        texts = [None if v is None else to_json(v).decode() for v in values]
        return pa.ExtensionArray.from_storage(
            pa.json_(pa.string()), pa.array(texts, pa.string())
        ), []
    if decimal_type(storage) is not None:
        # An integer is exact; any other number has gone through a float.
        values = [str(v) if type(v) is int else v for v in values]
    fits = _FITS.get(storage, _is_text)
    plain = set(map(type, values)) <= _PLAIN.get(storage, _TEXTS)  # spares looking at each
    if not plain and not all(v is None or fits(v) for v in values):
        return _faulty(storage, values, fits)
    if fits is _is_text and _parser(storage) is not None:
        return from_text(storage, pa.array(values, pa.string()))
    return pa.array(values, arrow_type(storage)), []


def _faulty(storage: Storage, values: Sequence[Any], fits: Callable[[Any], bool]) -> Conversion:
    rows = [row for row, value in enumerate(values) if value is not None and not fits(value)]
    shown = repr(values[rows[0]])
    got = shown if len(shown) <= 40 else shown[:37] + "..."
    problem = Problem(f"is not {_name(storage)} (got {got})", len(rows), rows[0])
    return pa.nulls(len(values), arrow_type(storage)), [problem]


def _name(storage: Storage) -> str:
    decimals = decimal_type(storage)
    if decimals is None:
        return _NAMES[storage]
    return f"text of a decimal with {decimals.precision} digits, {decimals.scale} after the point"


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


def _times(column: pa.Array) -> pa.Array:
    # Arrow would take nanoseconds, and cut them.
    plain = pc.match_substring_regex(column, TIME_TEXT)
    if not pc.all(plain, min_count=0).as_py():
        raise ValueError("not a time of day")
    return times_of_text(column)


def _decimals(precision: Precision, column: pa.Array) -> pa.Array:
    values = [None if v is None else precision.read(v) for v in column.to_pylist()]
    return pa.array(values, precision.arrow)


def _bytes(column: pa.Array) -> pa.Array:
    decoded = [None if v is None else b64decode(v, validate=True) for v in column.to_pylist()]
    return pa.array(decoded, pa.binary())


_PARSERS: dict[Storage, Callable[[pa.Array], pa.Array]] = {
    "int": _ints,
    "float": lambda column: column.cast(pa.float64()),
    "bool": lambda column: column.cast(pa.bool_()),
    "datetime": _datetimes,
    "date": lambda column: column.cast(pa.date32()),
    "time": _times,
    "bytes": _bytes,
}


def _parser(storage: Storage) -> Callable[[pa.Array], pa.Array] | None:
    decimals = decimal_type(storage)
    return _PARSERS.get(storage) if decimals is None else partial(_decimals, decimals)


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
    "time": _is_text,
    "bytes": _is_text,
}

_TEXTS: set[type] = {str, type(None)}
_PLAIN: dict[Storage, set[type]] = {
    "str": _TEXTS,
    "int": set(),  # may still be beyond 64 bits
    "float": {float, type(None)},
    "bool": {bool, type(None)},
    "datetime": _TEXTS,
    "date": _TEXTS,
    "time": _TEXTS,
    "bytes": _TEXTS,
}

# --- files ------------------------------------------------------------------------------------


def source_fields(spec: TypeSpec) -> dict[str, FieldSpec]:
    """The columns that a source can have: keys by their own names, and the fields."""
    roles = ("left_key", "right_key", spec.instance_key) if spec.kind == "relation" else ()
    keys = {
        name: FieldSpec(name, _STR, "str", nullable=False, index=False, field_id=0, required=True)
        for name in roles
        if name is not None
    }
    return {**keys, **{f.name: f for f in spec.fields}}


def _batch(
    spec: TypeSpec, schema: pa.Schema, columns: Iterable[tuple[str, Conversion]], offset: int
) -> pa.RecordBatch:
    """A batch of converted columns; ValidationError lists the problems of all of them."""
    arrays: list[pa.Array] = []
    remarks: dict[str, list[str]] = {}
    for name, (array, problems) in columns:
        arrays.append(array)
        if problems:
            remarks[name] = [problem.say(name, offset) for problem in problems]
    if remarks:
        listed = "; ".join(remark for column in remarks.values() for remark in column)
        raise ValidationError(f"{spec.name}: {listed}", type=spec.name, field=", ".join(remarks))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class CsvFile:
    """A CSV file with a header line, comma separated, UTF-8."""

    def __init__(self, spec: TypeSpec, path: Path) -> None:
        self._spec = spec
        self._path = path
        self._fields = source_fields(spec)
        names = self._header()
        # An unknown column is a plain text column here, and refused with all else that is wrong.
        types = [
            arrow_type(f.storage) if (f := self._fields.get(n)) else pa.string() for n in names
        ]
        self.schema = pa.schema(list(zip(names, types, strict=True)))

    def read(self) -> Iterator[pa.RecordBatch]:
        names = self.schema.names
        if self._header() != names:
            raise ValidationError(
                f"{self._spec.name}: the header changed since ingest()", type=self._spec.name
            )
        offset = 0
        for table in self._tables(CsvRows(_DIALECT, "", names)):
            for batch in table.to_batches():
                made = [(n, self._convert(n, c)) for n, c in zip(names, batch.columns, strict=True)]
                yield _batch(self._spec, self.schema, made, offset)
                offset += batch.num_rows

    def _tables(self, rows: CsvRows) -> Iterator[pa.Table]:
        """A file with a record that is none is refused at the latest when that is read."""
        with self._path.open("rb") as file:
            while data := file.read(_BLOCK_BYTES):
                tables = list(rows.feed(data))
                self._check(rows.bad)
                yield from tables
        tables = list(rows.close())
        self._check(rows.bad)
        yield from tables

    def _check(self, bad: Sequence[BadRecord]) -> None:
        if not bad:
            return
        sentences = [_said(record) for record in bad[:_LINES_SHOWN]]
        if len(bad) > _LINES_SHOWN:
            sentences.append(f"{len(bad) - _LINES_SHOWN} more such lines")
        raise ValidationError(
            f"{self._spec.name}: cannot be read: {'; '.join(sentences)}", type=self._spec.name
        )

    def _convert(self, name: str, column: pa.Array) -> Conversion:
        field = self._fields[name]
        if field.storage == "str" and not field.nullable:
            return pc.fill_null(column, ""), []
        return from_text(field.storage, column)

    def _header(self) -> list[str]:
        rows = CsvRows(_DIALECT, "")
        with self._path.open("rb") as file:
            while rows.names is None and (data := file.read(_HEADER_BYTES)):
                list(rows.feed(data))
        if rows.names is None:
            list(rows.close())
            self._check(rows.bad)
        names = rows.names
        if not names:
            raise ValidationError(
                f"{self._spec.name}: the first line must name the columns", type=self._spec.name
            )
        return names


def _said(record: BadRecord) -> str:
    where = f"line {record.line}: " if record.line else ""
    detail = f" ({record.detail})" if record.detail else ""
    raw = shown(record.raw)
    text = raw if len(raw) <= _TEXT_SHOWN else f"{raw[:_TEXT_SHOWN]}..."
    return f"{where}{record.fault}{detail}: {text!r}"


def parsed_json(text: bytes) -> Any:
    """ValueError for what is no JSON; NaN and infinity are none.

    pydantic ends at 200 levels, which a value alone may have, and there is a record around it.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith("recursion limit"):
            raise
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive lines of a file, blank ones left out, and their numbers from 1."""

    numbers: list[int]
    lines: list[bytes]


class JsonColumns:
    """Parsed JSON objects as columns of a type. Objects may lack keys, in any order."""

    def __init__(self, spec: TypeSpec) -> None:
        self._spec = spec
        self.fields = source_fields(spec)
        self.schema = pa.schema(
            [
                # Not plain text: where `str | int` is declared, a text column would be the value.
                (name, pa.json_(pa.string()) if f.storage == "json" else arrow_type(f.storage))
                for name, f in self.fields.items()
            ]
        )

    def batch(self, records: Sequence[dict[str, Any]], offset: int = 0) -> pa.RecordBatch:
        """ValidationError lists what is wrong in all columns; rows are counted from `offset`."""
        made = [(name, self._column(field, records)) for name, field in self.fields.items()]
        return _batch(self._spec, self.schema, made, offset)

    def _column(self, field: FieldSpec, records: Sequence[dict[str, Any]]) -> Conversion:
        values = [record.get(field.name, MISSING) for record in records]
        absent = [row for row, value in enumerate(values) if value is MISSING]
        if absent and field.required and not field.nullable:
            return pa.nulls(len(values)), [Problem("is missing", len(absent), absent[0])]
        for row in absent:
            values[row] = _default(field)
        return from_python(field.storage, values)


class JsonLinesFile:
    """A file with one JSON object a line. Records may lack keys, in any order."""

    def __init__(self, spec: TypeSpec, path: Path, *, batch_rows: int) -> None:
        self._spec = spec
        self._path = path
        self._batch_rows = batch_rows
        self._columns = JsonColumns(spec)
        self._fields = self._columns.fields
        self.schema = self._columns.schema

    def read(self) -> Iterator[pa.RecordBatch]:
        """Batches of the declared types. The first one is small: it is the sample."""
        offset = 0
        for block in self._blocks():
            records = self._parse(block)
            yield self._columns.batch(records, offset)
            offset += len(records)

    def _blocks(self) -> Iterator[_Block]:
        block, size, limit = _Block([], []), 0, min(_SAMPLE_ROWS, self._batch_rows)
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(_BOM).strip()  # files that were put together have several
                if not line:
                    continue
                block.numbers.append(number)
                block.lines.append(line)
                size += len(line)
                if len(block.lines) >= limit or size >= _BLOCK_BYTES:
                    yield block
                    block, size, limit = _Block([], []), 0, self._batch_rows
        if block.lines:
            yield block

    def _parse(self, block: _Block) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        wrong: list[str] = []
        for number, line in zip(block.numbers, block.lines, strict=True):
            try:
                record = parsed_json(line)
            except ValueError as error:
                wrong.append(f"line {number} is not JSON ({error})")
                continue
            if isinstance(record, dict):
                records.append(record)
            else:
                wrong.append(f"line {number} is not a JSON object")
        strangers = set().union(*records) - set(self._fields)
        if len(wrong) > _LINES_SHOWN:
            wrong[_LINES_SHOWN:] = [f"{len(wrong) - _LINES_SHOWN} more lines are not JSON objects"]
        wrong += [unknown_name(name, self._fields, what="column") for name in sorted(strangers)]
        if wrong:
            raise ValidationError(
                f"{self._spec.name}: {'; '.join(wrong)}",
                type=self._spec.name,
                field=", ".join(sorted(strangers)),
            )
        return records


def _default(field: FieldSpec) -> Any:
    """What stands in for an absent key, in its JSON form."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not None:
        return encode(field.type_spec, field.default_factory())
    return None
