"""CSV and JSON lines as Arrow batches of the declared types, never of guessed ones.

Values are written as in canonical JSON: datetimes and dates in ISO 8601 (a datetime without a zone
is UTC), bytes in base64. In CSV, a field that is stored as JSON holds JSON text; an empty cell is
null, or the empty string where the field is a `str` that cannot be null; a quoted empty cell is
always the empty string. In JSON lines, a key that a record lacks gets the field's default, else
null. Promise: "007" in a `str` field stays "007", and what does not fit is refused, by row.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from storage_engine.errors import ValidationError
from storage_engine.model.canonical import encode
from storage_engine.model.problems import Problem
from storage_engine.model.spec import MISSING, FieldSpec, TypeSpec
from storage_engine.model.validation import unknown_name
from storage_engine.runtime.text_values import arrow_type, from_python, from_text

_BLOCK_BYTES = 8 * 1024 * 1024
_SAMPLE_ROWS = 1_000
_LINES_SHOWN = 3
_BOM = b"\xef\xbb\xbf"
_STR = {"kind": "primitive", "name": "str"}

Made = tuple[pa.Array, list[Problem]]


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
    spec: TypeSpec, schema: pa.Schema, columns: Iterable[tuple[str, Made]], offset: int
) -> pa.RecordBatch:
    """A batch of converted columns; ValidationError lists the problems of all of them."""
    arrays: list[pa.Array] = []
    said: dict[str, list[str]] = {}
    for name, (array, problems) in columns:
        arrays.append(array)
        if problems:
            said[name] = [problem.say(name, offset) for problem in problems]
    if said:
        listed = "; ".join(sentence for sentences in said.values() for sentence in sentences)
        raise ValidationError(f"{spec.name}: {listed}", type=spec.name, field=", ".join(said))
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
        from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv

        names = self.schema.names
        if self._header() != names:
            raise ValidationError(
                f"{self._spec.name}: the header changed since ingest()", type=self._spec.name
            )
        reader = open_csv(
            self._path,
            # Column names are given, so that a file without rows is no special case.
            read_options=ReadOptions(block_size=_BLOCK_BYTES, column_names=names, skip_rows=1),
            parse_options=ParseOptions(newlines_in_values=True),
            convert_options=ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        offset = 0
        with reader:
            for batch in reader:
                made = [(n, self._convert(n, c)) for n, c in zip(names, batch.columns, strict=True)]
                yield _batch(self._spec, self.schema, made, offset)
                offset += batch.num_rows

    def _convert(self, name: str, column: pa.Array) -> Made:
        field = self._fields[name]
        if field.storage == "str" and not field.nullable:
            return pc.fill_null(column, ""), []
        return from_text(field.storage, column)

    def _header(self) -> list[str]:
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), None)
        if not names:
            raise ValidationError(
                f"{self._spec.name}: the first line must name the columns", type=self._spec.name
            )
        return names


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive lines of a file, blank ones left out, and their numbers from 1."""

    numbers: list[int]
    lines: list[bytes]


class JsonLinesFile:
    """A file with one JSON object a line. Records may lack keys, in any order."""

    def __init__(self, spec: TypeSpec, path: Path, *, batch_rows: int) -> None:
        self._spec = spec
        self._path = path
        self._batch_rows = batch_rows
        self._fields = source_fields(spec)
        self.schema = pa.schema(
            [
                # Not plain text: where `str | int` is declared, a text column would be the value.
                (name, pa.json_(pa.string()) if f.storage == "json" else arrow_type(f.storage))
                for name, f in self._fields.items()
            ]
        )

    def read(self) -> Iterator[pa.RecordBatch]:
        """Batches of the declared types. The first one is small: it is the sample."""
        offset = 0
        for block in self._blocks():
            records = self._parse(block)
            made = [(name, self._column(field, records)) for name, field in self._fields.items()]
            yield _batch(self._spec, self.schema, made, offset)
            offset += len(records)

    def _blocks(self) -> Iterator[_Block]:
        block, size, limit = _Block([], []), 0, min(_SAMPLE_ROWS, self._batch_rows)
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
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
                record = from_json(line, allow_inf_nan=False)
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

    def _column(self, field: FieldSpec, records: Sequence[dict[str, Any]]) -> Made:
        values = [record.get(field.name, MISSING) for record in records]
        absent = [row for row, value in enumerate(values) if value is MISSING]
        if absent and field.required and not field.nullable:
            return pa.nulls(len(values)), [Problem("is missing", len(absent), absent[0])]
        for row in absent:
            values[row] = _default(field)
        return from_python(field.storage, values)


def _default(field: FieldSpec) -> Any:
    """What stands in for an absent key, in its JSON form."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not None:
        return encode(field.type_spec, field.default_factory())
    return None
