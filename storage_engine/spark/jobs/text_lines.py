"""What executors do with text: lines of files in, rows and lines that cannot be read out.

Spark hands over the lines of a part of a file, as bytes and in their order. CSV is put together
again and read by records, as `Session.ingest` reads it; JSON lines are looked at one by one by the
parser that `Session.ingest` has, and given their values by Spark. Beside its values a row has the
file that it came from and, where it cannot be read, the line and why.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from storage_engine.errors import ValidationError
from storage_engine.model.csv_text import MALFORMED, BadRecord, CsvDialect, CsvRows
from storage_engine.spark.schema import arrow_schema

FILE = "__file"  # where a row came from
LINE = "__line"  # its text as bytes: where it cannot be read; of JSON lines always
FAULT = "__fault"  # why it cannot be read
FACTS = (FILE, LINE, FAULT)
VALUE = "value"  # a line, as Spark names it
START = "__start"  # where in its file a part begins
NUMBER = "__number"  # of a piece of a part
FACT_FIELDS = (
    StructField(FILE, StringType()),
    StructField(LINE, BinaryType()),
    StructField(FAULT, StringType()),
)
_PIECE = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
_SURROGATE = "line has half of a surrogate pair"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def path_shown(path: str) -> str:
    """As people write it: Spark's paths are URIs."""
    return unquote(re.sub(r"^file:/+", "/", path))


@dataclass(frozen=True)
class _Part:
    """Consecutive lines of one part of a file; `labels` are values that its folders' names give."""

    path: str
    start: int
    labels: dict[str, Any]
    lines: pa.Array


def _parts(batch: pa.RecordBatch) -> Iterator[_Part]:
    paths, starts = batch.column(FILE), batch.column(START)
    same = pc.and_(pc.equal(paths[1:], paths[:-1]), pc.equal(starts[1:], starts[:-1]))
    ends = [n + 1 for n in pc.indices_nonzero(pc.invert(same)).to_pylist()]
    labels = [name for name in batch.schema.names if name not in (VALUE, FILE, START, NUMBER)]
    begin = 0
    for end in [*ends, batch.num_rows]:
        if end > begin:
            values = {name: batch.column(name)[begin].as_py() for name in labels}
            lines = batch.column(VALUE).slice(begin, end - begin)
            yield _Part(paths[begin].as_py(), starts[begin].as_py(), values, lines)
        begin = end


def _joined(lines: pa.Array) -> bytes:
    """Line ends are there already."""
    large = pa.types.is_large_binary(lines.type)
    _, offsets, data = lines.buffers()
    if data is None:
        return b""
    places = memoryview(offsets).cast("q" if large else "i")
    begin, end = places[lines.offset], places[lines.offset + len(lines)]
    return bytes(memoryview(data)[begin:end])


@dataclass(frozen=True)
class CsvTask:
    """Rows of text columns, `schema` (with the facts at its end)."""

    dialect: CsvDialect
    names: list[str]
    schema: StructType
    first: str  # the file that the names are of

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows: CsvRows | None = None
        at: tuple[str, int] | None = None
        labels: dict[str, Any] = {}
        for batch in batches:
            for part in _parts(batch):
                if at != (part.path, part.start):
                    if rows is not None:
                        yield from self._made(rows, rows.close(), labels)
                    at, labels = (part.path, part.start), part.labels
                    rows = self._rows(path_shown(part.path), begins=part.start == 0)
                assert rows is not None
                yield from self._made(rows, rows.feed(_joined(part.lines)), labels)
        if rows is not None:
            yield from self._made(rows, rows.close(), labels)

    def whole(self, contents: Iterable[tuple[str, bytes]]) -> Iterator[pa.RecordBatch]:
        """Of whole files, by their labels."""
        for label, content in contents:
            rows = self._rows(label, begins=True)
            for begin in range(0, len(content), _PIECE):
                yield from self._made(rows, rows.feed(content[begin : begin + _PIECE]), {})
            yield from self._made(rows, rows.close(), {})

    def _rows(self, label: str, *, begins: bool) -> CsvRows:
        return CsvRows(
            self.dialect,
            label,
            list(self.names),
            header=begins and self.dialect.header,
            begins=begins,
            first=self.first,
        )

    def _made(
        self, rows: CsvRows, tables: Iterable[pa.Table], labels: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        for table in tables:
            count = table.num_rows
            nothing = {LINE: pa.nulls(count, pa.binary()), FAULT: pa.nulls(count, pa.string())}
            yield from self._complete(
                rows.label,
                dict(zip(table.column_names, table.columns, strict=True)),
                nothing,
                labels,
                count,
            )
        bad: list[BadRecord] = rows.bad
        if bad:
            facts = {
                LINE: pa.array([record.raw for record in bad], pa.binary()),
                FAULT: pa.array([record.fault for record in bad], pa.string()),
            }
            yield from self._complete(rows.label, {}, facts, labels, len(bad))
            rows.bad.clear()

    def _complete(
        self,
        label: str,
        columns: dict[str, Any],
        facts: dict[str, Any],
        labels: dict[str, Any],
        count: int,
    ) -> Iterator[pa.RecordBatch]:
        arrays = []
        schema = arrow_schema(self.schema)
        for column in schema:
            if column.name == FILE:
                arrays.append(pa.repeat(pa.scalar(label, pa.string()), count))
            elif column.name in facts:
                arrays.append(facts[column.name])
            elif column.name in labels:
                arrays.append(pa.repeat(pa.scalar(labels[column.name], column.type), count))
            elif column.name in columns:
                arrays.append(columns[column.name])
            else:
                arrays.append(pa.nulls(count, column.type))
        yield from pa.table(arrays, schema=schema).to_batches()


@dataclass(frozen=True)
class PieceTask:
    """Lines of parts as pieces that can be put in order: path, start, number, bytes."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers: dict[tuple[str, int], int] = {}
        for batch in batches:
            for part in _parts(batch):
                number = numbers[part.path, part.start] = (
                    numbers.get((part.path, part.start), -1) + 1
                )
                columns = {
                    VALUE: pa.array([_joined(part.lines)], pa.binary()),
                    FILE: [part.path],
                    START: pa.array([part.start], pa.int64()),
                    NUMBER: pa.array([number], pa.int64()),
                }
                columns |= {
                    name: pa.array([value], batch.schema.field(name).type)
                    for name, value in part.labels.items()
                }
                yield pa.RecordBatch.from_pydict(columns)


@dataclass(frozen=True)
class WholeCsvTask:
    """Of files that are read as a whole: archives, and encodings that lines cannot be told in."""

    task: CsvTask
    zipped: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for path, content in _contents(batches):
            yield from self.task.whole(contained(path, content, zipped=self.zipped))


@dataclass(frozen=True)
class HeaderTask:
    """The columns of each file: path, header, problem."""

    dialect: CsvDialect
    zipped: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for path, content in _contents(batches):
            columns: list[tuple[str, list[str] | None, str | None]] = []
            try:
                for label, member in contained(path, content, zipped=self.zipped):
                    if (names := self._names(label, member)) is not None:
                        columns.append((label, names, None))
            except ValidationError as error:  # told, not raised: Spark would try again
                columns.append((path, None, str(error)))
            paths, headers, problems = zip(*columns, strict=True) if columns else ((), (), ())
            yield pa.RecordBatch.from_pydict(
                {
                    "path": pa.array(paths, pa.string()),
                    "header": pa.array(headers, pa.list_(pa.string())),
                    "problem": pa.array(problems, pa.string()),
                }
            )

    def _names(self, label: str, member: bytes) -> list[str] | None:
        rows = CsvRows(self.dialect, label)
        list(rows.feed(member[:_PIECE]))
        if rows.names is None:
            list(rows.close())
        return rows.names


def _contents(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, bytes]]:
    for batch in batches:
        for path, content in zip(batch.column("path"), batch.column("content"), strict=True):
            yield path_shown(path.as_py()), content.as_py()


def contained(path: str, content: bytes, *, zipped: bool) -> Iterator[tuple[str, bytes]]:
    """The files of an archive, without folders and what macOS adds; else the file itself."""
    if not zipped:
        yield path, content
        return
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                if not info.is_dir() and not info.filename.startswith("__MACOSX/"):
                    yield f"{path}/{info.filename}", archive.read(info)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValidationError(f"{path}: cannot be read as a zip file: {error}") from None


@dataclass(frozen=True)
class JsonTask:
    """Lines that are JSON objects, and those that are none: value (null), labels, facts."""

    schema: StructType

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self.schema)
        for batch in batches:
            for part in _parts(batch):
                lines = [line for raw in part.lines.to_pylist() if (line := _stripped(raw))]
                faults = [json_fault(line) for line in lines]
                count = len(lines)
                made: dict[str, Any] = {
                    VALUE: pa.array(
                        [
                            None if fault else line
                            for line, fault in zip(lines, faults, strict=True)
                        ],
                        pa.binary(),
                    ).cast(pa.string()),
                    FILE: pa.repeat(pa.scalar(path_shown(part.path), pa.string()), count),
                    LINE: pa.array(lines, pa.binary()),
                    FAULT: pa.array(faults, pa.string()),
                }
                arrays = [
                    made[column.name]
                    if column.name in made
                    else pa.repeat(pa.scalar(part.labels[column.name], column.type), count)
                    for column in schema
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)


Shape = Any  # of JSON values: the name of a type, ["array", shape], or {key: shape}


@dataclass(frozen=True)
class ShapeTask:
    """Which keys lines have, and of which types: one JSON text for each task. `as_text`: plain
    values are text."""

    as_text: bool

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shape: Shape = {}
        for batch in batches:
            for raw in batch.column(VALUE).to_pylist():
                line = _stripped(raw)
                try:
                    record = from_json(line, allow_inf_nan=False, cache_strings="keys")
                except ValueError:
                    continue
                if isinstance(record, dict):
                    shape = _merged(shape, self._of(record))
        yield pa.RecordBatch.from_pydict({"shape": [json.dumps(shape)]})

    def _of(self, value: Any) -> Shape:
        if isinstance(value, dict):
            return {name: self._of(member) for name, member in value.items()}
        if isinstance(value, list):
            item: Shape = "void"
            for member in value:
                item = _merged(item, self._of(member))
            return ["array", item]
        if value is None:
            return "void"
        if self.as_text or isinstance(value, str):
            return "string"
        if isinstance(value, bool):
            return "boolean"
        if isinstance(value, float):
            return "double"
        return "bigint" if -(2**63) <= value < 2**63 else "string"


def _merged(first: Shape, other: Shape) -> Shape:
    """What holds values of both; text, where nothing else does."""
    if other in (first, "void"):
        return first
    if first == "void":
        return other
    if isinstance(first, dict) and isinstance(other, dict):
        return {**first, **{n: _merged(first.get(n, "void"), of) for n, of in other.items()}}
    if isinstance(first, list) and isinstance(other, list):
        return ["array", _merged(first[1], other[1])]
    return "double" if {str(first), str(other)} == {"bigint", "double"} else "string"


def shape_fields(texts: Iterable[str]) -> list[StructField]:
    """The columns that tasks have seen."""
    shape: Shape = {}
    for text in texts:
        shape = _merged(shape, json.loads(text))
    return [StructField(name, _type_of(of)) for name, of in sorted(shape.items())]


def _type_of(shape: Shape) -> DataType:
    if isinstance(shape, dict):
        if not shape:
            return StringType()
        return StructType([StructField(name, _type_of(of)) for name, of in sorted(shape.items())])
    if isinstance(shape, list):
        return ArrayType(_type_of(shape[1]))
    return _TYPES.get(str(shape), StringType())


_TYPES: dict[str, DataType] = {
    "bigint": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
}


def _stripped(raw: bytes) -> bytes:
    return raw.removeprefix(_BOM).strip(b" \t\r\n")


def json_fault(line: bytes) -> str | None:
    """Why a line is no JSON object; None where it is one."""
    try:
        record = from_json(line, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as wrong:
            return f"line is not UTF-8: byte 0x{line[wrong.start]:02x}"
        halved = _HALF.search(line) and ("surrogate" in str(error) or "escape" in str(error))
        return _SURROGATE if halved else MALFORMED
    return None if isinstance(record, dict) else MALFORMED


def with_facts(fields: Sequence[StructField]) -> StructType:
    return StructType([*fields, *FACT_FIELDS])


@dataclass(frozen=True)
class OpenLinesTask:
    """The files that have lines which are no whole records."""

    dialect: CsvDialect

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        quote, record = self.dialect.quote.encode(), self.dialect.patterns.record
        told: set[str] = set()
        for batch in batches:
            files = batch.column(FILE).to_pylist()
            opened = set()
            for line, file in zip(batch.column(VALUE).to_pylist(), files, strict=True):
                if file in told or quote not in line:
                    continue
                match = record.match(line)
                if match is None or match.end() != len(line):
                    opened.add(file)
            opened -= told
            told |= opened
            yield pa.RecordBatch.from_pydict({FILE: pa.array(sorted(opened), pa.string())})


def one_line(dialect: CsvDialect) -> CsvDialect:
    """Records never go beyond their line."""
    return replace(dialect, spans_lines=False)
